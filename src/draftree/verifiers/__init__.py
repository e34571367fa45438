"""Verifiers: decide which drafted tokens are accepted.

Each module of this folder but `base` is one rule: its file name is its name in specs, and the registry lists it without
importing it or torch. `base` holds the interface `Verifier`, the `Guarantee` of a rule about its texts, the
`RandomSource` of its decisions, and the ratios and residuals that rules with draft distributions share.

Invariants: a verifier is a pure function of a tree, the target's distributions and random decisions; all decisions come
from the `RandomSource`, so that tests can enumerate them; a path starts at the root and ends with a bonus token.

The engine and everything above it may import this package; it imports `core` and `sampling` only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftree.core.registry import Registry

if TYPE_CHECKING:
    from draftree.verifiers.base import Verifier

VERIFIERS: Registry[Verifier] = Registry("draftree.verifiers", "draftree.verifiers.base:Verifier", kind="verifier")
