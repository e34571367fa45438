"""The default planner, with a clock by which drafts pay, drafts and prunes trees without changing a text."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftree import LLM, SamplingParams
from draftree.core.types import RoundRecord
from families import drafter_folder, prompts, target
from paced import Cost, compute_bound, memory_bound, paced_llm

RAGGED = prompts(3, 17, 9)
DRAFTS = ("ngram,min=1", "model:{},k=4", "model:{},tree=best-8", "ngram,min=1+model:{},tree=2-2-1")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drafters")


def params(temperature: float) -> SamplingParams:
    return SamplingParams(max_tokens=24, temperature=temperature, seed=4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("draft", DRAFTS)
def test_texts_are_plain_decodings_where_drafts_pay(draft: str, temperature: float, folders: Path) -> None:
    records: list[RoundRecord] = []
    spec = draft.format(drafter_folder("llama", folders))
    done = paced_llm(target("llama"), spec, on_round=records.append).generate(RAGGED, params(temperature))
    plain = LLM(target("llama")).generate(RAGGED, params(temperature))
    assert [d.token_ids for d in done] == [p.token_ids for p in plain]
    rows = [row for record in records for row in record.sequences]
    assert sum(row.num_drafted for row in rows) > 0
    if "tree" in draft:
        assert any(len(row.tree) < len(row.drafted) for row in rows), "no tree was cut"


@pytest.mark.parametrize("cost", [memory_bound, compute_bound])
@pytest.mark.parametrize("family", ["gemma2", "gpt2", "deepseek_v3", "qwen3_moe"])
def test_families_keep_their_texts(family: str, cost: Cost, folders: Path) -> None:
    spec = f"ngram,min=1+model:{drafter_folder(family, folders)},tree=2-2"
    plain = LLM(target(family)).generate(RAGGED, params(1.0))
    done = paced_llm(target(family), spec, cost=cost).generate(RAGGED, params(1.0))
    assert [d.token_ids for d in done] == [p.token_ids for p in plain]


def test_by_a_simulated_clock_rounds_repeat_themselves(folders: Path) -> None:
    spec = f"model:{drafter_folder('llama', folders)},tree=best-8"
    counts = []
    for _ in range(2):
        done = paced_llm(target("llama"), spec).generate(RAGGED, params(0.0))
        counts.append([(d.stats.rounds, d.stats.draft_tokens, d.stats.accepted_tokens) for d in done])
    assert counts[0] == counts[1]
