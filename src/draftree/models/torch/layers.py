"""Parts of a transformers model: passes through a subset of its layers, its embedding, output head and final norm."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from draftree.core.errors import UnsupportedModelError
from draftree.models.base import EmbeddingFacts, LanguageModel, LayerSubset
from draftree.models.kv.slots import LayerRange, require_capture
from draftree.models.torch.attention import keep_out_of_compiled_layers, numbered
from draftree.models.torch.inspection import whole_tensor
from draftree.models.torch.packing import PackedLinear

PERCEPTRONS = ("mlp", "feed_forward", "block_sparse_moe", "ffn")  # names of multilayer perceptrons in layers


@dataclass(slots=True)
class Caught:
    """Inputs of layers in a pass, each of shape (rows, hidden); filled while the pass runs."""

    hidden: dict[int, Tensor] = field(default_factory=dict)

    def stacked(self, layers: Sequence[int]) -> Tensor | None:
        """Return the inputs of these layers, shape (rows, layers, hidden), float32 or float64; None for no layers."""
        if not layers:
            return None
        states = torch.stack([self.hidden[layer] for layer in layers], dim=1)
        return states if states.dtype == torch.float64 else states.float()


logger = logging.getLogger(__name__)


class TorchLayers:
    def __init__(self, model: Any, num_layers: int) -> None:
        self.num_layers = num_layers
        self._name = type(model).__name__
        self._layers: list[nn.Module] = []
        self._widths: dict[tuple[int, str], int | None] = {}
        """Length of the tuple that a layer (named "") or a sublayer returns; None if it returns no tuple."""
        self._num_axes = 3
        """Number of axes of a layer's output: (batch, rows, hidden) unless the residual stream has several parts."""
        self._shares: bool | None = None  # whether layers share attentions; None if unknown
        self.bind(model)

    def bind(self, model: Any) -> None:
        """Find the layers in this model, which must have the architecture of the first one."""
        lists = (m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == self.num_layers)
        self._layers = list(next(lists, []))

    def release(self) -> None:
        self._layers = []

    def numbered(self) -> AbstractContextManager[None]:
        """Number the calls of attentions that several layers share, if there are such."""
        if self._shares is None:
            modules = (module for layer in self._layers for module in layer.modules())
            self._shares = any(getattr(module, "layer_idx", 0) in (None, -1) for module in modules)
        return numbered(self._layers) if self._shares else nullcontext()

    def compile(self, trial: Callable[[], object]) -> None:
        """Fuse the small operations of each layer by torch's compiler, unless a trial of the model then fails."""
        keep_out_of_compiled_layers()
        for layer in self._layers:
            layer.forward = torch.compile(layer.forward, dynamic=True)
        try:
            trial()
        except Exception as error:  # compilers and what they call raise many types
            self.uncompile()
            logger.warning("layers of %s are not compiled: %s", self._name, str(error).strip().split("\n")[0][:300])

    def uncompile(self) -> None:
        for layer in self._layers:
            layer.__dict__.pop("forward", None)

    def require(self, part: LayerSubset) -> None:
        self._require_found()
        for layer in part.attention:
            self._attention(layer)
        for layer in part.mlp:
            self._perceptron(layer)

    def require_capture(self) -> None:
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
        name = next(names, None)
        if name is None:
            raise UnsupportedModelError(f"{self._name} keeps the {kind} of layer {layer} where it is not found")
        return name

    @contextmanager
    def running(self, layer_range: LayerRange) -> Iterator[Caught]:
        """Limit forward passes inside to a range of layers, and copy the inputs of `captured_layers`."""
        if layer_range.capture:
            self.require_capture()
        caught = Caught()
        part = layer_range.part or LayerSubset()
        with ExitStack() as stack:
            for index in range(layer_range.first):
                replacement = layer_range.hidden if index == 0 else None
                stack.enter_context(self._instead(index, "", _passing(replacement)))
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
            output = call(hidden_states)
            return output if width is None else (output, *[None] * (width - 1))

        compiled = module.__dict__.get("forward")
        module.forward = forward
        try:
            yield
        finally:
            del module.forward
            if compiled is not None:
                module.forward = compiled

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Record the output format of each module during forward passes of the whole model inside."""

        def noting(place: tuple[int, str]) -> Callable[[nn.Module, Any, Any], None]:
            def note(module: nn.Module, args: Any, output: Any) -> None:
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


def _passing(replacement: Tensor | None) -> Callable[[Tensor], Tensor]:
    def passed(hidden: Tensor) -> Tensor:
        if replacement is None:
            return hidden
        missing = hidden.shape[1] - replacement.shape[0]
        return torch.nn.functional.pad(replacement.to(hidden.dtype), (0, 0, 0, missing)).unsqueeze(0)

    return passed


PROBE_TOKENS = (3, 5)
TOLERANCE = 1e-3
HALF_TOLERANCE = 2e-2  # maximum relative error between facts, or a norm, and a pass, in float32 and in half precision


def _of_vocabulary(model: Any, weight: Any, what: str) -> Tensor:
    vocab = int(model.config.get_text_config().vocab_size)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or weight.shape[0] < vocab or not weight.is_floating_point():
        raise UnsupportedModelError(
            f"{type(model).__name__} has no {what} of {vocab} rows of numbers: choose a drafter that needs none"
        )
    return whole_tensor(weight)[:vocab]


def scale_of_embedding(embedding: Any, config: Any) -> float:
    scale = getattr(embedding, "embed_scale", None)
    factor = 1.0 if scale is None else float(torch.as_tensor(scale).to(embedding.weight.dtype))
    return factor * float(getattr(config, "embedding_multiplier", 1.0))


@dataclass(frozen=True, slots=True, eq=False)
class _Probe:
    """Pass over one token: module outputs by name, the first layer's input, and logits; one axis each."""

    modules: dict[str, Tensor]
    entered: Tensor
    logits: Tensor


@torch.inference_mode()
def embedding_facts(model: Any, layers: TorchLayers) -> EmbeddingFacts:
    """Return how a model uses its embedding and its head. Runs two passes over one token each.

    The facts are read from the configuration and compared with a pass of the model; a model that uses its embedding
    or its head in another way is refused.
    """
    layers.require_capture()
    probe, other = (_probe(model, layers, token) for token in PROBE_TOKENS)
    head = model.get_output_embeddings()
    bias = getattr(head, "bias", None)
    scale, cap = _logit_facts(model, probe)
    return EmbeddingFacts(
        embedding_scale=_embedding_scale(model, probe, other),
        logit_scale=scale,
        soft_cap=cap,
        bias=None if bias is None else whole_tensor(bias).float(),
    )


def _probe(model: Any, layers: TorchLayers, token: int) -> _Probe:
    modules: dict[str, Tensor] = {}

    def reads(module: nn.Module, args: tuple[Any, ...]) -> None:
        modules["head input"] = args[0].flatten(0, -2)[-1]

    def writes(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        modules["head output"] = output.flatten(0, -2)[-1].float()

    def ends(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        modules["base output"] = output[0].flatten(0, -2)[-1]

    head = model.get_output_embeddings()
    if head is None:
        raise UnsupportedModelError(f"{type(model).__name__} names no output head: choose a drafter that needs none")
    with ExitStack() as stack:
        stack.callback(head.register_forward_pre_hook(reads).remove)
        stack.callback(head.register_forward_hook(writes).remove)
        for base in (model.base_model, model.get_decoder()):  # some models run only a submodule of their base model
            stack.callback(base.register_forward_hook(ends).remove)
        caught = stack.enter_context(layers.running(LayerRange(0, layers.num_layers, capture=(0,))))
        ids = torch.tensor([[token]], device=model.device)
        logits = model(input_ids=ids, use_cache=False).logits[0, -1].float()
    return _Probe(modules, caught.hidden[0][-1].float(), logits)


def _tolerance(model: Any) -> float:
    return TOLERANCE if next(model.parameters()).dtype in (torch.float32, torch.float64) else HALF_TOLERANCE


def _embedding_scale(model: Any, probe: _Probe, other: _Probe) -> float:
    """Return the scale, from the difference of two tokens at one position, in which learned positions cancel."""
    embedding = model.get_input_embeddings()
    config = model.config.get_text_config()
    weight = _of_vocabulary(model, getattr(embedding, "weight", None), "input embedding")
    first, second = (weight[token].float() for token in PROBE_TOKENS)
    rows, entered = first - second, probe.entered - other.entered
    root = float(torch.tensor(weight.shape[1] ** 0.5).to(weight.dtype))
    for scale in (scale_of_embedding(embedding, config), root):
        if rows.shape == entered.shape and _is_near(scale * rows, entered, _tolerance(model)):
            return scale
    raise UnsupportedModelError(
        f"{type(model).__name__} changes embeddings by more than a factor before its first layer: choose a drafter "
        "that does not read the target's embedding"
    )


def _logit_facts(model: Any, probe: _Probe) -> tuple[float, float | None]:
    config, tolerance = model.config.get_text_config(), _tolerance(model)
    modules = probe.modules
    names = {"head input", "head output", "base output"}
    if names <= set(modules) and _is_near(modules["head input"].float(), modules["base output"].float(), tolerance):
        cap = getattr(config, "final_logit_softcapping", None)
        scaling, factor = getattr(config, "logits_scaling", None), getattr(config, "logit_scale", None)
        for scale in (1.0, 1.0 / scaling if scaling else 1.0, factor or 1.0):
            made = EmbeddingFacts(1.0, float(scale), cap).capped(modules["head output"])
            if _is_near(made, probe.logits, tolerance):
                return float(scale), cap
    raise UnsupportedModelError(
        f"{type(model).__name__} does more between its last layer and its logits than a norm, a product, a scale and a "
        "cap: choose a drafter that does not use the target's output head"
    )


def _is_near(actual: Tensor, wanted: Tensor, tolerance: float) -> bool:
    return actual.shape == wanted.shape and float((actual - wanted).norm()) <= tolerance * float(wanted.norm())


PROBE_TOKEN = 3
MAX_VECTORS = 2  # a norm has a weight and a bias at most; larger modules are not tried


@torch.inference_mode()
def _final_norm(model: Any, layers: TorchLayers) -> nn.Module:
    """Return the module between the last layer and the head: a copy in float32, or the identity for none."""
    layers.require_capture()
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
    tolerance = _tolerance(model)
    if _is_near(last, wanted, tolerance):
        return nn.Identity()
    for module in candidates.values():
        is_small = sum(parameter.numel() for parameter in module.parameters()) <= MAX_VECTORS * wanted.numel()
        if is_small:
            normed = _applied(module, last)
            if normed is not None and _is_near(normed, wanted, tolerance):
                return copy.deepcopy(module).float().eval()
    raise UnsupportedModelError(
        f"{type(model).__name__} does more between its last layer and its output head than one norm: choose a drafter "
        "that does not use the target's output head"
    )


def _applied(module: nn.Module, state: Tensor) -> Tensor | None:
    """Return what a module makes of one state, in float32; None if it takes other input."""
    try:
        output = copy.deepcopy(module).float().eval()(state[None])
    except Exception:  # a module for other input may raise anything
        return None
    return output[0] if isinstance(output, Tensor) and output.dim() == 2 else None


class TransformersModel(LanguageModel):
    """What causal models of transformers have in common: embedding, output head and final norm."""

    model: Any
    _layers: TorchLayers
    _norm: nn.Module | None = None

    def require_capture(self, layers: Sequence[int]) -> None:
        require_capture(layers, first=0, end=self._layers.num_layers)
        self._layers.require_capture()

    def input_embedding(self) -> Tensor:
        """Return a view of the model's weight."""
        weight = getattr(self.model.get_input_embeddings(), "weight", None)
        return _of_vocabulary(self.model, weight, "input embedding")

    def output_head(self) -> Tensor:
        """Return a view, or a new tensor if the weight is packed."""
        head = self.model.get_output_embeddings()
        weight = head.unpacked() if isinstance(head, PackedLinear) else getattr(head, "weight", None)
        return _of_vocabulary(self.model, weight, "output head")

    @torch.inference_mode()
    def final_norm(self, hidden: Tensor) -> Tensor:
        if self._norm is None:
            self._norm = _final_norm(self.model, self._layers)
        return self._norm(hidden.to(self.device, torch.float32))

    def embedding_facts(self) -> EmbeddingFacts:
        return embedding_facts(self.model, self._layers)
