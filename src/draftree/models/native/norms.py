"""Norms of a transformers model: their formula, identified by values, since implementations have many names."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftree.models.native.blueprint import LAYER_NORM, RMS_NORM
from draftree.models.native.build import NativeUnavailableError

KINDS = ((RMS_NORM, 0.0), (RMS_NORM, 1.0), (LAYER_NORM, 0.0), (LAYER_NORM, 1.0))
NORM_TOLERANCE = 2.0**-6
"""Maximum relative error of an element: twice that of two roundings to bfloat16."""


@dataclass(frozen=True, slots=True)
class NormFacts:
    """Formula that all norms of a model share, as the C library requires.

    Attributes:
        kind: RMS_NORM, or LAYER_NORM with mean and variance.
        offset: added to the weights.
        epsilon: added to the mean square.
        has_bias: whether there are biases.
    """

    kind: int
    offset: float
    epsilon: float
    has_bias: bool


def norm_facts(norm: Any) -> NormFacts:
    """Return the formula that reproduces a norm.

    With a large weight offsets 0 and 1 differ little, so errors are relative to each element, and a float32 copy is
    used if possible: bfloat16 rounds 25 to within 0.1.

    Raises:
        NativeUnavailableError: no known formula reproduces it.
    """
    if not isinstance(getattr(norm, "weight", None), Tensor):
        raise NativeUnavailableError(f"{type(norm).__name__} has no 'weight'")
    has_bias = isinstance(getattr(norm, "bias", None), Tensor)
    # a norm with a bias has a mean
    errors = {one: _norm_error(norm, *one) for one in KINDS if one[0] == LAYER_NORM or not has_bias}
    found = min(errors, key=lambda one: float(errors[one].mean()))
    if not float(errors[found].max()) < NORM_TOLERANCE:  # also refuses NaN
        raise NativeUnavailableError(
            f"{type(norm).__name__} is neither a root-mean-square norm nor one with mean and variance"
        )
    return NormFacts(*found, epsilon_of(norm), has_bias)


def epsilon_of(norm: Any) -> float:
    """Return what a norm adds to the mean square.

    Raises:
        NativeUnavailableError: it has no such number.
    """
    found = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if found is None:
        raise NativeUnavailableError(f"{type(norm).__name__} has no 'eps'")
    return float(found)


@torch.inference_mode()
def _norm_error(norm: Any, kind: int, offset: float) -> Tensor:
    """Return the relative error of each element, shape (inputs, elements), with this formula.

    The inputs have a mean, which a norm may subtract, and two scales, one so small that epsilon matters.
    """
    weight: Tensor = norm.weight.detach().float()
    bias = 0.0 if getattr(norm, "bias", None) is None else norm.bias.detach().float()
    epsilon = epsilon_of(norm)
    sizes = torch.linspace(0.5, 1.5, weight.numel())
    sizes[::3] *= -1
    x = torch.stack([sizes, sizes * epsilon**0.5]) if epsilon > 0 else sizes[None]
    found = copy.deepcopy(norm).float()(x).float()
    centred = x - x.mean(-1, keepdim=True) if kind == LAYER_NORM else x
    wanted = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + epsilon) * (weight + offset) + bias
    # where product and bias cancel, the rounding of both counts
    size = torch.maximum(wanted.abs(), torch.as_tensor(bias).abs())
    return (found - wanted).abs() / size.clamp_min(torch.finfo(torch.float32).tiny)


def require_like_norms(model: Any, names: Iterable[str], wanted: NormFacts) -> None:
    """Check that all norms have one formula, as the C library requires.

    Args:
        model: a transformers model.
        names: names of the norms' weights.
        wanted: formula of another norm.

    Raises:
        NativeUnavailableError: one differs.
    """
    for name in names:
        found = norm_facts(model.get_submodule(name.rpartition(".")[0]))
        if found != wanted:
            raise NativeUnavailableError(
                f"its norms differ: epsilon and offset are {(found.epsilon, found.offset)} in '{name}' and "
                f"{(wanted.epsilon, wanted.offset)} in the last norm"
            )
