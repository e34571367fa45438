from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from draftree.core.errors import InvalidRequestError
from draftree.sampling.bans import BadWords, MinTokens, NoRepeatNgram
from draftree.sampling.controls import Controls, build_controls
from draftree.sampling.filters import MinP, TopK, TopP
from draftree.sampling.history import History
from draftree.sampling.laws import LawRows, Laws
from draftree.sampling.params import SamplingParams
from draftree.sampling.penalties import CountPenalty, LogitBias, RepetitionPenalty

VOCAB = 12
EVERYTHING: dict[str, Any] = {
    "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "presence_penalty": 0.5,
    "frequency_penalty": 0.25, "logit_bias": {3: 1.0}, "no_repeat_ngram_size": 3, "bad_words": ["ab"],
    "min_tokens": 2,
}  # fmt: skip


def letters(text: str) -> list[int]:
    return [ord(letter) % VOCAB for letter in text]


def build(encode: Callable[[str], list[int]] | None = letters, **values: Any) -> Controls:
    return build_controls(SamplingParams(**values), vocab_size=VOCAB, eos_ids=[2], encode=encode, seed=1)


def test_order() -> None:
    controls = build(**EVERYTHING)
    kinds = [LogitBias, RepetitionPenalty, CountPenalty, NoRepeatNgram, BadWords, MinTokens]
    assert [type(processor) for processor in controls.processors] == kinds
    assert [type(keep) for keep in controls.filters] == [TopK, TopP, MinP]
    assert controls.temperature == 0.7
    assert controls.noise.seed == 1


def test_filters_are_left_out_at_temperature_0() -> None:
    controls = build(**EVERYTHING | {"temperature": 0})
    assert controls.filters == ()
    assert len(controls.processors) == 6


@pytest.mark.parametrize(
    ("values", "plain"),
    [
        ({}, True),
        ({"temperature": 0}, True),
        ({"temperature": 0.5}, False),
        ({"temperature": 0, "top_k": 3}, True),
        ({"top_k": 3}, False),
        ({"top_k": VOCAB}, True),
        ({"top_k": -1}, True),
        ({"top_p": 0.5}, False),
        ({"min_p": 0.5}, False),
        ({"temperature": 0, "presence_penalty": 0.5}, False),
        ({"temperature": 0, "frequency_penalty": -0.5}, False),
        ({"min_tokens": 1}, False),
        ({"min_tokens": 1, "ignore_eos": True}, True),
        ({"stop_token_ids": [3], "stop": "x", "seed": 4, "logprobs": 2}, True),
    ],
)
def test_is_plain_where_the_models_logits_are_used_as_they_are(values: dict[str, Any], plain: bool) -> None:
    assert build(**values).is_plain is plain


def test_stop_ids() -> None:
    assert build().stop_ids == {2}
    assert build(stop_token_ids=[5, 6]).stop_ids == {2, 5, 6}
    assert build(stop_token_ids=[5], ignore_eos=True).stop_ids == {5}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, ["logit_bias", "token 12", "from 0 to 11"]),
        ({"stop_token_ids": [3, 99]}, ["stop_token_ids", "token 99", "from 0 to 11"]),
        ({"logprobs": VOCAB + 1}, ["logprobs=13", "12 tokens"]),
    ],
)
def test_refuses_what_the_vocabulary_does_not_have(values: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        build(**values)
    assert all(word in str(caught.value) for word in words)


def test_bad_words_need_a_tokenizer_that_knows_them() -> None:
    with pytest.raises(InvalidRequestError, match="need a tokenizer"):
        build(encode=None, bad_words=["ab"])
    with pytest.raises(InvalidRequestError, match="no tokens for 'ab'"):
        build(encode=lambda text: [], bad_words=["ab"])


def test_bad_words_are_forbidden_as_they_stand_and_behind_a_space() -> None:
    asked: list[str] = []

    def encode(text: str) -> list[int]:
        asked.append(text)
        return {"ab": [4, 5], " ab": [7]}[text]

    controls = build(encode, bad_words=["ab"])
    assert asked == ["ab", " ab"]
    laws = Laws(torch.zeros(2, VOCAB), [LawRows(History([1, 3]), controls, [[], [4]])])
    forbidden = [row.isneginf().nonzero().flatten().tolist() for row in laws.logits]
    assert forbidden == [[7], [5, 7]]


def test_min_tokens_forbids_stop_ids_inside_a_tree_too() -> None:
    controls = build(min_tokens=3, stop_token_ids=[4])
    history = History([1, 1])
    history.append([5])
    laws = Laws(torch.zeros(4, VOCAB), [LawRows(history, controls, [[], [6], [6, 7], [6, 7, 8]])])
    forbidden = [row.isneginf().nonzero().flatten().tolist() for row in laws.logits]
    assert forbidden == [[2, 4], [2, 4], [], []]


def test_biases_of_minus_infinity_forbid() -> None:
    controls = build(logit_bias={0: -math.inf, 1: 2.5})
    logits = Laws(torch.zeros(1, VOCAB), [LawRows(History([1]), controls, [[]])]).logits[0]
    assert logits[:3].tolist() == [-math.inf, 2.5, 0.0]
