"""Our processors and filters match transformers' own, for the controls that both have."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process as theirs

from draftree.sampling.controls import build_controls
from draftree.sampling.distributions import DistributionRows, Distributions
from draftree.sampling.history import History
from draftree.sampling.logits import TensorLogits
from draftree.sampling.logits_processors import ban_ngrams_of_source, ban_repeated_ngrams
from draftree.sampling.params import SamplingParams

VOCAB = 211
EOS = [2, 9]
PROMPT_LENGTH = 6
ALLOWED = [*range(40), *range(60, VOCAB, 2)]
WORDS = {"one": [17], "two": [3, 4], "three": [4, 3, 5]}


def encode(text: str) -> list[int]:
    return WORDS[text.strip()] if text.strip() == text else [11, *WORDS[text.strip()]]


CONTROLS: dict[str, tuple[dict[str, Any], Any]] = {
    "logit bias": (
        {"logit_bias": {3: 1.5, 20: -2.25}},
        lambda: theirs.SequenceBiasLogitsProcessor([[[3], 1.5], [[20], -2.25]]),
    ),
    "allowed tokens": (
        {"allowed_token_ids": ALLOWED},
        lambda: theirs.SuppressTokensLogitsProcessor([token for token in range(VOCAB) if token not in ALLOWED]),
    ),
    "repetition penalty": (
        {"repetition_penalty": 1.3},
        lambda: theirs.RepetitionPenaltyLogitsProcessor(1.3),
    ),
    "reward of repetition": (
        {"repetition_penalty": 0.7},
        lambda: theirs.RepetitionPenaltyLogitsProcessor(0.7),
    ),
    **{
        f"no repeat of {size}": (
            {"no_repeat_ngram_size": size},
            lambda size=size: theirs.NoRepeatNGramLogitsProcessor(size),
        )
        for size in (1, 2, 3, 4)
    },
    "bad words": (
        {"bad_words": list(WORDS)},
        lambda: theirs.NoBadWordsLogitsProcessor([ids for word in WORDS for ids in (encode(word), encode(f" {word}"))]),
    ),
    "min tokens": (
        {"min_tokens": 25},
        lambda: theirs.MinNewTokensLengthLogitsProcessor(PROMPT_LENGTH, 25, EOS),
    ),
    "temperature": ({"temperature": 0.7}, lambda: theirs.TemperatureLogitsWarper(0.7)),
    "top-k": ({"top_k": 20}, lambda: theirs.TopKLogitsWarper(20)),
    "top-k of one": ({"top_k": 1}, lambda: theirs.TopKLogitsWarper(1)),
    "top-p": ({"top_p": 0.85}, lambda: theirs.TopPLogitsWarper(0.85)),
    "small top-p": ({"top_p": 0.01}, lambda: theirs.TopPLogitsWarper(0.01)),
    "min-p": ({"min_p": 0.05}, lambda: theirs.MinPLogitsWarper(0.05)),
}
ORDER = [
    "allowed tokens", "logit bias", "repetition penalty", "no repeat of 3", "bad words", "min tokens", "temperature",
    "min-p", "top-k", "top-p",
]  # fmt: skip


def texts(seed: int, *, rows: int = 5) -> list[list[int]]:
    """Token rows in which tokens, runs of them and bad words recur."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(PROMPT_LENGTH, 40, (rows,), generator=generator).tolist()
    found = [torch.randint(0, 6, (length,), generator=generator).tolist() for length in lengths]
    # one row ends as a spaced bad word begins, the others end as they began
    return [[*row, 11] if index == 2 else [*row, *row[:4]] for index, row in enumerate(found)]


def logits_of(seed: int, rows: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, VOCAB, generator=generator, dtype=dtype) * 3
    return logits.masked_fill(torch.rand(rows, VOCAB, generator=generator) < 0.03, -math.inf)


def ours(values: dict[str, Any], tokens: Sequence[int], logits: Tensor, *, drafted: int) -> Tensor:
    """The distribution of one row, whose last tokens are drafted and the others written."""
    controls = build_controls(
        SamplingParams(max_tokens=None, **values), vocab_size=VOCAB, eos_ids=EOS, encode=encode, seed=0
    )
    history = History(tokens[:PROMPT_LENGTH])
    cut = max(PROMPT_LENGTH, len(tokens) - drafted)
    history.append(tokens[PROMPT_LENGTH:cut])
    return Distributions(TensorLogits(logits[None]), [DistributionRows(history, controls, [tokens[cut:]])]).logits[0]


def compare(names: Sequence[str], seed: int, dtype: torch.dtype) -> None:
    values: dict[str, Any] = {}
    for name in names:
        values |= CONTROLS[name][0]
    rows = texts(seed)
    logits = logits_of(seed, len(rows), dtype)
    for index, tokens in enumerate(rows):
        chain = theirs.LogitsProcessorList([CONTROLS[name][1]() for name in names])
        expected = chain(torch.tensor([tokens]), logits[index : index + 1].clone())[0]
        for drafted in (0, 3):
            found = ours(values, tokens, logits[index].clone(), drafted=drafted)
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CONTROLS)
def test_each_control(name: str, dtype: torch.dtype) -> None:
    for seed in range(10):
        compare([name], seed, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_all_controls_together(dtype: torch.dtype) -> None:
    for seed in range(20):
        compare(ORDER, seed, dtype)


def test_the_texts_make_every_control_act() -> None:
    for name in CONTROLS:
        changed = 0
        for seed in range(10):
            for index, tokens in enumerate(texts(seed)):
                logits = logits_of(seed, 5, torch.float32)[index]
                changed += not torch.equal(ours(CONTROLS[name][0], tokens, logits, drafted=0), logits)
        assert changed >= 10, name


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ngram_blocking_of_a_batch(size: int, waits: bool) -> None:
    """Many random histories; ids at and above the width of the scores are among them."""
    num_banned = 0
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        length = int(torch.randint(1, 80, (1,), generator=generator))
        tokens = torch.randint(0, 2 + seed % 9, (10, length), generator=generator)
        source = torch.randint(0, 2 + seed % 9, (5, 40), generator=generator)
        scores = torch.randn(10, 7, generator=generator)
        wanted = theirs.NoRepeatNGramLogitsProcessor(size)(tokens, scores.clone())
        assert torch.equal(ban_repeated_ngrams(scores.clone(), tokens, size=size, waits=waits), wanted)
        num_banned += int(wanted.isneginf().sum())
        wide = torch.randn(10, 11, generator=generator)
        wanted = theirs.EncoderNoRepeatNGramLogitsProcessor(size, source)(tokens, wide.clone())
        assert torch.equal(ban_ngrams_of_source(wide, tokens, source, size=size, waits=waits), wanted)
        num_banned += int(wanted.isneginf().sum())
    assert num_banned > 500


@pytest.mark.parametrize("spread", [1.0, 4.0])
def test_filters_at_the_width_of_a_vocabulary(spread: float) -> None:
    logits = torch.randn(4, 49_152, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * spread
    for values, process in (
        ({"top_k": 50}, theirs.TopKLogitsWarper(50)),
        ({"top_p": 0.9}, theirs.TopPLogitsWarper(0.9)),
        ({"top_p": 0.999}, theirs.TopPLogitsWarper(0.999)),
        ({"min_p": 0.02}, theirs.MinPLogitsWarper(0.02)),
    ):
        expected = process(torch.zeros(4, 1, dtype=torch.int64), logits.clone())
        for row in range(4):
            found = ours(values, [1] * PROMPT_LENGTH, logits[row].clone(), drafted=0)
            assert torch.equal(found, expected[row])
