"""In half precision texts may differ, but only at near-ties of the target."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from draftree import LLM, SamplingParams
from draftree.loading.transformers_model import wrap_model
from draftree.models.base import Extend, LanguageModel, Pass
from families import drafter_folder, fresh, prompts
from slot_samples import at_once, filled

PROMPTS = prompts(5, 20, 9, 14)
DTYPES = [torch.bfloat16, torch.float16]
ULPS = 8
"""Largest gap of a near-tie, in units of the last place of the largest logit: what a few roundings along two layers
may add up to."""


@functools.cache
def model(family: str, dtype: torch.dtype) -> LanguageModel:
    return wrap_model(fresh(family, dtype=dtype)).model


def gap(lm: LanguageModel, text: Sequence[int], one: int, other: int) -> tuple[float, float]:
    """The gap of two tokens after a text, and the unit of the last place there."""
    logits = at_once(lm, text)[-1]
    return abs(float(logits[one] - logits[other])), float(logits.abs().max()) * torch.finfo(lm.dtype).eps


@pytest.mark.parametrize("draft", ["ngram,min=1", "lookahead,window=5,n=3", "model:{}", "model:{},tree=best-6"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_texts_part_at_near_ties_only(family: str, dtype: torch.dtype, draft: str, models: Path) -> None:
    lm = model(family, dtype)
    assert lm.dtype is dtype
    params = SamplingParams(max_tokens=24, temperature=0)
    plain = LLM(lm, "none").generate(PROMPTS, params)
    done = LLM(lm, draft.format(drafter_folder(family, models)), plan="fixed").generate(PROMPTS, params)
    parted = 0
    for prompt, one, other in zip(PROMPTS, plain, done, strict=True):
        assert len(one.token_ids) == len(other.token_ids) == 24
        place = next((i for i in range(24) if one.token_ids[i] != other.token_ids[i]), None)
        if place is None:
            continue
        parted += 1
        tokens = one.token_ids[place], other.token_ids[place]
        distance, unit = gap(lm, [*prompt, *one.token_ids[:place]], *tokens)
        assert distance <= ULPS * unit, f"text {prompt}: at {place} {tokens} are {distance / unit:.1f} units apart"
    assert parted <= 2
    assert sum(d.stats.accepted_tokens for d in done) > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_hardly_depends_on_its_company_or_padding(dtype: torch.dtype) -> None:
    from draftree.models.torch.hf import HFModel

    lm = HFModel(fresh("llama", dtype=dtype), row_buckets=(2, 4, 8))
    slots = [filled(lm, text) for text in ([3, 4, 5], [6, 7], [8])]
    alone = []
    for slot in slots:
        alone.append(lm.run(Pass([Extend(slot, [9, 10, 11], [-1, 0, 1])])).logits.tensor())
        lm.commit(slot, [])
    together = lm.run(Pass([Extend(slot, [9, 10, 11], [-1, 0, 1]) for slot in slots]))
    for index, rows in enumerate(alone):
        assert rows.shape == together.of(index).tensor().shape
        scale = float(rows.abs().max()) * torch.finfo(dtype).eps
        assert float((rows - together.of(index).tensor()).abs().max()) <= ULPS * scale
