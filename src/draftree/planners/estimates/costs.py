"""Times of passes and drafts on this machine, measured in every round and optionally before the first one.

The cost of a pass is the measured curve over its rows, times a level and a shape that are learned for every (batch,
prefix) cell: the level depends on the load of the machine, the shape on the cost of more rows in this cell. A new cell
starts as a copy of the last one in use. Rounds without a draft have a level of their own, since a draft and the work on
its tree slow the pass after it down, by up to a third where passes are short.
"""

from __future__ import annotations

from bisect import bisect
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from statistics import median

from draftree.planners.estimates.constants import AUTO

MAX_ROWS = 4096
"""Number of rows up to which the curve is extrapolated."""


@dataclass(slots=True)
class _Cell:
    """Costs of one batch size and one range of prefix lengths. Mutated by `PassCosts`.

    Attributes:
        batch: number of sequences.
        level: factor of the measured curve; None before any measurement.
        shape: further factor by number of rows, and the number of rounds that it averages.
        curve: seconds by rows; empty if it must be recomputed.
        rounds: number of observed rounds.
        plain: level of rounds without a draft; None if passes were not measured before the first round.
        drafted: number of rounds with a draft since the last one without.
    """

    batch: int
    level: float | None = None
    shape: dict[int, tuple[float, int]] = field(default_factory=dict)
    curve: list[float] = field(default_factory=list)
    rounds: int = 0
    plain: float | None = None
    drafted: int = 0

    def observe_plain(self, level: float) -> None:
        """Learn from a round without a draft; before the first draft, its level is that of all rounds."""
        assert self.plain is not None
        self.plain += (min(level, AUTO.max_jump * self.plain) - self.plain) / AUTO.cost_memory
        self.drafted = 0
        if not self.shape:
            self.level = self.plain

    def observe_drafted(self, rows: int, level: float, most: float) -> None:
        """Learn from a round with a draft, whose time is `most` times that of a measured plain pass.

        No plain round takes longer. After many in a row, the machine may be slower or faster for plain rounds, too.
        """
        before = self.level = self.level or level
        mean, count = self.shape.get(rows, (1.0, 0))
        ratio = min(level / before, AUTO.max_jump * mean)
        self.level *= 1.0 + (ratio / _settled(mean, count) - 1.0) / AUTO.cost_memory
        self.shape[rows] = (
            mean + (ratio - mean) / min(count + 1, AUTO.cost_memory),
            min(count + 1, AUTO.cost_memory),
        )
        self.centre()
        self.drafted += 1
        if self.plain is not None:
            change = self.level / before if self.drafted > AUTO.settled_rounds else 1.0
            self.plain = min(self.plain * change, most)

    def centre(self) -> None:
        """Move the mean of the shape into the level, which also applies to other numbers of rows."""
        shared = sum(mean * count for mean, count in self.shape.values()) / sum(n for _, n in self.shape.values())
        self.level = (self.level or 1.0) * shared
        self.shape = {rows: (mean / shared, count) for rows, (mean, count) in self.shape.items()}


class PassCosts:
    """Time of a round without its draft, by rows, batch and prefix. Mutated by `observe`."""

    def __init__(self) -> None:
        self._cells: dict[tuple[int, int], _Cell] = {}
        self._last = _Cell(1)
        self.learn({})

    def learn(self, pass_seconds: Mapping[int, float]) -> None:
        """Set measured passes of one sequence; a pass costs at most what one with more rows costs."""
        known = sorted(pass_seconds)
        seconds = list(accumulate((pass_seconds[rows] for rows in reversed(known)), min))[::-1]
        self._last = _Cell(1, 1.0 if known else None, plain=1.0 if known else None)
        self._cells = {}
        known, seconds = known or [1], seconds or [1.0]
        slope = seconds[-1] / known[-1] if len(known) > 1 else AUTO.unknown_row_share * seconds[0]
        points = [*known, known[-1] + MAX_ROWS], [*seconds, seconds[-1] + slope * MAX_ROWS]
        self._base = _between(*points, MAX_ROWS)

    def curve(self, batch: int, prefix: int, *, max_rows: int) -> Sequence[float]:
        """Return the seconds of a pass over 0, 1, 2, … rows, never decreasing."""
        cell = self._cell(batch, prefix)
        if len(cell.curve) <= max_rows:
            known = sorted(cell.shape) or [1]
            means = [(cell.level or 1.0) * _settled(*cell.shape.get(rows, (1.0, 1))) for rows in known]
            factors = _between(known, means, max_rows)
            seconds = [base * factor for base, factor in zip(self._base, factors, strict=False)]
            if cell.plain is not None and cell.shape and batch < len(seconds):
                seconds[: batch + 1] = [base * cell.plain for base in self._base[: batch + 1]]
            cell.curve = list(accumulate(seconds, max))
        return cell.curve

    def observe(self, rows: int, batch: int, prefix: int, *, seconds: float, is_plain: bool = False) -> None:
        """Learn from a round's seconds without its draft.

        Args:
            is_plain: whether no draft was made, not even an empty one.
        """
        cell = self._cell(batch, prefix)
        level = seconds / self._base[min(rows, MAX_ROWS)]
        if is_plain and cell.plain is not None:
            cell.observe_plain(level)
        else:
            cell.observe_drafted(rows, level, seconds / self._base[min(batch, MAX_ROWS)])
        cell.rounds += 1
        if cell.rounds < AUTO.settled_rounds or cell.rounds % AUTO.renew_rounds == 0:
            cell.curve = []
        self._last = cell

    def _cell(self, batch: int, prefix: int) -> _Cell:
        key = batch if batch < 8 else 8 * batch.bit_length(), prefix.bit_length()
        found = self._cells.get(key)
        if found is None:
            # another batch has other numbers of rows, so its shape is unknown
            points = self._last.shape.items() if self._last.batch == batch else ()
            shape = {rows: (mean, 1) for rows, (mean, _) in points}
            found = _Cell(batch, self._last.level, shape, plain=self._last.plain)
            self._cells[key] = found
        return found


def _between(places: Sequence[int], values: Sequence[float], last: int) -> list[float]:
    """Interpolate values at 0, 1, …, `last` linearly between ascending places; constant beyond them.

    Avoids numpy, whose code a pass evicts from the processor caches.
    """
    found = [values[0]] * min(places[0], last + 1)
    for (start, low), (end, high) in pairwise(zip(places, values, strict=True)):
        slope = (high - low) / (end - start)
        found.extend([low + slope * step for step in range(max(0, min(end, last + 1) - start))])
    found.extend([values[-1]] * (last + 1 - len(found)))
    return found


def _settled(mean: float, count: int) -> float:
    """Return a ratio, shrunk towards 1 if it averages few rounds."""
    return 1.0 + (mean - 1.0) * count / (count + 1)


@dataclass(slots=True)
class DraftCosts:
    """Times of one drafter's calls, of its levels and of reading unread tokens, in seconds. Mutated by `observe`.

    The cost of a depth is the median of its recent drafts. What follows from shallower drafts counts as a few drafts
    beside them, so that a slow one, such as the first, is not taken for the cost of its depth.

    Attributes:
        calls: recent drafts of any depth; those with catching up only until there is another.
        samples: recent drafts by number of levels, without catching up, each with its number. The first level may cost
            more than the others: a head reads the accepted tokens with it.
        by_depth: cost of a draft by the depths that were measured.
        guessed: time of a level, estimated from a draft after catching up.
        unread_token: time of each token that it had to read before drafting.
        is_rough: whether `calls` includes catching up.
        count: number of drafts without catching up.
    """

    calls: deque[float] = field(default_factory=lambda: deque(maxlen=AUTO.cost_window))
    samples: dict[int, deque[tuple[float, int]]] = field(default_factory=dict)
    by_depth: dict[int, float] = field(default_factory=dict)
    guessed: float = 0.0
    unread_token: float = 0.0
    is_rough: bool = True
    count: int = 0

    @property
    def call(self) -> float | None:
        """Time of a draft; None before the first one."""
        return median(self.calls) if self.calls else None

    def observe(self, seconds: float, depth: int, *, unread: int) -> None:
        """Learn from a draft.

        Args:
            depth: number of drafted levels; 0 for an empty draft.
            unread: number of tokens that it had to read first; with many, the draft does not measure a level.
        """
        catches_up = unread > AUTO.min_unread
        if catches_up:
            # assumes that catching up took as long as a level
            self.guessed = self.guessed or seconds / (1 + depth)
            each = max(0.0, seconds - self.of(depth)) / unread
            self.unread_token = (
                each
                if not self.unread_token
                else self.unread_token + (min(each, AUTO.max_draft_jump * self.unread_token) - self.unread_token) / 2
            )
        if catches_up and self.calls:
            return
        if self.is_rough:
            self.calls.clear()
        self.calls.append(seconds)
        self.is_rough = catches_up
        if depth and not catches_up:
            self._observe_depth(depth, seconds)

    def _observe_depth(self, depth: int, seconds: float) -> None:
        self.count += 1
        own = self.samples.setdefault(depth, deque(maxlen=AUTO.cost_window))
        before = median([value for value, _ in own]) if own else None
        own.append((seconds, self.count))
        if before:
            self._scale_others(depth, median([value for value, _ in own]) / before)
        self._settle()

    def _scale_others(self, depth: int, factor: float) -> None:
        """Change the costs of other depths that were not drafted lately: the machine is slower or faster at each."""
        if factor == 1.0:
            return
        for other, own in self.samples.items():
            if other != depth and own[-1][1] <= self.count - AUTO.cost_window:
                self.samples[other] = deque([(value * factor, at) for value, at in own], maxlen=AUTO.cost_window)

    def _settle(self) -> None:
        """Compute the cost of every measured depth, ascending: none costs less than a shallower one."""
        self.by_depth = {}
        least = 0.0
        for depth in sorted(self.samples):
            own = self.samples[depth]
            while len(own) > 1 and own[0][1] <= self.count - AUTO.cost_age:
                own.popleft()
            follows = [self.of(depth)] * AUTO.cost_doubt if self.by_depth else []
            least = max(least, median([*follows, *(value for value, _ in own)]))
            self.by_depth[depth] = least

    @property
    def knows_levels(self) -> bool:
        """Whether drafts of two depths were measured, which tell the cost of a further level."""
        return len(self.by_depth) > 1

    def catching_up(self, unread: Sequence[int]) -> float:
        """Return the seconds to read unread tokens of each text; a few are part of every call."""
        return self.unread_token * sum(count for count in unread if count > AUTO.min_unread)

    def of(self, depth: int, *, otherwise: float = 0.0) -> float:
        """Return the seconds of a draft of `depth` levels; before the first draft a level costs `otherwise`."""
        if not self.by_depth or not depth:
            return depth * (self.guessed or otherwise)
        known = list(self.by_depth)
        if depth in self.by_depth or len(known) == 1:
            return self.by_depth.get(depth, depth * self.by_depth[known[0]] / known[0])
        place = min(max(bisect(known, depth), 1), len(known) - 1)
        low, high = known[place - 1], known[place]
        each = (self.by_depth[high] - self.by_depth[low]) / (high - low)
        if depth < low:
            return depth * self.by_depth[low] / low
        if depth > high:  # noise must not make a further level dearer than the mean of those before
            return self.by_depth[high] + (depth - high) * min(each, self.by_depth[high] / high)
        return self.by_depth[low] + (depth - low) * each

    def is_below(self, share: float, plain_seconds: float) -> bool:
        """Return whether a draft costs less than this share of a plain pass."""
        call = self.call
        return call is not None and call < share * plain_seconds
