"""What passes and drafts cost here: measured before the first round, if at all, and by every round since.

A pass costs the curve that was measured by its rows, times a level and a shape that are learned apart for every
(batch, prefix) cell: the level follows what the machine does beside, the shape what more rows cost in this cell. A
cell that nothing is known of begins as the last one that was used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from draftree.planners.estimates.constants import AUTO

MAX_ROWS = 4096
"""Rows up to which the curve is extrapolated."""


@dataclass(slots=True)
class _Cell:
    """What is learned of one batch size and one range of prefixes. Mutated by `PassCosts`."""

    batch: int
    level: float | None = None
    shape: dict[int, tuple[float, int]] = field(default_factory=dict)
    curve: list[float] = field(default_factory=list)
    rounds: int = 0

    def centre(self) -> None:
        """What all points of the shape share belongs into the level, which other numbers of rows go by as well."""
        shared = sum(mean * count for mean, count in self.shape.values()) / sum(n for _, n in self.shape.values())
        self.level = (self.level or 1.0) * shared
        self.shape = {rows: (mean / shared, count) for rows, (mean, count) in self.shape.items()}


class PassCosts:
    """Seconds of a round without its draft, by rows, batch and prefix. Mutated by `observe`."""

    def __init__(self) -> None:
        self._cells: dict[tuple[int, int], _Cell] = {}
        self._last = _Cell(1)
        self.learn({})

    def learn(self, pass_seconds: Mapping[int, float]) -> None:
        """Take measured passes of one sequence; a pass is never dearer than one with more rows."""
        known = sorted(pass_seconds)
        seconds = list(accumulate((pass_seconds[rows] for rows in reversed(known)), min))[::-1]
        self._last = _Cell(1, 1.0 if known else None)
        self._cells = {}
        known, seconds = known or [1], seconds or [1.0]
        slope = seconds[-1] / known[-1] if len(known) > 1 else AUTO.unknown_row_share * seconds[0]
        points = [*known, known[-1] + MAX_ROWS], [*seconds, seconds[-1] + slope * MAX_ROWS]
        self._base = _between(*points, MAX_ROWS)

    @property
    def is_known(self) -> bool:
        """Whether seconds are seconds: something was measured."""
        return self._last.level is not None

    def curve(self, batch: int, prefix: int, *, max_rows: int) -> Sequence[float]:
        """Seconds of a pass over 0, 1, 2, … rows, never falling."""
        cell = self._cell(batch, prefix)
        if len(cell.curve) <= max_rows:
            known = sorted(cell.shape) or [1]
            means = [(cell.level or 1.0) * _settled(*cell.shape.get(rows, (1.0, 1))) for rows in known]
            factors = _between(known, means, max_rows)
            seconds = (base * factor for base, factor in zip(self._base, factors, strict=False))
            cell.curve = list(accumulate(seconds, max))
        return cell.curve

    def observe(self, rows: int, batch: int, prefix: int, *, seconds: float) -> None:
        """Learn from a round."""
        cell = self._cell(batch, prefix)
        mean, count = cell.shape.get(rows, (1.0, 0))
        base = self._base[min(rows, MAX_ROWS)]
        if cell.level is None:
            cell.level = seconds / base
        ratio = min(seconds / base / cell.level, AUTO.max_jump * mean)
        cell.level *= 1.0 + (ratio / _settled(mean, count) - 1.0) / AUTO.cost_memory
        cell.shape[rows] = mean + (ratio - mean) / min(count + 1, AUTO.cost_memory), min(count + 1, AUTO.cost_memory)
        cell.centre()
        cell.rounds += 1
        if cell.rounds < AUTO.settled_rounds or cell.rounds % AUTO.renew_rounds == 0:
            cell.curve = []
        self._last = cell

    def _cell(self, batch: int, prefix: int) -> _Cell:
        key = batch if batch < 8 else 8 * batch.bit_length(), prefix.bit_length()
        found = self._cells.get(key)
        if found is None:
            # another batch has other numbers of rows: of its shape nothing is known
            points = self._last.shape.items() if self._last.batch == batch else ()
            found = _Cell(batch, self._last.level, {rows: (mean, 1) for rows, (mean, _) in points})
            self._cells[key] = found
        return found


def _between(places: Sequence[int], values: Sequence[float], last: int) -> list[float]:
    """Values at 0, 1, …, `last`, straight between those that are given at ascending places, level beyond them.

    Without numpy, whose code a pass drives out of the caches.
    """
    found = [values[0]] * min(places[0], last + 1)
    for (start, low), (end, high) in pairwise(zip(places, values, strict=True)):
        slope = (high - low) / (end - start)
        found.extend([low + slope * step for step in range(max(0, min(end, last + 1) - start))])
    found.extend([values[-1]] * (last + 1 - len(found)))
    return found


def _settled(mean: float, count: int) -> float:
    """A ratio that was seen a few times only is held closer to 1."""
    return 1.0 + (mean - 1.0) * count / (count + 1)


@dataclass(slots=True)
class DraftCosts:
    """What one drafter's calls and levels take, and following a text that it has not read. Mutated by `observe`."""

    level: float | None = None
    call: float | None = None
    guessed: float = 0.0
    """What a level took, as far as a call that had to catch up first can tell."""
    unread_token: float = 0.0
    """Seconds for each token that it had to catch up with before it could draft."""
    is_rough: bool = True
    """Whether `call` is of a draft that had to catch up first."""

    def observe(self, seconds: float, depth: int, *, unread: int) -> None:
        """Learn from a round.

        Args:
            seconds: of this drafter.
            depth: levels that it drafted; 0 if it had nothing to offer.
            unread: tokens that it had to catch up with: a call with many is no measure of those without.
        """
        is_first = unread > AUTO.min_unread
        if is_first:
            # a guess: that catching up took as long as a level
            self.guessed = self.guessed or seconds / (1 + depth)
            each = max(0.0, seconds - self.of(depth)) / unread
            self.unread_token = (
                each
                if not self.unread_token
                else self.unread_token + (min(each, AUTO.max_draft_jump * self.unread_token) - self.unread_token) / 2
            )
        if is_first and self.call is not None:
            return
        if self.call is None or self.is_rough:
            self.call, self.is_rough = seconds, is_first
        else:
            self.call += (min(seconds, AUTO.max_draft_jump * self.call) - self.call) / AUTO.cost_memory
        if depth and not is_first:
            each = seconds / depth
            self.level = (
                each
                if self.level is None
                else self.level + (min(each, AUTO.max_draft_jump * self.level) - self.level) / AUTO.cost_memory
            )

    def catching_up(self, unread: Sequence[int]) -> float:
        """Seconds until it has read so many tokens of each text; a few are part of every call."""
        return self.unread_token * sum(count for count in unread if count > AUTO.min_unread)

    def of(self, depth: int, *, otherwise: float = 0.0) -> float:
        """Seconds of a draft of so many levels; each counts as `otherwise` where nothing was seen yet."""
        return depth * ((self.guessed or otherwise) if self.level is None else self.level)

    def is_below(self, share: float, plain_seconds: float) -> bool:
        """Whether a draft costs less than this share of a plain pass."""
        return self.call is not None and self.call < share * plain_seconds
