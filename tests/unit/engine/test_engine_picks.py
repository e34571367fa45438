"""A drafter with `wants_picks` receives the target's pick at every node, under every verifier; others receive none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from draftree.core.tree import Draw, TokenTree, chain, path
from draftree.core.types import Budget, SequenceRecord, Verdict
from draftree.drafters.base import Drafter, DraftTraits, Observation, SequenceView
from draftree.drafters.wrappers.merged import MergedDrafter
from draftree.engine.engine import Engine
from draftree.engine.sequence import WritingSequence
from draftree.models.table import TableLM, hashed
from draftree.options import EngineLimits
from draftree.planners import PLANNERS
from draftree.sampling import logits
from draftree.sampling.controls import build_controls
from draftree.sampling.params import SamplingParams
from engine_samples import parts_of
from views import view_of

VOCAB = 8
TREE = TokenTree((1, 2, 3, 1, 5), (-1, -1, 0, 0, 2))
Observations = list[tuple[list[int], TokenTree, Verdict]]


class Listener(Drafter[SequenceView]):
    """Drafts always the same tree and records its verdicts."""

    def __init__(self, tree: TokenTree, *, wants_picks: bool) -> None:
        self.tree = tree
        self.traits = self.describe(wants_picks)
        self.observations: Observations = []

    @classmethod
    def describe(cls, config: bool) -> DraftTraits:
        return DraftTraits(draws=frozenset({Draw.FREE}), depth=3, nodes=8, branches=True, wants_picks=config)

    def open(self, sequence: SequenceView) -> SequenceView:
        return sequence

    def draft_one(self, state: SequenceView, budget: Budget) -> TokenTree:
        return self.tree if budget.num_nodes >= len(self.tree) and budget.depth >= 3 else TokenTree((), ())

    def observe(self, observations: Sequence[Observation[SequenceView]]) -> None:
        for observation in observations:
            history, verdict = observation.state.history, observation.verdict
            assert verdict is not None, "these prompts are read in a round"
            before = len(history) - len(verdict.path) - 1
            self.observations.append((history.tokens[:before].tolist(), observation.tree, verdict))


def merged_of(*drafters: Listener) -> MergedDrafter:
    traits = [drafter.traits for drafter in drafters]
    names = [f"drafter {place}" for place in range(len(drafters))]
    return MergedDrafter(drafters, names, traits=traits, draw=Draw.FREE, vocab_size=VOCAB)


def write(
    drafter: Any,
    traits: DraftTraits,
    *,
    verify: str,
    temperature: float,
    rows: list[tuple[WritingSequence, SequenceRecord]] | None = None,
) -> TableLM:
    """Write two texts; with `rows` the first one is traced, and the records of both are appended."""
    model = TableLM(hashed(VOCAB, seed=5))
    planner = PLANNERS.find("fixed")
    plan = planner(planner.Config(), default_depth=3, default_nodes=8)
    engine = Engine(parts_of(model, drafter, traits, plan, verify=verify), EngineLimits(max_batch_size=2))
    controls = build_controls(SamplingParams(temperature=temperature), vocab_size=VOCAB, seed=7)
    texts = [
        WritingSequence("r", index, prompt, controls=controls, limit=12, detokenizer=None)
        for index, prompt in enumerate(([1, 2], [3]))
    ]
    if rows is not None:
        texts[0].rounds = []
        engine.on_round(lambda record: rows.extend((texts[row.index], row) for row in record.sequences))
    engine.add(*texts)
    while not engine.is_idle:
        engine.step()
    return model


def expected(model: TableLM, before: Sequence[int], tokens: Sequence[int], temperature: float) -> int:
    context = [*before, *tokens]
    scores = model.logits(context)
    if temperature:
        controls = build_controls(SamplingParams(temperature=temperature), vocab_size=VOCAB, seed=7)
        scores = scores / temperature + controls.noise.gumbel(len(context), torch.arange(VOCAB))
    return int(scores.argmax())


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("verify", ["coupled", "match", "soft", "typical"])
def test_the_picks_are_the_targets_own_at_every_node(verify: str, temperature: float) -> None:
    drafter = Listener(TREE, wants_picks=True)
    model = write(drafter, drafter.traits, verify=verify, temperature=temperature)
    drafted = [entry for entry in drafter.observations if len(entry[1])]
    assert drafted
    for before, tree, verdict in drafter.observations:
        ways = [path(tree.parents, node) for node in range(-1, len(tree))]
        tokens = [[tree.tokens[node] for node in way] for way in ways]
        assert list(verdict.picks) == [expected(model, before, row, temperature) for row in tokens]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("verify", ["coupled", "match", "soft", "typical"])
def test_records_of_traced_texts_have_the_picks_at_every_node(verify: str, temperature: float) -> None:
    drafter = Listener(TREE, wants_picks=False)
    rows: list[tuple[WritingSequence, SequenceRecord]] = []
    model = write(drafter, drafter.traits, verify=verify, temperature=temperature, rows=rows)
    assert {text.index for text, _ in rows} == {0, 1}
    assert any(len(row.tree) for text, row in rows if not text.index)
    for text, row in rows:
        if text.index:
            assert row.picks == ()
            continue
        before = text.history.tokens[: row.prefix_length].tolist()
        ways = [path(row.tree.parents, node) for node in range(-1, len(row.tree))]
        tokens = [[row.tree.tokens[node] for node in way] for way in ways]
        assert list(row.picks) == [expected(model, before, each, temperature) for each in tokens]
    assert {verdict.picks for _, _, verdict in drafter.observations} == {()}


def test_picks_cost_no_second_search(monkeypatch: pytest.MonkeyPatch) -> None:
    search, calls = logits.argmax, []
    monkeypatch.setattr(logits, "argmax", lambda scores: calls.append(len(scores)) or search(scores))
    drafter = Listener(TREE, wants_picks=False)
    write(drafter, drafter.traits, verify="coupled", temperature=0.8)
    unasked = list(calls)
    drafter = Listener(TREE, wants_picks=True)
    write(drafter, drafter.traits, verify="coupled", temperature=0.8)
    assert calls == unasked * 2
    drafter = Listener(TREE, wants_picks=False)
    write(drafter, drafter.traits, verify="coupled", temperature=0.8, rows=[])
    assert calls == unasked * 3


def test_parts_of_a_merged_tree_get_their_own_nodes_picks() -> None:
    one, other = Listener(chain((2, 6, 4)), wants_picks=False), Listener(TREE, wants_picks=True)
    traits = MergedDrafter.describe([one.traits, other.traits])
    assert traits.wants_picks
    assert not MergedDrafter.describe([one.traits, one.traits]).wants_picks
    model = write(merged_of(one, other), traits, verify="coupled", temperature=0.8)
    assert {verdict.picks for _, _, verdict in one.observations} == {()}
    drafted = [entry for entry in other.observations if len(entry[1])]
    assert drafted
    for before, tree, verdict in drafted:
        # the merged tree has 7 nodes and room for 8: every node was scored
        tokens = [[tree.tokens[node] for node in path(tree.parents, end)] for end in range(-1, len(tree))]
        assert list(verdict.picks) == [expected(model, before, row, 0.8) for row in tokens]


def test_nodes_that_a_merged_tree_had_no_room_for_have_no_pick() -> None:
    one, other = Listener(chain((2, 6, 4)), wants_picks=False), Listener(TREE, wants_picks=True)
    merged = merged_of(one, other)
    view = view_of([1, 2], vocab_size=VOCAB)
    state = merged.open(view)
    (tree,) = merged.draft([state], [Budget(5, 3)])
    assert tree.tokens == (2, 6, 1, 3, 1)
    view.history.append([7])
    merged.observe([Observation(state, 1, tree, Verdict((), 7, picks=(7, 10, 11, 12, 13, 14)))])
    ((_, part, verdict),) = other.observations
    assert part is TREE
    assert verdict.picks == (7, 12, 10, 13, 14, None)
