"""A sink gets hidden states of every token that the target reads, equal to those of a single pass."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftree import LLM, SamplingParams
from draftree.core.errors import ConfigurationError
from draftree.engine.engine import Engine
from draftree.engine.memory import slot_budget
from draftree.engine.parts import StateRows, StateSink
from draftree.engine.sequence import WritingSequence
from draftree.models.base import Extend, LanguageModel, Pass
from draftree.models.table import TableLM, hashed
from draftree.options import EngineLimits
from engine_samples import run
from native_samples import native

VOCAB = 12

in_c = pytest.mark.skipif(shutil.which("cc") is None, reason="native kernels need a C compiler")


class Kept(StateSink):
    """Keeps all states, and notes texts that are read again."""

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.layers = layers
        self.states: dict[WritingSequence, Tensor] = {}
        self.repeated: set[WritingSequence] = set()

    def take(self, hidden: Tensor, texts: Sequence[StateRows]) -> None:
        for text in texts:
            new = hidden[list(text.rows)].clone()
            old = self.states.get(text.sequence, new[:0])
            assert text.start <= len(old), "no token is left out"
            if text.start < len(old):
                self.repeated.add(text.sequence)
            self.states[text.sequence] = torch.cat([old[: text.start], new])


def table() -> TableLM:
    model = TableLM(hashed(VOCAB, seed=5), order=3, num_features=3)
    model.num_layers = 2
    return model


def reference(model: LanguageModel, tokens: Sequence[int], layers: tuple[int, ...]) -> Tensor:
    """States of all but the last token, from one pass over a slot of its own."""
    slot = model.open()
    capture = tuple(sorted(set(layers)))
    found = model.run(Pass([Extend(slot, tokens[:-1], range(-1, len(tokens) - 2))], capture=capture)).hidden
    model.close(slot)
    assert found is not None
    return found[:, [capture.index(layer) for layer in layers]]


def texts_with(model: Any, draft: str | None, sink: StateSink | None, **limits: Any) -> list[WritingSequence]:
    llm = LLM(model, draft, plan=None if draft is None else "fixed:3")
    parts = replace(llm.engine.parts, sink=sink)
    engine = Engine(parts, EngineLimits(prefix_cache_size=0, **limits))
    shared = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]
    prompts = [shared, shared, [*shared, 7], [2, 3], [5] * 700]
    if model.max_length < 1000:
        prompts[4] = [5] * 150
    sequences = []
    for seed, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=24, temperature=0.9 * (seed % 2), seed=seed, stop_token_ids=[11])
        sequences += llm.requests.sequences(prompt, params)
    engine.add(*sequences)
    run(engine)
    return sequences


@pytest.mark.parametrize("draft", [None, "ngram", "suffix"])
@pytest.mark.parametrize("layers", [(0, 1, 2), (2, 0)])
def test_states_of_all_but_the_last_token_arrive(draft: str | None, layers: tuple[int, ...]) -> None:
    sink = Kept(layers)
    model = table()
    written = texts_with(model, draft, sink, max_batch_size=3)
    assert {str(sequence.finish_reason) for sequence in written} == {"stop", "length"}
    assert set(sink.states) == set(written)
    for sequence in written:
        tokens = sequence.history.tokens.tolist()
        assert torch.equal(sink.states[sequence], reference(model, tokens, layers))
    plain = texts_with(table(), None, None)
    assert [s.history.tokens.tolist() for s in written] == [s.history.tokens.tolist() for s in plain]
    assert not sink.repeated


@in_c
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("draft", [None, "ngram"])
def test_states_in_c_are_bit_identical_to_those_of_one_pass(kind: str, draft: str | None) -> None:
    model = native("qwen3", kind)
    sink = Kept((0, 1, 2))
    for sequence in texts_with(model, draft, sink, max_batch_size=4, prefill_chunk_size=40):
        tokens = sequence.history.tokens.tolist()
        assert torch.equal(sink.states[sequence], reference(model, tokens, (0, 1, 2)))


def test_a_preempted_text_is_read_again() -> None:
    # room for two texts now, and for one when both have grown
    model = native("llama") if shutil.which("cc") else None
    if model is None:
        pytest.skip("native kernels need a C compiler")
    llm = LLM(model, "none")
    sink = Kept((1, 2))
    memory = 2 * slot_budget(llm.engine.parts).slot_bytes(260)
    engine = Engine(
        replace(llm.engine.parts, sink=sink),
        EngineLimits(max_batch_size=4, prefix_cache_size=0, sequence_memory=memory),
    )
    sequences = []
    for seed in range(3):
        params = SamplingParams(max_tokens=300, temperature=1.0, seed=seed, ignore_eos=True)
        sequences += llm.requests.sequences([3, 5, 7 + seed], params)
    engine.add(*sequences)
    run(engine)
    assert sink.repeated, "the memory is too small for all"
    for sequence in sequences:
        assert torch.equal(sink.states[sequence], reference(model, sequence.history.tokens.tolist(), (1, 2)))


def test_cached_prefixes_are_refused() -> None:
    parts = replace(LLM(table(), "none").engine.parts, sink=Kept((0,)))
    with pytest.raises(ConfigurationError, match="prefix_cache_size is 8, but hidden states of every token"):
        Engine(parts)


def test_a_failed_text_gets_no_more_states() -> None:
    good = hashed(VOCAB, seed=5)

    def spoilt(context: tuple[int, ...]) -> Tensor:
        return good(context) * (float("nan") if len(context) > 6 else 1.0)

    model = TableLM(spoilt, num_features=1)
    llm, sink = LLM(model, "none"), Kept((0,))
    engine = Engine(replace(llm.engine.parts, sink=sink), EngineLimits(prefix_cache_size=0))
    (sequence,) = llm.requests.sequences([1, 2, 3], SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
    engine.add(sequence)
    run(engine)
    assert sequence.error is not None
    assert len(sink.states[sequence]) == 6
