"""Experts, parallel sublayers, caps and sinks run in C, or are refused with a reason."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from draftree.core.errors import UnsupportedModelError
from draftree.models.base import Extend, Pass
from draftree.models.native import decoder
from draftree.models.native.blueprint import CLAMPED_SILU, MAX_EXPERTS
from draftree.models.native.build import NativeUnavailableError
from draftree.models.native.decoder import NativeDecoder
from draftree.models.native.facts import facts_of
from draftree.models.native.lowering import plan_lowering
from draftree.models.native.model import NativeModel
from draftree.models.native.shares import TeamMemory, divide
from draftree.models.native.weights import ModelWeights
from draftree.models.torch.hf import HFModel
from families import fresh
from native_builds import BUILDS, built
from native_samples import DTYPES, FAMILIES, QUANTIZED, SIZES, lower, lowered, native, text
from slot_samples import alone, at_once, filled

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="passes in C need a C compiler")

PARALLEL: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "parallel": [("gpt_neox", {}), ("phi", {}), ("stablelm", {"use_parallel_residual": True})],
    "one after the other": [("gpt_neox", {"use_parallel_residual": False}), ("stablelm", {}), ("starcoder2", {})],
}
LIMITS = {"float32": 2e-5, "bfloat16": 0.03, "int8": 0.08, "int4": 0.15}


def peer_of(family: str, **others: Any) -> Any:
    return fresh(family, **(SIZES | FAMILIES[family] | others))


def logits_of(model: Any, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        found: Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()
    return found


def require_near(found: Tensor, wanted: Tensor, kind: str = "float32") -> None:
    spread = wanted.max() - wanted.min()
    assert (found - wanted).pow(2).mean().sqrt() < LIMITS[kind] * spread


@pytest.mark.parametrize("name", PARALLEL)
def test_what_a_perceptron_reads_is_found_by_running_the_layer(name: str) -> None:
    for family, others in PARALLEL[name]:
        lm, tokens = lowered(family, **others), text(50)
        assert lm.blueprint.is_parallel is (name == "parallel")
        require_near(at_once(lm, tokens), logits_of(peer_of(family, **others), tokens))


@pytest.mark.parametrize("kind", DTYPES)
def test_a_model_of_parallel_layers_runs_without_its_attention(kind: str) -> None:
    lm = lowered("gpt_neox", kind)
    slot = filled(lm, text(9))
    whole = lm.run(Pass([Extend(slot, [5, 6], [-1, 0])])).logits.tensor()
    lm.commit(slot, ())
    assert torch.equal(whole, lm.run(Pass([Extend(slot, [5, 6], [-1, 0])])).logits.tensor())


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss"])
def test_experts_in_every_set_of_instructions(
    family: str, kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = built(name)
    monkeypatch.setattr(decoder, "library", lambda: library)
    lm, tokens = lowered(family, kind), text(70)
    rows = alone(lm, tokens)
    assert torch.equal(at_once(lm, tokens), rows)
    if kind == "float32":
        require_near(rows, logits_of(peer_of(family), tokens))


@pytest.mark.parametrize("threads", [1, 2, 9])
def test_threads_change_no_bit_of_experts(threads: int) -> None:
    """Threads that join late go through the phases of layers with other numbers of pieces."""
    lm, before = lowered("qwen3_moe", "bfloat16", num_hidden_layers=6), torch.get_num_threads()
    wanted = alone(lm, text(20))
    try:
        torch.set_num_threads(threads)
        assert all(torch.equal(at_once(lm, text(20)), wanted) for _ in range(10))
    finally:
        torch.set_num_threads(before)


def test_layers_with_and_without_experts_have_several_sizes() -> None:
    others = {"mlp_only_layers": [0], "intermediate_size": 128}
    lm, tokens = lowered("qwen3_moe", **others), text(60)
    assert [layer.experts is None for layer in lm.blueprint.layers] == [True, False]
    assert lm.blueprint.mlp == 128
    require_near(at_once(lm, tokens), logits_of(peer_of("qwen3_moe", **others), tokens))


@pytest.mark.parametrize("is_renormalized", [True, False])
def test_the_weights_of_experts_are_found_by_values(is_renormalized: bool) -> None:
    lm, tokens = lowered("qwen3_moe", norm_topk_prob=is_renormalized), text(60)
    experts = lm.blueprint.layers[0].experts
    assert experts is not None
    assert (experts.count, experts.chosen, experts.is_renormalized) == (6, 3, is_renormalized)
    require_near(at_once(lm, tokens), logits_of(peer_of("qwen3_moe", norm_topk_prob=is_renormalized), tokens))


def test_a_shared_expert_has_a_gate() -> None:
    experts = native("qwen2_moe").blueprint.layers[0].experts
    assert experts is not None
    assert experts.shared_gate is not None
    assert experts.shared_down is not None
    assert (experts.down.inputs, experts.shared_down.inputs, experts.widest) == (32, 64, 64)


def test_of_equal_experts_the_first_are_chosen() -> None:
    found = []
    for others in (1.0, 0.0):
        model = peer_of("mixtral")
        with torch.no_grad():
            for layer in model.model.layers:
                layer.mlp.gate.weight.zero_()
                layer.mlp.experts.gate_up_proj[2:] *= others
        found.append(at_once(lower(HFModel(model)), text(30)))
    assert torch.equal(*found)


def test_clamped_gates_and_sinks() -> None:
    plan = native("gpt_oss").blueprint
    assert plan.activation == CLAMPED_SILU
    assert plan.gate_limit == 7.0
    assert all(layer.sinks is not None for layer in plan.layers)
    lm, tokens = lowered("gpt_oss", swiglu_limit=0.5), text(40)
    require_near(at_once(lm, tokens), logits_of(peer_of("gpt_oss", swiglu_limit=0.5), tokens))


def test_caps_are_those_of_transformers() -> None:
    plan = native("gemma2").blueprint
    assert plan.logit_cap == 3.0
    assert [layer.score_cap for layer in plan.layers] == [2.0, 2.0]
    assert [layer.window for layer in plan.layers] == [37, None]
    assert float(alone(native("gemma2"), text(20)).abs().max()) <= 3.0


def test_a_router_of_another_formula_is_refused() -> None:
    model = HFModel(peer_of("mixtral"))

    def by_logistic(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = hidden @ model.model.model.layers[0].mlp.gate.weight.T
        scores, indices = logits.sigmoid().topk(2, dim=-1)
        return logits, scores, indices

    model.model.model.layers[0].mlp.gate.forward = by_logistic
    with pytest.raises(NativeUnavailableError, match="chooses or weighs experts in another way"):
        plan_lowering(model)


def test_too_many_experts_are_refused() -> None:
    model = peer_of("mixtral", num_local_experts=MAX_EXPERTS + 1, num_experts=MAX_EXPERTS + 1)
    with pytest.raises(NativeUnavailableError, match=f"of {MAX_EXPERTS} at most"):
        plan_lowering(HFModel(model))


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "qwen3_moe"])
def test_weights_of_float16_keep_their_values(family: str) -> None:
    model, tokens = peer_of(family, dtype=torch.float16), text(60)
    lm = lower(HFModel(model))
    assert lm.blueprint.dtype == "float32"
    require_near(at_once(lm, tokens), logits_of(peer_of(family, dtype=torch.float16).float(), tokens))


def test_norms_of_single_heads_are_refused() -> None:
    with pytest.raises(NativeUnavailableError, match="unknown use"):
        plan_lowering(HFModel(peer_of("phi", qk_layernorm=True)))


@pytest.mark.parametrize("family", ["mixtral", "gpt_neox"])
def test_such_models_are_not_divided(family: str) -> None:
    with pytest.raises(NativeUnavailableError, match="experts, or weights in another order"):
        divide(native(family).blueprint, 0, 2, TeamMemory(-1))


FALCON: dict[str, dict[str, Any]] = {
    "one key head, parallel": {"multi_query": True, "parallel_attn": True},
    "all key heads": {"multi_query": False, "parallel_attn": False, "bias": True},
    "groups, two norms": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "groups, one norm": {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
}


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("name", FALCON)
def test_models_with_an_attention_of_their_own(name: str, kind: str) -> None:
    changes: dict[str, Any] = {"alibi": False, "new_decoder_architecture": False, "ffn_hidden_size": 96}
    changes |= {key: size for key, size in SIZES.items() if key != "head_dim"} | FALCON[name]
    tokens, wanted = text(80), logits_of(fresh("falcon", **changes), text(80))
    model = fresh("falcon", dtype=DTYPES[kind], **changes)
    plan = plan_lowering(facts_of(model))
    lm = NativeModel(plan, ModelWeights(model), quantization=kind if kind in QUANTIZED else None)
    found = at_once(lm, tokens)
    require_near(found, wanted, kind)
    assert torch.equal(found, alone(lm, tokens))


def test_scores_that_depend_on_distances_are_refused() -> None:
    with pytest.raises(NativeUnavailableError, match="adds distances to scores"):
        facts_of(fresh("falcon-alibi"))


def test_experts_have_no_copy_with_fewer_bits() -> None:
    with pytest.raises(UnsupportedModelError, match="no copy with fewer bits"):
        native("mixtral").quantized_copy("int8")


def test_a_copy_with_fewer_bits_of_fused_heads() -> None:
    lm = lowered("gpt_neox")
    copy = lm.quantized_copy("int8")
    slot = filled(lm, text(30))
    own = lm.run(Pass([Extend(slot, [5], [-1])])).logits.tensor()
    lm.commit(slot, ())
    found = lm.run_with(copy._decoder, Pass([Extend(slot, [5], [-1])])).logits.tensor()  # type: ignore[attr-defined]
    require_near(found, own, "int8")
    assert not torch.equal(found, own)


def test_a_model_with_experts_keeps_the_memory_of_its_weights_in_mind() -> None:
    lm, model = native("mixtral", "bfloat16"), peer_of("mixtral")
    weights = sum(parameter.numel() for parameter in model.parameters() if isinstance(parameter, nn.Parameter))
    assert isinstance(lm.decoder, NativeDecoder)
    assert lm.footprint.weights >= 2 * weights
    assert lm.footprint.row > native("mistral", "bfloat16").footprint.row
