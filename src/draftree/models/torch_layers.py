"""Passes through a part of a transformers model's layers: what is left out passes its rows on, for one pass.

Layers are told by standing in a list as long as the configuration says; attentions by knowing their layer's index. A
layer that is left out returns what it was given. An attention or a perceptron that is left out returns zeros, which
the residual stream takes no notice of. Nothing of the model is changed but while such a pass runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from draftree.core.errors import UnsupportedModelError
from draftree.models.base import Part
from draftree.models.sketch import Stretch

PERCEPTRONS = ("mlp", "feed_forward", "block_sparse_moe", "ffn")
"""Names by which layers know their multilayer perceptron."""


@dataclass(slots=True)
class Caught:
    """The hidden states that came out of the last layer of a pass, once it is through."""

    hidden: Tensor | None = None


class TorchLayers:
    """The layers of a model of transformers.

    Args:
        model: a `…ForCausalLM`.
        num_layers: as many as its configuration says.
    """

    def __init__(self, model: Any, num_layers: int) -> None:
        lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == num_layers]
        self._name = type(model).__name__
        self._layers = list(lists[0]) if lists else []
        self._widths: dict[nn.Module, int | None] = {}

    def require(self, part: Part) -> None:
        """Refuse a part that names what the layers do not have.

        Raises:
            UnsupportedModelError: the layers, or what is to be left out of them, are not found.
        """
        if not self._layers:
            raise UnsupportedModelError(f"{self._name} keeps its layers where they are not found")
        for layer in part.attention:
            self._part_of(layer, self._attention(layer), "attention")
        for layer in part.mlp:
            self._part_of(layer, self._perceptron(layer), "multilayer perceptron")

    def _attention(self, layer: int) -> nn.Module | None:
        return next((child for child in self._layers[layer].children() if hasattr(child, "layer_idx")), None)

    def _perceptron(self, layer: int) -> nn.Module | None:
        found: nn.Module | None = next(
            (child for name, child in self._layers[layer].named_children() if name in PERCEPTRONS), None
        )
        return found

    def _part_of(self, layer: int, found: nn.Module | None, kind: str) -> nn.Module:
        if found is None:
            raise UnsupportedModelError(f"{self._name} keeps the {kind} of layer {layer} where it is not found")
        return found

    @contextmanager
    def running(self, stretch: Stretch) -> Iterator[Caught]:
        """Forward passes of the model inside run through this stretch only."""
        caught = Caught()
        part = stretch.part or Part()
        with ExitStack() as stack:
            for index, layer in enumerate(self._layers):
                if index < stretch.first:
                    given = stretch.hidden if index == 0 else None
                    stack.enter_context(self._instead(layer, _passing(given)))
                elif index >= stretch.end:
                    stack.enter_context(self._instead(layer, _passing(None, caught if index == stretch.end else None)))
            for index in part.attention:
                if index < stretch.end:
                    stack.enter_context(
                        self._instead(self._part_of(index, self._attention(index), "attention"), _zeros)
                    )
            for index in part.mlp:
                if index < stretch.end:
                    stack.enter_context(self._instead(self._part_of(index, self._perceptron(index), "mlp"), _zeros))
            yield caught

    @contextmanager
    def _instead(self, module: nn.Module, call: Callable[[Tensor], Tensor]) -> Iterator[None]:
        width = self._widths[module]

        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            found = call(hidden_states)
            return found if width is None else (found, *[None] * (width - 1))

        module.forward = forward
        try:
            yield
        finally:
            del module.forward

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Forward passes of the whole model inside show how many things each module returns."""

        def note(module: nn.Module, given: Any, output: Any) -> None:
            self._widths[module] = len(output) if isinstance(output, tuple) else None

        with ExitStack() as stack:
            for layer in self._layers:
                for module in (layer, *layer.children()):
                    hook = module.register_forward_hook(note)
                    stack.callback(hook.remove)
            yield


def _passing(given: Tensor | None, caught: Caught | None = None) -> Callable[[Tensor], Tensor]:
    def passed(hidden: Tensor) -> Tensor:
        if caught is not None:
            caught.hidden = hidden[0]
        if given is None:
            return hidden
        missing = hidden.shape[1] - given.shape[0]
        return torch.nn.functional.pad(given, (0, 0, 0, missing)).unsqueeze(0)

    return passed


def _zeros(hidden: Tensor) -> Tensor:
    return torch.zeros_like(hidden)
