"""The text of a sequence that ends anywhere inside an accepted run is the text of its kept tokens."""

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


def written_in_runs(
    tokenizer: Tokenizer, ids: list[int], length_of_run: int, *, limit: int | None = None, **params: object
) -> WritingSequence:
    written = sequence(tokenizer, limit or len(ids), **params)
    for start in range(0, len(ids), length_of_run):
        if not written.is_finished:
            run = ids[start : start + length_of_run]
            written.write(run, len(run) - 1)
    return written


def shown(written: WritingSequence) -> str:
    update = written.take_update()
    return "" if update is None else "".join(piece.text for piece in update.pieces)


@pytest.mark.parametrize("backend", [byte_level, byte_fallback])
@pytest.mark.parametrize("length_of_run", [1, 2, 5, 100])
def test_the_limit_may_fall_anywhere(backend: Callable[[], object], length_of_run: int) -> None:
    tokenizer = Tokenizer(backend())
    ids = tokenizer.encode(TEXT)
    for limit in range(1, len(ids)):
        written = written_in_runs(tokenizer, ids, length_of_run, limit=limit)
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
    written = written_in_runs(tokenizer, ids, length_of_run, stop=[stop])
    whole = tokenizer.decode(ids, True)
    assert shown(written) == whole.split(stop)[0]
    assert written.finish_reason is (FinishReason.STOP if stop in whole else FinishReason.LENGTH)


def ends_of_prefixes(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """How many characters of the text are complete after each token."""
    return [len(tokenizer.decode(ids[:count], True).rstrip("\ufffd")) for count in range(len(ids) + 1)]


@pytest.mark.parametrize("stop", ["fox\n", "x\n\n語", "The fox", "😀\nThe dog", "e", "日本 é"])
@pytest.mark.parametrize("length_of_run", [1, 3, 100])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_may_begin_before_the_minimum_and_ends_after_it(
    stop: str, length_of_run: int, include: bool
) -> None:
    """As in vLLM: its last character belongs to a later token than number `min_tokens`."""
    tokenizer = Tokenizer(byte_level())
    ids = tokenizer.encode(TEXT)
    whole, ends = tokenizer.decode(ids, True), ends_of_prefixes(tokenizer, ids)
    straddled = 0
    for least in range(len(ids) + 1):
        places = [place for place in range(len(whole)) if whole.startswith(stop, place)]
        found = [place for place in places if place + len(stop) > ends[least]]
        written = written_in_runs(
            tokenizer,
            ids,
            length_of_run,
            stop=[stop],
            min_tokens=least,
            max_tokens=99,
            include_stop_str_in_output=include,
        )
        if found:
            straddled += found[0] < ends[least]
            assert shown(written) == whole[: found[0] + (len(stop) if include else 0)]
            assert (written.finish_reason, written.stop_reason) == (FinishReason.STOP, stop)
        else:
            assert shown(written) == whole
            assert (written.finish_reason, written.stop_reason) == (FinishReason.LENGTH, None)
    assert straddled > 0 or len(stop) == 1


def test_text_of_the_minimum_that_may_become_a_stop_string_is_held_back() -> None:
    tokenizer = Tokenizer(byte_level())
    ids = tokenizer.encode("abcd")
    assert len(ids) == 4
    written = sequence(tokenizer, 10, stop=["cd"], min_tokens=3)
    written.write(ids[:3], 2)
    assert shown(written) == "ab"
    written.write(ids[3:], 0)
    assert (shown(written), written.stop_reason) == ("", "cd")


@pytest.mark.parametrize(
    ("params", "token", "reason"),
    [
        ({}, "eos", None),
        ({"stop_token_ids": [7]}, 7, 7),
        ({"stop_token_ids": [7], "ignore_eos": True}, 7, 7),
        ({"stop_token_ids": ["eos"]}, "eos", None),
        ({"stop_token_ids": ["eos"], "ignore_eos": True}, "eos", "eos"),
    ],
)
def test_the_stop_reason_is_the_requested_token(params: dict, token: object, reason: object) -> None:  # type: ignore[type-arg]
    tokenizer = Tokenizer(byte_level())

    def real(value: object) -> object:
        return tokenizer.eos_token_id if value == "eos" else value

    given = {name: [real(one) for one in value] if isinstance(value, list) else value for name, value in params.items()}
    written = sequence(tokenizer, 10, **given)
    written.write([9, real(token)], 0)  # type: ignore[list-item]
    assert written.finish_reason is FinishReason.STOP
    assert written.stop_reason == real(reason)
