"""Recurrent mixers of a transformers model, identified by structure and values: gated delta nets and Mamba2."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftree.models.native.blueprint import (
    RECURRENCES,
    LatentBlueprint,
    LinearBlueprint,
    LinearRecurrence,
    MixerBlueprint,
    OutputPart,
)
from draftree.models.native.build import NativeUnavailableError
from draftree.models.native.library import LANES
from draftree.models.native.modules import Names, epsilon_of, first_part, linear_of, part, scaled

NORM_TOLERANCE = 1e-4  # largest error of a norm of float32 numbers relative to the largest result


def has_decaying_state(mixer: Any) -> bool:
    """Return whether a module has the parameters of a gated delta net or of Mamba2."""
    return all(isinstance(getattr(_decay_of(mixer), name, None), Tensor) for name in ("A_log", "dt_bias"))


def _decay_of(mixer: Any) -> Any:
    """Return the module with the parameters of the decay."""
    return first_part(mixer, "forget_gate") or mixer


def linear_recurrence_of(mixer: Any, convolution: nn.Conv1d, *, names: Names) -> MixerBlueprint:
    """Return the blueprint of a gated delta net or of Mamba2 with this convolution.

    Raises:
        NativeUnavailableError: it is neither.
    """
    if str(getattr(mixer, "activation", "")) not in ("silu", "swish"):
        raise NativeUnavailableError(f"the activation of {type(mixer).__name__} is not SiLU")
    blueprint = _mamba2 if first_part(mixer, "in_proj") is not None else _gated_delta
    described = blueprint(mixer, convolution, names=names)
    plan = described.recurrence
    assert isinstance(plan, LinearRecurrence), "both kinds are linear"
    if plan.channels != convolution.in_channels:
        raise NativeUnavailableError(f"the convolution of {type(mixer).__name__} has an unknown size")
    if plan.key_dim % LANES or plan.value_dim % LANES:
        raise NativeUnavailableError(
            f"the states of {type(mixer).__name__} are {plan.key_dim} by {plan.value_dim}: native kernels need "
            f"multiples of {LANES}"
        )
    return described


def _gated_delta(mixer: Any, convolution: nn.Conv1d, *, names: Names) -> MixerBlueprint:
    heads, groups = (int(part(mixer, name, "num_heads")) for name in ("num_v_heads", "num_k_heads"))
    key_dim, value_dim = (int(part(mixer, name, "head_dim")) for name in ("head_k_dim", "head_v_dim"))
    values = heads // groups * value_dim  # of a group
    latents: tuple[LatentBlueprint, ...] = ()
    if first_part(mixer, "in_proj_qkvz") is not None:
        sizes = (key_dim, key_dim, values, values)
        *convolved, gate = _parts(mixer, "in_proj_qkvz", groups, sizes, names=names)
        factor, step = _parts(mixer, "in_proj_ba", groups, (heads // groups,) * 2, names=names)
        inputs = (*convolved, factor, step, gate)
    elif (decay := first_part(mixer, "forget_gate")) is not None:
        inputs = tuple(_linear(mixer, f"{name}_proj", names=names) for name in "qkvb")
        latents = (_low_rank(decay, "f", names=names), _low_rank(mixer, "g", names=names))
    else:
        separate = ("q_proj", "k_proj", "v_proj", "b_proj", "a_proj", "g_proj")
        fused = ("in_proj_qkv", "in_proj_b", "in_proj_a", "in_proj_z")
        chosen = fused if first_part(mixer, fused[0]) is not None else separate
        inputs = tuple(_linear(mixer, name, names=names) for name in chosen)
    norm = _norm_of(part(mixer, "norm", "o_norm"), value_dim, (1,), names=names)
    recurrence = LinearRecurrence(
        kind=RECURRENCES["GATED_DELTA"],
        heads=heads,
        groups=groups,
        heads_of_group=heads // groups,
        key_dim=key_dim,
        value_dim=value_dim,
        decays=int(_decay_of(mixer).dt_bias.numel()) // heads,
        factor_scale=2.0 if getattr(mixer, "allow_neg_eigval", False) else 1.0,
        **_common(mixer, convolution, replace(norm, groups=heads), names=names),
    )
    output = linear_of(part(mixer, "out_proj", "o_proj"), "'out_proj'", names=names)
    return MixerBlueprint(inputs, recurrence, output, latents)


def _linear(mixer: Any, name: str, *, names: Names) -> LinearBlueprint:
    return linear_of(part(mixer, name), f"'{name}'", names=names)


def _low_rank(mixer: Any, name: str, *, names: Names) -> LatentBlueprint:
    """Return two products, one after the other."""
    first, second = (_linear(mixer, f"{name}_{part}_proj", names=names) for part in "ab")
    return LatentBlueprint(first, norm=None, epsilon=0.0, product=second)


def _mamba2(mixer: Any, convolution: nn.Conv1d, *, names: Names) -> MixerBlueprint:
    heads, value_dim = int(part(mixer, "num_heads")), int(part(mixer, "head_dim"))
    groups, key_dim = int(part(mixer, "n_groups")), int(part(mixer, "ssm_state_size"))
    values = heads * value_dim
    sizes = (values, values, groups * key_dim, groups * key_dim, heads)
    parts = _parts(mixer, "in_proj", 1, sizes, names=names)
    gate, value, key, query, step = map(scaled, parts, _factors(mixer, sizes))
    limits = first_part(mixer, "time_step_limit") or (0.0, math.inf)
    norm = _norm_of(part(mixer, "norm"), values, (groups, 1, heads), names=names)
    recurrence = LinearRecurrence(
        kind=RECURRENCES["MAMBA2"],
        heads=heads,
        groups=groups,
        heads_of_group=heads // groups,
        key_dim=key_dim,
        value_dim=value_dim,
        skip=names.of_parameter(part(mixer, "D")),
        step_limits=(float(limits[0]), float(limits[1])),
        **_common(mixer, convolution, norm, names=names),
    )
    output = linear_of(part(mixer, "out_proj"), "'out_proj'", names=names)
    return MixerBlueprint((value, key, query, step, gate), recurrence, output)


def _factors(mixer: Any, sizes: Sequence[int]) -> list[float]:
    """Return the factor of each part of a mixer's inputs."""
    factors: Tensor | None = getattr(mixer, "mup_vector", None)
    whole = float(getattr(mixer, "ssm_in_multiplier", 1.0))
    if factors is None:
        return [whole] * len(sizes)
    parts = factors.detach().flatten().split(list(sizes))
    if not all(bool((part == part[0]).all()) for part in parts):
        raise NativeUnavailableError(f"{type(mixer).__name__} scales its inputs one by one")
    return [whole * float(part[0]) for part in parts]


def _common(mixer: Any, convolution: nn.Conv1d, norm: _Norm, *, names: Names) -> dict[str, Any]:
    return {
        "convolution": names.of(convolution),
        "bias": names.of_bias(convolution),
        "taps": int(convolution.kernel_size[0]),
        "decay": names.of_parameter(_decay_of(mixer).A_log),
        "step_bias": names.of_parameter(_decay_of(mixer).dt_bias),
        "norm": norm.name,
        "norm_groups": norm.groups,
        "norm_epsilon": norm.epsilon,
        "is_norm_first": norm.is_first,
        "is_logistic": norm.is_logistic,
    }


def _parts(mixer: Any, name: str, groups: int, sizes: Sequence[int], *, names: Names) -> list[LinearBlueprint]:
    """Return a fused product as one for each of its parts, which have these sizes in each of equal groups."""
    whole = linear_of(part(mixer, name), f"'{name}'", names=names)
    if whole.outputs != groups * sum(sizes):
        raise NativeUnavailableError(f"'{name}' of {type(mixer).__name__} has {whole.outputs} outputs")
    parts, first = [], 0
    for size in sizes:
        parts.append(replace(whole, outputs=groups * size, part=OutputPart(groups, first, first + size)))
        first += size
    return parts


@dataclass(frozen=True, slots=True)
class _Norm:
    """Norm of results and of their gates; without a name there are gates only."""

    name: str | None
    groups: int
    is_first: bool
    epsilon: float
    is_logistic: bool = False  # whether gates are logistic functions; otherwise SiLU


@torch.inference_mode()
def _norm_of(norm: Any, size: int, groups: Sequence[int], *, names: Names) -> _Norm:
    """Return the formula by which a module norms and gates vectors of this size, found by its values."""
    if isinstance(norm, nn.Identity):
        return _Norm(None, 1, False, 0.0)
    generator = torch.Generator().manual_seed(0)
    x, gate = torch.randn(2, 3, size, generator=generator)
    single = copy.deepcopy(norm).float()
    result, weight, epsilon = single(x, gate), single.weight, epsilon_of(norm)
    for count, is_first, is_logistic in itertools.product(dict.fromkeys(groups), (True, False), (False, True)):
        factor = gate.sigmoid() if is_logistic else F.silu(gate)
        parts = (x if is_first else x * factor).unflatten(-1, (count, -1))
        wanted = (parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + epsilon)).flatten(-2) * weight
        wanted = wanted * factor if is_first else wanted
        if torch.allclose(result, wanted, rtol=0, atol=NORM_TOLERANCE * float(wanted.abs().max())):
            return _Norm(names.of(norm), count, is_first, epsilon, is_logistic)
    raise NativeUnavailableError(f"{type(norm).__name__} norms and gates results in an unknown way")
