"""Sums over texts of arms that took turns, with intervals over prompts; for the benchmarks beside this file.

A line of a results file is one text (or one batch of texts) of one arm, with at least `arm`, `prompt`, `tokens`,
`first_tokens` (of the first round), `seconds`, `first_seconds` (until the end of the first round) and `token_ids`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

RESAMPLES = 2000

Text = dict[str, Any]


def arms_of(path: Path) -> dict[str, list[Text]]:
    """Return the texts of each arm, in one order: those of the prompts that all arms have."""
    arms: dict[str, dict[str, Text]] = {}
    for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        arms.setdefault(line["arm"], {})[line["prompt"]] = line
    prompts = [prompt for prompt in next(iter(arms.values())) if all(prompt in texts for texts in arms.values())]
    return {name: [texts[prompt] for prompt in prompts] for name, texts in arms.items()}


def total(texts: Sequence[Text], name: str) -> float:
    """Return the sum of a field."""
    return sum(text[name] for text in texts)


def decode_ms(texts: Sequence[Text]) -> float:
    """Return milliseconds per token after the first round of each text."""
    seconds = total(texts, "seconds") - total(texts, "first_seconds")
    return 1000 * seconds / (total(texts, "tokens") - total(texts, "first_tokens"))


def interval(count: int, value: Callable[[Sequence[int]], float]) -> tuple[float, float]:
    """Return the 95% interval of a value of texts, by their numbers, from resampled texts."""
    chance = random.Random(1)
    found = sorted(value([chance.randrange(count) for _ in range(count)]) for _ in range(RESAMPLES))
    return found[int(0.025 * RESAMPLES)], found[int(0.975 * RESAMPLES)]


def speeds(texts: Sequence[Text], plain: Sequence[Text]) -> dict[str, Any]:
    """Return milliseconds per token, and the speed relative to plain decoding of the same prompts."""
    low, high = interval(
        len(texts), lambda chosen: decode_ms([plain[i] for i in chosen]) / decode_ms([texts[i] for i in chosen])
    )
    return {
        "ms_per_token": round(decode_ms(texts), 1),
        "speedup": round(decode_ms(plain) / decode_ms(texts), 2),
        "speedup_95": (round(low, 2), round(high, 2)),
    }


def are_same(texts: Sequence[Text], others: Sequence[Text]) -> bool:
    """Return whether each text is the beginning of the other one, or the other way round."""
    pairs = ((text["token_ids"], other["token_ids"]) for text, other in zip(texts, others, strict=True))
    return all(one[: len(other)] == other[: len(one)] for one, other in pairs)
