"""Final norm of a transformers model in float32, found by a pass over one token."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from typing import Any, final

import torch
from torch import Tensor, nn

from draftree.core.errors import UnsupportedModelError
from draftree.models.kv.partial import LayerRange
from draftree.models.torch.layers import TorchLayers

PROBE_TOKEN = 3
MAX_ERROR = 1e-3
MAX_ERROR_HALF = 2e-2
"""Maximum relative error of the found norm in the probing pass, in float32 and in half precision."""
MAX_VECTORS = 2
"""A norm has a weight and a bias at most; larger modules are not tried."""


@final
class FinalNorm:
    """The norm between a model's last layer and its output head: a copy in float32, or the identity.

    Args:
        model: a `…ForCausalLM`.
        layers: its layers.

    Raises:
        UnsupportedModelError: the head does not read the output of one module that reads the last layer's.
    """

    def __init__(self, model: Any, layers: TorchLayers) -> None:
        layers.require_capture()
        self._device = model.device
        module = _find(model, layers)
        self._norm = None if module is None else copy.deepcopy(module).float().eval()

    @torch.inference_mode()
    def __call__(self, hidden: Tensor) -> Tensor:
        """Return states after the norm, same shape, float32, on the device of the model."""
        states = hidden.to(self._device, torch.float32)
        return states if self._norm is None else self._norm(states)


@torch.inference_mode()
def _find(model: Any, layers: TorchLayers) -> nn.Module | None:
    """Return the module whose output is the head's input; None if the head reads the last layer's output."""
    head = model.get_output_embeddings()
    if head is None:
        raise UnsupportedModelError(f"{type(model).__name__} names no output head: choose a drafter that needs none")
    read: list[Tensor] = []
    owners = {id(base): base for base in (model, model.base_model, model.get_decoder())}
    candidates = {id(child): child for owner in owners.values() for child in owner.children()}
    count = layers.num_layers
    with ExitStack() as stack:
        stack.callback(head.register_forward_pre_hook(lambda module, args: read.append(args[0])).remove)
        caught = stack.enter_context(layers.running(LayerRange(0, count, capture=(count,))))
        model(input_ids=torch.tensor([[PROBE_TOKEN]], device=model.device), use_cache=False)
    last, wanted = caught.hidden[count][-1].float(), read[-1].flatten(0, -2)[-1].float()
    if _is_near(last, wanted, model):
        return None
    for module in candidates.values():
        is_small = sum(parameter.numel() for parameter in module.parameters()) <= MAX_VECTORS * wanted.numel()
        if is_small and _is_near(_applied(module, last), wanted, model):
            return module
    raise UnsupportedModelError(
        f"{type(model).__name__} does more between its last layer and its output head than one norm: choose a drafter "
        "that does not use the target's output head"
    )


def _applied(module: nn.Module, state: Tensor) -> Tensor | None:
    """Return what a module makes of one state, in float32; None if it takes other input."""
    try:
        found = copy.deepcopy(module).float().eval()(state[None])
    except Exception:  # a module for other input may raise anything
        return None
    return found[0] if isinstance(found, Tensor) and found.dim() == 2 else None


def _is_near(found: Tensor | None, wanted: Tensor, model: Any) -> bool:
    if found is None or found.shape != wanted.shape:
        return False
    exact = next(model.parameters()).dtype in (torch.float32, torch.float64)
    return float((found - wanted).norm()) <= (MAX_ERROR if exact else MAX_ERROR_HALF) * float(wanted.norm())
