"""Expected gains: acceptance of nodes, credit of drafters, gains of levels and of recent drafts, and trials."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from draftree.core.tree import TokenTree, depths
from draftree.core.types import MAX_NODES, DraftPart
from draftree.planners.estimates.constants import AUTO, TrialRates


@dataclass(slots=True)
class TrialSchedule:
    """Schedule of the trials of one drafter, or of rows that are not expected to pay. Mutated by its methods.

    A trial is due once its cost is at most a share of the time since the last one. Every fruitless trial divides the
    share, down to a least one. So waits grow geometrically up to a cap that is proportional to the cost of a trial.

    Attributes:
        fruitless: trials in a row that brought nothing.
        last_round: number of the round of the last trial; the first one is due at once.
    """

    fruitless: int = 0
    last_round: float = -math.inf

    def rounds_left(self, cost: float, now: int, *, rates: TrialRates = AUTO.trials) -> int:
        """Rounds until the next trial."""
        share = max(rates.least_share, rates.first_share / rates.backoff ** max(0, min(self.fruitless, 16)))
        return math.ceil(max(0.0, self.last_round + cost / share - now))

    def record(self, now: int, *, paid: bool, hit: bool = False) -> None:
        """Record a trial.

        Args:
            paid: whether it was worth its cost; the back-off starts anew.
            hit: whether its first guess was accepted, which may be chance: the next trial is due at once.
        """
        self.last_round = -math.inf if paid or hit else now
        self.fruitless = 0 if paid else self.fruitless + (not hit)

    def restart(self) -> None:
        """Start the back-off anew: it pays."""
        self.fruitless = 0

    def open_text(self) -> None:
        """Start the back-off anew for a new text. Its first trial is due at once, and does not lengthen the wait.

        A lookup often has nothing to continue at the end of a prompt, so the first draft of a text tells little.
        """
        self.fruitless, self.last_round = -1, -math.inf


LOG_EDGES = tuple(math.log(edge) for edge in AUTO.score_edges)
CENTRES = tuple((low + high) / 2 for low, high in zip((0.0, *AUTO.score_edges), (*AUTO.score_edges, 1.0), strict=True))
"""Centre of each bin."""
NO_SCORE = -1e-4
"""Conditional log-probabilities above this mean that the drafter has no scores."""
FIRST_UNSCORED = 100
"""Number of the first bin of unscored nodes."""

Sources = tuple[str, ...]
Key = tuple[Sources, int]


@dataclass(slots=True)
class Bin:
    """Nodes and accepted nodes of one kind. Mutated by `Acceptance`.

    Attributes:
        hits: number of accepted nodes, observed or initially assumed.
        tries: number of nodes, likewise.
        assumed: acceptance by the drafter's probability; None without one.
        weight: weight in guesses of `assumed`.
    """

    hits: float
    tries: float
    assumed: float | None = None
    weight: float = AUTO.score_weight

    def chance(self, odds: float) -> float:
        """Return the acceptance probability of such a node, given its parent.

        Args:
            odds: factor of the assumed odds, from all bins of these drafters.
        """
        if self.assumed is None:
            return self.hits / self.tries
        return (self.hits + self.weight * shifted(self.assumed, odds)) / (self.tries + self.weight)


def shifted(chance: float, odds: float) -> float:
    """Return the chance with odds multiplied by `odds`."""
    return chance * odds / (1.0 - chance + chance * odds)


@dataclass(slots=True)
class Deviation:
    """Observed and expected hits and misses of one sequence. Mutated by `Acceptance`."""

    hits: float = AUTO.sequence_weight
    expected_hits: float = AUTO.sequence_weight
    misses: float = AUTO.sequence_weight
    expected_misses: float = AUTO.sequence_weight

    @property
    def odds(self) -> float:
        """Factor of the odds of its nodes."""
        return self.hits / self.expected_hits * self.expected_misses / self.misses

    def observe(self, expected: float, hit: float, *, memory: float) -> None:
        """Add one node and its expected acceptance."""
        # decays towards the prior, not towards zero
        rest, keep = AUTO.sequence_weight / memory, 1.0 - 1.0 / memory
        self.hits = keep * self.hits + rest + hit
        self.expected_hits = keep * self.expected_hits + rest + expected
        self.misses = keep * self.misses + rest + 1.0 - hit
        self.expected_misses = keep * self.expected_misses + rest + 1.0 - expected


@dataclass(slots=True)
class SequenceAcceptance:
    """One sequence's deviations, by sources."""

    by_sources: dict[Sources, Deviation] = field(default_factory=dict)

    def of(self, sources: Sources) -> Deviation:
        """Return the deviation for these sources."""
        found = self.by_sources.get(sources)
        if found is None:
            found = self.by_sources[sources] = Deviation()
        return found


class Acceptance:
    """Learns acceptance from verdicts. Mutated by `observe`.

    Args:
        memory: number of nodes after which an observation of a bin has weight 1/e.
    """

    def __init__(self, memory: float, calibrated: Sequence[str] = ()) -> None:
        self._keep = 1.0 - 1.0 / memory
        self._calibrated = frozenset(calibrated)
        self._bins: dict[Key, Bin] = {}
        self._assumed = SequenceAcceptance()

    def survivals(self, own: SequenceAcceptance, tree: TokenTree) -> list[float]:
        """Return the probability of each node that it and its ancestors are accepted."""
        if not len(tree):
            return []
        found: list[float] = []
        bins = self._bins
        shifts = {sources: shift.odds for sources, shift in own.by_sources.items()}
        odds = {sources: shift.odds for sources, shift in self._assumed.by_sources.items()}
        for parent, key in zip(tree.parents, keys_of(tree), strict=True):
            chance = (bins.get(key) or self._new(key)).chance(odds.get(key[0], 1.0))
            shift = shifts.get(key[0])
            if shift is not None:
                chance = shifted(chance, shift)
            found.append(chance if parent < 0 else chance * found[parent])
        return found

    def observe(self, own: SequenceAcceptance, tree: TokenTree, path: Sequence[int]) -> None:
        """Learn from the verdict on a scored tree: on the children of the root and of accepted nodes."""
        visited = {-1, *path}
        for node, (parent, key) in enumerate(zip(tree.parents, keys_of(tree), strict=True)):
            if parent not in visited:
                continue
            bin_, hit = self._bins.get(key) or self._new(key), 1.0 if node in visited else 0.0
            # overconfidence is common to all bins, so it also corrects bins without observations
            assumed = self._assumed.of(key[0])
            own.of(key[0]).observe(bin_.chance(assumed.odds), hit, memory=AUTO.sequence_memory)
            if bin_.assumed is not None:
                assumed.observe(bin_.assumed, hit, memory=AUTO.calibration_memory)
            bin_.hits = self._keep * bin_.hits + hit
            bin_.tries = self._keep * bin_.tries + 1.0

    def _new(self, key: Key) -> Bin:
        sources, kind = key
        if kind < FIRST_UNSCORED:
            if self._calibrated.issuperset(sources) and self._calibrated:
                self._bins[key] = Bin(0.0, 0.0, CENTRES[kind], AUTO.calibrated_weight)
            else:
                self._bins[key] = Bin(0.0, 0.0, AUTO.score_discount * CENTRES[kind])
            return self._bins[key]
        depth, rank = divmod(kind - FIRST_UNSCORED, len(AUTO.rank_chances))
        above = self._bins.get((sources, kind - len(AUTO.rank_chances))) if depth else None
        chance = AUTO.rank_chances[rank] if above is None else above.chance(1.0)
        weight = AUTO.later_rank_weight if rank else AUTO.first_rank_weight
        self._bins[key] = Bin(weight * chance, weight)
        return self._bins[key]


def keys_of(tree: TokenTree) -> list[Key]:
    """Return the bin of every node."""
    scores, sources = tree.scores, tree.sources
    keys: list[Key] = []
    depths: list[int] = []
    num_children = [0] * (len(tree) + 1)
    for node, parent in enumerate(tree.parents):
        depths.append(1 if parent < 0 else depths[parent] + 1)
        rank = num_children[parent + 1]
        num_children[parent + 1] += 1
        certainty = scores[node] - (scores[parent] if parent >= 0 else 0.0) if scores else 0.0
        if certainty < NO_SCORE:
            kind = bisect_left(LOG_EDGES, certainty)
        else:
            depth = (
                AUTO.depth_bins[depths[node] - 1] if depths[node] <= len(AUTO.depth_bins) else AUTO.depth_bins[-1] + 1
            )
            kind = FIRST_UNSCORED + depth * len(AUTO.rank_chances) + min(rank, len(AUTO.rank_chances) - 1)
        keys.append((sources[node] if sources else (), kind))
    return keys


@dataclass(slots=True)
class Credit:
    """Summed survival and number of scored nodes of each level of one drafter, for one sequence's round.

    Attributes:
        gains: summed survival of the scored nodes, by level.
        rows: number of scored nodes, by level.
        depth: number of drafted levels.
        first: summed survival of the scored nodes of the first level, shared ones included.
    """

    gains: list[float]
    rows: list[float]
    depth: int = MAX_NODES
    first: float = 0.0


class Credits:
    """Attribution of nodes to drafters by the sources of trees."""

    def __init__(self, parts: Sequence[DraftPart]) -> None:
        self._parts = tuple(parts)
        self._nothing = [Credit([0.0] * part.depth, [0.0] * part.depth, 0) for part in parts]
        self._guessers: dict[tuple[str, ...], tuple[int, ...]] = {}

    def depth_of(self, part: int, tree: TokenTree) -> int:
        """Return the deepest level of a tree with a node of this drafter."""
        levels = depths(tree.parents)
        if len(self._parts) == 1 or not tree.sources:
            return max(levels, default=0)
        shared = (level for level, names in zip(levels, tree.sources, strict=True) if part in self.guessers(names))
        return max(shared, default=0)

    def has_hit(self, part: int, tree: TokenTree, path: Sequence[int]) -> bool:
        """Return whether a drafter proposed the first accepted token."""
        return bool(path) and (
            len(self._parts) == 1 or not tree.sources or part in self.guessers(tree.sources[path[0]])
        )

    def guessers(self, names: tuple[str, ...]) -> tuple[int, ...]:
        """Return the drafters with these names; the first if there is none."""
        found = self._guessers.get(names)
        if found is None:
            found = tuple(
                index
                for index, part in enumerate(self._parts)
                if any(name == part.name or name.startswith(f"{part.name}/") for name in names)
            )
            self._guessers[names] = found = found or (0,)
        return found

    def of(
        self, tree: TokenTree, survivals: Sequence[float], *, costly: Sequence[bool], drafted: TokenTree | None = None
    ) -> list[Credit]:
        """Return every drafter's credit for a scored tree; a shared node counts for a drafter that is not costly.

        Args:
            drafted: the tree before it was cut; None if it was not.
        """
        whole = tree if drafted is None else drafted
        if not len(whole):
            return self._nothing
        credits = [
            Credit([0.0] * part.depth, [0.0] * part.depth, self.depth_of(index, whole))
            for index, part in enumerate(self._parts)
        ]
        is_alone = len(self._parts) == 1 or not tree.sources
        for node, (level, survival) in enumerate(zip(depths(tree.parents), survivals, strict=True)):
            named = (0,) if is_alone else self.guessers(tree.sources[node])
            if level == 1:
                for part in named:
                    credits[part].first += survival
            owner = named[0] if len(named) == 1 else next((part for part in named if not costly[part]), named[0])
            if level <= len(credits[owner].gains):
                credits[owner].gains[level - 1] += survival
                credits[owner].rows[level - 1] += 1.0
        return credits


@dataclass(frozen=True, slots=True)
class Prices:
    """Seconds that a decision compares.

    Attributes:
        draft: of the draft of one sequence.
        token: of a plain pass, per token that it writes.
        planning: of the planner, in a round with any draft.
        rates: shares of the time that trials may cost; no seconds.
        margin: gain relative to the cost of a draft from which it pays; no seconds.
    """

    draft: float
    token: float
    planning: float
    rates: TrialRates = AUTO.cheap_trials
    margin: float = 1.0

    def surplus(self, gain: float) -> float:
        """Return the seconds that a draft with this gain in tokens saves beyond its cost and the margin."""
        return gain * self.token - self.margin * self.draft


def _schedule_of_new_text() -> TrialSchedule:
    schedule = TrialSchedule()
    schedule.open_text()
    return schedule


@dataclass(slots=True)
class RecentDrafts:
    """One sequence's recent drafts from one cheap drafter. Mutated every round.

    Attributes:
        gain: tokens that a draft adds, less the cost of its rows in tokens of plain passes; None before the first
            decision.
        trials: schedule of trials while drafts do not pay; what other texts lacked, this one may repeat.
        is_trial: whether the draft of this round is a trial.
    """

    gain: float | None = None
    trials: TrialSchedule = field(default_factory=_schedule_of_new_text)
    is_trial: bool = False

    def rounds_until_trial(self, prices: Prices, now: int, *, planning: float) -> int:
        """Return the rounds until the next trial, which takes so many seconds of the planner's time."""
        return self.trials.rounds_left((prices.draft + planning) / prices.token, now, rates=prices.rates)

    def observe(self, now: int, net_gain: float, prices: Prices, *, planning: float) -> None:
        """Learn from a draft.

        Args:
            prices: seconds of the round.
            planning: this sequence's share of the planner's seconds.
        """
        if self.gain is not None:
            self.gain += (net_gain - self.gain) / AUTO.recent_memory
        if self.is_trial:
            self.trials.record(now, paid=prices.surplus(net_gain) > planning)


def choose_sequences(owns: Sequence[RecentDrafts], prices: Prices, now: int, *, shared_gain: float) -> list[bool]:
    """Return for which sequences to draft, and set `RecentDrafts.is_trial`.

    The planner's time is common: sequences whose drafts pay must regain it together, and trials share it.

    Args:
        prices: seconds of the round.
        shared_gain: average over all texts, which a new text begins with if it is alone. In a batch that is the average
            of the sequences with drafts, so a new one has only trials until a draft paid.
    """
    for own in owns:
        if own.gain is None:
            own.gain = shared_gain if len(owns) == 1 else 0.0
    surplus = [prices.surplus(own.gain or 0.0) for own in owns]
    is_on = sum(value for value in surplus if value > 0) > prices.planning
    drafts = [is_on and value > 0 for value in surplus]
    waiting = [own for own, does_draft in zip(owns, drafts, strict=True) if not does_draft]
    due = [own for own in waiting if not own.rounds_until_trial(prices, now, planning=0.0)]
    shared = 0.0 if is_on else prices.planning / max(1, len(due))
    for own, does_draft in zip(owns, drafts, strict=True):
        own.is_trial = not does_draft and not own.rounds_until_trial(prices, now, planning=shared)
        if does_draft:
            own.trials.restart()
    return [does_draft or own.is_trial for own, does_draft in zip(owns, drafts, strict=True)]


def rounds_until_any_trial(owns: Sequence[RecentDrafts], prices: Prices, now: int) -> int:
    """Return the least number of rounds until a trial of any sequence."""
    shared = prices.planning / len(owns)
    return min(own.rounds_until_trial(prices, now, planning=shared) for own in owns)


def net_gains(credits: Sequence[Credit], curve: Sequence[float], batch: int, *, token_seconds: float) -> list[float]:
    """Return the tokens that each sequence's draft adds, less its share of the cost of all rows.

    Args:
        curve: seconds of a pass by rows.
    """
    rows = [sum(credit.rows) for credit in credits]
    whole = round(sum(rows))
    seconds = curve[min(batch + whole, len(curve) - 1)] - curve[batch]
    each = seconds / whole / token_seconds if whole else 0.0
    return [sum(credit.gains) - each * count for credit, count in zip(credits, rows, strict=True)]


@dataclass(slots=True)
class Levels:
    """Averages of each level's gain and rows. Mutated by its methods.

    Attributes:
        gains: tokens a round, by level.
        rows: scored nodes a round, by level.
        weights: drafts that each average counts as.
        reached: share of drafts that had the level; the others stopped before.
        rates: acceptance of each level, given that of the level above, that was measured before; empty if unknown.
        hits: drafts whose first token was accepted.
        expected_hits: how many were expected; gains are corrected by the ratio.
        known_ratio: acceptance of first tokens relative to the first of `rates`.
        num_known: weight in drafts of this ratio.
        last_round: number of the round to which the weights are faded.
    """

    gains: list[float]
    rows: list[float]
    weights: list[float]
    reached: list[float]
    rates: tuple[float, ...] = ()
    hits: float = AUTO.hit_prior
    expected_hits: float = AUTO.hit_prior
    known_ratio: float = 1.0
    num_known: float = AUTO.known_weight
    last_round: int = 0

    @classmethod
    def of_depth(cls, depth: int, rates: Sequence[float] = ()) -> Levels:
        """Averages without an observation."""
        prior = AUTO.known_hit_prior if rates else AUTO.hit_prior
        return cls([0.0] * depth, [1.0] * depth, [0.0] * depth, [1.0] * depth, tuple(rates[:depth]), prior, prior)

    @property
    def hit_ratio(self) -> float:
        """Accepted first tokens over expected ones: averages of expected gains follow a bad drafter late."""
        return self.hits / self.expected_hits

    def observe_hits(self, hits: int, expected: float, *, drafts: int) -> None:
        """Count accepted first tokens, how many were expected, and drafts."""
        if self.rates and drafts:
            self.num_known = min(self.num_known + drafts, AUTO.hit_memory)
            rate = max(self.rates[0], AUTO.min_survival)
            self.known_ratio += (hits / rate - drafts * self.known_ratio) / self.num_known
        self.expected_hits += expected
        self.hits += hits
        if self.expected_hits > AUTO.hit_memory:
            self.hits *= AUTO.hit_memory / self.expected_hits
            self.expected_hits = AUTO.hit_memory

    def observe(self, now: int, credits: Sequence[Credit], depth: int) -> None:
        """Average what drafts of `depth` levels brought in round `now`."""
        self._fade(now - 1)
        count = len(credits)
        for level in range(depth):
            weight = min(self.weights[level] + count, max(AUTO.gain_memory, count))
            self.weights[level] = weight
            self.gains[level] += sum(credit.gains[level] - self.gains[level] for credit in credits) / weight
            self.rows[level] += sum(credit.rows[level] - self.rows[level] for credit in credits) / weight
            reached = sum(level < credit.depth for credit in credits)
            self.reached[level] += (reached - count * self.reached[level]) / weight
        self._fade(now, start=depth)

    def _fade(self, now: int, *, start: int = 0) -> None:
        keep, self.last_round = AUTO.untried_keep ** max(0, now - self.last_round), max(now, self.last_round)
        for level in range(start, len(self.weights)):
            # the first level keeps some weight, or a useless drafter would be taken for an unknown one
            least = 0.0 if level else min(self.weights[0], AUTO.min_first_weight)
            self.weights[level] = max(keep * self.weights[level], least)

    def expected(self, now: int) -> list[float]:
        """The gain of every level; with little weight, extrapolated from the levels above."""
        self._fade(now)
        found: list[float] = []
        above, ratio = 1.0, AUTO.first_gain
        for gain, weight in zip(self.gains, self.weights, strict=True):
            found.append((weight * gain + above * ratio) / (weight + 1.0))
            ratio = min(0.95, found[-1] / above) if above > 0 else 0.0
            above = found[-1]
        return found

    def known(self) -> list[float]:
        """Return the gain of every level by the known rates and their ratio; empty without them."""
        found: list[float] = []
        for rate in (*self.rates, *self.rates[-1:] * (len(self.gains) - len(self.rates))):
            found.append(rate * (found[-1] if found else self.known_ratio))
        return found

    def mixed_with(self, shared: Sequence[float], now: int, *, ratio: float = 1.0) -> list[float]:
        """One sequence's gains times a ratio, held closer to those of all sequences the fewer drafts it has had."""
        self._fade(now)
        return [
            (ratio * weight * own + AUTO.shared_weight * gain) / (weight + AUTO.shared_weight)
            for own, weight, gain in zip(self.gains, self.weights, shared, strict=True)
        ]


@dataclass(slots=True)
class SequenceLevels:
    """One sequence's estimates of one drafter.

    Attributes:
        levels: gains of the drafter's levels.
        recent: recent drafts, if the drafter is cheap.
        num_read: number of the sequence's tokens that the drafter has read.
        is_sampled: whether the text is sampled with a temperature.
    """

    levels: Levels
    recent: RecentDrafts = field(default_factory=RecentDrafts)
    num_read: int = 0
    is_sampled: bool = False
