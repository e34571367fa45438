"""Status of all replicas as one answer: loads are summed, rates weighted by tokens. Needs no ray."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

SUMMED = ("running", "waiting", "tokens_per_second")
"""Numbers of a model that are summed over its replicas."""
AVERAGED = ("acceptance_length", "acceptance_rate")
"""Numbers of a model that are averaged over its replicas, weighted by their tokens/s."""


def merged_status(texts: Mapping[str, str]) -> str:
    """Return the status of all replicas as one of the same form.

    Models are those of the first replica, with their summed load. `replicas` has the ids of the replicas.

    Args:
        texts: status of each replica as JSON, by its id; at least one.
    """
    each = [json.loads(text) for text in texts.values()]
    first = each[0]
    merged = first | {
        "models": [_model(model, each) for model in first["models"]],
        "queue": {name: sum(status["queue"][name] for status in each) for name in first["queue"]},
        "is_ready": any(status["is_ready"] for status in each),
        "uptime_seconds": max(status["uptime_seconds"] for status in each),
        "replicas": list(texts),
    }
    return json.dumps(merged, separators=(",", ":"))


def _model(model: dict[str, Any], each: Sequence[dict[str, Any]]) -> dict[str, Any]:
    own = [found for status in each for found in status["models"] if found["name"] == model["name"]]
    sums = {name: sum(found[name] for found in own) for name in SUMMED}
    return model | sums | {name: _average(own, name) for name in AVERAGED}


def _average(own: Sequence[dict[str, Any]], name: str) -> float | None:
    known = [(found[name], found["tokens_per_second"]) for found in own if found[name] is not None]
    weight = sum(tokens for _, tokens in known)
    return sum(value * tokens for value, tokens in known) / weight if weight else None
