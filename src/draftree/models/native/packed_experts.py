"""Packing of the experts of a layer for the C library."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from draftree.models.native.blueprint import ExpertsBlueprint
from draftree.models.native.structures import CExperts, CLinear


def packed_experts(
    plan: ExpertsBlueprint, pack: Callable[..., CLinear], router_format: int
) -> tuple[CExperts, tuple[Any, Any]]:
    """Return the structure of a layer's experts, and the two arrays to which it points.

    Args:
        plan: the experts.
        pack: packs linear layers (`PackedWeights`), without releasing their weights.
        router_format: format of the router, which is never quantized.
    """
    router = pack(plan.unquantized, kind=router_format, is_one=True, release=False)
    first, last = [], []
    for expert in range(plan.count):
        first.append(pack([replace(plan.gate_up, expert=expert)], in_turns=True, release=False))
        last.append(pack([replace(plan.down, expert=expert)], release=False))
    if plan.shared_down is not None:
        first.append(pack(plan.shared_gate_up, in_turns=True, release=False))
        last.append(pack([plan.shared_down], release=False))
    gate_up, down = (CLinear * len(first))(*first), (CLinear * len(last))(*last)
    found = CExperts(
        router=router,
        gate_up=ctypes.addressof(gate_up),
        down=ctypes.addressof(down),
        count=plan.count,
        chosen=plan.chosen,
        is_renormalized=plan.is_renormalized,
        shared=plan.shared_down is not None,
        has_shared_gate=plan.shared_gate is not None,
    )
    return found, (gate_up, down)
