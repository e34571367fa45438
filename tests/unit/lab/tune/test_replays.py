"""Replays of a recorded text: rounds equal those of real runs, for drafters, trees and planners; costs are charged."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from bench_samples import write_model
from draftree import LLM, SamplingParams
from draftree.core.errors import ConfigurationError, InvalidRequestError, UnsupportedModelError
from draftree.core.types import RoundRecord
from draftree.heads.folders import write_head
from draftree.lab.tune.candidates import PLAIN, Candidate
from draftree.lab.tune.contest import text_digest
from draftree.lab.tune.replays import (
    MeasuredCosts,
    Replays,
    interpolated,
    layers_of,
    measure_round_costs,
    record_text,
    states_of,
    why_not_replayed,
)
from draftree.loading.load import load_model
from draftree.loading.loaded import LoadedModel
from draftree.models.base import LayerSubset
from draftree.models.replay import RecordedText, ReplayClock, ReplayModel
from head_samples import head_config, random_head

PROMPT = [5, 9, 12, 5, 9, 12, 5, 9, 30, 31, 5, 9]
COSTS = MeasuredCosts({1: 1.0, 3: 2.0, 64: 4.0}, {0.0: {1: 0.25, 64: 0.5}, 0.8: {1: 0.5, 64: 1.0}})


def still() -> float:
    """A clock on which nothing takes time."""
    return 0.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def near(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with some noise in its weights: a drafter that is often right."""
    copy = tmp_path_factory.mktemp("models") / "near"
    shutil.copytree(folder, copy)
    model = LlamaForCausalLM.from_pretrained(copy, trust_remote_code=False)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    model.save_pretrained(copy)
    return copy


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(folder, dtype="float32", kernels="torch")


def params_at(temperature: float, count: int = 48) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=temperature, seed=3, ignore_eos=True)


def recorded(loaded: LoadedModel, temperature: float, layers: Sequence[int] = ()) -> RecordedText:
    return record_text(LLM(loaded, "none", max_batch_size=1), PROMPT, params_at(temperature), layers)


def rounds_of(records: Sequence[RoundRecord]) -> list[tuple[Any, ...]]:
    """What a round drafted, scored, accepted and wrote."""
    rows = [record.sequences[0] for record in records]
    return [(row.prefix_length, row.drafted.tokens, row.tree.parents, row.path, row.bonus) for row in rows]


def real_rounds(loaded: LoadedModel, draft: str, plan: str, text: RecordedText) -> list[tuple[Any, ...]]:
    records: list[RoundRecord] = []
    llm = LLM(loaded, draft, plan=plan, max_batch_size=1, on_round=records.append)
    (done,) = llm.generate([list(text.prompt)], text.params)
    assert done.token_ids == text.tokens
    return rounds_of(records)


def replayed_rounds(loaded: LoadedModel, draft: str, plan: str, text: RecordedText) -> list[tuple[Any, ...]]:
    records: list[RoundRecord] = []
    clock = ReplayClock(still)
    model = ReplayModel(loaded.model, COSTS, clock)
    model.text = text
    llm = LLM(replace(loaded, model=model), draft, plan=plan, max_batch_size=1, on_round=records.append, clock=clock)
    (done,) = llm.generate([list(text.prompt)], text.params)
    assert done.token_ids == text.tokens
    return rounds_of(records)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    ("draft", "plan"),
    [
        ("ngram", "fixed"),
        ("ngram,k=3", "heuristic"),
        ("suffix", "fixed"),
        ("suffix", "additive"),
        ("lookahead", "fixed"),
        ("ngram+suffix", "fixed"),
        ("model:NEAR,k=3", "fixed"),
        ("model:NEAR,tree=2-2-1", "fixed"),
        ("model:NEAR,tree=best-8", "threshold"),
        ("model:NEAR,k=4+suffix", "heuristic"),
    ],
)
def test_rounds_of_a_replay_are_those_of_the_real_run(
    loaded: LoadedModel, near: Path, draft: str, plan: str, temperature: float
) -> None:
    spec, text = draft.replace("NEAR", str(near)), recorded(loaded, temperature)
    real = real_rounds(loaded, spec, plan, text)
    assert replayed_rounds(loaded, spec, plan, text) == real
    if (draft, temperature) == ("model:NEAR,k=3", 0.0):
        assert len(real) < len(text.tokens) - 3, "some drafts are accepted"


def test_seconds_are_those_of_the_measured_passes(loaded: LoadedModel) -> None:
    text = recorded(loaded, 0.8)
    plain = Replays(loaded, None, COSTS, clock=still).write(PLAIN, text)
    assert plain.seconds_per_token == pytest.approx(1.0 + 0.5)
    assert plain.acceptance_length == 1.0
    assert plain.text == text_digest(text.tokens)
    greedy = Replays(loaded, None, COSTS, clock=still).write(PLAIN, recorded(loaded, 0.0))
    assert greedy.seconds_per_token == pytest.approx(1.0 + 0.25)


def test_a_pass_of_more_rows_costs_more(loaded: LoadedModel, near: Path) -> None:
    text = recorded(loaded, 0.0)
    free = MeasuredCosts({1: 1.0, 64: 1.0})
    draft = Candidate(f"model:{near},k=2", "fixed")
    cheap = Replays(loaded, None, free, clock=still).write(draft, text)
    assert cheap.seconds_per_token == pytest.approx(1 / cheap.acceptance_length, rel=0.1)
    dear = Replays(loaded, None, MeasuredCosts({1: 1.0, 3: 3.0}), clock=still).write(draft, text)
    assert dear.acceptance_length == cheap.acceptance_length
    assert dear.seconds_per_token == pytest.approx(3 * cheap.seconds_per_token, rel=0.1)


def test_costs_between_the_measured_rows_are_interpolated() -> None:
    known = {1: 1.0, 3: 2.0, 64: 4.0}
    assert [interpolated(known, rows) for rows in (1, 2, 3, 64, 128)] == [1.0, 1.5, 2.0, 4.0, 8.0]
    assert MeasuredCosts(known).pick_seconds(4, 0.5) == 0.0


def test_states_of_a_text_are_returned_where_drafts_are_right(loaded: LoadedModel) -> None:
    text = recorded(loaded, 0.0, (0, 2))
    whole = states_of(loaded.model, (*text.prompt, *text.tokens[:-1]), (0, 2))
    assert text.hidden is not None
    assert torch.equal(text.hidden, whole)
    assert whole.shape == (len(text.prompt) + len(text.tokens) - 1, 2, 32)


def test_layers_and_rows_are_those_of_the_candidates(loaded: LoadedModel) -> None:
    assert layers_of([PLAIN, Candidate("suffix")], loaded) == ()


@pytest.mark.parametrize(
    ("draft", "reason"),
    [
        ("lookahead,window=3", "target tokens off the accepted path"),
        ("model:NEAR,ahead=2", "while the target verifies"),
    ],
)
def test_drafters_that_need_more_than_the_text_are_named(
    loaded: LoadedModel, near: Path, draft: str, reason: str
) -> None:
    found = why_not_replayed(Candidate(draft.replace("NEAR", str(near))), loaded)
    assert found is not None
    assert reason in found
    assert why_not_replayed(Candidate("suffix"), loaded) is None


@pytest.mark.parametrize(
    ("draft", "reason"), [("early-exit:1", "layers of the target"), ("synthetic", "no passes over other texts")]
)
def test_drafters_that_run_the_target_cannot_be_replayed(loaded: LoadedModel, draft: str, reason: str) -> None:
    found = Replays(loaded, None, COSTS).why_not(Candidate(draft), recorded(loaded, 0.0))
    assert found is not None
    assert reason in found


def test_other_requests_are_refused(loaded: LoadedModel) -> None:
    model = ReplayModel(loaded.model, COSTS, ReplayClock(still))
    model.text = recorded(loaded, 0.8)
    llm = LLM(replace(loaded, model=model), "none", max_batch_size=1)
    (done,) = llm.generate([PROMPT], params_at(0.8, 20))
    assert done.token_ids == model.text.tokens[:20]
    for prompt, params in (
        ([1, *PROMPT], params_at(0.8)),
        (PROMPT, params_at(0.7)),
        (PROMPT, replace(params_at(0.8), seed=4)),
        (PROMPT, params_at(0.8, 49)),
        (PROMPT, replace(params_at(0.8), top_k=5)),
    ):
        with pytest.raises(InvalidRequestError, match="not the recorded one"):
            llm.generate([prompt], params)


def test_a_text_that_ended_by_itself_is_replayed_to_its_end(tmp_path: Path) -> None:
    model = load_model(write_model(tmp_path / "ends"), dtype="float32", kernels="torch")
    plain = LLM(model, "none", max_batch_size=1)
    (first,) = plain.generate([PROMPT], params_at(0.0))
    stop = first.token_ids[20]
    params = replace(params_at(0.0), stop_token_ids=[stop])
    text = record_text(plain, PROMPT, params)
    assert text.is_ended
    assert len(text.tokens) <= 21
    assert replayed_rounds(model, "suffix", "fixed", text) == real_rounds(model, "suffix", "fixed", text)


def test_parts_and_logits_of_a_replay_are_refused(loaded: LoadedModel) -> None:
    model = ReplayModel(loaded.model, COSTS, ReplayClock(still))
    with pytest.raises(UnsupportedModelError, match="layers of the target"):
        model.require_part(LayerSubset(end=1))
    with pytest.raises(UnsupportedModelError, match="copy of the target"):
        model.quantized_copy("int8")
    with pytest.raises(ConfigurationError, match="verifies drafts itself"):
        LLM(replace(loaded, model=model), "ngram", verify="token")


def test_a_clock_is_charged_in_place_of_the_time_that_passed() -> None:
    now = 10.0
    clock = ReplayClock(lambda: now)
    start = clock()
    now = 13.0
    clock.charge(start, 0.5)
    assert clock() == start + 0.5
    now = 14.0
    assert clock() == start + 1.5


def test_rounds_are_measured_by_rows(loaded: LoadedModel) -> None:
    times = iter(range(10_000))
    costs = measure_round_costs(
        loaded.model, max_rows=5, prefix=16, temperatures=(0.0, 0.8), clock=lambda: float(next(times))
    )
    assert costs.passes == dict.fromkeys((1, 2, 3, 4, 5), 1.0)
    assert costs.picks == dict.fromkeys((0.0, 0.8), dict.fromkeys((1, 2, 3, 4, 5), 1.0))
    assert loaded.model.num_open == 0


def test_a_head_is_replayed_with_the_recorded_states(loaded: LoadedModel, tmp_path: Path) -> None:
    size = loaded.model.vocab_size
    config = head_config(
        features=(0, 1, -1), target_hidden=32, hidden=32, vocab_size=size, draft_vocab_size=size, max_length=160
    )
    write_head(random_head(config, scale=0.2), tmp_path / "head")
    draft = f"head:{tmp_path / 'head'},tree=best-8"
    layers = layers_of([Candidate(draft)], loaded)
    assert layers == (0, 1, 2)
    for temperature in (0.0, 0.8):
        text = recorded(loaded, temperature, layers)
        assert replayed_rounds(loaded, draft, "fixed", text) == real_rounds(loaded, draft, "fixed", text)
    unrecorded = Replays(loaded, None, COSTS).why_not(Candidate(draft), recorded(loaded, 0.0))
    assert unrecorded is not None
    assert "hidden states of layers [0, 1, 2] were not recorded" in unrecorded
