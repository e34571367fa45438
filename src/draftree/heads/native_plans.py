"""Blueprints of heads for the native kernels, and their weights.

A head is a decoder of the usual kind whose input is made from states: those of the target are projected (EAGLE-3,
P-EAGLE), or fused with the embedding of a token (EAGLE-1, MTP), or are context that the rows of a block see (DFlash).
The layer of an MTP head is described by its structure, as the layers of its target are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor, nn

from draftree.core.errors import UnsupportedModelError
from draftree.heads.base import Head
from draftree.heads.config import HeadConfig
from draftree.heads.dflash import DFlashHead
from draftree.heads.eagle import Eagle3Head, EagleFamilyHead
from draftree.heads.layers import Rotary, Shared
from draftree.heads.mtp import MtpHead
from draftree.models.native.blueprint import (
    GELU_TANH,
    SILU,
    Blueprint,
    FusionBlueprint,
    LayerBlueprint,
    LinearBlueprint,
    ProjectionBlueprint,
    Rope,
)
from draftree.models.native.build import NativeUnavailableError
from draftree.models.native.describe import DTYPES, plan_model
from draftree.models.native.weights import Weights

ACTIVATIONS = {"silu": SILU, "gelu_pytorch_tanh": GELU_TANH}
EMBEDDING, NORM, OUTPUT, OUTPUT_BIAS = "embed_tokens.weight", "norm.weight", "lm_head.weight", "lm_head.bias"
NO_EMBEDDING = ""
UNITS = {"hidden": 16, "target_hidden": 16, "head_dim": 16, "intermediate": 32}
"""Sizes of a head are multiples of these."""


@final
class HeadWeights(Weights):
    """Weights of a module, emptied once they are packed, and those that it shares, of which the embedding is lent.

    `changed`: by name what makes the packed weight from that of the module.
    """

    def __init__(
        self,
        module: nn.Module,
        shared: Mapping[str, Tensor],
        *,
        embedding: str,
        forget_output: Callable[[], None] | None = None,
        changed: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
    ) -> None:
        self._module = module
        self._own: dict[str, Tensor] = {n: w for n, w in module.named_parameters() if n not in shared}
        self._buffers = dict(module.named_buffers())
        self._shared = dict(shared)
        self._embedding = embedding
        self._forget_output = forget_output
        self._changed = changed or {}

    def get(self, name: str) -> Tensor:
        for weights in (self._shared, self._own, self._buffers):
            if name in weights:
                weight = weights[name].detach()
                return self._changed[name](weight) if name in self._changed else weight
        raise KeyError(name)

    def release(self, name: str) -> None:
        if name in self._shared:
            if self._forget_output is not None and name != self._embedding and self._shared.pop(name).dim() == 2:
                self._forget_output()
            return
        weight = self._own.pop(name, None)
        if weight is None:  # a buffer
            return
        owner, _, attribute = name.rpartition(".")
        empty = nn.Parameter(torch.empty(0, dtype=weight.dtype), requires_grad=False)
        setattr(self._module.get_submodule(owner), attribute, empty)

    def lends(self, name: str) -> bool:
        return name == self._embedding and name in self._shared


@dataclass(frozen=True, slots=True)
class HeadPlan:
    blueprint: Blueprint
    weights: Weights
    recycles_normed: bool = False  # whether states are recycled after the final norm


def plan_head(head: Head) -> HeadPlan:
    """Return the plan of a bound head with layers; NativeUnavailableError says what is not supported."""
    weight = next(head.parameters())
    dtype = str(weight.dtype).removeprefix("torch.")
    if weight.device.type != "cpu" or dtype not in DTYPES:
        raise NativeUnavailableError(
            f"native kernels support float32 and bfloat16 on CPUs, not {dtype} on {weight.device}"
        )
    if isinstance(head, MtpHead):
        return _plan_mtp(head)
    config = head.config
    if not config.num_layers:
        raise NativeUnavailableError("it has no layers")
    if config.activation not in ACTIVATIONS:
        raise NativeUnavailableError(
            f"its activation is {config.activation}: native kernels support {', '.join(ACTIVATIONS)}"
        )
    for name, unit in UNITS.items():
        if (size := getattr(config, name)) % unit:
            raise NativeUnavailableError(f"its {name} of {size} is no multiple of {unit}")
    if isinstance(head, DFlashHead):
        return _plan_dflash(head, dtype)
    assert isinstance(head, EagleFamilyHead), "all other heads have no layers"
    return _plan_eagle(head, dtype)


def _plan_eagle(head: EagleFamilyHead, dtype: str) -> HeadPlan:
    """Plan a head of the EAGLE family.

    The first layer of EAGLE-3 is a joined layer: its attention reads the normed embedding and the normed state before
    a row. The residual stream starts at that state, or at the product of the target's hidden states, `fc`. In EAGLE-1
    it starts at the product of both, `fc`, and no norm follows.
    """
    config = head.config
    joins = isinstance(head, Eagle3Head)
    bias = "fc.bias" if config.fc_bias else None
    plan = _plan(config, dtype, head.rotary)
    first, *others = (_layer(config, index) for index in range(config.num_layers))
    if joins:
        first = replace(
            _layer(config, 0, width=2 * config.hidden),
            attention_norm="layers.0.hidden_norm.weight",
            embedding_norm=first.attention_norm,
            is_normed_residual=config.norm_before_residual,
        )
        count = len(config.features)
        norms = [f"fc_norm.{i}.weight" for i in range(count)] if config.fc_norm else []
        norms = ["input_norm.weight"] if config.norm_before_fc else norms
        linear = LinearBlueprint("fc.weight", bias, count * config.target_hidden, config.hidden)
        plan = replace(plan, projection=ProjectionBlueprint(linear, tuple(norms)))
    else:
        first = replace(first, attention_norm=None)
        linear = LinearBlueprint("fc.weight", bias, 2 * config.hidden, config.hidden)
        plan = replace(plan, fusion=FusionBlueprint(linear, None, None), final_norm=None)
    shared = {}
    if head.embed_tokens is None:
        shared[EMBEDDING] = head.embedding_weight()
    if head.lm_head is None:
        shared[OUTPUT] = head.output_weight()
    weights = HeadWeights(head, shared, embedding=EMBEDDING, forget_output=head.forget_output)
    return HeadPlan(replace(plan, layers=(first, *others)), weights, recycles_normed=config.norm_output)


def _plan_dflash(head: DFlashHead, dtype: str) -> HeadPlan:
    """Plan a head whose blocks see each other and the context."""
    config = head.config
    if config.conv_taps:
        raise NativeUnavailableError("its layers have convolutions")
    windows = config.windows or (0,) * config.num_layers
    layers = tuple(
        replace(
            _layer(config, index),
            window=window or None,
            sees_block=not (config.causal or (window and config.causal_windows)),
        )
        for index, window in enumerate(windows)
    )
    linear = LinearBlueprint("fc.weight", None, len(config.features) * config.target_hidden, config.hidden)
    projection = ProjectionBlueprint(linear, (), "hidden_norm.weight")
    plan = replace(_plan(config, dtype, head.rotary), layers=layers, projection=projection)
    return _shared_plan(plan, head, head.shared)


def _plan_mtp(head: MtpHead) -> HeadPlan:
    """Plan an MTP head as a model of its layers, whose input is fused; states are recycled after the final norm."""
    config = head.config
    try:
        model = head.as_model()
        plan = plan_model(model)
    except UnsupportedModelError as reason:
        raise NativeUnavailableError(str(reason)) from reason
    if (plan.kv_heads, plan.head_dim) != (config.num_kv_heads, config.head_dim):
        raise NativeUnavailableError("keys and values of its layer have sizes of their own")
    for name in ("eh_proj", "enorm", "hnorm"):
        setattr(model, name, getattr(head, name))
    linear = LinearBlueprint("eh_proj.weight", None, 2 * config.hidden, config.hidden)
    plan = replace(
        plan,
        kind=config.kind,
        context=config.max_length,
        fusion=FusionBlueprint(linear, "enorm.weight", "hnorm.weight"),
        final_norm=plan.final_norm if config.has_norm else None,
    )

    def with_embedding_first(weight: Tensor) -> Tensor:
        return torch.cat(weight.chunk(2, dim=1)[::-1], dim=1)

    changed = {"eh_proj.weight": with_embedding_first} if head.is_hidden_first else {}
    return replace(_shared_plan(plan, model, head.shared, changed), recycles_normed=config.has_norm)


def _shared_plan(
    plan: Blueprint, module: nn.Module, parts: Shared, changed: Mapping[str, Callable[[Tensor], Tensor]] | None = None
) -> HeadPlan:
    """Return the plan of a head with the embedding and the output that it uses, its own or the target's."""
    shared = {plan.embedding: parts.embedding}
    plan = replace(plan, embedding_scale=parts.scale)
    if (facts := parts.facts) is not None:
        shared[plan.head.weight] = parts.output
        if parts.bias is not None:
            shared[OUTPUT_BIAS] = parts.bias
            plan = replace(plan, head=replace(plan.head, bias=OUTPUT_BIAS))
        plan = replace(plan, logit_scale=facts.logit_scale, logit_cap=facts.soft_cap)
    weights = HeadWeights(module, shared, embedding=plan.embedding, forget_output=parts.forget_output, changed=changed)
    return HeadPlan(plan, weights)


def plan_product(linear: nn.Linear) -> HeadPlan:
    """Return the plan of a linear layer as a decoder without layers, whose passes start at hidden states."""
    dtype = linear.weight.dtype
    bias = None if linear.bias is None else "bias"
    plan = Blueprint(
        kind="product",
        fingerprint="",
        context=1,
        dtype=str(dtype).removeprefix("torch."),
        hidden=linear.in_features,
        heads=1,
        kv_heads=1,
        head_dim=linear.in_features,
        mlp=0,
        vocab=linear.out_features,
        activation=SILU,
        epsilon=1.0,
        norm_offset=0.0,
        embedding_scale=1.0,
        residual_scale=1.0,
        logit_scale=1.0,
        embedding=NO_EMBEDDING,
        final_norm=None,
        head=LinearBlueprint("weight", bias, linear.in_features, linear.out_features),
        ropes=(),
        layers=(),
    )
    weights = HeadWeights(linear, {NO_EMBEDDING: torch.empty(0, dtype=dtype)}, embedding=NO_EMBEDDING)
    return HeadPlan(plan, weights)


def _plan(config: HeadConfig, dtype: str, rotary: Rotary) -> Blueprint:
    """Return the blueprint of a head with our own layers, which follow."""
    return Blueprint(
        kind=config.kind,
        fingerprint="",
        context=config.max_length,
        dtype=dtype,
        hidden=config.hidden,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        mlp=config.intermediate,
        vocab=config.draft_vocab_size,
        activation=ACTIVATIONS[config.activation],
        epsilon=config.epsilon,
        norm_offset=0.0,
        embedding_scale=1.0,
        residual_scale=1.0,
        logit_scale=1.0,
        embedding=EMBEDDING,
        final_norm=NORM,
        head=LinearBlueprint(OUTPUT, None, config.hidden, config.draft_vocab_size),
        ropes=(Rope(rotary.frequencies, rotary.scaling),),
        layers=(),
    )


def _layer(config: HeadConfig, index: int, *, width: int = 0) -> LayerBlueprint:
    """Return a layer whose attention reads `width` numbers of a row, by default the hidden size."""
    name = f"layers.{index}"
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def linear(part: str, inputs: int, outputs: int, *, has_bias: bool = False) -> LinearBlueprint:
        bias = f"{name}.{part}.bias" if has_bias else None
        return LinearBlueprint(f"{name}.{part}.weight", bias, inputs, outputs)

    qkv = (("q", queries), ("k", keys), ("v", keys))
    return LayerBlueprint(
        attention_norm=f"{name}.input_layernorm.weight",
        attention_post_norm=None,
        mlp_norm=f"{name}.post_attention_layernorm.weight",
        mlp_post_norm=None,
        query_norm=f"{name}.self_attn.q_norm.weight" if config.qk_norm else None,
        key_norm=f"{name}.self_attn.k_norm.weight" if config.qk_norm else None,
        qkv=tuple(
            linear(f"self_attn.{p}_proj", width or config.hidden, size, has_bias=config.attention_bias)
            for p, size in qkv
        ),
        output=linear("self_attn.o_proj", queries, config.hidden, has_bias=config.output_bias),
        gate_up=tuple(
            linear(f"mlp.{p}_proj", config.hidden, config.intermediate, has_bias=config.mlp_bias)
            for p in ("gate", "up")
        ),
        down=linear("mlp.down_proj", config.intermediate, config.hidden, has_bias=config.mlp_bias),
        window=None,
        scaling=config.head_dim**-0.5,
        rope=0,
    )
