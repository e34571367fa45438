"""Initial pass costs of the target, measured by a few passes before the first round, once per model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

from draftree.core.host import SYSTEM_CLOCK, Clock
from draftree.models.base import Extend, LanguageModel, Pass, Slot

ROWS = (1, 4, 8, 16, 32, 64)
WIDE_ROWS = (1, 16, 64, 128, 256, 512, 1024)
"""Numbers of rows that are measured for models whose passes wait for their weights: large trees pay there. Fewer of the
small ones, which cost alike."""
MOST_TIMES = 8.0
"""A pass that costs so many times the shortest one ends the measurement of such models: few rounds write so many
tokens."""
PREFIX = 16
REPEATS = 3
ENOUGH_SECONDS = 0.01
"""Passes of one number of rows are repeated until they took this long."""

_MEASURED: WeakKeyDictionary[LanguageModel, dict[Clock, dict[int, float]]] = WeakKeyDictionary()


def costs_of(model: LanguageModel, *, max_rows: int, clock: Clock = SYSTEM_CLOCK) -> Mapping[int, float]:
    """Return seconds of passes by rows, up to at least `max_rows`; measured once per clock and model."""
    given = model.known_costs(max_rows)
    if given is not None:
        return given
    known = _MEASURED.setdefault(model, {}).setdefault(clock, {})
    rows = WIDE_ROWS if model.streams_weights else ROWS
    needed = tuple(count for count in rows if count not in known and count <= _enough(max_rows, rows))
    if needed and not (model.streams_weights and _is_too_long(known)):
        known.update(measure_costs(model, max_rows=max_rows, rows=needed, clock=clock))
    return known


def measure_costs(
    model: LanguageModel, *, max_rows: int, rows: Sequence[int] = ROWS, clock: Clock = SYSTEM_CLOCK
) -> dict[int, float]:
    """Measure the seconds of a pass for each number of rows, after a short prefix; rounds refine them later.

    Short passes are repeated and the fastest counts. Passes of models that stream their weights are long: the
    measurement ends where more rows cannot pay.

    Args:
        model: the model.
        max_rows: no pass is longer than the next measured number of rows.
        rows: the numbers of rows.
        clock: clock of the measurement.
    """
    longest = min(_enough(max_rows, rows), model.max_length // 2)
    prefix = min(PREFIX, model.max_length - longest)
    model.reserve(model.num_open + 1, prefix + longest)
    slot = model.open_probe()
    try:
        model.run(Pass([Extend(slot, [0] * prefix, range(-1, prefix - 1), logits_at=())]))
        model.commit(slot, range(prefix))
        _run(model, slot, 1)  # the first pass with logits loads the output head
        found: dict[int, float] = {}
        for count in (count for count in rows if count <= longest):
            for _ in range(model.num_warm_ups):
                _run(model, slot, count)
            times: list[float] = []
            while len(times) < REPEATS and sum(times) < ENOUGH_SECONDS:
                model.synchronize()
                start = clock()
                model.run(Pass([Extend(slot, [0] * count, range(-1, count - 1))]))
                model.synchronize()
                times.append(clock() - start)
                model.commit(slot, ())
            found[count] = min(times)  # other work on the machine only adds time
            if model.streams_weights and _is_too_long(found):
                break
    finally:
        model.close(slot)
    return found


def _is_too_long(seconds: Mapping[int, float]) -> bool:
    """Return whether more rows than the measured ones cannot pay."""
    return bool(seconds) and max(seconds.values()) > MOST_TIMES * min(seconds.values())


def _run(model: LanguageModel, slot: Slot, count: int) -> None:
    """Run a pass over `count` rows; the slot is unchanged afterwards."""
    model.run(Pass([Extend(slot, [0] * count, range(-1, count - 1))]))
    model.commit(slot, ())


def _enough(max_rows: int, rows: Sequence[int]) -> int:
    return next((count for count in rows if count >= max_rows), rows[-1])
