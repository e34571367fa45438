"""Sums of the lines of `offload.py`: one row for each arm."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from text_sums import Text, are_same, arms_of, speeds, total


def row_of(texts: Sequence[Text], plain: Sequence[Text], longest: Sequence[Text]) -> dict[str, Any]:
    """Return the sums of an arm; all arguments have the same prompts in the same order."""
    first, rounds, tokens = texts[0], total(texts, "rounds"), total(texts, "tokens")
    memory = first["target_bytes"] + first["drafter_bytes"] + first["drafter_cache_bytes"]
    later = max(1, rounds - len(texts))
    return {
        "arm": first["arm"],
        "prompts": len(texts),
        "tokens": tokens,
        "memory_mb": round(memory / 1e6),
        "memory_share": round(memory / first["weight_bytes"], 3),
        "pass_mb": round(first["pass_bytes"] / 1e6),
        "tokens_per_round": round(tokens / rounds, 2),
        "nodes_per_round": round(total(texts, "nodes") / rounds, 1),
        "mb_per_token": round(total(texts, "read") / tokens / 1e6),
        "pass_ms": round(1000 * total(texts, "score_seconds") / later),
        "draft_ms": round(1000 * total(texts, "draft_seconds") / later),
        "first_token_ms": round(1000 * total(texts, "first_seconds") / len(texts)),
        **speeds(texts, plain),
        "same_texts": are_same(texts, longest),
    }


def rows(path: Path) -> list[dict[str, Any]]:
    """Return one row for each arm of a file, over the prompts that all arms have.

    The speed of a drafter is relative to `none` with the same memory if there is such an arm, else to the first arm.
    """
    arms = arms_of(path)
    longest = max(arms.values(), key=lambda texts: len(texts[0]["token_ids"]))
    found = []
    for name, texts in arms.items():
        draft, bar, memory = name.partition("|")
        plain = f"none{bar}{memory}" if draft != "none" and f"none{bar}{memory}" in arms else next(iter(arms))
        found.append(row_of(texts, arms[plain], longest))
    return found


def summarize(path: Path) -> None:
    """Print the rows of a file as lines of JSON."""
    for row in rows(path):
        print(json.dumps(row))
