"""Modules of a transformers model by the names that families share; the name of the family is not used."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftree.models.native.blueprint import GELU, GELU_TANH, QUICK_GELU, RELU, RELU_SQUARED, SILU, LinearBlueprint
from draftree.models.native.build import NativeUnavailableError

LINEAR_TOLERANCE = 2.0**-6
"""Largest error of a product relative to the largest one: that of two roundings to bfloat16."""


class Names:
    """Names of a model's parameters. A shared parameter has its first name.

    Args:
        model: a transformers model.

    Attributes:
        parameters: all parameters by name.
    """

    def __init__(self, model: Any) -> None:
        self.parameters: dict[str, Tensor] = dict(model.named_parameters())
        self._names = {id(parameter): name for name, parameter in self.parameters.items()}

    def of(self, module: Any) -> str:
        """Return the name of a module's weight."""
        return self._names[id(part(module, "weight"))]

    def of_parameter(self, parameter: Any) -> str:
        """Return the name of a parameter."""
        return self._names[id(parameter)]

    def of_bias(self, module: Any) -> str | None:
        """Return the name of a module's bias, if it has one."""
        bias = getattr(module, "bias", None)
        return None if bias is None else self._names[id(bias)]


def part(module: Any, *names: str) -> Any:
    """Return the first of these attributes that a module has.

    Raises:
        NativeUnavailableError: it has none of them.
    """
    found = first_part(module, *names)
    if found is None:
        raise NativeUnavailableError(f"{type(module).__name__} has no '{names[0]}'")
    return found


def first_part(module: Any, *names: str) -> Any:
    """Return the first of these attributes that a module has; None for none."""
    return next((found for name in names if (found := getattr(module, name, None)) is not None), None)


def linear_of(module: Any, name: str, *, names: Names) -> LinearBlueprint:
    """Return the blueprint of a linear layer, or of one whose weight is stored as (inputs, outputs).

    Raises:
        NativeUnavailableError: it is another module.
    """
    if type(module) is nn.Linear or (isinstance(module, nn.Linear) and _is_plain(module)):
        return LinearBlueprint(names.of(module), names.of_bias(module), module.in_features, module.out_features)
    if type(module).__name__ == "Conv1D" and int(getattr(module, "nf", -1)) == module.weight.shape[-1]:
        inputs, outputs = map(int, module.weight.shape)
        return LinearBlueprint(names.of(module), names.of_bias(module), inputs, outputs, is_transposed=True)
    raise NativeUnavailableError(f"{name} is a {type(module).__name__}, not a plain linear layer")


@torch.inference_mode()
def _is_plain(module: nn.Linear) -> bool:
    """Return whether a module of a derived class computes what a linear layer does, by its values."""
    x = torch.linspace(-1, 1, 2 * module.in_features).reshape(2, -1).to(module.weight.dtype)
    wanted = F.linear(x, module.weight, module.bias)
    return bool((module(x) - wanted).abs().max() <= LINEAR_TOLERANCE * wanted.abs().max())


def linears_of(owner: Any, parts: Sequence[str], fused: Sequence[str], *, names: Names) -> tuple[LinearBlueprint, ...]:
    """Return the linear layers with these names, or a fused one."""
    whole = next((name for name in fused if hasattr(owner, name)), None)
    chosen = list(parts) if whole is None else [whole]
    return tuple(linear_of(part(owner, name), f"'{name}'", names=names) for name in chosen)


def activation_of(functions: Sequence[Any]) -> int:
    """Return the activation of all layers, identified by its values: implementations have many names.

    Raises:
        NativeUnavailableError: it is not known, or layers differ.
    """
    x = torch.linspace(-4, 4, 33)
    known = {
        SILU: F.silu(x),
        GELU_TANH: F.gelu(x, approximate="tanh"),
        GELU: F.gelu(x),
        RELU: F.relu(x),
        RELU_SQUARED: F.relu(x).square(),
        QUICK_GELU: x * torch.sigmoid(1.702 * x),
    }
    with torch.inference_mode():
        found = [function(x) for function in functions]
    for kind, wanted in known.items():
        if all(torch.allclose(one, wanted, atol=1e-5) for one in found):
            return kind
    raise NativeUnavailableError("the activation of its layers is neither SiLU, ReLU, its square, nor a kind of GELU")


@torch.inference_mode()
def runs_before(run: Any, one: nn.Module, other: nn.Module) -> bool:
    """Return whether a module runs before another one in a call of `run`.

    Raises:
        NativeUnavailableError: one of them does not run.
    """
    order: list[nn.Module] = []
    hooks = [module.register_forward_pre_hook(lambda module, _: order.append(module)) for module in (one, other)]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    if one not in order or other not in order:
        raise NativeUnavailableError("the norms of its layers do not run as modules")
    return order.index(one) < order.index(other)


class _ReadError(Exception):
    """Ends a pass once the input of a module is known."""


@torch.inference_mode()
def reads_before(run: Any, writer: nn.Module, reader: nn.Module) -> bool:
    """Return whether the input of one module is independent of the output of another one, which runs before it.

    Args:
        run: runs the model, the same way in every call.
        writer: its output is changed.
        reader: its input is compared.

    Raises:
        NativeUnavailableError: the second module does not run.
    """
    found: list[Tensor] = []

    def note(_: nn.Module, given: tuple[Tensor, ...]) -> None:
        found.append(given[0].clone())
        raise _ReadError

    with ExitStack() as stack:
        stack.callback(reader.register_forward_pre_hook(note).remove)
        for offset in (0.0, 1.0):
            hook = writer.register_forward_hook(lambda _, given, output, offset=offset: output + offset)
            try:
                run()
            except _ReadError:
                pass
            finally:
                hook.remove()
    if len(found) != 2:
        raise NativeUnavailableError("the sublayers of its layers do not run as modules")
    return torch.equal(found[0], found[1])
