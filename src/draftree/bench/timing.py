"""Timing of single passes of a model."""

from __future__ import annotations

import time
from collections.abc import Sequence

from draftree.models.base import Extend, LanguageModel, Pass, Slot

WARM_UP_PASSES = 2


def some_tokens(model: LanguageModel, count: int) -> list[int]:
    """Return `count` arbitrary tokens."""
    return [(7 + 31 * place) % model.vocab_size for place in range(count)]


def slot_after(model: LanguageModel, prefix: int) -> Slot:
    """Open a slot with `prefix` committed tokens."""
    slot = model.open_probe()
    model.run(Pass([Extend(slot, some_tokens(model, prefix), range(-1, prefix - 1), logits_at=[prefix - 1])]))
    model.commit(slot, range(prefix))
    return slot


def pass_seconds(model: LanguageModel, slot: Slot, parents: Sequence[int]) -> float:
    """Time a pass over the nodes of a tree, all of which give logits; the slot is unchanged afterwards."""
    job = Extend(slot, some_tokens(model, len(parents)), parents)
    start = time.perf_counter()
    logits = model.run(Pass([job])).logits.tensor()
    float(logits[-1, 0])  # reading a value waits for the GPU
    seconds = time.perf_counter() - start
    model.commit(slot, ())
    return seconds
