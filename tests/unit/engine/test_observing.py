"""The drafter observes every pass: prompt chunks, rounds, and the hidden states that its traits name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftree.build import DraftMethod, build_parts, choose_methods
from draftree.core.errors import ConfigurationError
from draftree.core.tree import EMPTY, Draw, TokenTree, chain
from draftree.core.types import Budget, Verdict
from draftree.drafters.base import DraftContext, Drafter, DraftTraits, Observation, SequenceView
from draftree.drafters.wrappers.merged import MergedDrafter
from draftree.engine.engine import Engine
from draftree.engine.parts import EngineParts
from draftree.engine.round import PassOutcome, observe
from draftree.engine.sequence import DraftState, WritingSequence
from draftree.loading.loaded import LoadedModel
from draftree.models.base import Extend, PassResult
from draftree.models.table import TableLM, hashed
from draftree.options import EngineLimits
from draftree.planners import PLANNERS
from draftree.sampling.controls import build_controls
from draftree.sampling.logits import TensorLogits
from draftree.sampling.params import SamplingParams
from engine_samples import parts_of as engine_parts
from engine_samples import run
from views import view_of

VOCAB = 8


class Recorder(Drafter[SequenceView]):
    """Drafts two tokens and keeps what it observes."""

    def __init__(self, features: tuple[int, ...] = (), context: DraftContext | None = None) -> None:
        self.traits = self.describe(features)
        self.observed: list[tuple[Observation[SequenceView], int]] = []
        """Observations, each with the length of the target's slot then."""

    @classmethod
    def describe(cls, config: tuple[int, ...]) -> DraftTraits:
        return DraftTraits(draws=frozenset({Draw.FREE}), depth=2, nodes=2, features=config)

    def open(self, sequence: SequenceView) -> SequenceView:
        return sequence

    def draft_one(self, state: SequenceView, budget: Budget) -> TokenTree:
        return chain([1, 2][: min(budget.num_nodes, budget.depth)])

    def observe(self, observations: Sequence[Observation[SequenceView]]) -> None:
        for one in observations:
            self.observed.append((one, -1 if one.state.slot is None else one.state.slot.length))


def merged_with(recorder: Recorder) -> tuple[Any, DraftTraits]:
    other = Recorder((2,))
    traits = [other.traits, recorder.traits]
    merged = MergedDrafter([other, recorder], ["other", "own"], traits=traits, draw=Draw.FREE, vocab_size=VOCAB)
    return merged, MergedDrafter.describe(traits)


def parts_of(drafter: Any, traits: DraftTraits) -> EngineParts:
    planner = PLANNERS.find("fixed")
    plan = planner(planner.Config(), default_depth=2, default_nodes=2)
    return engine_parts(TableLM(hashed(VOCAB, seed=5)), drafter, traits, plan, verify="coupled")


@pytest.mark.parametrize("wrapped", [lambda own: (own, own.traits), merged_with])
def test_every_chunk_and_every_round_is_observed(wrapped: Any) -> None:
    recorder = Recorder()
    drafter, traits = wrapped(recorder)
    # what is captured is not under test here: tables have no layers
    traits = DraftTraits(draws=traits.draws, depth=2, nodes=4)
    engine = Engine(parts_of(drafter, traits), EngineLimits(max_batch_size=4))
    lengths = (1500, 40, 3)
    for seed, length in enumerate(lengths):
        controls = build_controls(SamplingParams(), vocab_size=VOCAB, seed=seed)
        prompt = [seed + 1, *([1, 2, 3] * length)][:length]
        engine.add(WritingSequence(str(seed), 0, prompt, controls=controls, limit=length + 30, detokenizer=None))
    run(engine)
    for length in lengths:
        own = [pair for pair in recorder.observed if pair[0].state.history.prompt_length == length]
        gained = 0
        for one, slot_length in own:
            if one.verdict is None:
                assert not len(one.tree)
                assert gained + one.tokens_read < length, "a chunk ends before the root"
            path = () if one.verdict is None else one.verdict.path
            # a merged drafter's own path is as long as the whole one: both draft the same
            gained += one.tokens_read + len(path)
            assert slot_length == gained, "what was read and accepted is what the target's slot holds"
        rounds = [one for one, _ in own if one.verdict is not None]
        assert rounds
        assert all(one.tokens_read == 1 for one in rounds[1:]), "after the prompt the root alone is read"
        assert (len(own) > len(rounds)) == (length > 512)


class _Written(SimpleNamespace):
    is_finished = False


def test_hidden_states_are_those_of_what_the_slot_gained() -> None:
    recorder = Recorder((-1, 0, 2))
    parts = parts_of(recorder, recorder.traits)
    parts.target.num_layers = 4
    assert tuple(parts.feature_layers(recorder.traits)) == (4, 0, 2)
    assert parts.capture == (0, 2, 4)
    view = view_of([1, 2], vocab_size=VOCAB)
    first, second, ended = (_Written(draft_state=DraftState(parts.drafters[0], view)) for _ in range(3))
    ended.is_finished = True
    jobs = [Extend(None, [0] * count, range(-1, count - 1)) for count in (4, 3, 5)]  # type: ignore[arg-type]
    hidden = torch.arange(12 * 3 * 2, dtype=torch.float32).view(12, 3, 2)
    gains = [
        PassOutcome(first, 0, [0, 1, 3], 2, chain([1, 2]), Verdict((1,), 5)),  # type: ignore[arg-type]
        PassOutcome(ended, 1, [0], 1, EMPTY, Verdict((), 5)),  # type: ignore[arg-type]
        PassOutcome(second, 2, range(5), 5),  # type: ignore[arg-type]
    ]
    logits = TensorLogits(torch.zeros(12, VOCAB))
    observe(parts, gains, PassResult.of_jobs(jobs, logits, hidden))
    (one, other) = (observation for observation, _ in recorder.observed)
    assert one.hidden is not None
    assert torch.equal(one.hidden, hidden[[0, 1, 3]][:, [2, 0, 1]])
    assert other.hidden is not None
    assert torch.equal(other.hidden, hidden[7:][:, [2, 0, 1]])
    assert (other.tokens_read, other.tree, other.verdict) == (5, EMPTY, None)
    observe(parts, gains, PassResult.of_jobs(jobs, logits))
    assert [observation.hidden for observation, _ in recorder.observed[2:]] == [None, None]


def test_a_part_of_merged_drafters_gets_its_own_layers() -> None:
    recorder = Recorder((5, 2))
    merged, traits = merged_with(recorder)
    assert traits.features == (2, 5)
    view = view_of([1, 2], vocab_size=VOCAB)
    state, hidden = merged.open(view), torch.randn(3, 2, 4)
    merged.observe([Observation(state, 3, EMPTY, None, hidden)])
    ((one, _),) = recorder.observed
    assert one.hidden is not None
    assert torch.equal(one.hidden, hidden[:, [1, 0]])


def test_states_of_rounds_are_not_captured_while_the_planner_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder((-1,))
    parts = parts_of(recorder, recorder.traits)
    parts = replace(parts, target=TableLM(hashed(VOCAB, seed=5), num_features=1))
    planner = parts.drafters[0].planner
    engine = Engine(parts, EngineLimits(max_batch_size=1))
    for needs_states in (True, False):
        monkeypatch.setattr(planner, "needs_states", lambda needs_states=needs_states: needs_states)
        recorder.observed.clear()
        controls = build_controls(SamplingParams(), vocab_size=VOCAB, seed=1)
        engine.add(WritingSequence(str(needs_states), 0, [1, 2, 3], controls=controls, limit=20, detokenizer=None))
        run(engine)
        prompt, *rounds = [one.hidden is not None for one, _ in recorder.observed]
        assert prompt, "a later draft reads the prompt's"
        assert rounds
        assert all(has_states == needs_states for has_states in rounds)


@pytest.mark.parametrize("layers", [(5,), (-6,), (0, 9)])
def test_layers_that_the_target_does_not_have_are_refused(layers: tuple[int, ...]) -> None:
    model = TableLM(hashed(VOCAB, seed=5), num_features=5)
    model.num_layers = 4
    methods = choose_methods("ngram", "coupled", "fixed")

    def build(features: tuple[int, ...]) -> EngineParts:
        method = DraftMethod("own", Recorder, features)
        chosen = replace(methods, drafters=(method,), traits=method.traits)
        loaded = LoadedModel(model, None, (), "table")
        return build_parts(chosen, loaded, None)

    with pytest.raises(ConfigurationError, match=f"layer {layers[-1]}, but 'table' has 4 layers"):
        build(layers)
    assert build((3, -5, -1)).capture == (0, 3, 4)
