"""Layers of every kind run natively as in transformers, or are refused with a reason.

Experts, parallel sublayers, caps and sinks; biases, norms with a mean, perceptrons without a gate, learned positions;
neighbours that rotate together, layers without rotation, and norms of all heads.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from draftree.core.errors import UnsupportedModelError
from draftree.models.base import Extend, Pass
from draftree.models.native import decoder
from draftree.models.native.blueprint import GELU, GELU_TANH, MAX_EXPERTS, QUICK_GELU, RELU, SILU
from draftree.models.native.build import NativeUnavailableError
from draftree.models.native.decoder import NativeDecoder
from draftree.models.native.describe import facts_of, plan_lowering, plan_model
from draftree.models.native.model import NativeModel, UnpackedWeights
from draftree.models.native.shares import TeamMemory, divide
from draftree.models.native.weights import ModelWeights
from draftree.models.torch.hf import HFModel
from families import fresh
from native_builds import EACH_BUILD, built
from native_samples import DTYPES, FAMILIES, LATENT_EXPERTS, QUANTIZED, SIZES, in_c, lower, lowered, native, text
from slot_samples import alone, at_once, filled

pytestmark = in_c

PARALLEL: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "parallel": [("gpt_neox", {}), ("phi", {}), ("stablelm", {"use_parallel_residual": True})],
    "one after the other": [("gpt_neox", {"use_parallel_residual": False}), ("stablelm", {}), ("starcoder2", {})],
}
ACTIVATIONS = {"gelu": GELU, "gelu_new": GELU_TANH, "quick_gelu": QUICK_GELU, "relu": RELU, "silu": SILU}
AFTER: dict[str, Any] = {"do_layer_norm_before": False}
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


@pytest.mark.parametrize("name", EACH_BUILD)
@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("family", ["gpt2", "qwen2_moe", "gpt_oss"])
def test_every_set_of_instructions_agrees(family: str, kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = built(name)
    monkeypatch.setattr(decoder, "library", lambda: library)
    lm, tokens = lowered(family, kind), text(70)
    rows = alone(lm, tokens)
    assert torch.equal(at_once(lm, tokens), rows)
    if kind == "float32":
        require_near(rows, logits_of(peer_of(family), tokens))
    elif family == "gpt2":
        wanted = alone(native(family, kind), tokens)
        assert (rows - wanted).pow(2).mean().sqrt() < 0.01 * (rows.max() - rows.min())


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
    require_near(at_once(lm, tokens), logits_of(peer_of("qwen3_moe", norm_topk_prob=is_renormalized), tokens))


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


def test_gates_are_clamped() -> None:
    lm, tokens = lowered("gpt_oss", swiglu_limit=0.5), text(40)
    require_near(at_once(lm, tokens), logits_of(peer_of("gpt_oss", swiglu_limit=0.5), tokens))


ROUTED: dict[str, Any] = {"n_routed_experts": 6, "num_local_experts": 6, "num_experts_per_tok": 3, "n_group": 1}
GROUPED: dict[str, Any] = {"num_local_experts": 16, "num_experts": 16, "n_group": 4, "topk_group": 2}
ROUTERS: dict[str, dict[str, Any]] = {
    "glm4_moe": {**ROUTED, "topk_group": 1, "moe_intermediate_size": 32, "partial_rotary_factor": 0.5},
    "dots1": {**ROUTED, "topk_group": 1, "moe_intermediate_size": 32, "n_shared_experts": 2},
    "granitemoe": ROUTED,
    "granitemoeshared": {**ROUTED, "shared_intermediate_size": 64},
    "minimax_m2": ROUTED,
    "deepseek_v3": LATENT_EXPERTS | GROUPED,
    "deepseek_v2": LATENT_EXPERTS | GROUPED | {"topk_method": "group_limited_greedy"},
}


@pytest.mark.parametrize("family", ROUTERS)
def test_routers_and_shared_experts_of_other_kinds(family: str) -> None:
    peer, tokens = fresh(family, **(SIZES | ROUTERS[family])), text(60)
    wanted = logits_of(peer, tokens)
    lm = lower(HFModel(peer))
    assert lm.blueprint.has_experts
    require_near(at_once(lm, tokens), wanted)
    assert torch.equal(at_once(lm, tokens), alone(lm, tokens))


def test_a_router_of_another_formula_is_refused() -> None:
    model = HFModel(peer_of("mixtral"))

    def by_squares(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = hidden @ model.model.model.layers[0].mlp.gate.weight.T
        scores, indices = logits.sigmoid().square().topk(2, dim=-1)
        return logits, scores, indices

    model.model.model.layers[0].mlp.gate.forward = by_squares
    with pytest.raises(NativeUnavailableError, match="chooses or weighs experts in another way"):
        plan_lowering(model)


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("others", [{"rope_interleave": False}, {"attention_bias": True, "kv_lora_rank": 80}])
def test_latent_attention_of_other_forms(others: dict[str, Any], kind: str) -> None:
    lm, tokens = lowered("deepseek_v3", kind, **others), text(70)
    if kind == "float32":
        require_near(at_once(lm, tokens), logits_of(peer_of("deepseek_v3", **others), tokens))
    assert torch.equal(at_once(lm, tokens), alone(lm, tokens))


def test_values_of_latent_attention_are_no_longer_than_keys() -> None:
    with pytest.raises(NativeUnavailableError, match="no longer than keys"):
        plan_lowering(HFModel(peer_of("deepseek_v3", v_head_dim=64)))


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


def test_queries_are_scaled_by_their_position() -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "original_max_position_embeddings": 20}
    model, tokens = fresh("ministral3", **SIZES, rope_parameters={**rope, "llama_4_scaling_beta": 0.5}), text(70)
    wanted = logits_of(model, tokens)
    lm = lower(HFModel(model))
    require_near(at_once(lm, tokens), wanted)
    assert torch.equal(at_once(lm, tokens), alone(lm, tokens))


def test_norms_of_single_heads_with_mean_and_bias() -> None:
    model, tokens = peer_of("phi", qk_layernorm=True), text(60)
    lm = lower(HFModel(model))
    require_near(at_once(lm, tokens), logits_of(peer_of("phi", qk_layernorm=True), tokens))


@pytest.mark.parametrize(
    ("family", "others", "reason"),
    [
        ("opt", AFTER, "norms after its sublayers is not divided"),
        ("minicpm3", {}, "latent attention"),
    ],
)
def test_models_of_these_layers_are_not_divided(family: str, others: dict[str, Any], reason: str) -> None:
    plan = plan_lowering(HFModel(peer_of(family, **others)))
    with pytest.raises(NativeUnavailableError, match=reason):
        divide(plan, 0, 2, TeamMemory.create())


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
    assert lm.footprint.weights >= (1.5 if lm.decoder.library.keeps_compact else 2) * weights
    assert lm.footprint.row > native("mistral", "bfloat16").footprint.row


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_is_that_of_transformers(name: str) -> None:
    lm, tokens = lowered("gpt2", activation_function=name), text(60)
    assert lm.blueprint.activation == ACTIVATIONS[name]
    require_near(at_once(lm, tokens), logits_of(peer_of("gpt2", activation_function=name), tokens))


@pytest.mark.parametrize("kind", DTYPES)
def test_norms_after_the_sublayers(kind: str) -> None:
    lm, tokens = lowered("opt", kind, **AFTER), text(100)
    found = at_once(lm, tokens)
    assert lm.blueprint.is_post_norm
    require_near(found, logits_of(peer_of("opt", **AFTER), tokens), kind)
    assert torch.equal(found, alone(lm, tokens))


def test_hidden_states_of_a_model_with_norms_after_its_sublayers_are_refused() -> None:
    lm = lowered("opt", **AFTER)
    slot = filled(lm, text(3))
    with pytest.raises(UnsupportedModelError, match="norms after its sublayers"):
        lm.run(Pass([Extend(slot, [5], [-1])], capture=(1,)))


def test_a_position_after_the_table_is_after_the_context() -> None:
    assert lowered("opt", max_position_embeddings=37).max_length == 37
    assert lowered("gpt2", max_position_embeddings=37).max_length == 37


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_a_copy_with_fewer_bits_is_the_model_with_fewer_bits(family: str) -> None:
    target, tokens = native(family, "bfloat16"), text(40)
    copy: Any = target.quantized_copy("int8")
    twin = NativeModel(copy._decoder._blueprint, copy._decoder)
    assert torch.equal(at_once(twin, tokens), at_once(native(family, "int8"), tokens))


def test_a_projection_of_the_embedding_is_refused() -> None:
    model = peer_of("opt", word_embed_proj_dim=32)
    with pytest.raises(NativeUnavailableError, match="unknown use"):
        plan_lowering(HFModel(model))


def test_two_heads_are_not_taken_for_two_rows() -> None:
    others = {"num_attention_heads": 2, "num_key_value_heads": 1}
    lm, tokens = lowered("exaone4", **others), text(60)
    require_near(at_once(lm, tokens), logits_of(peer_of("exaone4", **others), tokens))


def test_neighbours_that_rotate_behind_norms_of_heads_are_refused() -> None:
    with pytest.raises(NativeUnavailableError, match="behind norms of heads"):
        plan_model(peer_of("cohere", use_qk_norm=True))


@pytest.mark.parametrize("family", ["cohere2", "glm4", "olmo2"])
def test_unpacked_weights_make_the_same_model(family: str) -> None:
    ours, tokens = native(family, "bfloat16"), text(40)
    again = NativeModel(ours.blueprint.as_unpacked(), UnpackedWeights(ours.blueprint, ours.decoder))
    assert torch.equal(at_once(again, tokens), alone(ours, tokens))
