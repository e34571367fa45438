from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from draftree.core.errors import InvalidRequestError
from draftree.sampling.controls import Controls, build_controls
from draftree.sampling.distributions import DistributionRows, Distributions
from draftree.sampling.history import History
from draftree.sampling.logits import TensorLogits
from draftree.sampling.params import SamplingParams

VOCAB = 12


def letters(text: str) -> list[int]:
    return [ord(letter) % VOCAB for letter in text]


def build(encode: Callable[[str], list[int]] | None = letters, **values: Any) -> Controls:
    return build_controls(SamplingParams(**values), vocab_size=VOCAB, eos_ids=[2], encode=encode, seed=1)


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
        ({"min_tokens": 1, "ignore_eos": True}, False),
        ({"allowed_token_ids": [3]}, False),
        ({"stop_token_ids": [3], "stop": "x", "seed": 4, "logprobs": 2, "prompt_logprobs": 2}, True),
    ],
)
def test_is_plain_where_the_models_logits_are_used_as_they_are(values: dict[str, Any], plain: bool) -> None:
    assert build(**values).is_plain is plain


def test_end_of_text_ids_that_end_the_text() -> None:
    assert build(stop_token_ids=[5]).eos_ids == {2}
    assert build(stop_token_ids=[2], ignore_eos=True).eos_ids == frozenset()


def test_stop_ids() -> None:
    assert build().stop_ids == {2}
    assert build(stop_token_ids=[5, 6]).stop_ids == {2, 5, 6}
    assert build(stop_token_ids=[5], ignore_eos=True).stop_ids == {5}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, ["logit_bias", "token 12", "from 0 to 11"]),
        ({"stop_token_ids": [3, 99]}, ["stop_token_ids", "token 99", "from 0 to 11"]),
        ({"allowed_token_ids": [3, VOCAB]}, ["allowed_token_ids", "token 12", "from 0 to 11"]),
        ({"logprobs": VOCAB + 1}, ["logprobs=13", "12 tokens"]),
        ({"prompt_logprobs": VOCAB + 1}, ["prompt_logprobs=13", "12 tokens"]),
    ],
)
def test_refuses_tokens_outside_the_vocabulary(values: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        build(**values)
    assert all(word in str(caught.value) for word in words)


def test_bad_words_need_a_tokenizer_with_tokens_for_them() -> None:
    with pytest.raises(InvalidRequestError, match="need a tokenizer"):
        build(encode=None, bad_words=["ab"])
    with pytest.raises(InvalidRequestError, match="no tokens for 'ab'"):
        build(encode=lambda text: [], bad_words=["ab"])


@pytest.mark.parametrize("word", ["ab", " ab", "  ab"])
def test_bad_words_are_forbidden_without_and_with_a_space_before(word: str) -> None:
    asked: list[str] = []

    def encode(text: str) -> list[int]:
        asked.append(text)
        return {"ab": [4, 5], " ab": [7]}[text]

    controls = build(encode, bad_words=[word])
    assert asked == ["ab", " ab"]
    rows = DistributionRows(History([1, 3]), controls, [[], [4]])
    distributions = Distributions(TensorLogits(torch.zeros(2, VOCAB)), [rows])
    forbidden = [row.isneginf().nonzero().flatten().tolist() for row in distributions.logits]
    assert forbidden == [[7], [5, 7]]


def test_a_bad_word_that_has_tokens_only_without_a_space_is_forbidden_so() -> None:
    controls = build({"ab": [4], " ab": []}.__getitem__, bad_words=["ab"])
    rows = DistributionRows(History([1]), controls, [[]])
    logits = Distributions(TensorLogits(torch.zeros(1, VOCAB)), [rows]).logits[0]
    assert logits.isneginf().nonzero().flatten().tolist() == [4]


def test_min_tokens_forbids_an_ignored_end_of_text_too() -> None:
    """As in vLLM: with `ignore_eos` it does not end the text, with `min_tokens` it must be later."""
    controls = build(min_tokens=1, ignore_eos=True)
    assert controls.stop_ids == frozenset()
    rows = DistributionRows(History([1]), controls, [[], [6]])
    distributions = Distributions(TensorLogits(torch.zeros(2, VOCAB)), [rows])
    assert [row.isneginf().nonzero().flatten().tolist() for row in distributions.logits] == [[2], []]


def test_top_p_counts_the_mass_that_min_p_left() -> None:
    """As in vLLM: of 0.4, 0.3, 0.2 and 0.1 min-p keeps two tokens, which have 4/7 and 3/7 of the mass then."""
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1] + [0.0] * (VOCAB - 4)]).log()
    for values, kept in (({"min_p": 0.6, "top_p": 0.55}, 1), ({"top_p": 0.55}, 2), ({"min_p": 0.6}, 2)):
        distributions = Distributions(TensorLogits(logits), [DistributionRows(History([1]), build(**values), [[]])])
        assert int(distributions.logits.isfinite().sum()) == kept


def test_biases_come_before_repetition_penalties_and_presence_penalties_after_them() -> None:
    history = History([1])
    history.append([3])
    controls = build(logit_bias={3: 1.0}, repetition_penalty=2.0, presence_penalty=0.5)
    rows = DistributionRows(history, controls, [[]])
    logits = Distributions(TensorLogits(torch.full((1, VOCAB), 3.0)), [rows]).logits[0]
    assert logits[[0, 1, 3]].tolist() == [3.0, 3.0 / 2, (3.0 + 1) / 2 - 0.5]


def test_allowed_tokens_are_all_that_is_left_in_every_row() -> None:
    controls = build(allowed_token_ids=[7, 3, 3], logit_bias={5: 1.0, 3: 2.0})
    rows = DistributionRows(History([1]), controls, [[], [6]])
    distributions = Distributions(TensorLogits(torch.ones(2, VOCAB)), [rows])
    for row in distributions.logits:
        assert {place: value for place, value in enumerate(row.tolist()) if value > -math.inf} == {3: 3.0, 7: 1.0}
