"""The text of a sequence that ends anywhere inside a run of accepted tokens is the text of the tokens it keeps."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from draftree.engine.sequence import FinishReason, WritingSequence
from draftree.sampling.controls import build_controls
from draftree.sampling.params import SamplingParams
from draftree.text.detokenize import Detokenizer
from draftree.text.tokenizer import Tokenizer
from text_backends import byte_fallback, byte_level

TEXT = "The fox\n\n語 😀\nThe dog 日本 é\n"


def sequence(tokenizer: Tokenizer, limit: int, **params: object) -> WritingSequence:
    controls = build_controls(
        SamplingParams(**params),  # type: ignore[arg-type]
        vocab_size=len(tokenizer.vocabulary()),
        eos_ids=[tokenizer.eos_token_id],
        seed=1,
    )
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=True)
    return WritingSequence("request", 0, [1], controls=controls, limit=1 + limit, detokenizer=detokenizer)


def shown(written: WritingSequence) -> str:
    return "".join(piece.text for piece in written.take_pieces())


@pytest.mark.parametrize("backend", [byte_level, byte_fallback])
@pytest.mark.parametrize("length_of_run", [1, 2, 5, 100])
def test_the_limit_may_fall_anywhere(backend: Callable[[], object], length_of_run: int) -> None:
    tokenizer = Tokenizer(backend())
    ids = tokenizer.encode(TEXT)
    for limit in range(1, len(ids)):
        written = sequence(tokenizer, limit)
        for start in range(0, len(ids), length_of_run):
            if not written.is_finished:
                run = ids[start : start + length_of_run]
                written.write(run, len(run) - 1)
        assert written.finish_reason is FinishReason.LENGTH
        assert shown(written) == tokenizer.decode(ids[:limit], True)


@pytest.mark.parametrize("backend", [byte_level, byte_fallback])
def test_the_end_of_text_may_fall_anywhere(backend: Callable[[], object]) -> None:
    tokenizer = Tokenizer(backend())
    ids = tokenizer.encode(TEXT)
    for place in range(len(ids)):
        written = sequence(tokenizer, 1000)
        run = [*ids[:place], tokenizer.eos_token_id, *ids[place:]]
        assert written.write(run, len(run) - 1) == place + 1
        assert written.finish_reason is FinishReason.STOP
        assert shown(written) == tokenizer.decode(ids[:place], True)


@pytest.mark.parametrize("backend", [byte_level, byte_fallback])
@pytest.mark.parametrize("stop", ["\n", "\n\n", "fox\n\n語", "😀\nT", "本", "é\n", "never"])
@pytest.mark.parametrize("length_of_run", [1, 3, 100])
def test_a_stop_string_ends_the_text_before_it(backend: Callable[[], object], stop: str, length_of_run: int) -> None:
    tokenizer = Tokenizer(backend())
    ids = tokenizer.encode(TEXT)
    written = sequence(tokenizer, len(ids), stop=[stop])
    for start in range(0, len(ids), length_of_run):
        if not written.is_finished:
            run = ids[start : start + length_of_run]
            written.write(run, len(run) - 1)
    whole = tokenizer.decode(ids, True)
    assert shown(written) == whole.split(stop)[0]
    assert written.finish_reason is (FinishReason.STOP if stop in whole else FinishReason.LENGTH)
