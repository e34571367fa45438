"""References of passes in C over weights of few bits: the model's own forward pass, with what these passes read.

Their products read packed weights, and inputs that are rounded to 8 bits with a scale for each group of 32. A forward
pass with the same weights and the same rounding differs from them by the rounding of float32 only, so that a comparison
shows small mistakes, which the rounding of the weights would hide.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftree.loading.packed_products import PackedExperts, PackedProduct, products_of_rows, rounded
from draftree.loading.upcast import in_float32
from draftree.models.check import (
    BRANCHES,
    PREFIX_LENGTH,
    QUANTIZED_TOLERANCE,
    CheckResult,
    ReferenceLogits,
    check,
    tokens_of_check,
)
from draftree.models.native.blueprint import Blueprint
from draftree.models.native.build import NativeMismatchError
from draftree.models.native.model import NativeModel, UnpackedWeights
from draftree.models.native.seq2seq.model import NativeEncoderDecoder
from draftree.models.native.weights import KeptWeights
from draftree.models.torch.inspection import prompt_inputs
from draftree.models.torch.seq2seq.sources import encoded_probe
from draftree.models.torch.seq2seq.sources import reference_logits as source_reference_logits

__all__ = [
    "ROUNDED_TOLERANCE",
    "checked_packed",
    "packed_reference",
    "packed_source_reference",
    "require_packed",
    "whole_reference",
    "with_rounded_inputs",
]

ROUNDED_TOLERANCE = 0.15
"""Maximum difference of logits from such a reference, relative to their range. A number between two steps of 8 bits may
be rounded up in one and down in the other, which the layers after it amplify: 0.04 in a model of 30 layers."""


@contextlib.contextmanager
def with_rounded_inputs(model: nn.Module) -> Iterator[None]:
    """Round the inputs of all linear layers inside the block.

    Args:
        model: a `…ForCausalLM` whose forward passes are computed in float32.
    """
    with contextlib.ExitStack() as undo:
        for module in model.modules():
            if isinstance(module, nn.Linear):
                hook = module.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0]), *inputs[1:]))
                undo.callback(hook.remove)
        yield


@torch.inference_mode()
def packed_reference(model: Any, ours: NativeModel) -> ReferenceLogits | None:
    """Return logits of the model's own forward pass over the packed weights, with rounded inputs.

    Args:
        model: the `…ForCausalLM` whose weights were packed; unusable afterwards if they were released, otherwise
            unchanged.
        ours: the native model with these weights.

    Returns:
        The reference; None for a model with a projection before its layers, and for one with experts that is streamed.
    """
    plan = ours.blueprint
    if plan.projection is not None or (plan.has_experts and ours.streams_weights):
        return None
    ids = tokens_of_check(ours.vocab_size)
    with with_packed_weights(model, ours):
        logits: dict[tuple[int, ...], Tensor] = {branch: _scored(model, ids, branch) for branch in BRANCHES}
    return ReferenceLogits(ids, logits)


@torch.inference_mode()
def packed_source_reference(model: Any, ours: NativeEncoderDecoder) -> ReferenceLogits:
    """Return the same of an encoder-decoder model on the probe source, whose encoder keeps its own weights and dtype.

    Args:
        model: the `…ForConditionalGeneration` whose weights were packed and released; unusable afterwards.
        ours: the native model with these weights.
    """
    hidden = encoded_probe(model)
    with with_packed_weights(model, ours, embedding=model.get_decoder().embed_tokens):
        return source_reference_logits(model, hidden.float())


def whole_reference(model: Any, plan: Blueprint, rough: ReferenceLogits) -> ReferenceLogits:
    """Return the reference of a model of which each process packs a share; the model keeps its weights.

    The whole model is packed here, too: rows are rounded one by one, so its blocks are those of all shares.

    Args:
        model: the `…ForCausalLM`.
        plan: its architecture.
        rough: logits of its weights before rounding.

    Raises:
        NativeMismatchError: logits of the packed model differ from these.
    """
    whole = NativeModel(plan, KeptWeights(model), quantization="int4")
    found = check(whole, rough, tolerance=QUANTIZED_TOLERANCE["int4"], compares_tokens=False)
    if not (found.chains_ok and found.trees_ok):
        raise NativeMismatchError(f"its logits differ there (error {max(found.chain_error, found.tree_error):.1e})")
    reference = packed_reference(model, whole)
    assert reference is not None, "models with projections or experts are not divided"
    return reference


@contextlib.contextmanager
def with_packed_weights(model: Any, ours: NativeModel, embedding: Any = None) -> Iterator[None]:
    """Compute products of forward passes with packed weights and rounded inputs inside the block, in float32.

    Args:
        model: the model whose weights were packed.
        ours: the native model with these weights.
        embedding: embedding of its decoder; None for its input embedding.
    """
    plan = ours.blueprint
    weights = UnpackedWeights(plan.as_unpacked(), ours.decoder, torch.float32)
    products: list[PackedProduct | PackedExperts] = [
        PackedProduct(model.get_submodule(linear.weight.rpartition(".")[0]), linear, plan.head_dim, weights)
        for layer in plan.layers
        for linear in products_of_rows(layer)
    ]
    products.append(PackedProduct(model.get_output_embeddings(), plan.head, plan.head_dim, weights))
    products += [
        PackedExperts(model.get_submodule(layer.gate_up[0].weight.rpartition(".")[0]), index, ours)
        for index, layer in enumerate(plan.layers)
        if layer.experts is not None
    ]
    embedding = model.get_input_embeddings() if embedding is None else embedding
    own = embedding.weight
    _fill_released(model, plan, weights, [product.module for product in products])
    try:
        embedding.weight = nn.Parameter(weights.get(plan.embedding).float(), requires_grad=False)
        with in_float32(model), contextlib.ExitStack() as undo:
            for product in products:
                undo.enter_context(_replaced(product.module, product.forward))
            yield
    finally:
        embedding.weight = own


def checked_packed(model: Any, ours: NativeModel, rough: CheckResult) -> CheckResult:
    """Compare passes over weights of 4 bits with the model's own forward pass over the same weights.

    Args:
        model: the model whose weights were packed and released.
        ours: the native model.
        rough: result of the comparison with the weights before rounding; returned if there is no other reference.

    Raises:
        NativeMismatchError: the logits differ.
    """
    reference = packed_reference(model, ours)
    return rough if reference is None else require_packed(ours, reference, rough)


def require_packed(ours: NativeModel, reference: ReferenceLogits, rough: CheckResult) -> CheckResult:
    """Compare passes with a reference over the same weights; the result has the exactness of `rough`.

    Raises:
        NativeMismatchError: the logits differ.
    """
    found = check(ours, reference, tolerance=ROUNDED_TOLERANCE, compares_tokens=False)
    if not (found.chains_ok and found.trees_ok):
        error = max(found.chain_error, found.tree_error)
        raise NativeMismatchError(f"its logits differ there from those of the same weights of 4 bits ({error:.1e})")
    return replace(found, is_exact=rough.is_exact)


def _scored(model: Any, ids: tuple[int, ...], branch: tuple[int, ...]) -> Tensor:
    tokens = torch.tensor([[*ids[:PREFIX_LENGTH], *(ids[PREFIX_LENGTH + node] for node in branch)]])
    found: Tensor = model(**prompt_inputs(model, tokens, use_cache=False)).logits
    return found[0, PREFIX_LENGTH - 1 :].float()


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
    own = vars(module).get("forward")
    vars(module)["forward"] = forward
    try:
        yield
    finally:
        del vars(module)["forward"]
        if own is not None:
            vars(module)["forward"] = own
