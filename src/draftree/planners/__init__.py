"""Planners: decide how much each sequence drafts in the next round.

Each module of this folder but `base` is one method: its file name is its name in specs, and the registry lists it
without importing it or torch. `base` holds the interface `Planner` and the adapting `Length` of simple
planners.

Invariants: a plan changes speed, never a text whose verifier guarantees it; a planner sees records of rounds, no model
and no tensor; state of a sequence is in the object that `open` returns.

The engine and everything above it may import this package; it imports `core` only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftree.core.registry import Registry

if TYPE_CHECKING:
    from draftree.planners.base import Planner

PLANNERS: Registry[Planner] = Registry("draftree.planners", "draftree.planners.base:Planner", kind="planner")
