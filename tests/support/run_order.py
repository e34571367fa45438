"""Tests in a random order that a seed repeats. Not a test itself."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence

import pytest


def in_random_order(items: Sequence[pytest.Item], seed: int) -> list[pytest.Item]:
    """Files in random order, and the tests of each file in random order; the order depends on seed and tests alone."""
    files: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in sorted(items, key=lambda item: item.nodeid):
        files[item.nodeid.partition("::")[0]].append(item)
    dice = random.Random(seed)
    names = dice.sample(sorted(files), len(files))
    return [item for name in names for item in dice.sample(files[name], len(files[name]))]
