"""References of native passes: a model's own forward pass in float32, or with what packed products read.

The logits of a model in bfloat16 deviate by the rounding of every layer, up to a tenth of their spread if norms have
large weights, so they are no reference for passes with less rounding. The same weights in float32 arithmetic are.

Native products over low-bit weights read packed weights, and inputs that are rounded to 8 bits with a scale for
each group of 32. A forward pass with the same weights and the same rounding differs from them by the rounding of
float32 only, so that a comparison shows small mistakes, which the rounding of the weights would hide.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftree.models.base import CheckResult
from draftree.models.check import QUANTIZED_TOLERANCE, ReferenceLogits, check, reference_logits
from draftree.models.native.blueprint import (
    CLAMPED_SILU,
    GELU,
    GELU_TANH,
    QUICK_GELU,
    RELU,
    SILU,
    Blueprint,
    LinearBlueprint,
)
from draftree.models.native.build import NativeMismatchError
from draftree.models.native.library import LANES
from draftree.models.native.model import NativeModel, UnpackedWeights, products_of_rows
from draftree.models.native.packing import arranged
from draftree.models.native.seq2seq.model import NativeEncoderDecoder
from draftree.models.native.weights import ModelWeights
from draftree.models.torch.seq2seq.sources import encoded_probe
from draftree.models.torch.seq2seq.sources import reference_logits as source_reference_logits

CHUNK_ROWS = 4096  # number of a linear layer's outputs whose weights are in float32 at the same time


@contextlib.contextmanager
def in_float32(model: Any) -> Iterator[None]:
    """Compute the model's forward passes in float32 inside the block.

    Linear layers convert their weights in chunks of `CHUNK_ROWS`, embeddings return float32, and vectors (norms,
    biases) and convolutions are replaced by float32 copies. Other modules with matrices, such as experts, have float32
    copies of them while they run, one module at a time. The model is restored after the block. float32 models are
    unchanged.
    """
    if all(parameter.dtype == torch.float32 for parameter in model.parameters()):
        yield
        return
    with contextlib.ExitStack() as undo:
        vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
        # mixers read the weights of their convolutions and do not call them
        kernels = [module.weight for module in model.modules() if isinstance(module, nn.Conv1d)]
        for parameter in (*vectors, *kernels):
            undo.callback(setattr, parameter, "data", parameter.data)
            parameter.data = parameter.data.float()
        for module in model.modules():
            if type(module) is nn.Linear:
                undo.enter_context(_replaced(module, functools.partial(_linear, module)))
            elif isinstance(module, nn.Embedding):
                undo.callback(module.register_forward_hook(lambda _, __, output: output.float()).remove)
            elif isinstance(module, nn.Conv1d):
                continue
            elif matrices := [parameter for parameter in module.parameters(recurse=False) if parameter.dim() > 1]:
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
        self._own = [parameter.data for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.data = parameter.data.float()

    def end(self) -> None:
        for parameter, original in zip(self._parameters, self._own, strict=False):
            parameter.data = original
        self._own = []


def _linear(module: nn.Linear, x: Tensor) -> Tensor:
    rows = [F.linear(x.float(), part.float()) for part in module.weight.split(CHUNK_ROWS)]
    product = rows[0] if len(rows) == 1 else torch.cat(rows, -1)
    return product if module.bias is None else product + module.bias.float()


GROUP_INPUTS, LARGEST = 32, 127


def rounded(inputs: Tensor) -> Tensor:
    """Return inputs as native kernels round them, float32: 8 bits, one scale per 32 numbers of the last dimension."""
    size = inputs.shape[-1]
    groups = F.pad(inputs.float(), (0, -size % GROUP_INPUTS)).unflatten(-1, (-1, GROUP_INPUTS))
    most = groups.abs().amax(-1, keepdim=True)
    steps = groups * torch.where(most > 1e-30, LARGEST / most, 0)
    return (steps.round() * (most / LARGEST)).flatten(-2)[..., :size]


@dataclass(frozen=True, slots=True)
class PackedProduct:
    """A linear layer that is computed with its packed weight, unpacked for each call."""

    module: nn.Module  # the linear layer
    linear: LinearBlueprint  # how its weight is stored
    head_dim: int  # size of a head
    weights: UnpackedWeights  # the packed weights

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the product of rounded inputs, float32, in the order of the module's outputs."""
        linear = self.linear
        weight, bias = self.weights.get(linear.weight).float(), None
        # a bias that the module does not have is added by the model
        if linear.bias is not None and getattr(self.module, "bias", None) is not None:
            bias = self.weights.get(linear.bias).float()[: len(weight)]
        self.weights.release(linear.weight)
        product = F.linear(rounded(inputs), weight, bias)
        if not linear.is_reordered:
            return product
        places = torch.arange(linear.outputs, dtype=torch.float32)[:, None]
        order = arranged(places, replace(linear, is_transposed=False), head_dim=self.head_dim)[:, 0].long()
        return torch.empty_like(product).index_copy_(-1, order, product)


ACTIVATIONS: Mapping[int, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        SILU: F.silu,
        GELU: F.gelu,
        GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
        RELU: F.relu,
        QUICK_GELU: lambda x: x * torch.sigmoid(1.702 * x),
    }
)


def gated(plan: Blueprint, gate: Tensor, up: Tensor) -> Tensor:
    """Return what enters the last product of a perceptron."""
    if plan.activation != CLAMPED_SILU:
        return ACTIVATIONS[plan.activation](gate) * up
    gate, limit = gate.clamp(max=plan.gate_limit), plan.gate_limit
    return (up.clamp(-limit, limit) + 1) * gate * torch.sigmoid(gate * plan.gate_slope)


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """Experts of a layer that are computed with their packed weights, unpacked one after the other."""

    module: nn.Module  # the experts
    layer: int  # number of their layer
    ours: NativeModel  # the model with the packed weights

    def forward(self, hidden: Tensor, *args: Any, **named: Any) -> Tensor:
        """Return the weighted sums of each row's experts; `args` are these and their weights, (rows, experts)."""
        chosen, scores = (*args, *(named[name] for name in ("router_indices", "routing_weights") if name in named))
        sums = torch.zeros(hidden.shape, dtype=torch.float32)
        for expert in chosen.unique().tolist():
            rows, places = torch.where(chosen == expert)
            results = self._expert(expert, rounded(hidden[rows]))
            sums.index_add_(0, rows, results * scores[rows, places, None].float())
        return sums

    def _expert(self, expert: int, inputs: Tensor) -> Tensor:
        plan = self.ours.blueprint
        both = self._product(f"gate_up.{expert}", inputs).unflatten(-1, (-1, 2, LANES))
        inner = gated(plan, both[..., 0, :].flatten(-2), both[..., 1, :].flatten(-2))
        return self._product(f"down.{expert}", rounded(inner))

    def _product(self, name: str, inputs: Tensor) -> Tensor:
        weight, bias = self.ours.decoder.product_weight(self.layer, name, torch.float32)
        return F.linear(inputs, weight, None if bias is None else bias[: len(weight)])


ROUNDED_TOLERANCE = 0.15
"""Maximum difference of logits from such a reference, relative to their range. A number between two steps of 8 bits may
be rounded up in one and down in the other, which the layers after it amplify: 0.04 in a model of 30 layers."""


@contextlib.contextmanager
def with_rounded_inputs(model: nn.Module) -> Iterator[None]:
    """Round the inputs of all linear layers inside the block."""
    with contextlib.ExitStack() as undo:
        for module in model.modules():
            if isinstance(module, nn.Linear):
                hook = module.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0]), *inputs[1:]))
                undo.callback(hook.remove)
        yield


@torch.inference_mode()
def packed_reference(model: Any, ours: NativeModel) -> ReferenceLogits | None:
    """Return logits of the model's own forward pass over the packed weights, with rounded inputs.

    None for a model with a projection before its layers, for one with products of parts of a weight, and for one with
    experts that is streamed. A model whose weights were released is unusable afterwards.
    """
    plan = ours.blueprint
    if plan.projection is not None or plan.has_parts or (plan.has_experts and ours.streams_weights):
        return None
    with with_packed_weights(model, ours):
        return reference_logits(model)


@torch.inference_mode()
def packed_source_reference(model: Any, ours: NativeEncoderDecoder) -> ReferenceLogits:
    """Return the same of an encoder-decoder model on the probe source; its encoder keeps its own weights."""
    hidden = encoded_probe(model)
    with with_packed_weights(model, ours, embedding=model.get_decoder().embed_tokens):
        return source_reference_logits(model, hidden.float())


def whole_reference(model: Any, plan: Blueprint, rough: ReferenceLogits) -> tuple[ReferenceLogits, float]:
    """Return the reference of a model of which each process packs a share, and the tolerance; it keeps its weights.

    The whole model is packed here, too: rows are rounded one by one, so its blocks are those of all shares. `rough` is
    the reference of a model without one of its packed weights.
    """
    whole = NativeModel(plan, ModelWeights(model, keeps=True), quantization="int4")
    tolerance = QUANTIZED_TOLERANCE["int4"]
    require_ok(check(whole, rough, tolerance=tolerance, compares_tokens=False))
    reference = packed_reference(model, whole)
    return (rough, tolerance) if reference is None else (reference, ROUNDED_TOLERANCE)


@contextlib.contextmanager
def with_packed_weights(model: Any, ours: NativeModel, embedding: Any = None) -> Iterator[None]:
    """Compute products with packed weights and rounded inputs inside the block, in float32."""
    plan = ours.blueprint
    weights = UnpackedWeights(plan.as_unpacked(), ours.decoder, torch.float32)
    products: list[PackedProduct | PackedExperts] = [
        PackedProduct(model.get_submodule(linear.weight.rpartition(".")[0]), linear, plan.head_dim, weights)
        for layer in plan.layers
        for _, linears, _ in products_of_rows(layer)
        for linear in linears
    ]
    products.append(PackedProduct(model.get_output_embeddings(), plan.head, plan.head_dim, weights))
    products += [
        PackedExperts(model.get_submodule(layer.gate_up[0].weight.rpartition(".")[0]), index, ours)
        for index, layer in enumerate(plan.layers)
        if layer.experts is not None
    ]
    embedding = model.get_input_embeddings() if embedding is None else embedding
    original = embedding.weight
    _fill_released(model, plan, weights, [product.module for product in products])
    try:
        embedding.weight = nn.Parameter(weights.get(plan.embedding).float(), requires_grad=False)
        with in_float32(model), contextlib.ExitStack() as undo:
            for product in products:
                undo.enter_context(_replaced(product.module, product.forward))
            yield
    finally:
        embedding.weight = original


def require_ok(result: CheckResult, of: str = "") -> CheckResult:
    """Return a result of chains and trees that pass the self-check."""
    if not (result.chains_ok and result.trees_ok):
        raise NativeMismatchError(f"its logits differ there{of} (error {result.error:.1e})")
    return result


def checked_packed(model: Any, ours: NativeModel, rough: CheckResult) -> CheckResult:
    """Compare passes with the model's own over the same 4-bit weights; `rough` if there is no reference."""
    reference = packed_reference(model, ours)
    return rough if reference is None else require_packed(ours, reference, rough)


def require_packed(ours: NativeModel, reference: ReferenceLogits, rough: CheckResult) -> CheckResult:
    """Compare passes with a reference over the same weights; the result has the exactness of `rough`."""
    result = check(ours, reference, tolerance=ROUNDED_TOLERANCE, compares_tokens=False)
    return replace(require_ok(result, " from those of the same 4-bit weights"), is_exact=rough.is_exact)


def _fill_released(model: Any, plan: Blueprint, weights: UnpackedWeights, modules: Sequence[nn.Module]) -> None:
    """Give released norms and positions the packed values, in float32; products and the embedding have none."""
    without = {id(module) for module in (*modules, model.get_input_embeddings())}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        owner, _, attribute = name.rpartition(".")
        module = model.get_submodule(owner)
        if id(module) in without or name in (plan.embedding, plan.head.weight) or parameter.numel():
            continue
        value = weights.get(name).float()
        if name == plan.positions:
            value = F.pad(value, (0, 0, plan.position_offset, 0))
        setattr(module, attribute, nn.Parameter(value, requires_grad=False))


@contextlib.contextmanager
def _replaced(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Compute a module by another function inside the block."""
    original = vars(module).get("forward")
    vars(module)["forward"] = forward
    try:
        yield
    finally:
        del vars(module)["forward"]
        if original is not None:
            vars(module)["forward"] = original
