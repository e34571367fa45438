"""Beam search on models with recurrent states: results are those of the same recurrence without slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from draftree.beam.drafting import BeamDrafter, ModelBeams, RunnersUp
from draftree.beam.params import BeamSearchParams
from draftree.beam.result import BeamResult
from draftree.beam.search import BeamSearch
from draftree.models.base import LanguageModel
from recurrent import RecurrentLM

LONG = [1 + i * i % 9 for i in range(50)]
PROMPTS = [[1, 3], [2, 5, 2, 5, 2], [4], LONG, [*LONG, 7]]
ENDS = [0]
STRATEGIES: dict[str, dict[str, Any]] = {
    "greedy": {"beam_width": 1},
    "beam": {"beam_width": 4, "early_stopping": "never"},
    "wide": {"beam_width": 12},
    "groups": {"beam_width": 6, "num_beam_groups": 3, "diversity_penalty": 0.4},
    "phrases": {"beam_width": 5, "force_words_ids": [[4, 5], [7]]},
    "independent": {"beam_width": 3, "sampling": "independent", "seed": 3},
}


def run(
    model: LanguageModel,
    params: BeamSearchParams,
    *drafters: BeamDrafter,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    capacity: int | None = None,
    chunk: int = 512,
) -> list[BeamResult]:
    searcher = BeamSearch(model, end_ids=ENDS, drafters=drafters, capacity=capacity)
    searcher.chunk_size = chunk
    found = searcher.run(prompts, [params] * len(prompts))
    assert model.num_open == 0
    return found


def params_of(strategy: str) -> BeamSearchParams:
    given = STRATEGIES[strategy]
    return BeamSearchParams(num_return_sequences=given["beam_width"], max_new_tokens=14, **given)


@pytest.mark.parametrize("chunk", [7, 512])
@pytest.mark.parametrize(("trees", "capacity"), [(True, None), (True, 3), (False, None)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_beams_are_those_of_a_model_without_states(
    strategy: str, trees: bool, capacity: int | None, chunk: int
) -> None:
    params, model = params_of(strategy), RecurrentLM(supports_trees=trees)
    expected = run(RecurrentLM().without_slots(), params)
    found = run(model, params, capacity=capacity, chunk=chunk)
    assert [one.hypotheses for one in found] == [one.hypotheses for one in expected]
    # prompts move the state on, all but their last tokens
    assert model.num_settled == sum(len(ids) - 1 for ids in PROMPTS)


@pytest.mark.parametrize("strategy", ["greedy", "beam", "phrases"])
@pytest.mark.parametrize("draft", ["model", "runners-up"])
def test_drafted_beams_are_the_same(draft: str, strategy: str) -> None:
    params, small = params_of(strategy), RecurrentLM(distance=0.2)
    drafter = RunnersUp() if draft == "runners-up" else ModelBeams(small)
    prompts = [*PROMPTS, LONG * 25]  # the last one is read in several passes
    found = run(RecurrentLM(), params, drafter, prompts=prompts)
    expected = run(RecurrentLM().without_slots(), params, prompts=prompts)
    assert [one.hypotheses for one in found] == [one.hypotheses for one in expected]
    if draft == "model":
        assert small.num_settled == sum(len(ids) - 1 for ids in prompts)
    assert small.num_open == 0


def test_ensembles_mix_models_with_states_and_without() -> None:
    others = [RecurrentLM(seed=2), RecurrentLM(seed=3)]
    given: dict[str, Any] = {"beam_width": 3, "num_return_sequences": 3, "max_new_tokens": 10}
    found = run(RecurrentLM(), BeamSearchParams(models=[others[0], others[1].without_slots()], **given))
    plain = [model.without_slots() for model in others]
    expected = run(RecurrentLM().without_slots(), BeamSearchParams(models=plain, **given))
    assert [one.hypotheses for one in found] == [one.hypotheses for one in expected]
