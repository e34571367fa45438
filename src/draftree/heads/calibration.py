"""What a head's folder says about acceptance: calibrated confidence, and the rates that training measured.

The score of a token is its share of the softmax of a node's perturbed scores. The map to the probability that a drafted
token is the target token is p = sigmoid(slope * logit(share) + offset), with a pair for each level, and other pairs for
greedy than for sampled sequences. The slope is positive, so the order of a node's children stays. It is fitted on
sequences that training has not seen. A head without a map may estimate the acceptance of each level itself (DSpark):
the estimate then sets the offset of each node, with slope 1. Planners and trees of the best nodes use the result;
target tokens do not depend on it.

Planners start their estimates with the rates of `recipe.json`: the share of accepted first candidates of each level,
given that the level before was accepted.

Source: Platt scaling; EAGLE-2 (arXiv 2406.16858) uses the scores as they are; the estimate is that of DSpark,
github.com/deepseek-ai/DeepSpec.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftree.core.errors import ModelLoadError
from draftree.core.files import MALFORMED, read_json, write_json
from draftree.sampling.tree_search import MOST_SURE

CONFIDENCE = "confidence.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Calibration:
    """Map from scores to probabilities: slope and offset of each level; the last pair is for all deeper levels too."""

    greedy: tuple[tuple[float, float], ...]
    sampled: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        for pairs in (self.greedy, self.sampled):
            is_sound = all(0 < slope < math.inf and math.isfinite(offset) for slope, offset in pairs)
            if not pairs or not is_sound:
                raise ModelLoadError(f"'{CONFIDENCE}' is damaged: a level needs a positive slope and a finite offset")

    def log_probabilities(self, log_shares: Sequence[float], level: int, *, is_sampled: bool) -> list[float]:
        """Return `log_probability` of each child of a node."""
        return [self.log_probability(value, level, is_sampled=is_sampled) for value in log_shares]

    def log_probability(self, log_share: float, level: int, *, is_sampled: bool) -> float:
        """Return the log-probability that a token of a level (from 0) is the target token, given its log-share."""
        if not log_share > -math.inf:
            return log_share
        slope, offset = self.map_of(level, is_sampled=is_sampled)
        return _log_sigmoid(slope * _logit(math.exp(log_share)) + offset)

    def map_of(self, level: int, *, is_sampled: bool) -> tuple[float, float]:
        """Return slope and offset of a level, counted from 0."""
        pairs = self.sampled if is_sampled else self.greedy
        return pairs[min(level, len(pairs) - 1)]


def with_confidence(log_shares: Sequence[float], confidence: float) -> list[float]:
    """Return the log-probabilities that the children of a node are the target token; log-shares descend.

    logit(p) = logit(share) + logit(confidence) - logit(share of the first child): the first child has the estimated
    probability `confidence`, and the order of the children stays.
    """
    if not log_shares or not log_shares[0] > -math.inf:
        return list(log_shares)
    offset = _logit(confidence) - _logit(math.exp(log_shares[0]))
    return [_log_sigmoid(_logit(math.exp(value)) + offset) if value > -math.inf else value for value in log_shares]


def _logit(share: float) -> float:
    """Return log(p / (1 - p)), bounded."""
    share = min(max(share, MOST_SURE), 1 - MOST_SURE)
    return math.log(share / (1 - share))


def _log_sigmoid(value: float) -> float:
    """Return log(1 / (1 + exp(-value))) without overflow."""
    return min(value, 0.0) - math.log1p(math.exp(-abs(value)))


def write_calibration(calibration: Calibration, folder: Path) -> None:
    """Write the map beside a head."""
    values = {"format": FORMAT, "greedy": calibration.greedy, "sampled": calibration.sampled}
    write_json(folder / CONFIDENCE, values, indent=1)


def read_calibration(folder: Path) -> Calibration | None:
    """Return the map of a head's folder; None if it has none."""
    path = folder / CONFIDENCE
    if not path.is_file():
        return None
    try:
        values = read_json(path)
        if values["format"] != FORMAT:
            raise ModelLoadError(f"{path} has format {values['format']!r}, and this program reads {FORMAT}")
        return Calibration(
            *(tuple((float(slope), float(offset)) for slope, offset in values[kind]) for kind in ("greedy", "sampled"))
        )
    except (OSError, *MALFORMED) as reason:
        raise ModelLoadError(f"{path} is damaged ({reason!r}): delete it or get the head again") from reason


RECIPE = "recipe.json"


@dataclass(frozen=True, slots=True)
class AcceptanceRates:
    """Acceptance of each level, given that the level before was accepted; empty if unknown."""

    greedy: tuple[float, ...] = ()
    sampled: tuple[float, ...] = ()


def read_rates(folder: Path) -> AcceptanceRates:
    """Return the rates of a head's folder; unknown ones if no training of this package has written a recipe there.

    The file only describes a head, and other programs write files of this name, so content of another form is unknown
    too.
    """
    try:
        unseen = read_json(folder / RECIPE)["unseen"]
        by_temperature = {float(temperature): _rates(facts) for temperature, facts in unseen.items()}
    except (OSError, *MALFORMED):
        return AcceptanceRates()
    sampled = [rates for temperature, (rates, _) in by_temperature.items() if temperature > 0]
    weights = [reached for temperature, (_, reached) in by_temperature.items() if temperature > 0]
    return AcceptanceRates(by_temperature.get(0.0, ((), ()))[0], _mean(sampled, weights))


def _rates(facts: Mapping[str, Any]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the rate of each level and the number of drafts that reached it."""
    counts = facts["rounds"]["all"]
    rates, reached = (tuple(float(value) for value in counts[name]) for name in ("conditional", "reached"))
    if len(rates) != len(reached) or not all(0 <= rate <= 1 for rate in rates) or not all(map(math.isfinite, reached)):
        raise ValueError("rates and counts belong together")
    return rates, reached


def _mean(rates: Sequence[Sequence[float]], weights: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return the mean rate of each level over several temperatures, weighted by the drafts that reached it."""
    levels = zip(zip(*rates, strict=False), zip(*weights, strict=False), strict=True)
    reached = itertools.takewhile(lambda level: sum(level[1]) > 0, levels)
    return tuple(statistics.fmean(values, counts) for values, counts in reached)
