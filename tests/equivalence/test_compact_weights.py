"""Weights in bfloat16 are kept in 12 bits, and every bit of them and of the logits is that of 16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from draftree.models.native import decoder, packing
from draftree.models.native.model import NativeModel
from draftree.models.torch.hf import HFModel
from families import fresh
from native_builds import EACH_BUILD, built
from native_samples import FAMILIES, SIZES, in_c, lower, text
from slot_samples import at_once

pytestmark = in_c
RARE = [0.0, -0.0, 1e-40, -1e-40, 3e-9, -7e-12, 1.0, -2.0, 2.0**-60]
SHARES = {"few": 0.001, "many": 0.3}
WIDE: dict[str, Any] = {"hidden_size": 336, "intermediate_size": 352, "head_dim": 48, "tie_word_embeddings": False}


def with_rare_weights(model: Any, share: float) -> Any:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                rare = torch.tensor(RARE)[torch.randint(len(RARE), weight.shape, generator=generator)]
                weight.copy_(torch.where(torch.rand(weight.shape, generator=generator) < share, rare, weight.float()))
    return model


def model_of(share: float, **others: Any) -> Any:
    return with_rare_weights(fresh("qwen2", dtype=torch.bfloat16, **(SIZES | FAMILIES["qwen2"] | WIDE | others)), share)


def packed(model: Any, most_exceptions: float, monkeypatch: pytest.MonkeyPatch) -> NativeModel:
    monkeypatch.setattr(packing, "MOST_EXCEPTIONS", most_exceptions)
    return lower(HFModel(model))


def is_compact(model: NativeModel) -> bool:
    return model.decoder.packed.decoder.head.blocks is not None


def bits(weight: Tensor) -> Tensor:
    return weight.contiguous().view(torch.int16)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("vocab", [401, 432])  # blocks of 16 in pairs, and one alone
def test_every_bit_of_a_weight_comes_back(share: str, vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(SHARES[share], vocab_size=vocab)
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    lm = packed(model, 1.0, monkeypatch)
    assert is_compact(lm) is lm.decoder.library.keeps_compact
    assert torch.equal(bits(lm.decoder.output_head()), bits(weights["lm_head.weight"]))
    down, _ = lm.decoder.product_weight(1, "down")
    assert torch.equal(bits(down), bits(weights["model.layers.1.mlp.down_proj.weight"]))
    both, _ = lm.decoder.product_weight(0, "gate_up")
    gate, up = both.view(-1, 2, 16, both.shape[1]).transpose(0, 1).reshape(2, -1, both.shape[1])
    assert torch.equal(bits(gate), bits(weights["model.layers.0.mlp.gate_proj.weight"]))
    assert torch.equal(bits(up), bits(weights["model.layers.0.mlp.up_proj.weight"]))


@pytest.mark.parametrize("name", EACH_BUILD)
@pytest.mark.parametrize("share", SHARES)
def test_logits_have_the_bits_of_wide_weights(share: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = built(name)
    if not library.keeps_compact:
        pytest.skip("weights in bfloat16 have 16 bits")
    monkeypatch.setattr(decoder, "library", lambda: library)
    wide = packed(model_of(SHARES[share]), -1.0, monkeypatch)
    lm = packed(model_of(SHARES[share]), 1.0, monkeypatch)
    assert is_compact(lm)
    assert not is_compact(wide)
    assert lm.footprint.weights < wide.footprint.weights or share == "many"
    for rows in (1, 2, 4, 5, 7, 12, 13, 25, 40, 97, 130):
        assert torch.equal(at_once(lm, text(rows)), at_once(wide, text(rows))), rows


def test_weights_with_many_exponents_stay_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = packed(model_of(0.1), packing.MOST_EXCEPTIONS, monkeypatch)
    assert not is_compact(lm)
    wide = packed(model_of(0.1), -1.0, monkeypatch)
    assert torch.equal(at_once(lm, text(9)), at_once(wide, text(9)))


def test_a_tied_embedding_is_read_from_the_compact_head(monkeypatch: pytest.MonkeyPatch) -> None:
    others = {"tie_word_embeddings": True, "vocab_size": 401}
    lm, wide = (packed(model_of(0.3, **others), most, monkeypatch) for most in (1.0, -1.0))
    assert is_compact(lm) is lm.decoder.library.keeps_compact
    assert torch.equal(bits(lm.decoder.input_embedding()), bits(wide.decoder.input_embedding()))
    assert torch.equal(at_once(lm, text(30)), at_once(wide, text(30)))
