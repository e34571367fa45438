"""A head in another project's layout that always drafts changes no text, in batches and trees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from block_samples import ALL, config_of, random_head
from draftree import LLM, SamplingParams
from draftree.heads.folders import write_head
from draftree.heads.layouts.mtp import layer_config
from draftree.heads.layouts.values import Values
from draftree.heads.mtp import MtpHead
from draftree.heads.vocabulary import DraftVocabulary
from families import VOCAB_SIZE, drafter_folder, prompts

RAGGED = prompts(3, 17, 9)
WIDTH = 64
SIZES: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": 96, "head_dim": 16, "num_hidden_layers": 6}
TREES = ["", ",tree=best-9", ",tree=1-2-2,k=3"]


def head_folder(kind: str, where: Path, **others: Any) -> Path:
    sizes: dict[str, Any] = {"target_hidden": WIDTH, "hidden": WIDTH, "vocab_size": VOCAB_SIZE, "max_length": 128}
    full = kind in ("dflash", "medusa")
    head = random_head(config_of(ALL[kind], **sizes, draft_vocab_size=VOCAB_SIZE if full else 60, **others))
    folder = where / "-".join([kind, *map(str, others.values())])
    if kind != "medusa":
        write_head(head, folder)
        return folder
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 3, "medusa_num_layers": 2}))
    tensors = {name.removeprefix("medusa_head."): part.clone() for name, part in head.state_dict().items()}
    torch.save(tensors, folder / "medusa_lm_head.pt")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return drafter_folder("llama", tmp_path_factory.mktemp("models"), distance=0.0, **SIZES)


def generated(llm: LLM, temperature: float, **more: Any) -> list[tuple[int, ...]]:
    params = SamplingParams(max_tokens=24, temperature=temperature, seed=11, **more)
    return [done.token_ids for done in llm.generate(RAGGED, params)]


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("kind", ["dflash", "dspark", "peagle", "medusa"])
def test_texts_are_those_of_plain_decoding(model: Path, kind: str, tree: str, tmp_path: Path) -> None:
    plain = LLM(model, dtype="float32")
    fast = LLM(model, f"head:{head_folder(kind, tmp_path)}{tree}", plan="fixed", dtype="float32")
    for temperature in (0.0, 1.0):
        assert generated(fast, temperature) == generated(plain, temperature)
    fast.engine.check_integrity()
    done = fast.generate(RAGGED[0], SamplingParams(max_tokens=24, temperature=0, seed=1))[0]
    assert done.stats.draft_tokens > 20


def test_several_texts_of_a_prompt_and_cached_prefixes(model: Path, tmp_path: Path) -> None:
    folder = head_folder("dspark", tmp_path, markov_type="rnn")
    plain = LLM(model, dtype="float32", prefix_cache_size=0)
    fast = LLM(model, f"head:{folder},tree=best-9", plan="fixed", dtype="float32", prefill_chunk_size=8)
    for text in (RAGGED[1], RAGGED[1][:12], [*RAGGED[1][:10], 3, 4], RAGGED[1]):
        params = SamplingParams(max_tokens=16, temperature=1.0, seed=5, n=2)
        found, expected = fast.generate(text, params), plain.generate(text, params)
        assert [done.token_ids for done in found] == [done.token_ids for done in expected]
        fast.engine.check_integrity()


GLM: dict[str, Any] = {
    "model_type": "glm4_moe", "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48,
    "moe_intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "max_position_embeddings": 128, "eos_token_id": None,
    "bos_token_id": 1, "pad_token_id": 0, "use_qk_norm": True,
}  # fmt: skip


LATENT: dict[str, Any] = {
    "model_type": "deepseek_v3", "num_key_value_heads": 4, "n_group": 2, "kv_lora_rank": 8, "q_lora_rank": 12,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
}  # fmt: skip
DEEPSEEK = {name: value for name, value in {**GLM, **LATENT}.items() if name not in ("head_dim", "use_qk_norm")}
TARGETS = {"glm": GLM, "deepseek": DEEPSEEK}


def target_with_mtp(values: dict[str, Any], folder: Path) -> Path:
    """A random target whose folder also has an MTP layer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    known = dict(values)
    config: Any = AutoConfig.for_model(known.pop("model_type"), **known)
    loader: Any = AutoModelForCausalLM
    torch.manual_seed(5)
    loader.from_config(config).save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    layer = Values(json.loads((folder / "config.json").read_text()))
    head = MtpHead(layer_config(layer, depth=1, target_name=""), DraftVocabulary.full(VOCAB_SIZE))
    for name, part in head.state_dict().items():
        theirs = name.replace("block.", "", 1) if name.startswith("block.") else name
        theirs = "shared_head.norm.weight" if theirs == "norm.weight" else theirs
        spread = torch.randn(part.shape) * 0.3
        stored[f"model.layers.2.{theirs}"] = 1 + spread if "norm" in name else spread
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("tree", ["", ",k=3", ",tree=best-9,k=3"])
@pytest.mark.parametrize("name", TARGETS)
def test_the_mtp_layer_of_a_target_drafts_for_it(name: str, tree: str, tmp_path: Path) -> None:
    folder = target_with_mtp(TARGETS[name], tmp_path / "target")
    plain, fast = LLM(folder, dtype="float32"), LLM(folder, f"head:{folder}{tree}", plan="fixed", dtype="float32")
    for temperature in (0.0, 1.0):
        assert generated(fast, temperature) == generated(plain, temperature)
    assert fast.generate(RAGGED[0], SamplingParams(max_tokens=24, temperature=0))[0].stats.draft_tokens > 10
    fast.engine.check_integrity()
