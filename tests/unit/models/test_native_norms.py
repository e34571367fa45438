"""The kind and the offset of norms are detected element by element, independent of the size of their weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from draftree.models.native.blueprint import LAYER_NORM
from draftree.models.native.build import NativeUnavailableError
from draftree.models.native.describe import read
from draftree.models.native.modules import NormFacts, norm_facts
from draftree.models.torch.hf import HFModel
from families import fresh
from native_samples import FAMILIES, SIZES

SIZE = 640


def _large_mean() -> Tensor:
    """Mean 25, largest 300, smallest -0.8: the final norm of Gemma 3 270M."""
    weights = 10 + 30 * torch.rand(SIZE, generator=torch.Generator().manual_seed(1))
    weights[7], weights[9] = 300.0, -0.8125
    return weights


WEIGHTS: dict[str, Tensor] = {
    "zeros": torch.zeros(SIZE),
    "ones": torch.ones(SIZE),
    "minus one": torch.full((SIZE,), -1.0),
    "small": 0.1 * torch.randn(SIZE, generator=torch.Generator().manual_seed(2)),
    "some zero": torch.linspace(-2, 2, SIZE + 1)[:SIZE].round(),
    "large mean": _large_mean(),
    "two large ones": torch.cat([torch.ones(SIZE - 2), torch.tensor([700.0, -133.0])]),
    "all large": torch.linspace(200, 1700, SIZE),
}


def _with_weights(norm: Any, weights: Tensor, dtype: torch.dtype) -> Any:
    with torch.no_grad():
        norm.weight.copy_(weights)
    return norm.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize(("kind", "offset"), [(LlamaRMSNorm, 0.0), (Gemma3RMSNorm, 1.0)])
def test_the_offset_is_found(kind: Any, offset: float, weights: str, dtype: torch.dtype) -> None:
    assert norm_facts(_with_weights(kind(SIZE, eps=1e-6), WEIGHTS[weights], dtype)).offset == offset


class HalfNorm(LlamaRMSNorm):
    """Rounds its result to bfloat16 whatever the input."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        rounded: Tensor = super().forward(hidden_states).to(torch.bfloat16)
        return rounded


class HalfOffset(nn.Module):
    """The same with an offset of 1."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.inner = Gemma3RMSNorm(size, eps=eps)
        self.weight, self.eps = self.inner.weight, eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        rounded: Tensor = self.inner(hidden_states).to(torch.bfloat16)
        return rounded


@pytest.mark.parametrize("weights", [name for name in WEIGHTS if name != "all large"])
@pytest.mark.parametrize(("kind", "offset"), [(HalfNorm, 0.0), (HalfOffset, 1.0)])
def test_rounding_to_bfloat16_hides_no_offset(kind: Any, offset: float, weights: str) -> None:
    assert norm_facts(_with_weights(kind(SIZE, eps=1e-6), WEIGHTS[weights], torch.bfloat16)).offset == offset


class HalfOfOne(Gemma3RMSNorm):
    """Adds something else than 0 or 1 to its weight."""

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self._norm(x.float()) * (0.5 + self.weight.float())
        return normed.type_as(x)


class OneElementOff(LlamaRMSNorm):
    """A norm but for one element of small weight."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        result: Tensor = super().forward(hidden_states).clone()
        result[..., 9] *= 1.1
        return result


@pytest.mark.parametrize("kind", [HalfOfOne, OneElementOff])
@pytest.mark.parametrize("weights", ["small", "large mean", "two large ones"])
def test_other_norms_are_refused(kind: Any, weights: str) -> None:
    norm = kind(SIZE, eps=1e-6)
    with pytest.raises(NativeUnavailableError, match="neither a root-mean-square norm"):
        norm_facts(_with_weights(norm, WEIGHTS[weights], torch.bfloat16))


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("weights", ["ones", "small", "large mean", "two large ones"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_with_a_mean_are_identified(has_bias: bool, weights: str, dtype: torch.dtype) -> None:
    norm = nn.LayerNorm(SIZE, eps=1e-5, bias=has_bias)
    if has_bias:
        nn.init.normal_(norm.bias)
    assert norm_facts(_with_weights(norm, WEIGHTS[weights], dtype)) == NormFacts(LAYER_NORM, 0.0, 1e-5, has_bias)


def test_the_model_keeps_its_dtype_and_weights() -> None:
    norm = _with_weights(LlamaRMSNorm(SIZE), WEIGHTS["large mean"], torch.bfloat16)
    before = norm.weight
    norm_facts(norm)
    assert norm.weight is before
    assert before.dtype == torch.bfloat16


def _tiny(family: str = "gemma3_text") -> Any:
    return fresh(family, **(SIZES | FAMILIES[family]))


@pytest.mark.parametrize("place", ["input_layernorm", "post_feedforward_layernorm", "self_attn.q_norm"])
def test_every_norm_of_a_layer_is_read(place: str) -> None:
    model = _tiny()
    owner = model.model.layers[1]
    *path, name = place.split(".")
    for part in path:
        owner = getattr(owner, part)
    old = getattr(owner, name)
    new = LlamaRMSNorm(old.weight.numel(), eps=old.eps)
    with torch.no_grad():
        new.weight.copy_(old.weight)
    setattr(owner, name, new)
    with pytest.raises(NativeUnavailableError, match="norms differ"):
        read(HFModel(model))


def test_every_norm_has_the_same_epsilon() -> None:
    model = _tiny()
    model.model.layers[0].input_layernorm.eps = 0.5
    with pytest.raises(NativeUnavailableError, match="norms differ"):
        read(HFModel(model))


def test_large_weights_of_the_final_norm_keep_the_offset() -> None:
    model = _tiny()
    with torch.no_grad():
        model.model.norm.weight.copy_(_large_mean()[: model.model.norm.weight.numel()])
    assert read(HFModel(model)).norm_offset == 1.0


def test_every_layer_has_the_same_activation() -> None:
    model = _tiny("llama")
    model.model.layers[1].mlp.act_fn = nn.GELU(approximate="tanh")
    with pytest.raises(NativeUnavailableError, match="activation of its layers"):
        read(HFModel(model))


class OtherEpsilon(LlamaRMSNorm):
    """Has an epsilon that it does not use."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        mean: Tensor = hidden_states.float().pow(2).mean(-1, keepdim=True)
        return self.weight * hidden_states * torch.rsqrt(mean + 3 * self.variance_epsilon)


def test_an_epsilon_that_is_not_used_is_refused() -> None:
    with pytest.raises(NativeUnavailableError, match="neither a root-mean-square norm"):
        norm_facts(OtherEpsilon(SIZE, eps=1e-6))
