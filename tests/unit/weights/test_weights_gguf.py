"""GGUF files become plain folders that compute the same logits; damaged ones are refused in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from draftree.core.errors import ModelLoadError, UnsupportedModelError
from draftree.weights.cache import silent
from draftree.weights.convert_gguf import convert_gguf
from draftree.weights.gguf_file import BLOCKS, GgufFile
from weights_samples import PIECES, random_weights, write_gguf

SIZES: dict[str, Any] = {
    "vocab_size": len(PIECES),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
WINDOWED = {
    **SIZES,
    "num_hidden_layers": 7,
    "sliding_window": 4,
    "query_pre_attn_scalar": 16,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
        "sliding_attention": PLAIN_ROPE,
    },
}
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {**SIZES, "rope_parameters": PLAIN_ROPE | {"rope_theta": 5e5}}, {"rope_freq_base": 5e5}),
    "llama-tied": ("llama", {**SIZES, "tie_word_embeddings": True}, {}),
    "llama-biased": ("llama", {**SIZES, "attention_bias": True}, {}),
    "qwen2": ("qwen2", SIZES, {}),
    "qwen3": ("qwen3", SIZES | {"head_dim": 24}, {}),
    "gemma3": (
        "gemma3_text",
        WINDOWED,
        {"rope_freq_base": 1e6, "sliding_window": 4, "rope_scaling_type": gguf.RopeScalingType.LINEAR,
         "rope_scaling_factor": 8.0},
    ),
}  # fmt: skip


def family_model(family: str) -> PreTrainedModel:
    model_type, settings, _ = FAMILIES[family]
    return random_weights(AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings)), seed=5)


def architecture(family: str) -> str:
    return family.split("-")[0]


def logits(model: PreTrainedModel, length: int = 20) -> torch.Tensor:
    ids = torch.randint(3, len(PIECES), (1, length), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(ids).logits[0]


def converted(source: Path, folder: Path, dtype: Any = "float32") -> Path:
    folder.mkdir()
    convert_gguf(source, folder, dtype=dtype, progress=silent)
    return folder


@pytest.fixture(scope="module")
def llama_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "llama.gguf"
    write_gguf(family_model("llama"), path, "llama", rope_freq_base=5e5)
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_comes_back_from_gguf(family: str, tmp_path: Path) -> None:
    model = family_model(family)
    write_gguf(model, tmp_path / "model.gguf", architecture(family), **FAMILIES[family][2])
    folder = converted(tmp_path / "model.gguf", tmp_path / "folder")
    back = AutoModelForCausalLM.from_pretrained(folder)
    assert type(back) is type(model)
    torch.testing.assert_close(logits(back), logits(model), atol=1e-4, rtol=1e-4)


def test_a_sentencepiece_vocabulary_comes_with_it(tmp_path: Path, llama_file: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted(llama_file, tmp_path / "folder"))
    assert tokenizer("the</s>").input_ids == [1, PIECES.index("▁the"), 2]
    assert [tokenizer.convert_ids_to_tokens(index) for index in range(len(PIECES))] == PIECES
    assert tokenizer.model_max_length == 128


@pytest.mark.parametrize(
    ("family", "cutting", "expected"),
    [
        ("llama", "smollm", ["1", "2", "ab", "Ġ", "1", "<|end|>"]),
        ("llama", "gpt-2", ["12", "ab", "Ġ1", "<|end|>"]),
        ("qwen3", "qwen2", ["1", "2", "ab", "Ġ", "1", "<|end|>"]),
        ("llama", "llama-bpe", ["12", "ab", "Ġ", "1", "<|end|>"]),
    ],
)
def test_a_byte_level_vocabulary_cuts_text_by_its_own_rule(
    family: str, cutting: str, expected: list[str], tmp_path: Path
) -> None:
    write_gguf(family_model(family), tmp_path / "model.gguf", family, byte_level=cutting)
    tokenizer = AutoTokenizer.from_pretrained(converted(tmp_path / "model.gguf", tmp_path / "folder"))
    ids = tokenizer("12ab 1<|end|>").input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == expected
    assert tokenizer.decode(ids) == "12ab 1<|end|>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "12ab 1"
    assert tokenizer.eos_token == "<|end|>"
    assert len(tokenizer) == len(PIECES)


def test_an_unknown_tokenizer_is_refused(tmp_path: Path) -> None:
    write_gguf(family_model("llama"), tmp_path / "model.gguf", "llama", tokenizer_model="rwkv")
    with pytest.raises(UnsupportedModelError, match=r"of the kind 'rwkv' and splits text by the rule 'None'"):
        converted(tmp_path / "model.gguf", tmp_path / "folder")


def test_a_factor_per_frequency_is_kept(tmp_path: Path, llama_file: Path) -> None:
    model = family_model("llama")
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    path = tmp_path / "stretched.gguf"

    def add_rope_freqs(writer: gguf.GGUFWriter, values: Any) -> None:
        writer.add_tensor("rope_freqs.weight", values)

    gguf.GGUFWriter.add_rope_freqs = add_rope_freqs
    try:
        write_gguf(model, path, "llama", rope_freq_base=5e5, rope_freqs=factors)
    finally:
        del gguf.GGUFWriter.add_rope_freqs
    back = AutoModelForCausalLM.from_pretrained(converted(path, tmp_path / "folder"))
    model.model.rotary_emb.inv_freq /= torch.from_numpy(factors)
    torch.testing.assert_close(logits(back), logits(model), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q5_0", "BF16", "F16"])
def test_quantized_tensors_are_dequantized_to_their_values(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftree.weights.gguf_file.CHUNK_VALUES", 256)  # four of the six rows
    quantisation = gguf.GGMLQuantizationType[kind]
    values = np.random.default_rng(0).normal(size=(6, 64)).astype(np.float32)
    packed = gguf.quants.quantize(values, quantisation)
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tensor("matrix", packed, raw_dtype=None if kind == "F16" else quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read = GgufFile(tmp_path / "one.gguf").read("matrix")
    np.testing.assert_array_equal(read, gguf.quants.dequantize(packed, quantisation))
    assert np.abs(read - values).max() < 0.5


@pytest.mark.parametrize(("dtype", "code"), [("bfloat16", torch.bfloat16), ("float16", torch.float16)])
def test_weights_are_rounded_to_the_requested_type(
    dtype: str, code: torch.dtype, tmp_path: Path, llama_file: Path
) -> None:
    back = AutoModelForCausalLM.from_pretrained(converted(llama_file, tmp_path / "folder", dtype))
    original = family_model("llama").state_dict()
    assert back.dtype == code
    for name, values in back.state_dict().items():
        assert torch.equal(values, original[name].to(code)), name


def test_the_natural_type_is_the_one_of_the_matrices(llama_file: Path) -> None:
    file = GgufFile(llama_file)
    assert file.natural_dtype == "float32"
    assert file.unpacked_bytes == 4 * sum(parameter.numel() for parameter in family_model("llama").parameters())


@pytest.mark.parametrize(
    ("architecture", "keys", "why"),
    [
        ("mamba", {}, "architecture 'mamba', which cannot be unpacked from GGUF"),
        ("llama", {"expert_count": 4}, "mixture of experts"),
        ("llama", {"key_value": ("split.count", 3, gguf.GGUFValueType.UINT16)}, "split into 3 files"),
        ("llama", {"rope_dimension_count": 8}, "rotates only part of each head"),
        ("llama", {"rope_scaling_type": gguf.RopeScalingType.YARN}, "scales positions by the rule 'yarn'"),
        ("llama", {"pad_token_id": 9999}, r"tokenizer\.ggml\.padding_token_id is 9999, and its vocabulary has"),
        ("llama", {"eot_token_id": 9999}, r"tokenizer\.ggml\.eot_token_id is 9999"),
        ("llama", {"byte_level": "gpt-2", "add_bos_token": True}, r"begin with a bos token, and .*bos_token_id"),
        ("qwen2", {}, r"lacks the tensor 'blk\.0\.attn_q\.bias'"),
    ],
)
def test_unsupported_files_are_refused(architecture: str, keys: dict[str, Any], why: str, tmp_path: Path) -> None:
    model = family_model("llama")
    path = tmp_path / "model.gguf"
    if architecture == "mamba":
        model.named_parameters = lambda: iter(())  # type: ignore[method-assign, assignment]
    write_gguf(model, path, architecture, **keys)
    with pytest.raises((UnsupportedModelError, ModelLoadError), match=why):
        converted(path, tmp_path / "folder")


def test_a_tensor_without_a_place_is_refused(tmp_path: Path) -> None:
    write_gguf(family_model("qwen3"), tmp_path / "model.gguf", "qwen3")
    content = (tmp_path / "model.gguf").read_bytes()
    # Same length, so that the rest of the file stays as it is.
    (tmp_path / "model.gguf").write_bytes(content.replace(b"blk.1.attn_q_norm", b"blk.1.attn_x_norm"))
    with pytest.raises((UnsupportedModelError, ModelLoadError), match=r"attn_q_norm"):
        converted(tmp_path / "model.gguf", tmp_path / "folder")


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    model = family_model("llama-tied")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = float("nan")
    write_gguf(model, tmp_path / "model.gguf", "llama")
    with pytest.raises(ModelLoadError, match=r"'blk\.1\.ffn_up\.weight' has values that are not finite"):
        converted(tmp_path / "model.gguf", tmp_path / "folder")


def test_sizes_of_blocks_are_those_of_the_package() -> None:
    for number, (name, *sizes) in BLOCKS.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (name, tuple(sizes)) == (kind.name, gguf.GGML_QUANT_SIZES[kind])
