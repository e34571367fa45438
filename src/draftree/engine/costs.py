"""What a pass of the target takes here, measured by a few passes before the first round, once for a model."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

from draftree.models.base import Extend, LanguageModel, Slot

ROWS = (1, 4, 8, 16, 32, 64)
PREFIX = 64

_MEASURED: WeakKeyDictionary[LanguageModel, dict[int, float]] = WeakKeyDictionary()


def costs_of(model: LanguageModel, *, max_rows: int) -> Mapping[int, float]:
    """Seconds of passes of so many rows at least; measured once for as long as the model lives."""
    known = _MEASURED.setdefault(model, {})
    needed = tuple(count for count in ROWS if count not in known and count <= _enough(max_rows, ROWS))
    if needed:
        known.update(measure_costs(model, max_rows=max_rows, rows=needed))
    return known


def measure_costs(model: LanguageModel, *, max_rows: int, rows: Sequence[int] = ROWS) -> dict[int, float]:
    """Seconds of one pass over so many rows each, behind a short prefix; rounds will know better.

    Args:
        model: whose passes.
        max_rows: no pass is longer than the next measured number of rows.
        rows: the numbers of rows.
    """
    longest = min(_enough(max_rows, rows), model.max_length // 2)
    prefix = min(PREFIX, model.max_length - longest)
    slot = model.open()
    model.extend([Extend(slot, [0] * prefix, range(-1, prefix - 1), logits_at=())])
    model.commit(slot, range(prefix))
    _run(model, slot, 1)  # the first pass with logits reads the head for the first time
    found: dict[int, float] = {}
    for count in (count for count in rows if count <= longest):
        for _ in range(model.num_warm_ups):
            _run(model, slot, count)
        model.synchronize()
        start = time.perf_counter()
        model.extend([Extend(slot, [0] * count, range(-1, count - 1))])
        model.synchronize()
        found[count] = time.perf_counter() - start
        model.commit(slot, ())
    model.close(slot)
    return found


def _run(model: LanguageModel, slot: Slot, count: int) -> None:
    """A pass over so many rows that leaves the slot as it was."""
    model.extend([Extend(slot, [0] * count, range(-1, count - 1))])
    model.commit(slot, ())


def _enough(max_rows: int, rows: Sequence[int]) -> int:
    return next((count for count in rows if count >= max_rows), rows[-1])
