"""Acceptance of a drafter on texts that training has not seen: by depth, for greedy and sampled texts, by category.

The texts are those that the target wrote, so its picks are known. Drafts start at every token of an answer and read
the text's own tokens. Counts over the drafts that decoding would make (`walk`) are those of the engine with drafts of
a fixed length; counts over all starts have a smaller deviation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from draftree.core.noise import Noise, gumbel
from draftree.heads.calibration import MOST_SURE, Calibration
from draftree.heads.vocabulary import DraftVocabulary
from draftree.train.batches import Batch
from draftree.train.checkpoints import TrainingError

CANDIDATES = 4
"""Number of best tokens that are compared."""
CHUNK_ROWS = 512

StepLogits = Callable[[Tensor], Tensor]
"""Logits of a step for some chains: indices of chains, shape (rows,), to (rows, draft vocabulary)."""


@dataclass(frozen=True, slots=True, eq=False)
class JudgedStep:
    """Best tokens of one step for all chains of a batch.

    Attributes:
        has_room: whether the text has room for the step, shape (chains,); otherwise the values mean nothing.
        match: column of the target's pick among the candidates, -1 if it is none of them, shape (chains,).
        log_shares: logarithms of the candidates' shares of the softmax of perturbed scores, in the order in which they
            would be drafted, shape (chains, candidates); the scores of drafted nodes.
        is_covered: whether the draft vocabulary has the target's pick, shape (chains,).
    """

    has_room: Tensor
    match: Tensor
    log_shares: Tensor
    is_covered: Tensor


def judge(batch: Batch, steps: Iterable[StepLogits], vocabulary: DraftVocabulary) -> Iterator[JudgedStep]:
    """Yield the best tokens of every step, ranked with the noise with which the target wrote the text."""
    device = batch.tokens.device
    ids = vocabulary.ids.to(device)
    owner = torch.cat([torch.full((int(count),), text) for text, count in enumerate(_chain_counts(batch))])
    temperatures = torch.tensor([text.temperature for text in batch.texts])[owner].to(device)
    noises = [Noise(text.seed) for text in batch.texts]
    for step, logits_of in enumerate(steps):
        picks = batch.picks[batch.step_chains(step)]
        positions = (batch.positions[batch.chains] + step + 1).tolist()
        keys = [noises[text].keys(position) for text, position in zip(owner.tolist(), positions, strict=True)]
        parts = [
            _best(logits_of(part), temperatures[part], [keys[row] for row in part.tolist()], ids)
            for part in torch.arange(batch.num_chains, device=device).split(CHUNK_ROWS)
        ]
        chosen, log_shares = (torch.cat(values) for values in zip(*parts, strict=True))
        places = vocabulary.places(picks)
        equal = chosen == places[:, None]
        match = torch.where(equal.any(-1), equal.int().argmax(-1), -1)
        yield JudgedStep(batch.room > step, match, log_shares, places >= 0)


def _chain_counts(batch: Batch) -> Tensor:
    texts = batch.chain_rows.places // batch.chain_rows.longest
    return torch.bincount(texts, minlength=batch.chain_rows.num_texts).cpu()


def _best(logits: Tensor, temperatures: Tensor, keys: Sequence[tuple[int, int]], ids: Tensor) -> tuple[Tensor, ...]:
    """Return rows of the best tokens and logarithms of their shares."""
    is_noisy = temperatures > 0
    scores = logits.float() / torch.where(is_noisy, temperatures, 1.0)[:, None]
    noisy = is_noisy.nonzero()[:, 0]
    if len(noisy):
        scores[noisy] += gumbel([keys[row] for row in noisy.tolist()], ids)
    values, chosen = scores.topk(min(CANDIDATES, len(ids)), dim=-1)
    return chosen, values - scores.logsumexp(dim=-1, keepdim=True)


@dataclass(slots=True)
class DepthCounts:
    """Drafts of one length and how many of their tokens were accepted.

    Attributes:
        runs: number of drafts by accepted tokens, 0 to `depth`.
    """

    depth: int
    runs: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.runs = self.runs or [0] * (self.depth + 1)

    def add(self, runs: Sequence[int]) -> None:
        """Count drafts with these numbers of accepted tokens."""
        for run in runs:
            self.runs[run] += 1

    def merge(self, other: DepthCounts) -> None:
        """Add the counts of other drafts of the same length."""
        self.runs = [mine + theirs for mine, theirs in zip(self.runs, other.runs, strict=True)]

    @property
    def drafts(self) -> int:
        return sum(self.runs)

    @property
    def reached(self) -> list[int]:
        """Number of drafts whose token at each depth was judged: all tokens before it were accepted."""
        return [sum(self.runs[depth:]) for depth in range(self.depth)]

    @property
    def conditional(self) -> list[float]:
        """Acceptance at each depth of the drafts that reached it; 0 if none did."""
        return [sum(self.runs[depth + 1 :]) / reached if reached else 0.0 for depth, reached in enumerate(self.reached)]

    @property
    def survival(self) -> list[float]:
        """Share of all drafts that were accepted up to each depth; 0 without drafts."""
        return [sum(self.runs[depth + 1 :]) / self.drafts if self.drafts else 0.0 for depth in range(self.depth)]

    @property
    def acceptance_length(self) -> float:
        """Tokens written per round: mean accepted tokens and the target's own; 1 without drafts."""
        return 1 + sum(run * count for run, count in enumerate(self.runs)) / max(1, self.drafts)

    def check(self) -> None:
        """Check that survival adds up to the acceptance length."""
        if abs(sum(self.survival) - (self.acceptance_length - 1)) > 1e-9:
            raise TrainingError(
                f"survival by depth adds up to {sum(self.survival)}, and acceptance length minus 1 is "
                f"{self.acceptance_length - 1}: they must be equal"
            )


def runs_of(matches: Sequence[Sequence[bool]]) -> list[int]:
    """Return the number of matches before the first miss of each draft."""
    return [next((depth for depth, match in enumerate(row) if not match), len(row)) for row in matches]


def walk(runs: Sequence[int]) -> list[int]:
    """Return the drafts of a text that decoding would make: the next one starts after the accepted tokens and the pick.

    Returns:
        Indices of places, ascending.
    """
    places, place = [], 0
    while place < len(runs):
        places.append(place)
        place += runs[place] + 1
    return places


ALL = "all"
"""Key of the counts over all categories."""


@dataclass(slots=True)
class ModeCounts:
    """Counts over texts of one temperature.

    Attributes:
        starts: drafts from every token of an answer that has room for one.
        rounds: by category, the drafts that decoding would make; those with `ALL` are of all texts.
        hits: number of first tokens of drafts at each rank, from 0; the best `CANDIDATES` ranks.
        first: number of first tokens of drafts.
        covered: number of target's picks that the draft vocabulary has, of `first`.
        texts: number of texts.
    """

    depth: int
    starts: DepthCounts = field(init=False)
    rounds: dict[str, DepthCounts] = field(default_factory=dict)
    hits: list[int] = field(default_factory=lambda: [0] * CANDIDATES)
    first: int = 0
    covered: int = 0
    texts: int = 0

    def __post_init__(self) -> None:
        self.starts = DepthCounts(self.depth)

    def facts(self) -> dict[str, Any]:
        """Return the rates as JSON values, after the check of survival against the acceptance length."""
        for counts in (self.starts, *self.rounds.values()):
            counts.check()
        return {
            "texts": self.texts,
            "starts": _facts(self.starts),
            "rounds": {category: _facts(counts) for category, counts in sorted(self.rounds.items())},
            "coverage": self.covered / max(1, self.first),
            "top": {str(k): sum(self.hits[:k]) / max(1, self.first) for k in (1, 2, CANDIDATES)},
        }


@dataclass(slots=True)
class Evaluation:
    """Result of an evaluation.

    Attributes:
        modes: counts by temperature of the texts.
    """

    modes: dict[float, ModeCounts] = field(default_factory=dict)

    @property
    def score(self) -> float:
        """Mean over temperatures of the acceptance length from all starts: what early stopping maximizes."""
        lengths = [mode.starts.acceptance_length for mode in self.modes.values() if mode.starts.drafts]
        return sum(lengths) / len(lengths) if lengths else 1.0

    def facts(self) -> dict[str, Any]:
        """Return the rates as JSON values, by temperature."""
        return {f"{temperature:g}": mode.facts() for temperature, mode in sorted(self.modes.items())}


@torch.no_grad()
def evaluate(
    batches: Iterable[tuple[Batch, Sequence[str]]],
    steps_of: Callable[[Batch, int], Iterator[StepLogits]],
    vocabulary: DraftVocabulary,
    depth: int,
    *,
    watch: Callable[[Batch, list[JudgedStep]], None] | None = None,
) -> Evaluation:
    """Return the acceptance of a drafter.

    Args:
        batches: batches, and the category of each of their texts; empty for none.
        steps_of: logits of all steps of a batch for a number of levels.
    """
    found = Evaluation()
    for batch, categories in batches:
        judged = list(judge(batch, steps_of(batch, depth), vocabulary))
        if watch is not None:
            watch(batch, judged)
        matches = torch.stack([step.match == 0 for step in judged], dim=-1)
        start = 0
        for text, category in zip(batch.texts, categories, strict=True):
            stop = start + int(batch.room[start])
            mode = found.modes.setdefault(text.temperature, ModeCounts(depth))
            _count(mode, category, matches[start:stop], judged[0], slice(start, stop))
            start = stop
    return found


def _count(mode: ModeCounts, category: str, matches: Tensor, first: JudgedStep, chains: slice) -> None:
    """Add the drafts of one text. Drafts near its end have less room and are not counted."""
    count = len(matches)
    mode.texts += 1
    mode.first += count
    mode.covered += int(first.is_covered[chains].sum())
    for rank in range(CANDIDATES):
        mode.hits[rank] += int((first.match[chains] == rank).sum())
    runs = [min(run, count - place) for place, run in enumerate(runs_of(matches.tolist()))]
    has_room = max(0, count - mode.depth + 1)
    mode.starts.add(runs[:has_room])
    # the first round of decoding reads the prompt, so that drafts start after the first token of the answer
    visited = [1 + place for place in walk(runs[1:])]
    for name in (ALL, category) if category else (ALL,):
        mode.rounds.setdefault(name, DepthCounts(mode.depth)).add(
            [runs[place] for place in visited if place < has_room]
        )


def _facts(counts: DepthCounts) -> dict[str, Any]:
    return {
        "drafts": counts.drafts,
        "acceptance_length": counts.acceptance_length,
        "conditional": counts.conditional,
        "reached": counts.reached,
        "survival": counts.survival,
    }


def table(facts: Mapping[str, Any]) -> list[str]:
    """Return lines of a table in Markdown: conditional acceptance and survival by depth for each temperature."""
    lines = ["| temperature | texts | depth | reached | accepted | survival |", "| --- | --- | --- | --- | --- | --- |"]
    for temperature, mode in facts.items():
        rounds = mode["rounds"][ALL]
        for depth, (reached, rate, survival) in enumerate(
            zip(rounds["reached"], rounds["conditional"], rounds["survival"], strict=True)
        ):
            lines.append(f"| {temperature} | {mode['texts']} | {depth + 1} | {reached} | {rate:.3f} | {survival:.3f} |")
    return lines


# Fit of a drafter's confidence on unseen texts, and how well it is calibrated on others.
#
# A sample is a candidate of a level that decoding would reach: all levels before matched. Every second text fits the
# map and the others measure it.

LEAST_SLOPE = 0.05
LEAST_SAMPLES = 50
"""Samples below which a level takes the map of the level before."""
BINS = 10
PRIOR = 10.0
"""Weight of the identity, in samples."""
STEPS = 50


@dataclass(slots=True)
class _Level:
    """Samples of one level: logits of shares, and whether they matched; those that fit and those that measure."""

    shares: tuple[list[Tensor], list[Tensor]] = field(default_factory=lambda: ([], []))
    matches: tuple[list[Tensor], list[Tensor]] = field(default_factory=lambda: ([], []))

    def samples(self, side: int) -> tuple[Tensor, Tensor]:
        if not self.shares[side]:
            return torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.float64)
        return torch.cat(self.shares[side]).double(), torch.cat(self.matches[side]).double()


class ConfidenceFit:
    """Samples of judged drafts, and the fit. `add` is the `watch` of an evaluation."""

    def __init__(self, depth: int) -> None:
        self._levels = [[_Level() for _ in range(depth)] for _ in range(2)]
        self._num_texts = 0

    def add(self, batch: Batch, judged: list[JudgedStep]) -> None:
        layout = batch.chain_rows
        text = (layout.places // layout.longest).cpu() + self._num_texts
        sampled = torch.tensor([one.temperature > 0 for one in batch.texts])[text - self._num_texts]
        self._num_texts += layout.num_texts
        is_reached = torch.ones(batch.num_chains, dtype=torch.bool)
        for level, step in enumerate(judged):
            is_reached &= step.has_room.cpu()
            share = step.log_shares.cpu().double().exp().clamp(MOST_SURE, 1 - MOST_SURE)
            matches = step.match.cpu()[:, None] == torch.arange(share.shape[1])
            for kind in range(2):
                for side in range(2):
                    chosen = is_reached & (sampled == bool(kind)) & (text % 2 == side)
                    self._levels[kind][level].shares[side].append(share[chosen].logit().flatten())
                    self._levels[kind][level].matches[side].append(matches[chosen].flatten())
            is_reached &= step.match.cpu() == 0

    def fit(self) -> Calibration:
        greedy, sampled = (self._pairs(levels) for levels in self._levels)
        return Calibration(greedy, sampled)

    @staticmethod
    def _pairs(levels: list[_Level]) -> tuple[tuple[float, float], ...]:
        pairs: list[tuple[float, float]] = []
        for level in levels:
            shares, matches = level.samples(0)
            if len(shares) < LEAST_SAMPLES:
                pairs.append(pairs[-1] if pairs else (1.0, 0.0))
            else:
                pairs.append(_logistic(shares, matches))
        return tuple(pairs)

    def report(self, calibration: Calibration) -> dict[str, Any]:
        """Return the expected calibration error of raw and mapped scores on the other texts, as JSON values."""
        found: dict[str, Any] = {}
        for name, levels, pairs in (
            ("greedy", self._levels[0], calibration.greedy),
            ("sampled", self._levels[1], calibration.sampled),
        ):
            found[name] = []
            for level, (slope, offset) in zip(levels, pairs, strict=True):
                shares, matches = level.samples(1)
                if len(shares):
                    raw, mapped = shares.sigmoid(), (slope * shares + offset).sigmoid()
                    errors = {"raw": calibration_error(raw, matches), "mapped": calibration_error(mapped, matches)}
                    found[name].append({"samples": len(shares)} | errors)
        return found


def _logistic(shares: Tensor, matches: Tensor) -> tuple[float, float]:
    """Return slope and offset of the logistic regression, by Newton's method with a weak pull to the identity."""
    inputs = torch.stack((shares, torch.ones_like(shares)), dim=-1)
    prior = torch.tensor([1.0, 0.0], dtype=torch.float64)
    weights = prior.clone()
    for _ in range(STEPS):
        found = (inputs @ weights).sigmoid()
        slope = inputs.T @ (found - matches) + PRIOR * (weights - prior)
        curve = (inputs * (found * (1 - found))[:, None]).T @ inputs + PRIOR * torch.eye(2, dtype=torch.float64)
        step = torch.linalg.solve(curve, slope)
        weights = weights - step * min(1.0, 2.0 / float(step.norm().clamp_min(1e-12)))
    return max(LEAST_SLOPE, float(weights[0])), float(weights[1])


def calibration_error(probabilities: Tensor, matches: Tensor) -> float:
    """Return the expected calibration error: mean distance of probability and rate over bins of equal counts.

    Args:
        probabilities: estimates from 0 to 1, shape (samples,).
        matches: 1 for a match and 0 otherwise, shape (samples,).
    """
    order = probabilities.argsort()
    total = 0.0
    for part in order.tensor_split(BINS):
        if len(part):
            total += abs(float(probabilities[part].mean() - matches[part].mean())) * len(part)
    return total / max(1, len(order))
