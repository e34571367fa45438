"""MTP layers of DeepSeek, GLM, Qwen3-Next and Qwen3.5, read from targets' folders, against transformers' `MtpModel`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftree.core.errors import ModelLoadError
from draftree.heads.base import TargetParts
from draftree.heads.folders import check_head, read_config, read_head
from draftree.heads.mtp import MtpHead
from draftree.heads.passes import RowJob, TorchPasses
from draftree.models.base import EmbeddingFacts
from head_samples import causal
from mtp_families import FAMILIES, VOCABULARY, WIDTH, Reference, split_experts

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 48, "moe_intermediate_size": 16,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "num_experts_per_tok": 2,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    **COMMON, "model_type": "deepseek_v3", "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}  # fmt: skip
GLM: dict[str, Any] = {
    **COMMON, "model_type": "glm4_moe", "num_key_value_heads": 2, "head_dim": 8, "n_routed_experts": 4,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "use_qk_norm": True,
}  # fmt: skip
QWEN: dict[str, Any] = {
    **COMMON, "model_type": "qwen3_next", "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4,
    "shared_expert_intermediate_size": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
    "num_hidden_layers": 2,
}  # fmt: skip
QWEN35 = {**{name: value for name, value in QWEN.items() if "expert" not in name}, "model_type": "qwen3_5_text"}
QWEN35_MOE = {**QWEN, "model_type": "qwen3_5_moe_text"}
TARGETS = {"deepseek": DEEPSEEK, "glm": GLM, "qwen3-next": QWEN, "qwen3.5": QWEN35, "qwen3.5-moe": QWEN35_MOE}


def target_and_mtp(values: dict[str, Any]) -> tuple[Any, Any]:
    """A target of transformers and its `MtpModel`, both random."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_layers import MtpModel

    known = dict(values)
    config: Any = AutoConfig.for_model(known.pop("model_type"), **known, attn_implementation="eager")
    if not hasattr(config, "num_mtp_layers"):
        config.num_mtp_layers = 1
    if getattr(config, "layer_types", None) is not None:
        config.mtp_layer_types = ["full_attention"]
    if getattr(config, "mlp_layer_types", None) is not None:
        config.mtp_mlp_layer_types = ["sparse"]
    torch.manual_seed(3)
    loader: Any = AutoModelForCausalLM
    model = loader.from_config(config).eval().requires_grad_(False)
    mtp = MtpModel(model, 1).eval().requires_grad_(False)
    for part in (model, mtp.layers):
        for name, tensor in [*part.named_parameters(), *part.named_buffers()]:
            if tensor.is_floating_point() and "inv_freq" not in name:
                tensor.copy_(torch.randn_like(tensor) * 0.2 + (1.0 if "norm" in name and tensor.dim() == 1 else 0.0))
    return model, mtp


def written(values: dict[str, Any], mtp: Any, folder: Path) -> None:
    """The MTP layer as its authors store it, beside some tensors of the target."""
    is_next = values["model_type"].startswith("qwen3")
    prefix = "mtp." if is_next else f"model.layers.{values['num_hidden_layers']}."
    names = {
        "enorm.": "pre_fc_norm_embedding." if is_next else "enorm.",
        "hnorm.": "pre_fc_norm_hidden." if is_next else "hnorm.",
        "eh_proj.": "fc." if is_next else "eh_proj.",
        "post_norm.": "norm." if is_next else "shared_head.norm.",
        "mtp_block.": "layers.0." if is_next else "",
    }
    stored: dict[str, Tensor] = {"model.embed_tokens.weight": torch.zeros(VOCABULARY, WIDTH)}
    for name, tensor in mtp.layers[0].state_dict().items():
        start = next(start for start in names if name.startswith(start))
        stored |= split_experts(prefix + names[start] + name.removeprefix(start), tensor)
    if not is_next:
        stored[f"{prefix}embed_tokens.weight"] = torch.zeros(VOCABULARY, WIDTH)
        stored[f"{prefix}shared_head.head.weight"] = torch.zeros(VOCABULARY, WIDTH)
    save_file({name: tensor.clone().contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(values))


def bound(model: Any, folder: Path) -> MtpHead:
    head = read_head(folder)
    check_head(folder)
    assert isinstance(head, MtpHead)
    embedding, output = model.get_input_embeddings().weight, model.lm_head.weight
    head.bind(TargetParts(embedding, output, EmbeddingFacts(1.0, 1.0), lambda states: states, 2))
    return head


@pytest.mark.parametrize("name", TARGETS)
def test_an_mtp_layer_computes_what_transformers_does(name: str, tmp_path: Path) -> None:
    from transformers.cache_utils import MtpCache

    model, mtp = target_and_mtp(TARGETS[name])
    written(TARGETS[name], mtp, tmp_path)
    head = bound(model, tmp_path)
    noise = torch.Generator().manual_seed(4)
    tokens, states = (
        torch.randint(VOCABULARY, (2, 7), generator=noise),
        torch.randn(2, 7, WIDTH, generator=noise),
    )
    places = torch.arange(1, 8).expand(2, -1)
    for text in range(2):
        theirs = mtp.forward_layer(
            0, states[text : text + 1], places[:1], MtpCache(config=mtp.config), input_ids=tokens[text : text + 1]
        )[0]
        ours = head.run(tokens[text], head.project(states[text][:, None]), places[0], causal)
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(head.logits(ours), mtp._project_to_logits(theirs), rtol=1e-3, atol=1e-3)
    together = head.run(tokens, head.project(states[:, :, None]), places, causal)
    torch.testing.assert_close(together[1], ours, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", TARGETS)
def test_the_configuration_names_one_feature_and_no_draft_vocabulary(name: str, tmp_path: Path) -> None:
    _, mtp = target_and_mtp(TARGETS[name])
    written(TARGETS[name], mtp, tmp_path)
    config = read_config(tmp_path)
    assert (config.kind, config.features, config.is_full, config.depth) == ("mtp", (-1,), True, 1)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_published_layer_computes_what_its_parts_do(name: str, tmp_path: Path) -> None:
    reference = Reference(FAMILIES[name])
    reference.write(tmp_path)
    head = read_head(tmp_path)
    check_head(tmp_path)
    assert isinstance(head, MtpHead)
    noise = torch.Generator().manual_seed(4)
    embedding, output = (torch.randn(VOCABULARY, WIDTH, generator=noise) for _ in range(2))
    head.bind(TargetParts(embedding, output, EmbeddingFacts(1.0, 1.0), lambda states: states, 2))
    tokens, states = torch.randint(VOCABULARY, (9,), generator=noise), torch.randn(9, WIDTH, generator=noise)
    wanted = reference(embedding[tokens], states, torch.arange(1, 10))
    passes = TorchPasses(head, torch.device("cpu"))
    slot = passes.pool.open()
    before = passes.project(states[:, None])
    # the first rows are a prefix, the others a chain
    passes.read([RowJob(slot, tokens[:6].tolist(), range(1, 7), range(-1, 5), before[:6], (5,))])
    result = passes.extend([RowJob(slot, tokens[6:].tolist(), range(7, 10), range(-1, 2), before[6:], (0, 1, 2))])
    torch.testing.assert_close(result.states, wanted[6:], rtol=1e-3, atol=1e-3)
    own = output if reference.lm_head is None else reference.lm_head.weight
    torch.testing.assert_close(result.logits.tensor(), wanted[6:] @ own.T, rtol=1e-3, atol=1e-3)


def test_missing_and_unexpected_tensors_are_named(tmp_path: Path) -> None:
    _, mtp = target_and_mtp(GLM)
    written(GLM, mtp, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    prefix = "model.layers.2."
    del stored[f"{prefix}hnorm.weight"]
    stored[f"{prefix}self_attn.extra.weight"] = torch.zeros(1)
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"missing: hnorm\.weight; unexpected: block\.self_attn\.extra\.weight"):
        read_head(tmp_path)
    del stored[f"{prefix}mlp.experts.2.up_proj.weight"]
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"mlp\.experts\.2\.up_proj\.weight"):
        read_head(tmp_path)


def test_layers_that_alone_rotate_keys_are_refused(tmp_path: Path) -> None:
    Reference(FAMILIES["mellum"]).write(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"model_type": "exaone_moe"}))
    with pytest.raises(ModelLoadError, match="rotates keys, and other layers like it do not"):
        read_config(tmp_path)
