"""Acceptance of a drafter on texts that training has not seen: by depth, for greedy and sampled texts.

The texts are those that the target wrote, so its picks are known. Drafts start at every token of an answer and read
the text's own tokens. Counts over the drafts that decoding would make (`walk`) are those of the engine with drafts of
a fixed length; counts over all starts have a smaller deviation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from draftree.core.noise import Noise, gumbel
from draftree.heads.calibration import MOST_SURE, Calibration
from draftree.heads.vocabulary import DraftVocabulary
from draftree.train.batches import Batch

CANDIDATES = 4  # number of best tokens that are compared
CHUNK_ROWS = 512

StepLogits = Callable[[Tensor], Tensor]
"""Logits of a step for some chains: indices of chains, shape (rows,), to (rows, draft vocabulary)."""


@dataclass(frozen=True, slots=True, eq=False)
class JudgedStep:
    """Best tokens of one step for all chains of a batch."""

    has_room: Tensor  # whether the text has room for the step, shape (chains,); otherwise the values mean nothing
    match: Tensor  # column of the target's pick among the candidates, -1 if it is none of them, shape (chains,)
    # logarithms of the candidates' shares of the softmax of perturbed scores, in the order in which they would be
    # drafted, shape (chains, candidates); the scores of drafted nodes
    log_shares: Tensor
    is_covered: Tensor  # whether the draft vocabulary has the target's pick, shape (chains,)


def judge(batch: Batch, steps: Iterable[StepLogits], vocabulary: DraftVocabulary) -> Iterator[JudgedStep]:
    """Yield the best tokens of every step, ranked with the noise with which the target wrote the text."""
    device = batch.tokens.device
    ids = vocabulary.ids.to(device)
    texts = batch.chain_rows.texts
    temperatures = torch.tensor([text.temperature for text in batch.texts], device=device)[texts]
    noises = [Noise(batch.texts[text].seed) for text in texts.tolist()]
    for step, logits_of in enumerate(steps):
        positions = (batch.positions[batch.chains] + step + 1).tolist()
        keys = [noise.keys(position) for noise, position in zip(noises, positions, strict=True)]
        parts = [
            _best(logits_of(part), temperatures[part], [keys[row] for row in part.tolist()], ids)
            for part in torch.arange(batch.num_chains, device=device).split(CHUNK_ROWS)
        ]
        chosen, log_shares = (torch.cat(values) for values in zip(*parts, strict=True))
        places = vocabulary.places(batch.picks[batch.step_chains(step)])
        equal = chosen == places[:, None]
        match = torch.where(equal.any(-1), equal.int().argmax(-1), -1)
        yield JudgedStep(batch.room > step, match, log_shares, places >= 0)


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
    """Number of drafts of one length by accepted tokens, 0 to `depth`."""

    depth: int
    runs: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.runs = [0] * (self.depth + 1)

    def add(self, runs: Iterable[int]) -> None:
        """Count drafts with these numbers of accepted tokens."""
        for run in runs:
            self.runs[run] += 1

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
        return [sum(self.runs[depth + 1 :]) / max(1, reached) for depth, reached in enumerate(self.reached)]

    @property
    def survival(self) -> list[float]:
        """Share of all drafts that were accepted up to each depth; 0 without drafts."""
        return [sum(self.runs[depth + 1 :]) / max(1, self.drafts) for depth in range(self.depth)]

    @property
    def acceptance_length(self) -> float:
        """Tokens written per round: mean accepted tokens and the target's own; 1 without drafts."""
        return 1 + sum(run * count for run, count in enumerate(self.runs)) / max(1, self.drafts)

    def facts(self) -> dict[str, Any]:
        """Return the rates as JSON values."""
        names = ("drafts", "acceptance_length", "conditional", "reached", "survival")
        return {name: getattr(self, name) for name in names}


def runs_of(matches: Sequence[Sequence[bool]]) -> list[int]:
    """Return the number of matches before the first miss of each draft."""
    return [next((depth for depth, match in enumerate(row) if not match), len(row)) for row in matches]


def walk(runs: Sequence[int]) -> list[int]:
    """Return the places of drafts that decoding would make: one starts after the accepted tokens and the pick."""
    places, place = [], 0
    while place < len(runs):
        places.append(place)
        place += runs[place] + 1
    return places


@dataclass(slots=True)
class ModeCounts:
    """Counts over texts of one temperature."""

    starts: DepthCounts  # drafts from every token of an answer that has room for one
    rounds: DepthCounts  # the drafts that decoding would make
    # number of first tokens of drafts at each rank, from 0; the best `CANDIDATES` ranks
    hits: list[int] = field(default_factory=lambda: [0] * CANDIDATES)
    first: int = 0  # number of first tokens of drafts
    covered: int = 0  # number of target tokens that the draft vocabulary has, of `first`
    texts: int = 0

    def add(self, matches: Tensor, first: JudgedStep, chains: slice) -> None:
        """Add the drafts of one text. Drafts near its end have less room and are not counted.

        `matches`: whether each level of each draft is the target's pick, shape (chains, levels). `first`: the first
        step of its batch, of which these `chains` are the text's.
        """
        count = len(matches)
        self.texts += 1
        self.first += count
        self.covered += int(first.is_covered[chains].sum())
        for rank in range(CANDIDATES):
            self.hits[rank] += int((first.match[chains] == rank).sum())
        runs = [min(run, count - place) for place, run in enumerate(runs_of(matches.tolist()))]
        has_room = max(0, count - self.starts.depth + 1)
        self.starts.add(runs[:has_room])
        # the first round of decoding reads the prompt, so that drafts start after the first token of the answer
        self.rounds.add(runs[place + 1] for place in walk(runs[1:]) if place + 1 < has_room)

    def facts(self) -> dict[str, Any]:
        """Return the rates as JSON values."""
        return {
            "texts": self.texts,
            "starts": self.starts.facts(),
            "rounds": {"all": self.rounds.facts()},
            "coverage": self.covered / max(1, self.first),
            "top": {str(k): sum(self.hits[:k]) / max(1, self.first) for k in (1, 2, CANDIDATES)},
        }


@dataclass(slots=True)
class Evaluation:
    """Result of an evaluation: counts by temperature of the texts."""

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
    batches: Iterable[Batch],
    steps_of: Callable[[Batch, int], Iterable[StepLogits]],
    vocabulary: DraftVocabulary,
    depth: int,
    *,
    watch: Callable[[Batch, list[JudgedStep]], None] | None = None,
) -> Evaluation:
    """Return the acceptance of a drafter.

    `steps_of`: logits of all steps of a batch for a number of levels.
    """
    modes: dict[float, ModeCounts] = {}
    for batch in batches:
        judged = list(judge(batch, steps_of(batch, depth), vocabulary))
        if watch is not None:
            watch(batch, judged)
        matches = torch.stack([step.match == 0 for step in judged], dim=-1)
        start = 0
        for text in batch.texts:
            stop = start + int(batch.room[start])
            mode = modes.setdefault(text.temperature, ModeCounts(DepthCounts(depth), DepthCounts(depth)))
            mode.add(matches[start:stop], judged[0], slice(start, stop))
            start = stop
    return Evaluation(modes)


def table(facts: Mapping[str, Any]) -> list[str]:
    """Return lines of a table in Markdown: conditional acceptance and survival by depth for each temperature."""
    lines = ["| temperature | texts | depth | reached | accepted | survival |", "| --- | --- | --- | --- | --- | --- |"]
    for temperature, mode in facts.items():
        rounds = mode["rounds"]["all"]
        levels = zip(rounds["reached"], rounds["conditional"], rounds["survival"], strict=True)
        lines += [
            f"| {temperature} | {mode['texts']} | {depth} | {reached} | {rate:.3f} | {survival:.3f} |"
            for depth, (reached, rate, survival) in enumerate(levels, 1)
        ]
    return lines


# Fit of a drafter's confidence on unseen texts, and how well it is calibrated on others.
#
# A sample is a candidate of a level that decoding would reach: all levels before matched. Every second text fits the
# map and the others measure it.

LEAST_SLOPE = 0.05
LEAST_SAMPLES = 50  # samples below which a level takes the map of the level before
BINS = 10
PRIOR = 10.0  # weight of the identity, in samples
STEPS = 50
FITS = 0
MEASURES = 1


class ConfidenceFit:
    """Samples of judged drafts, and the fit. `add` is the `watch` of an evaluation."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._num_texts = 0
        self._samples: dict[tuple[bool, int, int], list[Tensor]] = defaultdict(list)
        """Logits of shares beside whether they matched, shape (2, samples), by kind of text, level and use."""

    def add(self, batch: Batch, judged: list[JudgedStep]) -> None:
        owners = batch.chain_rows.texts.cpu()
        is_sampled = torch.tensor([text.temperature > 0 for text in batch.texts])[owners]
        is_measured = (owners + self._num_texts) % 2 == MEASURES
        self._num_texts += len(batch.texts)
        is_reached = torch.ones(batch.num_chains, dtype=torch.bool)
        for level, step in enumerate(judged):
            is_reached &= step.has_room.cpu()
            shares = step.log_shares.cpu().double().exp().clamp(MOST_SURE, 1 - MOST_SURE).logit()
            matches = step.match.cpu()[:, None] == torch.arange(shares.shape[1])
            samples = torch.stack((shares, matches.double()))
            for kind in (False, True):
                for use in (FITS, MEASURES):
                    chosen = is_reached & (is_sampled == kind) & (is_measured == use)
                    self._samples[kind, level, use].append(samples[:, chosen].flatten(1))
            is_reached &= step.match.cpu() == 0

    def _level(self, is_sampled: bool, level: int, use: int) -> tuple[Tensor, Tensor]:
        empty = torch.zeros(2, 0, dtype=torch.float64)
        shares, matches = torch.cat([empty, *self._samples[is_sampled, level, use]], dim=1)
        return shares, matches

    def fit(self) -> Calibration:
        return Calibration(self._pairs(False), self._pairs(True))

    def _pairs(self, is_sampled: bool) -> tuple[tuple[float, float], ...]:
        pairs: list[tuple[float, float]] = []
        for level in range(self._depth):
            shares, matches = self._level(is_sampled, level, FITS)
            if len(shares) < LEAST_SAMPLES:
                pairs.append(pairs[-1] if pairs else (1.0, 0.0))
            else:
                pairs.append(_logistic(shares, matches))
        return tuple(pairs)

    def report(self, calibration: Calibration) -> dict[str, Any]:
        """Return the expected calibration error of raw and mapped scores on the other texts, as JSON values."""
        report: dict[str, Any] = {"greedy": [], "sampled": []}
        for (name, rows), pairs in zip(report.items(), (calibration.greedy, calibration.sampled), strict=True):
            for level, (slope, offset) in enumerate(pairs):
                shares, matches = self._level(name == "sampled", level, MEASURES)
                if len(shares):
                    raw = calibration_error(shares.sigmoid(), matches)
                    mapped = calibration_error((slope * shares + offset).sigmoid(), matches)
                    rows.append({"samples": len(shares), "raw": raw, "mapped": mapped})
        return report


def _logistic(shares: Tensor, matches: Tensor) -> tuple[float, float]:
    """Return slope and offset of the logistic regression, by Newton's method with a weak pull to the identity."""
    inputs = torch.stack((shares, torch.ones_like(shares)), dim=-1)
    prior = torch.tensor([1.0, 0.0], dtype=torch.float64)
    weights = prior.clone()
    for _ in range(STEPS):
        rates = (inputs @ weights).sigmoid()
        slope = inputs.T @ (rates - matches) + PRIOR * (weights - prior)
        curve = (inputs * (rates * (1 - rates))[:, None]).T @ inputs + PRIOR * torch.eye(2, dtype=torch.float64)
        step = torch.linalg.solve(curve, slope)
        weights = weights - step * min(1.0, 2.0 / float(step.norm().clamp_min(1e-12)))
    return max(LEAST_SLOPE, float(weights[0])), float(weights[1])


def calibration_error(probabilities: Tensor, matches: Tensor) -> float:
    """Return the expected calibration error: mean distance of probability and rate over bins of equal counts.

    `probabilities`: estimates from 0 to 1, shape (samples,). `matches`: 1 for a match and 0 otherwise, shape
    (samples,).
    """
    distances = (
        abs(float(probabilities[part].mean() - matches[part].mean())) * len(part)
        for part in probabilities.argsort().tensor_split(BINS)
        if len(part)
    )
    return sum(distances) / max(1, len(probabilities))
