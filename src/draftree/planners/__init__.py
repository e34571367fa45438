"""Planners, one per file. The registry lists them without importing them or torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftree.core.registry import Registry

if TYPE_CHECKING:
    from draftree.planners.base import Planner

PLANNERS: Registry[Planner] = Registry("draftree.planners", "draftree.planners.base:Planner", kind="planner")
