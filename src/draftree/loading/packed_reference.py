"""References of passes in C over weights of few bits: the model's own forward pass, with what these passes read.

Their products read packed weights, and inputs that are rounded to 8 bits with a scale for each group of 32. A forward
pass with the same weights and the same rounding differs from them by the rounding of float32 only, so that a comparison
shows small mistakes, which the rounding of the weights would hide.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftree.loading.upcast import in_float32
from draftree.models.check import BRANCHES, PREFIX_LENGTH, CheckResult, ReferenceLogits, check, tokens_of_check
from draftree.models.native.blueprint import Blueprint, LinearBlueprint
from draftree.models.native.build import NativeMismatchError
from draftree.models.native.model import NativeModel
from draftree.models.native.packing import arranged
from draftree.models.native.twins import UnpackedWeights
from draftree.models.torch.own_forward import prompt_inputs

__all__ = ["ROUNDED_TOLERANCE", "checked_packed", "packed_reference", "rounded", "with_rounded_inputs"]

ROUNDED_TOLERANCE = 0.15
"""Maximum difference of logits from such a reference, relative to their range. A number between two steps of 8 bits may
be rounded up in one and down in the other, which the layers after it amplify: 0.04 in a model of 30 layers."""
GROUP_INPUTS, LARGEST = 32, 127


def rounded(inputs: Tensor) -> Tensor:
    """Return inputs of products as passes in C round them: 8 bits, one scale for each 32 numbers of the last dimension.

    Args:
        inputs: shape (…, inputs); the last group may be shorter.

    Returns:
        A tensor of the same shape, float32.
    """
    size = inputs.shape[-1]
    groups = F.pad(inputs.float(), (0, -size % GROUP_INPUTS)).unflatten(-1, (-1, GROUP_INPUTS))
    most = groups.abs().amax(-1, keepdim=True)
    steps = groups * torch.where(most > 1e-30, LARGEST / most, 0)
    return (steps.round() * (most / LARGEST)).flatten(-2)[..., :size]


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
        model: the `…ForCausalLM` whose weights were packed and released; unusable afterwards.
        ours: the native model with these weights.

    Returns:
        The reference; None for a model with experts or with a projection before its layers.
    """
    plan = ours.blueprint
    if plan.has_experts or plan.projection is not None:
        return None
    weights = UnpackedWeights(plan.as_unpacked(), ours.decoder, torch.float32)
    linears = [linear for layer in plan.layers for linear in layer.linears]
    modules = [model.get_submodule(linear.weight.rpartition(".")[0]) for linear in linears]
    modules.append(model.get_output_embeddings())
    products = tuple(
        _Product(module, linear, plan.head_dim, weights)
        for module, linear in zip(modules, [*linears, plan.head], strict=True)
    )
    _fill_others(model, plan, weights, modules)
    ids = tokens_of_check(ours.vocab_size)
    with in_float32(model), contextlib.ExitStack() as undo:
        for product in products:
            undo.enter_context(_replaced(product.module, product.forward))
        logits: dict[tuple[int, ...], Tensor] = {branch: _scored(model, ids, branch) for branch in BRANCHES}
    return ReferenceLogits(ids, logits)


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
    if reference is None:
        return rough
    found = check(ours, reference, tolerance=ROUNDED_TOLERANCE, compares_tokens=False)
    if not (found.chains_ok and found.trees_ok):
        error = max(found.chain_error, found.tree_error)
        raise NativeMismatchError(f"its logits differ there from those of the same weights of 4 bits ({error:.1e})")
    return replace(found, is_exact=rough.is_exact)


@dataclass(frozen=True, slots=True)
class _Product:
    """A linear layer that is computed with its packed weight, unpacked for each call."""

    module: nn.Module
    linear: LinearBlueprint
    head_dim: int
    weights: UnpackedWeights

    def forward(self, inputs: Tensor) -> Tensor:
        linear = self.linear
        weight = self.weights.get(linear.weight).float()
        bias = None if linear.bias is None else self.weights.get(linear.bias).float()[: len(weight)]
        self.weights.release(linear.weight)
        found = F.linear(rounded(inputs), weight, bias)
        if not linear.is_reordered:
            return found
        places = torch.arange(linear.outputs, dtype=torch.float32)[:, None]
        order = arranged(places, replace(linear, is_transposed=False), head_dim=self.head_dim)[:, 0].long()
        return torch.empty_like(found).index_copy_(-1, order, found)


def _scored(model: Any, ids: tuple[int, ...], branch: tuple[int, ...]) -> Tensor:
    tokens = torch.tensor([[*ids[:PREFIX_LENGTH], *(ids[PREFIX_LENGTH + node] for node in branch)]])
    found: Tensor = model(**prompt_inputs(model, tokens, use_cache=False)).logits
    return found[0, PREFIX_LENGTH - 1 :].float()


def _fill_others(model: Any, plan: Blueprint, weights: UnpackedWeights, modules: Sequence[nn.Module]) -> None:
    """Give released norms, positions and embeddings the packed values, in float32."""
    products, embedding = set(map(id, modules)), model.get_input_embeddings()
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        owner, _, attribute = name.rpartition(".")
        module = model.get_submodule(owner)
        if id(module) in products or parameter.numel():
            continue
        value = weights.get(plan.embedding if module is embedding else name).float()
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
