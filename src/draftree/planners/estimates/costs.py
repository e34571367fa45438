"""Costs of passes and drafts, learned from the seconds of every round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

MIN_UNREAD = 16  # unread tokens above which a draft's seconds do not count as the cost of its levels
MAX_ROWS = 4096  # up to which the cost of a pass is extrapolated


@dataclass(frozen=True, slots=True)
class CostConstants:
    """Numbers that were tuned; docs/lab/auto.md compares each with its neighbours."""

    row_doubt: float = 0.25  # how unsure the cost of a further row is, relative to that of a pass
    step: float = 0.02  # share by which expected seconds change at most after a measurement
    surprise: float = 0.8  # of the expected seconds: a shorter measurement replaces them
    settled_rounds: int = 12
    """Rounds with a draft in a row after which the cost of rounds without one changes along, and the reverse."""


COSTS = CostConstants()


def change_of(expected: float, seconds: float) -> float:
    """Return by how much expected seconds change after a measurement: towards the median of measurements.

    A busy machine lengthens a measurement, and nothing shortens one much: a far shorter one is believed at once.
    """
    limit = COSTS.step * expected
    change = seconds - expected
    return change if seconds < COSTS.surprise * expected else max(-limit, min(change, limit))


@dataclass(slots=True)
class _Cell:
    """Factors of the measured curve for one batch size.

    A draft and the work on its tree slow the pass after it down, by up to a third where passes are short.
    """

    plain: float  # without a draft before the pass
    drafted: float  # with one
    row: float = 0.0  # of a further row, in passes over one: what the curve lacks
    num_alike: int = 0  # consecutive rounds with a draft, or negative without one
    magnitude: int = 0  # of the prefix length


class PassCosts:
    """Seconds of a round without its draft, by rows and batch. Mutated by `observe`."""

    def __init__(self) -> None:
        self.learn({})

    def learn(self, pass_seconds: Mapping[int, float]) -> None:
        """Set measured passes of one sequence; a pass costs at most what one with more rows costs."""
        known = sorted(pass_seconds) or [1]
        seconds = list(accumulate((pass_seconds.get(rows, 1.0) for rows in reversed(known)), min))[::-1]
        slope = seconds[-1] / known[-1] if len(known) > 1 else 0.02 * seconds[0]
        places = [*known, known[-1] + MAX_ROWS]
        values = [*seconds, seconds[-1] + slope * MAX_ROWS]
        self._base: list[float] = np.interp(range(MAX_ROWS + 1), places, values).tolist()
        self._has_scale = bool(pass_seconds)
        self._cells: dict[int, _Cell] = {}
        self._last = _Cell(1.0, 1.0)

    def plain(self, batch: int) -> float:
        """Return the seconds of a pass without a draft before it."""
        return self._base[min(batch, MAX_ROWS)] * self._cell(batch).plain

    def curve(self, batch: int, num_nodes: int) -> list[float]:
        """Return the seconds of a pass after a draft over 0, 1, 2, … nodes more than the batch, never falling."""
        cell = self._cell(batch)
        first = min(batch, MAX_ROWS)
        each = cell.row * self._base[first]
        base = self._base[first : first + num_nodes + 1]
        return list(accumulate((cell.drafted * seconds + each * more for more, seconds in enumerate(base)), max))

    def observe(self, rows: int, batch: int, prefix: int, *, seconds: float, is_plain: bool = False) -> None:
        """Learn from a round's seconds without its draft; `is_plain` if no draft was made, not even an empty one."""
        first = self._base[min(batch, MAX_ROWS)]
        last = self._base[min(rows, MAX_ROWS)]
        if not self._has_scale:
            self._has_scale = True
            scale = seconds / last
            self._cells = {}
            self._last = _Cell(scale, scale)
        self._last = cell = self._cell(batch)
        # a factor that was not seen for some rounds changes along with the others: the machine is slower or faster
        is_along = abs(cell.num_alike) >= COSTS.settled_rounds or cell.magnitude != prefix.bit_length()
        cell.magnitude = prefix.bit_length()
        if is_plain:
            change = change_of(cell.plain, seconds / first)
            if is_along:
                cell.drafted *= 1.0 + change / cell.plain
                cell.row *= 1.0 + change / cell.plain
            cell.plain += change
            cell.num_alike = min(0, cell.num_alike) - 1
        else:
            before = cell.drafted
            each = COSTS.row_doubt * (rows - batch) * first
            change = change_of(before * last + cell.row * (rows - batch) * first, seconds) / (last * last + each * each)
            cell.drafted += change * last
            cell.row += change * each * COSTS.row_doubt
            # no plain round takes longer than one with more rows
            cell.plain = min(cell.plain * (cell.drafted / before if is_along else 1.0), seconds / first)
            cell.num_alike = max(0, cell.num_alike) + 1

    def _cell(self, batch: int) -> _Cell:
        # a new batch size begins like the last one
        return self._cells.setdefault(batch if batch < 8 else 8 * batch.bit_length(), replace(self._last))


@dataclass(slots=True)
class DraftCosts:
    """Seconds of one drafter's calls, by levels, and of reading unread tokens. Mutated by `observe`."""

    first: float | None = None  # a head reads the accepted tokens with the first level
    further: float | None = None  # each; None before a draft of several levels
    unread_token: float = 0.0

    def observe(self, seconds: float, depth: int, *, unread: int = 0) -> None:
        """Learn from a draft of `depth` levels before which it had to read `unread` tokens."""
        if unread > MIN_UNREAD:
            each = max(0.0, seconds - (self.of(depth) or seconds / 2)) / unread
            self.unread_token = self.unread_token + change_of(self.unread_token, each) if self.unread_token else each
            return
        if self.first is None:
            self.first = seconds / depth
        steps = depth - 1
        if steps and self.further is None:
            self.further = min(self.first, max(0.0, seconds - self.first) / steps)
        change = change_of(self.of(depth), seconds) / (1 + steps * steps)
        self.first += change
        # noise must not make a further level dearer than the first, nor free
        self.further = self.further and min(max(self.further + change * steps, 0.1 * self.first), self.first)

    def catching_up(self, unread: int) -> float:
        """Return the seconds of reading tokens before a draft."""
        return self.unread_token * unread if unread > MIN_UNREAD else 0.0

    def of(self, depth: int) -> float:
        """Return the seconds of a draft of `depth` levels; 0 before the first draft."""
        first = self.first or 0.0
        return first + (depth - 1) * (first if self.further is None else self.further) if depth else 0.0
