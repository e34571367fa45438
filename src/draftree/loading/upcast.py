"""Forward passes of a bfloat16 model in float32, without a second copy of its weights.

The logits of a model in bfloat16 deviate by the rounding of every layer, up to a tenth of their spread if norms have
large weights, so they are no reference for passes with less rounding. The same weights in float32 arithmetic are.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHUNK_ROWS = 4096
"""Number of a linear layer's outputs whose weights are in float32 at the same time."""


@contextlib.contextmanager
def in_float32(model: Any) -> Iterator[None]:
    """Compute the model's forward passes in float32 inside the block.

    Linear layers convert their weights in chunks of `CHUNK_ROWS`, embeddings return float32, and vectors (norms,
    biases) are replaced by float32 copies. Other modules with matrices, such as experts, have float32 copies of them
    while they run, one module at a time. The model is restored after the block. float32 models are unchanged.

    Args:
        model: a `…ForCausalLM`.
    """
    if all(parameter.dtype == torch.float32 for parameter in model.parameters()):
        yield
        return
    with contextlib.ExitStack() as undo:
        for parameter in model.parameters():
            if parameter.dim() == 1:
                undo.callback(setattr, parameter, "data", parameter.data)
                parameter.data = parameter.data.float()
        for module in model.modules():
            if type(module) is nn.Linear:
                undo.callback(_reset_forward, module, vars(module).get("forward"))
                vars(module)["forward"] = functools.partial(_linear, module)
            elif isinstance(module, nn.Embedding):
                undo.callback(module.register_forward_hook(lambda _, __, found: found.float()).remove)
            elif matrices := [own for own in module.parameters(recurse=False) if own.dim() > 1]:
                copies = _Copies(matrices)
                undo.callback(copies.end)
                undo.callback(module.register_forward_pre_hook(lambda *_, copies=copies: copies.start()).remove)
                undo.callback(module.register_forward_hook(lambda *_, copies=copies: copies.end()).remove)
        yield


class _Copies:
    """Float32 copies of parameters, which replace them from `start` to `end`."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._own: list[Tensor] = []

    def start(self) -> None:
        """Replace the parameters by float32 copies."""
        self._own = [parameter.data for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.data = parameter.data.float()

    def end(self) -> None:
        """Restore the parameters, also after an error in between."""
        for parameter, own in zip(self._parameters, self._own, strict=False):
            parameter.data = own
        self._own = []


def _reset_forward(module: nn.Linear, own: Any) -> None:
    if own is None:
        del vars(module)["forward"]
    else:
        vars(module)["forward"] = own


def _linear(module: nn.Linear, x: Tensor) -> Tensor:
    rows = [F.linear(x.float(), part.float()) for part in module.weight.split(CHUNK_ROWS)]
    found = rows[0] if len(rows) == 1 else torch.cat(rows, -1)
    return found if module.bias is None else found + module.bias.float()
