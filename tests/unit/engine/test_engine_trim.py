"""A planner may prune drafted trees before they are scored: texts are unchanged, and every drafter stays in step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from draftree import LLM, SamplingParams
from draftree.core.tree import ROOT, TokenTree
from draftree.core.types import RoundRecord
from draftree.models.table import TableLM, hashed
from draftree.planners.fixed import FixedPlanner
from families import drafter_folder, target

PROMPTS = [[1, 2, 3, 1, 2], [4, 5, 4], [6]]
PARAMS = SamplingParams(max_tokens=60, temperature=0.7, seed=3)
TABLE = hashed(9, seed=1, scale=2.0)


class Shears:
    """Keeps nodes at random, and records the results."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.dice = random.Random(0)
        self.drafted: list[TokenTree] = []
        monkeypatch.setattr(FixedPlanner, "trim", lambda planner, states, trees, *, draft_seconds: self.cut(trees))

    def cut(self, trees: Sequence[TokenTree]) -> list[Sequence[int] | None]:
        self.drafted += trees
        return [None if self.dice.random() < 0.3 else self.some(tree) for tree in trees]

    def some(self, tree: TokenTree) -> list[int]:
        kept = {ROOT}
        for node, parent in enumerate(tree.parents):
            if parent in kept and self.dice.random() < 0.7:
                kept.add(node)
        return sorted(kept - {ROOT})


@pytest.fixture
def shears(monkeypatch: pytest.MonkeyPatch) -> Shears:
    return Shears(monkeypatch)


@pytest.mark.parametrize(
    "draft", ["ngram,min=1", "suffix", "lookahead,window=3", "synthetic,width=2", "ngram,min=1+suffix"]
)
def test_a_cut_tree_changes_no_text(draft: str, shears: Shears) -> None:
    model, records = TableLM(TABLE, order=2), list[RoundRecord]()
    plain = LLM(model, "none").generate(PROMPTS, PARAMS)
    done = LLM(model, draft, plan="fixed", on_round=records.append).generate(PROMPTS, PARAMS)
    assert [d.token_ids for d in done] == [p.token_ids for p in plain]
    assert any(map(len, shears.drafted))
    rows = [row for record in records for row in record.sequences]
    assert any(len(row.tree) < len(row.drafted) for row in rows)
    for row in rows:
        assert row.num_drafted == len(row.tree)
        assert set(row.tree.tokens) <= set(row.drafted.tokens)
        assert row.num_in_path == len(row.path)


def test_draws_from_a_distribution_are_never_cut(shears: Shears, tmp_path: Path) -> None:
    folder = drafter_folder("llama", tmp_path)
    llm = LLM(target("llama"), f"model:{folder},tree=iid-2-2", verify="multistep", plan="fixed")
    assert llm.generate(PROMPTS, PARAMS)[0].stats.draft_tokens
    assert not shears.drafted


@pytest.mark.parametrize("shape", ["chain", "best-8", "2-2-1"])
def test_a_stepped_model_stays_in_step_with_a_cut_tree(shape: str, shears: Shears, tmp_path: Path) -> None:
    """A drafter that is the target guesses right always, for as long as its slot holds the text."""
    records: list[RoundRecord] = []
    folder = str(drafter_folder("llama", tmp_path))
    plain = LLM(folder, "none", dtype="float32").generate(PROMPTS, PARAMS)
    llm = LLM(folder, f"model:{folder},tree={shape}", plan="fixed", dtype="float32", on_round=records.append)
    done = llm.generate(PROMPTS, PARAMS)
    llm.engine.check_integrity()
    assert [d.token_ids for d in done] == [p.token_ids for p in plain]
    rows = {(row.request_id, row.prefix_length): row for one in records for row in one.sequences if len(row.drafted)}
    assert any(len(row.tree) < len(row.drafted) for row in rows.values())
    # the first guess is the pick: kept or cut, it is what is written first
    written = {key: row.tree.tokens[row.path[0]] if row.path else row.bonus for key, row in rows.items()}
    assert written == {key: row.drafted.tokens[0] for key, row in rows.items()}
