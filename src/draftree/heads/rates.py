"""Acceptance of a head on texts that its training has not seen, from the `recipe.json` that training writes beside it.

Planners start their estimates with it. The rates are those of drafts that decoding would make: the share of accepted
first candidates of each level, given that the level before was accepted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftree.core.json_files import MALFORMED, read_json

__all__ = ["AcceptanceRates", "read_rates"]

RECIPE = "recipe.json"


@dataclass(frozen=True, slots=True)
class AcceptanceRates:
    """Acceptance of each level, given that the level before was accepted; empty if unknown.

    Attributes:
        greedy: on greedy texts.
        sampled: on texts sampled with a temperature.
    """

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
    found = []
    for values, counts in zip(zip(*rates, strict=False), zip(*weights, strict=False), strict=True):
        total = sum(counts)
        if not total > 0:
            break
        found.append(sum(rate * count for rate, count in zip(values, counts, strict=True)) / total)
    return tuple(found)
