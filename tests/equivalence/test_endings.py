"""Texts end where plain decoding ends them, anywhere in an accepted run, and nothing after the end counts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from draftree import LLM, Completion, SamplingParams
from draftree.core.tree import TokenTree, chain
from draftree.core.types import Budget
from draftree.models.table import Table, TableLM, hashed
from families import VOCAB_SIZE
from paced import steady
from spelling import EOS, LETTERS, tokenizer

PROMPT = [3, 45, 46, 12]
LENGTH = 24
K = 6
WRONG_EVERY = 11
"""Every so many positions the script guesses wrong, so that accepted runs begin at many offsets."""

Scripts = dict[str, Any]
LETTER_IDS = [tokenizer().encode(letter, add_special_tokens=False)[0] for letter in LETTERS]


@functools.cache
def table(seed: int, *, only_letters: bool) -> TableLM:
    """Random text over the whole vocabulary, bytes that form no character included, or over letters and words."""
    base = hashed(VOCAB_SIZE, seed, scale=3.0)
    allowed = torch.zeros(VOCAB_SIZE, dtype=torch.float64)
    if only_letters:
        allowed = torch.full_like(allowed, -40.0)
        allowed[LETTER_IDS + list(range(45, 63))] = 0.0
    allowed[:3] = -40.0
    return TableLM(lambda context: base(context) + allowed)


def ending(inner: TableLM, place: int) -> TableLM:
    """The same text, with the end of text as the token at a place of the output."""

    def logits(context: tuple[int, ...]) -> Tensor:
        found = inner.logits(context).clone()
        if len(context) == len(PROMPT) + place:
            found[EOS] = 100.0
        return found

    return TableLM(logits)


def write(model: TableLM, draft: str | None, **params: Any) -> Completion:
    llm = LLM(model, draft, plan=steady(draft), tokenizer=tokenizer())
    return llm.generate([PROMPT], SamplingParams(**({"temperature": 0.0, "max_tokens": LENGTH, "seed": 1} | params)))[0]


def knowing(text: tuple[int, ...]) -> Callable[[np.ndarray, Budget], TokenTree]:
    """A script that drafts the coming text with occasional errors."""

    def draft(tokens: np.ndarray, budget: Budget) -> TokenTree:
        start = len(tokens) - len(PROMPT)
        count = min(budget.num_nodes, budget.depth)
        coming = list(text[start : start + count])
        for place in range(len(coming)):
            if (start + place) % WRONG_EVERY == WRONG_EVERY - 1:
                coming[place] = (coming[place] + 1) % VOCAB_SIZE
        return chain(coming)

    return draft


def require_same(plain: Completion, drafted: Completion) -> None:
    assert drafted.token_ids == plain.token_ids
    assert (drafted.text, drafted.finish_reason, drafted.seed) == (plain.text, plain.finish_reason, plain.seed)
    assert drafted.stop_reason == plain.stop_reason
    stats = drafted.stats
    assert stats.completion_tokens == len(drafted.token_ids) == len(drafted.drafted)
    assert stats.accepted_tokens == sum(drafted.drafted) == sum(stats.accepted_by_depth) <= stats.draft_tokens
    assert plain.stats.rounds == len(plain.token_ids)
    assert stats.rounds < plain.stats.rounds or len(plain.token_ids) <= 1


def both(scripts: Scripts, model: TableLM, **params: Any) -> tuple[Completion, Completion]:
    """Plain, and with a drafter that sees past every end."""
    endless = params | {"ignore_eos": True, "stop": None, "stop_token_ids": None, "max_tokens": LENGTH + K}
    scripts["knowing"] = knowing(write(model, None, **endless).token_ids)
    plain, drafted = write(model, None, **params), write(model, f"scripted:knowing,k={K}", **params)
    require_same(plain, drafted)
    return plain, drafted


@pytest.mark.parametrize("place", range(2 * K + 2))
def test_end_of_text_anywhere_in_a_run(scripts: Scripts, place: int) -> None:
    plain, drafted = both(scripts, ending(table(1, only_letters=False), place))
    assert (plain.finish_reason, len(plain.token_ids), plain.token_ids[-1]) == ("stop", place + 1, EOS)
    assert plain.stop_reason is None
    assert sum(drafted.drafted) >= place - (place + 1) // (K + 1) - 1


@pytest.mark.parametrize("place", range(2 * K + 2))
def test_a_stop_token_anywhere_in_a_run(scripts: Scripts, place: int) -> None:
    model = table(2, only_letters=False)
    free = write(model, None).token_ids
    stop = free[place]
    plain, _ = both(scripts, model, stop_token_ids=[stop, 5])
    assert (plain.finish_reason, plain.stop_reason) == ("stop", plain.token_ids[-1])
    assert len(plain.token_ids) == 1 + min(free.index(token) for token in (stop, 5) if token in free)


@pytest.mark.parametrize("count", range(1, 2 * K + 3))
def test_a_limit_anywhere_in_a_run(scripts: Scripts, count: int) -> None:
    plain, drafted = both(scripts, table(3, only_letters=False), max_tokens=count)
    assert (plain.finish_reason, len(plain.token_ids)) == ("length", count)
    assert drafted.stats.draft_tokens <= count - 1 + drafted.stats.rounds * K
    assert sum(drafted.stats.drafted_by_depth) == drafted.stats.draft_tokens


@pytest.mark.parametrize("place", range(K + 2))
def test_an_ignored_end_of_text_does_not_end(scripts: Scripts, place: int) -> None:
    plain, _ = both(scripts, ending(table(1, only_letters=False), place), ignore_eos=True)
    assert (plain.finish_reason, len(plain.token_ids), plain.token_ids[place]) == ("length", LENGTH, EOS)


@pytest.mark.parametrize("least", [1, 3, K, K + 3])
def test_a_minimum_keeps_ends_away_along_a_run(scripts: Scripts, least: int) -> None:
    model = ending(table(1, only_letters=False), 2)
    plain, _ = both(scripts, model, min_tokens=least)
    assert (plain.finish_reason == "stop") == (least <= 2)
    assert len(plain.token_ids) == (3 if least <= 2 else LENGTH)


def first_end(ids: tuple[int, ...], stop: str) -> tuple[int, int]:
    """Tokens until the stop string is complete, and where it begins in the text; looked for token by token."""
    behind_prompt = tokenizer().decode(PROMPT, True)
    for count in range(1, len(ids) + 1):
        text = tokenizer().decode([*PROMPT, *ids[:count]], True)[len(behind_prompt) :]
        if stop in text:
            return count, text.index(stop)
    raise AssertionError(f"{stop!r} is not in the text")


def stops() -> list[str]:
    text = write(table(4, only_letters=True), None).text
    return sorted({text[start : start + width] for start in range(0, 14, 2) for width in (1, 2, 3, 5)})


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("stop", stops())
def test_a_stop_string_anywhere_in_a_run(scripts: Scripts, stop: str, keep: bool) -> None:
    model = table(4, only_letters=True)
    free = write(model, None)
    count, start = first_end(free.token_ids, stop)
    plain, _ = both(scripts, model, stop=[stop, "never written"], include_stop_str_in_output=keep)
    assert (plain.finish_reason, plain.stop_reason) == ("stop", stop)
    assert plain.token_ids == free.token_ids[:count]
    assert plain.text == free.text[: start + len(stop) if keep else start]


@pytest.mark.parametrize("least", [1, 4, 9])
def test_a_minimum_holds_for_stop_strings_too(scripts: Scripts, least: int) -> None:
    model = table(4, only_letters=True)
    free = write(model, None)
    stop = free.text[1:3]
    plain, _ = both(scripts, model, stop=[stop], min_tokens=least)
    assert len(plain.token_ids) >= least
    assert free.text.startswith(plain.text)


@pytest.mark.parametrize("least", [1, 4, 9])
@pytest.mark.parametrize("width", [2, 3, 6])
def test_a_stop_string_that_begins_before_the_minimum(scripts: Scripts, least: int, width: int) -> None:
    """Its last character is the first one of the token after the minimum."""
    model = table(4, only_letters=True)
    free = write(model, None)
    before = len(text_of(free.token_ids[:least]))
    start = max(0, before + 1 - width)
    stop = free.text[start : before + 1]
    assert len(stop) > 1
    plain, _ = both(scripts, model, stop=["never written", stop], min_tokens=least)
    assert (plain.finish_reason, plain.stop_reason) == ("stop", stop)
    assert plain.token_ids == free.token_ids[: least + 1]
    assert plain.text == free.text[:start]


def text_of(ids: tuple[int, ...]) -> str:
    before = tokenizer().decode(PROMPT, True)
    return tokenizer().decode([*PROMPT, *ids], True)[len(before) :]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("place", [1, 4])
def test_bytes_after_the_end_never_reach_the_text(scripts: Scripts, seed: int, place: int) -> None:
    plain, drafted = both(scripts, ending(table(100 + seed, only_letters=False), place), temperature=1.0, seed=seed)
    shown = [token for token in plain.token_ids if token != EOS]
    before = tokenizer().decode(PROMPT, True)
    assert drafted.text == tokenizer().decode([*PROMPT, *shown], True)[len(before) :]


@pytest.mark.parametrize("place", [0, 2, 5, 9])
def test_pieces_of_a_stream_are_the_text(scripts: Scripts, place: int) -> None:
    model = ending(table(4, only_letters=True), place)
    scripts["knowing"] = knowing(write(model, None, ignore_eos=True).token_ids)
    llm = LLM(model, "scripted:knowing", plan="fixed", tokenizer=tokenizer())
    params = SamplingParams(temperature=0, max_tokens=LENGTH)
    assert "".join(llm.stream(PROMPT, params)) == write(model, None).text


@pytest.mark.parametrize("offset", [0, 1, 5])
def test_a_prompt_that_leaves_room_for_few_tokens(scripts: Scripts, offset: int) -> None:
    inner: Table = table(2, only_letters=False).logits
    model = TableLM(inner, max_length=len(PROMPT) + 1 + offset)
    plain, _ = both_within(scripts, model)
    assert (plain.finish_reason, len(plain.token_ids)) == ("length", 1 + offset)


def both_within(scripts: Scripts, model: TableLM) -> tuple[Completion, Completion]:
    """As `both`, to the end of the model's context."""
    scripts["knowing"] = knowing(write(table(2, only_letters=False), None).token_ids)
    plain, drafted = (write(model, draft, max_tokens=None) for draft in (None, f"scripted:knowing,k={K}"))
    require_same(plain, drafted)
    return plain, drafted
