"""What a pass of the target takes here, measured before the first round."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

from draftree.models.base import Extend, LanguageModel

ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)
PREFIX = 64
REPEATS = 3


def measure_costs(model: LanguageModel, *, max_rows: int, rows: Sequence[int] = ROWS) -> dict[int, float]:
    """Median seconds of a pass over so many rows behind a short prefix.

    Args:
        model: whose passes.
        max_rows: no pass is longer than the next measured number of rows.
        rows: the numbers of rows.
    """
    longest = min(next((count for count in rows if count >= max_rows), rows[-1]), model.max_length // 2)
    prefix = min(PREFIX, model.max_length - longest)
    slot = model.open()
    model.extend([Extend(slot, [0] * prefix, range(-1, prefix - 1), logits_at=())])
    model.commit(slot, range(prefix))
    found: dict[int, float] = {}
    for count in (count for count in rows if count <= longest):
        seconds = []
        for _ in range(1 + REPEATS):
            start = time.perf_counter()
            model.extend([Extend(slot, [0] * count, range(-1, count - 1))])
            seconds.append(time.perf_counter() - start)
            model.commit(slot, ())
        found[count] = statistics.median(seconds[1:])  # the first one warms caches up
    model.close(slot)
    return found
