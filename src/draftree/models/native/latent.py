"""Multi-head latent attention of a transformers model: keys and values of all heads come from one vector of a token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from draftree.models.native.blueprint import (
    RMS_NORM,
    Blueprint,
    LatentBlueprint,
    LayerBlueprint,
    LinearBlueprint,
)
from draftree.models.native.build import NativeUnavailableError
from draftree.models.native.modules import Names, linear_of, norm_facts, part

UNIT = 16  # numbers that the C library handles at once


def is_latent(attention: Any) -> bool:
    return hasattr(attention, "kv_a_proj_with_mqa")


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """Numbers of one head."""

    heads: int
    own: int  # of a key, that the head has for itself
    shared: int  # of a key, after those: its rotary part, which all heads share
    value: int

    @staticmethod
    def of(attention: Any, heads: int) -> LatentSizes:
        vector = part(attention, "kv_a_layernorm").weight.numel()
        value = int(part(attention, "o_proj").in_features) // heads
        own = int(part(attention, "kv_b_proj").out_features) // heads - value
        return LatentSizes(heads, own, int(part(attention, "kv_a_proj_with_mqa").out_features) - vector, value)

    @property
    def head_dim(self) -> int:
        return self.own + self.shared


def with_latent_attention(
    plan: LayerBlueprint, attention: Any, sizes: LatentSizes, *, pairs: int, names: Names
) -> LayerBlueprint:
    """Return a layer with the inputs of latent attention; with `pairs`, neighbours of the shared part rotate together.

    Source: arXiv 2405.04434.
    """
    if pairs not in (0, sizes.shared):
        raise NativeUnavailableError(f"{pairs} of {sizes.shared} shared numbers of its keys rotate")

    def linear(name: str, unpaired: int = 0) -> LinearBlueprint:
        described = linear_of(part(attention, name), f"'{name}'", names=names)
        return replace(described, pairs=pairs, unpaired=unpaired) if pairs and unpaired else described

    def latent(vector: LinearBlueprint, norm: str, product: LinearBlueprint) -> LatentBlueprint:
        facts = norm_facts(part(attention, norm))
        if facts.kind != RMS_NORM or facts.offset or facts.has_bias:
            raise NativeUnavailableError(f"'{norm}' is no plain norm by the root mean square")
        return LatentBlueprint(vector, names.of(part(attention, norm)), facts.epsilon, product)

    expanded = linear("kv_b_proj")
    of_keys = latent(linear("kv_a_proj_with_mqa", expanded.inputs), "kv_a_layernorm", expanded)
    if getattr(attention, "q_a_proj", None) is None:
        return replace(plan, qkv=(linear("q_proj", sizes.own),), latents=(of_keys,))
    queries = latent(linear("q_a_proj"), "q_a_layernorm", linear("q_b_proj", sizes.own))
    return replace(plan, latents=(queries, of_keys))


def require_latent_sizes(plan: Blueprint, layer: LayerBlueprint) -> None:
    """Check that a layer has latent attention of the sizes of the model, in units of the C library."""
    *others, last = layer.latents
    queries = sum(linear.outputs for linear in (*layer.qkv, *(latent.product for latent in others)))
    own = plan.head_dim - plan.shared_dim
    sizes = {own, plan.shared_dim, plan.value_dim, *(latent.product.inputs for latent in layer.latents)}
    if (
        queries != plan.heads * plan.head_dim
        or last.product.outputs != plan.heads * (own + plan.value_dim)
        or last.vector.outputs != last.product.inputs + plan.shared_dim
        or layer.output is None
        or layer.output.inputs != plan.heads * plan.value_dim
    ):
        raise NativeUnavailableError("its layers have latent attention of several sizes")
    if plan.value_dim > plan.head_dim or any(size % UNIT for size in sizes):
        raise NativeUnavailableError(
            f"its latent attention has the sizes {sorted(sizes)}: native kernels need multiples of {UNIT}, and values "
            "that are no longer than keys"
        )
