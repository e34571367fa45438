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
from draftree.models.base import LayerSubset
from draftree.models.kv.partial import LayerRange

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
        self._num_layers = num_layers
        self._name = type(model).__name__
        self._layers: list[nn.Module] = []
        self._widths: dict[tuple[int, str], int | None] = {}
        """How many things a layer (named "") or a part of it returns; None for one that is no tuple."""
        self.bind(model)

    def bind(self, model: Any) -> None:
        """Find the layers in this model, which is built as the first one was."""
        lists = (m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == self._num_layers)
        self._layers = list(next(lists, []))

    def release(self) -> None:
        """Let the layers go until the next `bind`."""
        self._layers = []

    def require(self, part: LayerSubset) -> None:
        """Refuse a part that names what the layers do not have.

        Raises:
            UnsupportedModelError: the layers, or what is to be left out of them, are not found.
        """
        if not self._layers:
            raise UnsupportedModelError(f"{self._name} keeps its layers where they are not found")
        for layer in part.attention:
            self._attention(layer)
        for layer in part.mlp:
            self._perceptron(layer)

    def _attention(self, layer: int) -> str:
        names = (name for name, child in self._layers[layer].named_children() if hasattr(child, "layer_idx"))
        return self._first(names, layer, "attention")

    def _perceptron(self, layer: int) -> str:
        names = (name for name, _ in self._layers[layer].named_children() if name in PERCEPTRONS)
        return self._first(names, layer, "multilayer perceptron")

    def _first(self, names: Iterator[str], layer: int, kind: str) -> str:
        found = next(names, None)
        if found is None:
            raise UnsupportedModelError(f"{self._name} keeps the {kind} of layer {layer} where it is not found")
        return found

    @contextmanager
    def running(self, stretch: LayerRange) -> Iterator[Caught]:
        """Forward passes of the model inside run through this stretch only."""
        caught = Caught()
        part = stretch.part or LayerSubset()
        with ExitStack() as stack:
            for index in range(stretch.first):
                given = stretch.hidden if index == 0 else None
                stack.enter_context(self._instead(index, "", _passing(given)))
            for index in range(stretch.end, len(self._layers)):
                taken = caught if index == stretch.end else None
                stack.enter_context(self._instead(index, "", _passing(None, taken)))
            for layers, name_of in ((part.attention, self._attention), (part.mlp, self._perceptron)):
                for index in layers:
                    if index < stretch.end:
                        stack.enter_context(self._instead(index, name_of(index), torch.zeros_like))
            yield caught

    @contextmanager
    def _instead(self, layer: int, name: str, call: Callable[[Tensor], Tensor]) -> Iterator[None]:
        width = self._widths[layer, name]
        module = getattr(self._layers[layer], name) if name else self._layers[layer]

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

        def noting(place: tuple[int, str]) -> Callable[[nn.Module, Any, Any], None]:
            def note(module: nn.Module, given: Any, output: Any) -> None:
                self._widths[place] = len(output) if isinstance(output, tuple) else None

            return note

        with ExitStack() as stack:
            for index, layer in enumerate(self._layers):
                for name, module in (("", layer), *layer.named_children()):
                    stack.callback(module.register_forward_hook(noting((index, name))).remove)
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
