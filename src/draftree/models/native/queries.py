"""How the layers of a transformers model make their queries, by comparison of values: factors and rotations."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from draftree.models.native.facts import ModelFacts
from draftree.models.native.modules import first_part, part
from draftree.models.native.rotary import Rope
from draftree.models.torch.attention import LayerCall, ProbePass, announced

ATTENTION = ("self_attn", "attn", "attention", "self_attention")
QUERIES = ("q_proj", "qkv_proj", "c_attn")
FACTOR_TOLERANCE = 1e-2
"""Largest relative error of a factor of queries that is one of the usual ones, in half precision."""
ROTATION_TOLERANCE = 0.1
"""Largest error of rotated queries relative to their size. Another rotation of random queries differs by about 1."""


class Rotation(Enum):
    """How the queries of a layer are rotated by position.

    HALVES: number i of the rotary part of a head and number i of its second half are a pair.
    PAIRS: neighbouring numbers are a pair.
    """

    NONE = "none"
    HALVES = "halves"
    PAIRS = "pairs"


class _EnoughError(Exception):
    """Ends a pass once all queries of interest are known."""


@dataclass(slots=True)
class _Queries(ProbePass):
    """Pass that records the queries of each layer, shape (rows, heads, head_dim), up to a last layer."""

    last: int | None = None
    queries: dict[int, Tensor] = field(default_factory=dict)

    def attend(self, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Record the queries, and attend."""
        self.queries[call.layer] = query[0].transpose(0, 1).float()
        if call.layer == self.last:
            raise _EnoughError
        return ProbePass.attend(self, call, query, key, value)


@torch.inference_mode()
def _before_and_after(
    model: ModelFacts, layers: Sequence[Any], *, last: int | None = None
) -> dict[int, tuple[Tensor, Tensor]]:
    """Return by layer its queries as its product and norm give them, and as it attends with them.

    Args:
        model: a transformers model.
        layers: modules of its layers.
        last: layer at which the pass ends; None for all.

    Returns:
        Two tensors of shape (rows, heads, head_dim), float32, for rows at positions 0, 1, ….
    """
    heads = int(model.config.num_attention_heads)
    tokens = [1, 2, 1] if heads == 2 else [1, 2]  # not as many rows as heads, which tells both dimensions apart
    found: dict[int, Tensor] = {}
    probe = _Queries(last=last)
    with ExitStack() as stack:
        for index, layer in enumerate(layers):
            attention = part(layer, *ATTENTION)
            for module in (first_part(attention, *QUERIES), first_part(attention, "q_norm")):
                if module is not None:  # of product and norm, which runs later, the last one is kept
                    hook = module.register_forward_hook(lambda _, given, out, index=index: found.update({index: out}))
                    stack.callback(hook.remove)
        try:
            with announced(probe):
                model.model(input_ids=torch.tensor([tokens], device=model.device), use_cache=False)
        except _EnoughError:
            pass
    pairs = {}
    for index, after in probe.queries.items():
        if index in found:
            own = found[index][0].float()
            own = own.transpose(0, 1) if own.shape[0] != len(tokens) else own
            pairs[index] = own.reshape(len(tokens), -1)[:, : after[0].numel()].reshape(after.shape), after
    return pairs


def query_factors(model: ModelFacts, layers: Sequence[Any]) -> dict[int, float]:
    """Return by layer the factor between the product of its queries and the queries with which it attends.

    Some families scale queries before their attention. It is only of use for layers without rotary positions.
    """
    found = {}
    for index, (before, after) in _before_and_after(model, layers).items():
        factor = float((after * before).sum() / before.square().sum().clamp_min(torch.finfo().tiny))
        usual = (1.0, float(after.shape[-1]) ** -0.5)
        found[index] = next((one for one in usual if abs(factor - one) < FACTOR_TOLERANCE * one), factor)
    return found


def rotations(
    model: ModelFacts, layers: Sequence[Any], ropes: Sequence[Rope], kinds: Sequence[int | None]
) -> list[Rotation]:
    """Return how each layer rotates its queries.

    Layers with the same rotary positions and the same window are alike, so the pass ends at the last layer that is the
    first one of its kind. Queries of products with another name are taken to be rotated in the usual way; whether
    they are is found by the comparison of logits.

    Args:
        model: a transformers model.
        layers: modules of its layers.
        ropes: its kinds of rotary positions.
        kinds: index of each layer's kind; None for none.
    """
    alike = [(kind, model.calls[index].window) for index, kind in enumerate(kinds)]
    firsts = {one: alike.index(one) for one in alike if one[0] is not None}
    if not any(first_part(part(layer, *ATTENTION), *QUERIES) for layer in layers):
        return [Rotation.NONE if kind is None else Rotation.HALVES for kind in kinds]
    if not firsts:
        return [Rotation.NONE] * len(layers)
    recorded = _before_and_after(model, layers, last=max(firsts.values()))
    of_kind = {
        one: _rotation(*recorded[index], ropes[one[0]]) if index in recorded else Rotation.HALVES
        for one, index in firsts.items()
        if one[0] is not None
    }
    return [of_kind.get(one, Rotation.NONE) for one in alike]


def _rotation(before: Tensor, after: Tensor, rope: Rope) -> Rotation:
    """Return the rotation that agrees best with queries; HALVES, the usual one, if none agrees."""
    cosines, sines = (table[:, None, : table.shape[1] // 2] for table in rope.at(torch.arange(before.shape[0])))
    size = 2 * cosines.shape[-1]
    turned, rest = before[..., :size], before[..., size:]
    low, high = turned.chunk(2, dim=-1)
    even, odd = turned[..., ::2], turned[..., 1::2]
    halves = torch.cat((low * cosines - high * sines, high * cosines + low * sines, rest), dim=-1)
    pairs = torch.stack((even * cosines - odd * sines, odd * cosines + even * sines), dim=-1).flatten(-2)
    wanted = {
        Rotation.HALVES: halves,
        Rotation.PAIRS: torch.cat((pairs, rest), dim=-1),
        Rotation.NONE: before,
    }
    errors = {kind: float((one - after).norm()) for kind, one in wanted.items()}
    best = min(errors, key=lambda kind: errors[kind])
    return best if errors[best] <= ROTATION_TOLERANCE * float(after.norm()) else Rotation.HALVES
