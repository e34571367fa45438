"""Passes through a subset of a transformers model's layers, and copies of the residual stream between them.

The layers are the first module list whose length is the number of layers in the configuration; an attention is a child
with a layer index. A layer that is left out returns its input. An attention or a perceptron that is left out returns
zeros, which leave the residual stream as it is. The model is changed during such a pass only.
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
"""Names by which layers know their multilayer perceptron."""


@dataclass(slots=True)
class Caught:
    """Hidden states of a pass by the layer that they enter, each of shape (rows, hidden); filled while it runs."""

    hidden: dict[int, Tensor] = field(default_factory=dict)

    def stacked(self, layers: Sequence[int]) -> Tensor | None:
        """What enters these layers, shape (rows, layers, hidden); float32, or float64 as it is. None for no layers."""
        if not layers:
            return None
        found = torch.stack([self.hidden[layer] for layer in layers], dim=1)
        return found if found.dtype == torch.float64 else found.float()


class TorchLayers:
    """The layers of a model of transformers.

    Args:
        model: a `…ForCausalLM`.
        num_layers: as many as its configuration says.
    """

    def __init__(self, model: Any, num_layers: int) -> None:
        self.num_layers = num_layers
        self._name = type(model).__name__
        self._layers: list[nn.Module] = []
        self._widths: dict[tuple[int, str], int | None] = {}
        """Length of the tuple that a layer (named "") or a part of it returns; None if it returns no tuple."""
        self._num_axes = 3
        """Axes of what a layer returns first: (batch, rows, hidden) unless the residual stream has several parts."""
        self.bind(model)

    def bind(self, model: Any) -> None:
        """Find the layers in this model, which is built as the first one was."""
        lists = (m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == self.num_layers)
        self._layers = list(next(lists, []))

    def release(self) -> None:
        """Let the layers go until the next `bind`."""
        self._layers = []

    def require(self, part: LayerSubset) -> None:
        """Refuse a part that names what the layers do not have.

        Raises:
            UnsupportedModelError: the layers, or what is to be left out of them, are not found.
        """
        self._require_found()
        for layer in part.attention:
            self._attention(layer)
        for layer in part.mlp:
            self._perceptron(layer)

    def require_capture(self) -> None:
        """Refuse a model whose layers' inputs cannot be copied.

        Raises:
            UnsupportedModelError: the layers are not found, or pass on something else than one vector a row.
        """
        self._require_found()
        if self._num_axes != 3:
            raise UnsupportedModelError(
                f"{self._name} passes {self._num_axes} axes from layer to layer and not (batch, rows, hidden), so its "
                "hidden states cannot be captured: take a drafter that needs none of the target's"
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
    def running(self, stretch: LayerRange) -> Iterator[Caught]:
        """Forward passes of the model inside run through this stretch only, and copy what enters `captured_layers`."""
        if stretch.capture:
            self.require_capture()
        caught = Caught()
        part = stretch.part or LayerSubset()
        with ExitStack() as stack:
            for index in range(stretch.first):
                given = stretch.hidden if index == 0 else None
                stack.enter_context(self._instead(index, "", _passing(given)))
            for index in range(stretch.end, len(self._layers)):
                stack.enter_context(self._instead(index, "", _passing(None)))
            for layers, name_of in ((part.attention, self._attention), (part.mlp, self._perceptron)):
                for index in layers:
                    if index < stretch.end:
                        stack.enter_context(self._instead(index, name_of(index), torch.zeros_like))
            for index in set(stretch.captured_layers):
                stack.callback(self._copying(index, caught).remove)
            yield caught

    def _copying(self, layer: int, caught: Caught) -> RemovableHandle:
        """Hook that notes what enters a layer, or what leaves the last one."""

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
        """Forward passes of the whole model inside show what each module returns."""

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
