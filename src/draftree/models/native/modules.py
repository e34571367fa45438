"""Modules of a transformers model, identified by structure and values and not by the name of the family."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftree.models.native.blueprint import (
    GELU,
    GELU_TANH,
    LAYER_NORM,
    MAX_EXPERTS,
    QUICK_GELU,
    RELU,
    RELU_SQUARED,
    RMS_NORM,
    SIGMOID,
    SILU,
    SOFTMAX,
    ExpertsBlueprint,
    LinearBlueprint,
)
from draftree.models.native.build import NativeUnavailableError

LINEAR_TOLERANCE = 2.0**-6  # largest error of a product relative to the largest one: that of two roundings to bfloat16


class Names:
    """Names of a model's parameters. A shared parameter has its first name."""

    def __init__(self, model: Any) -> None:
        self.parameters: dict[str, Tensor] = dict(model.named_parameters())  # all parameters by name
        tensors = (*self.parameters.items(), *model.named_buffers())
        self._names = {id(tensor): name for name, tensor in tensors}

    def of(self, module: Any) -> str:
        return self._names[id(part(module, "weight"))]

    def of_parameter(self, parameter: Any) -> str:
        """Return the name of a parameter or a buffer."""
        return self._names[id(parameter)]

    def of_bias(self, module: Any) -> str | None:
        bias = getattr(module, "bias", None)
        return None if bias is None else self._names[id(bias)]


def part(module: Any, *names: str) -> Any:
    """Return the first of these attributes that a module has."""
    value = first_part(module, *names)
    if value is None:
        raise NativeUnavailableError(f"{type(module).__name__} has no '{names[0]}'")
    return value


def first_part(module: Any, *names: str) -> Any:
    """Return the first of these attributes that a module has; None for none."""
    return next((value for name in names if (value := getattr(module, name, None)) is not None), None)


def linear_of(module: Any, name: str, *, names: Names) -> LinearBlueprint:
    """Return the blueprint of a linear layer, or of one whose weight is stored as (inputs, outputs)."""
    if type(module) is nn.Linear or (isinstance(module, nn.Linear) and _is_plain(module)):
        return LinearBlueprint(names.of(module), names.of_bias(module), module.in_features, module.out_features)
    if type(module).__name__ == "Conv1D" and int(getattr(module, "nf", -1)) == module.weight.shape[-1]:
        inputs, outputs = map(int, module.weight.shape)
        return LinearBlueprint(names.of(module), names.of_bias(module), inputs, outputs, is_transposed=True)
    raise NativeUnavailableError(f"{name} is a {type(module).__name__}, not a plain linear layer")


def scaled(linear: LinearBlueprint, factor: float) -> LinearBlueprint:
    """Return a layer whose input or output a model multiplies by a factor, as one with another weight."""
    if factor != 1.0 and linear.bias is not None:
        raise NativeUnavailableError(f"the product with '{linear.weight}' has a bias, and its input is scaled")
    return replace(linear, factor=linear.factor * float(factor))


@torch.inference_mode()
def _is_plain(module: nn.Linear) -> bool:
    """Return whether a module of a derived class computes what a linear layer does, by its values."""
    x = torch.linspace(-1, 1, 2 * module.in_features).reshape(2, -1).to(module.weight.dtype)
    wanted = F.linear(x, module.weight, module.bias)
    return bool((module(x) - wanted).abs().max() <= LINEAR_TOLERANCE * wanted.abs().max())


def linears_of(owner: Any, parts: Sequence[str], fused: Sequence[str], *, names: Names) -> tuple[LinearBlueprint, ...]:
    """Return the linear layers with these names, or a fused one."""
    chosen = [name for name in fused if hasattr(owner, name)][:1] or parts
    return tuple(linear_of(part(owner, name), f"'{name}'", names=names) for name in chosen)


ACTIVATION_FUNCTIONS: Mapping[int, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        SILU: F.silu,
        GELU_TANH: partial(F.gelu, approximate="tanh"),
        GELU: F.gelu,
        RELU: F.relu,
        RELU_SQUARED: lambda x: F.relu(x).square(),
        QUICK_GELU: lambda x: x * torch.sigmoid(1.702 * x),
    }
)
OTHER_ACTIVATION = "the activation of its layers is neither SiLU, ReLU, its square, nor a kind of GELU"


def activation_of(functions: Sequence[Any]) -> int:
    """Return the activation of all layers, identified by its values: implementations have many names."""
    x = torch.linspace(-4, 4, 33)
    with torch.inference_mode():
        results = [function(x) for function in functions]
    for kind, expected in ACTIVATION_FUNCTIONS.items():
        if all(torch.allclose(result, expected(x), atol=1e-5) for result in results):
            return kind
    raise NativeUnavailableError(OTHER_ACTIVATION)


@torch.inference_mode()
def gated_activation_of(mlp: Any, gate: str, up: str, *, down: Any) -> int:
    """Return the activation of a perceptron with a gate that does not expose it, by the results of its products."""
    gate_product = getattr(mlp, gate)
    x = torch.randn(ROWS, gate_product.in_features, generator=torch.Generator().manual_seed(0))
    x = 4 * x.to(gate_product.weight.dtype)
    result, gates, factors = mlp(x), gate_product(x), getattr(mlp, up)(x)
    for kind, function in ACTIVATION_FUNCTIONS.items():
        wanted = down(function(gates) * factors)
        if (result - wanted).abs().max() <= LINEAR_TOLERANCE / 4 * wanted.abs().max():
            return kind
    raise NativeUnavailableError(OTHER_ACTIVATION)


class _ReadError(Exception):
    """Ends a pass once the input of a module is known."""


@torch.inference_mode()
def runs_before(run: Callable[[], object], first: nn.Module, second: nn.Module) -> bool:
    """Return whether a module runs before another one in a call of `run`."""
    order: list[nn.Module] = []
    with ExitStack() as stack:
        for module in (first, second):
            stack.callback(module.register_forward_pre_hook(lambda module, _: order.append(module)).remove)
        run()
    if first not in order or second not in order:
        raise NativeUnavailableError("the norms of its layers do not run as modules")
    return order.index(first) < order.index(second)


@torch.inference_mode()
def reads_before(run: Callable[[], object], writer: nn.Module, reader: nn.Module) -> bool:
    """Return whether the input of one module is independent of the output of another one, which runs before it."""
    inputs: list[Tensor] = []

    def note(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        inputs.append(arguments[0].clone())
        raise _ReadError

    for offset in (0.0, 1.0):
        with ExitStack() as stack, suppress(_ReadError):
            stack.callback(reader.register_forward_pre_hook(note).remove)
            hook = writer.register_forward_hook(lambda _, arguments, output, offset=offset: output + offset)
            stack.callback(hook.remove)
            run()
    if len(inputs) != 2:
        raise NativeUnavailableError("the sublayers of its layers do not run as modules")
    return torch.equal(*inputs)


ROUTER = ("gate", "router")
ROWS = 64  # number of random rows with which a router is compared
TOLERANCE = 2.0**-6  # largest error of a weight: that of two roundings to bfloat16


def has_experts(mlp: Any) -> bool:
    return first_part(mlp, "experts") is not None


def activation_module(mlp: Any) -> Any:
    return part(mlp, "experts") if has_experts(mlp) else mlp


def clamps_of(mlp: Any) -> tuple[float, float] | None:
    experts = activation_module(mlp)
    limit, slope = first_part(experts, "limit"), first_part(experts, "alpha")
    return None if limit is None or slope is None else (float(limit), float(slope))


def experts_of(mlp: Any, hidden: int, *, names: Names, shared: Any = None) -> ExpertsBlueprint:
    """Return the blueprint of experts; `shared`: a perceptron beside them whose results are added to theirs."""
    experts, router = part(mlp, "experts"), part(mlp, *ROUTER)
    gate_up = "gate_up_proj" if hasattr(experts, "gate_up_proj") else "up_proj"
    weight, parts = first_part(experts, gate_up), 2 if gate_up == "gate_up_proj" else 1
    if not isinstance(weight, Tensor) or weight.dim() != 3 or not isinstance(first_part(experts, "down_proj"), Tensor):
        raise NativeUnavailableError(f"{type(experts).__name__} does not store all experts in one weight")
    is_transposed = bool(getattr(experts, "is_transposed", weight.shape[2] != hidden))
    is_interleaved = not getattr(experts, "is_concatenated", clamps_of(mlp) is None)
    count, inner = int(weight.shape[0]), int(weight.shape[2 if is_transposed else 1]) // parts
    if count > MAX_EXPERTS:
        raise NativeUnavailableError(f"it has {count} experts in a layer, of {MAX_EXPERTS} at most")

    def linear(field: str, inputs: int, outputs: int, *, interleaved: bool = False) -> LinearBlueprint:
        bias = first_part(experts, f"{field}_bias")
        return LinearBlueprint(
            names.of_parameter(getattr(experts, field)),
            None if bias is None else names.of_parameter(bias),
            inputs,
            outputs,
            is_transposed=is_transposed,
            expert=0,
            is_interleaved=interleaved,
        )

    gate = first_part(mlp, "shared_expert_gate")
    if gate is not None:
        shared = part(mlp, "shared_expert")
    elif shared is None:
        shared = first_part(mlp, "shared_experts", "shared_expert")
    bias = first_part(router, *CHOICE_BIAS)
    bias = first_part(mlp, *CHOICE_BIAS) if bias is None else bias
    choice = _choice(router, bias, count, hidden)
    shared_parts: dict[str, Any] = {}
    if shared is not None:
        shared_parts = {
            "shared_gate_up": linears_of(
                shared,
                ("gate_proj", "up_proj") if hasattr(shared, "gate_proj") else ("up_proj",),
                ("gate_up_proj", "input_linear"),
                names=names,
            ),
            "shared_down": linear_of(part(shared, "down_proj", "output_linear"), "'down_proj'", names=names),
            "shared_gate": None if gate is None else linear_of(gate, "'shared_expert_gate'", names=names),
        }
    return ExpertsBlueprint(
        router=LinearBlueprint(names.of(router), names.of_bias(router), hidden, count),
        gate_up=linear(gate_up, hidden, parts * inner, interleaved=is_interleaved and parts == 2),
        down=linear("down_proj", inner, hidden),
        count=count,
        chosen=choice.chosen,
        is_renormalized=choice.is_renormalized,
        choice_bias=None if bias is None else names.of_parameter(bias),
        **{name: getattr(choice, name) for name in ("scores", "scale", "groups", "chosen_groups", "group_scores")},
        **shared_parts,
    )


@dataclass(frozen=True, slots=True)
class _Choice:
    """How a router chooses experts of a row and weighs them."""

    chosen: int
    scores: int
    is_renormalized: bool
    scale: float
    groups: int
    chosen_groups: int
    group_scores: int


CHOICE_BIAS = ("e_score_correction_bias", "expert_bias")
GROUPS = ("n_group", "num_group", "num_expert_group")
SPREAD = 2.0  # standard deviation of the logits with which a router is compared


@torch.inference_mode()
def _choice(router: Any, bias: Tensor | None, count: int, hidden: int) -> _Choice:
    """Return how a router chooses experts, by its values; `bias` is added to the scores where they are chosen."""
    weight: Tensor = part(router, "weight").detach()
    if tuple(weight.shape) != (count, hidden):
        raise NativeUnavailableError(f"{type(router).__name__} has a weight of the shape {tuple(weight.shape)}")
    groups = int(first_part(router, *GROUPS) or 1), int(first_part(router, "topk_group") or 1)
    groupings = ((*groups, 1), (*groups, 2), (1, 1, 1)) if groups[0] > 1 else ((1, 1, 1),)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, hidden, generator=generator)
    added = None if bias is None else torch.randn(count, generator=generator) / 4
    product_bias = first_part(router, "bias")
    spread = F.linear(x, weight.float()).std()
    x = (x * (SPREAD / spread if spread > 0 else 1.0)).to(weight.dtype)
    logits = F.linear(x, weight, None if product_bias is None else product_bias.detach()).float()
    result = _routed(router, x, bias, added)
    if not isinstance(result, tuple) or len(result) != 3:
        raise NativeUnavailableError(f"{type(router).__name__} does not return logits, weights and experts")
    weights, indices = result[1].float(), result[2]
    declared = float(first_part(router, "routed_scaling_factor") or 1.0)
    kinds = ((SOFTMAX, logits.softmax(-1)), (SIGMOID, logits.sigmoid()))
    for (scores, values), grouping in itertools.product(kinds, groupings):
        if scores == SOFTMAX and (added is not None or grouping[-1] > 1):
            continue  # the C library chooses by logits
        choice, is_clear = _of_groups(values if added is None else values + added, *grouping)
        least = choice.topk(indices.shape[-1], dim=-1).values.amin(-1, keepdim=True)
        if not bool((choice.gather(-1, indices) >= least - TOLERANCE)[is_clear].all()):
            continue
        shares = values.gather(-1, indices)
        for is_renormalized, wanted in ((False, shares), (True, shares / shares.sum(-1, keepdim=True))):
            for scale in {declared, 1.0}:
                if torch.allclose(weights, wanted * scale, rtol=0, atol=TOLERANCE * scale):
                    return _Choice(int(indices.shape[-1]), scores, is_renormalized, scale, *grouping)
    raise NativeUnavailableError(f"{type(router).__name__} chooses or weighs experts in another way")


def _of_groups(scores: Tensor, groups: int, chosen_groups: int, group_scores: int) -> tuple[Tensor, Tensor]:
    """Return scores without those of experts in other groups than a row's, and whether rounding changes no group."""
    parts = scores.unflatten(-1, (groups, -1))
    sums = parts.topk(group_scores, dim=-1).values.sum(-1)
    last, *others = sums.sort(-1, descending=True).values[:, chosen_groups - 1 :].unbind(-1)
    is_clear = last > others[0] + TOLERANCE if others else torch.ones_like(last, dtype=torch.bool)
    return parts.masked_fill((sums < last[:, None])[..., None], -torch.inf).flatten(-2), is_clear


def _routed(router: Any, x: Tensor, bias: Tensor | None, added: Tensor | None) -> Any:
    """Return a router's results for some rows, with other values of the bias of its choice."""
    if bias is None or added is None:
        return router(x)
    before = bias.clone()
    bias.copy_(added)
    try:
        takes_bias = not inspect.signature(router.forward).parameters.keys().isdisjoint(CHOICE_BIAS)
        return router(x, bias) if takes_bias else router(x)
    finally:
        bias.copy_(before)


KINDS = ((RMS_NORM, 0.0), (RMS_NORM, 1.0), (LAYER_NORM, 0.0), (LAYER_NORM, 1.0))
NORM_TOLERANCE = 2.0**-6  # maximum relative error of an element: twice that of two roundings to bfloat16


@dataclass(frozen=True, slots=True)
class NormFacts:
    """Formula that all norms of a model share, as the C library requires."""

    kind: int  # RMS_NORM, or LAYER_NORM with mean and variance
    offset: float  # added to the weights
    epsilon: float  # added to the mean square
    has_bias: bool  # whether there are biases


def norm_facts(norm: Any) -> NormFacts:
    """Return the formula that reproduces a norm.

    With a large weight offsets 0 and 1 differ little, so errors are relative to each element, and a float32 copy is
    used if possible: bfloat16 rounds 25 to within 0.1.
    """
    if not isinstance(getattr(norm, "weight", None), Tensor):
        raise NativeUnavailableError(f"{type(norm).__name__} has no 'weight'")
    has_bias = isinstance(getattr(norm, "bias", None), Tensor)
    # a norm with a bias has a mean
    errors = {formula: _norm_error(norm, *formula) for formula in KINDS if formula[0] == LAYER_NORM or not has_bias}
    best = min(errors, key=lambda formula: float(errors[formula].mean()))
    if not float(errors[best].max()) < NORM_TOLERANCE:  # also refuses NaN
        raise NativeUnavailableError(
            f"{type(norm).__name__} is neither a root-mean-square norm nor one with mean and variance"
        )
    return NormFacts(*best, epsilon_of(norm), has_bias)


def epsilon_of(norm: Any) -> float:
    """Return what a norm adds to the mean square."""
    epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if epsilon is None:
        raise NativeUnavailableError(f"{type(norm).__name__} has no 'eps'")
    return float(epsilon)


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
    output = copy.deepcopy(norm).float()(x).float()
    centred = x - x.mean(-1, keepdim=True) if kind == LAYER_NORM else x
    wanted = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + epsilon) * (weight + offset) + bias
    # where product and bias cancel, the rounding of both counts
    size = torch.maximum(wanted.abs(), torch.as_tensor(bias).abs())
    return (output - wanted).abs() / size.clamp_min(torch.finfo(torch.float32).tiny)


def require_like_norms(model: Any, names: Iterable[str], wanted: NormFacts) -> None:
    for name in names:
        facts = norm_facts(model.get_submodule(name.rpartition(".")[0]))
        if facts != wanted:
            raise NativeUnavailableError(
                f"its norms differ: epsilon and offset are {(facts.epsilon, facts.offset)} in '{name}' and "
                f"{(wanted.epsilon, wanted.offset)} in the last norm"
            )
