"""The first difference of a text from the plain one, and the score gap at that place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftree.bench.engines import RunParams
from draftree.bench.records import Divergence
from draftree.core.noise import Noise
from draftree.models.base import Extend, LanguageModel, Pass

CHUNK_ROWS = 512


def first_difference(plain: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the first place at which two texts differ; None if they are equal."""
    for place, (one, two) in enumerate(zip(plain, other, strict=False)):
        if one != two:
            return place
    return None if len(plain) == len(other) else min(len(plain), len(other))


def explain(
    model: LanguageModel,
    prompt: Sequence[int],
    plain: Sequence[int],
    *,
    other: Sequence[int],
    run_params: RunParams,
) -> Divergence | None:
    """Find the first difference and score the common prefix once more, in one pass, to measure the gap.

    Args:
        model: the target.
        prompt: token ids.
        plain: tokens of the plain method.
        other: tokens of another method.
        run_params: temperature and seed of both.
    """
    index = first_difference(plain, other)
    if index is None:
        return None
    if index >= min(len(plain), len(other)):
        return Divergence(index, None, None)
    prefix = [*prompt, *plain[:index]]
    scores = last_logits(model, prefix)
    if run_params.temperature > 0:
        tokens = torch.arange(scores.shape[-1], device=scores.device)
        scores = scores / run_params.temperature + Noise(run_params.seed).gumbel(len(prefix), tokens)
    best = scores.topk(2).values
    between = scores[plain[index]] - scores[other[index]]
    return Divergence(index, float(best[0] - best[1]), float(between))


def last_logits(model: LanguageModel, tokens: Sequence[int]) -> Tensor:
    """Return the logits after the last of these tokens, shape (vocab,)."""
    model.reserve(1, len(tokens))
    slot = model.open()
    try:
        for start in range(0, len(tokens), CHUNK_ROWS):
            chunk = list(tokens[start : start + CHUNK_ROWS])
            is_last = start + CHUNK_ROWS >= len(tokens)
            wanted = [len(chunk) - 1] if is_last else []
            logits = model.run(Pass([Extend(slot, chunk, range(-1, len(chunk) - 1), logits_at=wanted)])).logits.tensor()
            model.commit(slot, range(len(chunk)))
        return logits[0]
    finally:
        model.close(slot)
