"""Passes through a subset of a transformers model's layers, and copies of the residual stream between them.

The layers are the first module list whose length is the number of layers in the configuration; an attention is a child
with a layer index. A skipped layer returns its input. A skipped attention or perceptron returns zeros, which leave the
residual stream unchanged. The model is modified during such a pass only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from draftree.core.errors import UnsupportedModelError
from draftree.models.base import LayerSubset
from draftree.models.kv.partial import LayerRange

PERCEPTRONS = ("mlp", "feed_forward", "block_sparse_moe", "ffn")
"""Names of multilayer perceptrons in layers."""


@dataclass(slots=True)
class Caught:
    """Inputs of layers in a pass, each of shape (rows, hidden); filled while the pass runs."""

    hidden: dict[int, Tensor] = field(default_factory=dict)

    def stacked(self, layers: Sequence[int]) -> Tensor | None:
        """Return the inputs of these layers, shape (rows, layers, hidden), float32 or float64; None for no layers."""
        if not layers:
            return None
        found = torch.stack([self.hidden[layer] for layer in layers], dim=1)
        return found if found.dtype == torch.float64 else found.float()


class TorchLayers:
    """Layers of a transformers model.

    Args:
        model: a `…ForCausalLM`.
        num_layers: number of layers in its configuration.
    """

    def __init__(self, model: Any, num_layers: int) -> None:
        self.num_layers = num_layers
        self._name = type(model).__name__
        self._layers: list[nn.Module] = []
        self._widths: dict[tuple[int, str], int | None] = {}
        """Length of the tuple that a layer (named "") or a sublayer returns; None if it returns no tuple."""
        self._num_axes = 3
        """Number of axes of a layer's output: (batch, rows, hidden) unless the residual stream has several parts."""
        self.bind(model)

    def bind(self, model: Any) -> None:
        """Find the layers in this model, which must have the architecture of the first one."""
        lists = (m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == self.num_layers)
        self._layers = list(next(lists, []))

    def release(self) -> None:
        """Drop the references to the layers until the next `bind`."""
        self._layers = []

    def require(self, part: LayerSubset) -> None:
        """Check that the layers and the skipped sublayers exist.

        Raises:
            UnsupportedModelError: a layer or a sublayer was not found.
        """
        self._require_found()
        for layer in part.attention:
            self._attention(layer)
        for layer in part.mlp:
            self._perceptron(layer)

    def require_capture(self) -> None:
        """Check that the inputs of the layers can be copied.

        Raises:
            UnsupportedModelError: the layers were not found, or do not pass one vector per row.
        """
        self._require_found()
        if self._num_axes != 3:
            raise UnsupportedModelError(
                f"{self._name} passes {self._num_axes} axes from layer to layer and not (batch, rows, hidden), so its "
                "hidden states cannot be captured: choose a drafter that needs none of the target's"
            )

    def _require_found(self) -> None:
        if not self._layers:
            raise UnsupportedModelError(f"{self._name} has no module list of {self.num_layers} layers")

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
    def running(self, layer_range: LayerRange) -> Iterator[Caught]:
        """Limit forward passes inside to a range of layers, and copy the inputs of `captured_layers`."""
        if layer_range.capture:
            self.require_capture()
        caught = Caught()
        part = layer_range.part or LayerSubset()
        with ExitStack() as stack:
            for index in range(layer_range.first):
                given = layer_range.hidden if index == 0 else None
                stack.enter_context(self._instead(index, "", _passing(given)))
            for index in range(layer_range.end, len(self._layers)):
                stack.enter_context(self._instead(index, "", _passing(None)))
            for layers, name_of in ((part.attention, self._attention), (part.mlp, self._perceptron)):
                for index in layers:
                    if index < layer_range.end:
                        stack.enter_context(self._instead(index, name_of(index), torch.zeros_like))
            for index in set(layer_range.captured_layers):
                stack.callback(self._copying(index, caught).remove)
            yield caught

    def _copying(self, layer: int, caught: Caught) -> RemovableHandle:
        """Add a hook that records a layer's input, or the last layer's output."""

        def enters(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            caught.hidden[layer] = (args[0] if args else kwargs["hidden_states"])[0]

        def leaves(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            caught.hidden[layer] = (output[0] if isinstance(output, tuple) else output)[0]

        if layer < len(self._layers):
            return self._layers[layer].register_forward_pre_hook(enters, with_kwargs=True)
        return self._layers[-1].register_forward_hook(leaves)

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
        """Record the output format of each module during forward passes of the whole model inside."""

        def noting(place: tuple[int, str]) -> Callable[[nn.Module, Any, Any], None]:
            def note(module: nn.Module, given: Any, output: Any) -> None:
                self._widths[place] = len(output) if isinstance(output, tuple) else None
                first = output[0] if isinstance(output, tuple) else output
                if place[1] == "" and isinstance(first, Tensor):
                    self._num_axes = first.dim()

            return note

        with ExitStack() as stack:
            for index, layer in enumerate(self._layers):
                for name, module in (("", layer), *layer.named_children()):
                    stack.callback(module.register_forward_hook(noting((index, name))).remove)
            yield


def _passing(given: Tensor | None) -> Callable[[Tensor], Tensor]:
    def passed(hidden: Tensor) -> Tensor:
        if given is None:
            return hidden
        missing = hidden.shape[1] - given.shape[0]
        return torch.nn.functional.pad(given.to(hidden.dtype), (0, 0, 0, missing)).unsqueeze(0)

    return passed
