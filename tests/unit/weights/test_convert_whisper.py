"""Whisper in CTranslate2's format: the converted folder computes what the model did; damaged files are refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken
from transformers import AutoTokenizer, WhisperConfig, WhisperForConditionalGeneration

from draftree import LLM, SamplingParams
from draftree.core.errors import ModelLoadError, UnsupportedModelError
from draftree.weights.convert_whisper import NUM_TIMESTAMPS, Ctranslate2File, convert_whisper
from text_backends import byte_level

NAMES = ("endoftext", "startoftranscript", "translate", "transcribe", "startoflm", "startofprev", "nocaptions")
SIDES = ("encoder", "decoder")


def tokenizer() -> Any:
    made = byte_level(chat_template=None)
    special = [AddedToken(f"<|{name}|>", special=True) for name in (*NAMES, "notimestamps")]
    made.add_tokens(special, special_tokens=True)
    return made


def whisper(vocab_size: int) -> Any:
    sizes = {f"{side}_{name}": size for side in SIDES for name, size in (("layers", 2), ("attention_heads", 2),
             ("ffn_dim", 24))}  # fmt: skip
    torch.manual_seed(0)
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "decoder_start_token_id": 0}
    config = WhisperConfig(vocab_size=vocab_size, d_model=16, num_mel_bins=4, max_source_positions=1500,
                           max_target_positions=20, init_std=0.5, **sizes, **ids)  # fmt: skip
    return WhisperForConditionalGeneration(config).eval()


def written(model: Any, *, kind: str = "WhisperSpec", version: int = 6) -> bytes:
    """Return a model in CTranslate2's format, float16."""
    weights = {name: value.detach().numpy() for name, value in model.state_dict().items()}
    found: dict[str, np.ndarray] = {"decoder/embeddings/weight": weights["model.decoder.embed_tokens.weight"]}

    def norm(to: str, name: str) -> None:
        found[f"{to}/gamma"], found[f"{to}/beta"] = weights[f"{name}.weight"], weights[f"{name}.bias"]

    def rows(to: str, names: list[str]) -> None:
        found[f"{to}/weight"] = np.concatenate([weights[f"{name}.weight"] for name in names])
        zeros = {name: np.zeros(weights[f"{name}.weight"].shape[0], np.float32) for name in names}
        found[f"{to}/bias"] = np.concatenate([weights.get(f"{name}.bias", zeros[name]) for name in names])

    for side in SIDES:
        here = f"model.{side}"
        found[f"{side}/num_heads"] = np.array(2, np.int16)
        found[f"{side}/position_encodings/encodings"] = weights[f"{here}.embed_positions.weight"]
        norm(f"{side}/layer_norm", f"{here}.layer_norm")
        for layer in range(2):
            to, name = f"{side}/layer_{layer}", f"{here}.layers.{layer}"
            norm(f"{to}/self_attention/layer_norm", f"{name}.self_attn_layer_norm")
            rows(f"{to}/self_attention/linear_0", [f"{name}.self_attn.{one}_proj" for one in "qkv"])
            rows(f"{to}/self_attention/linear_1", [f"{name}.self_attn.out_proj"])
            if side == "decoder":
                norm(f"{to}/attention/layer_norm", f"{name}.encoder_attn_layer_norm")
                rows(f"{to}/attention/linear_0", [f"{name}.encoder_attn.q_proj"])
                rows(f"{to}/attention/linear_1", [f"{name}.encoder_attn.{one}_proj" for one in "kv"])
                rows(f"{to}/attention/linear_2", [f"{name}.encoder_attn.out_proj"])
            norm(f"{to}/ffn/layer_norm", f"{name}.final_layer_norm")
            rows(f"{to}/ffn/linear_0", [f"{name}.fc1"])
            rows(f"{to}/ffn/linear_1", [f"{name}.fc2"])
    for name in ("conv1", "conv2"):
        for part in ("weight", "bias"):
            found[f"encoder/{name}/{part}"] = weights[f"model.encoder.{name}.{part}"]

    def text(name: str) -> bytes:
        return struct.pack("<H", len(name) + 1) + name.encode() + b"\0"

    parts = [struct.pack("<I", version), text(kind), struct.pack("<II", 3, len(found))]
    for name, values in found.items():
        raw = values if values.dtype == np.int16 else values.astype("<f2")
        shape = struct.pack(f"<B{raw.ndim}I", raw.ndim, *raw.shape)
        parts.append(text(name) + shape + struct.pack("<BI", 2 if raw.dtype == np.int16 else 4, raw.nbytes))
        parts.append(raw.tobytes())
    aliases = [text("decoder/projection/weight"), text("decoder/embeddings/weight")]
    return b"".join([*parts, struct.pack("<I", 1), *aliases])


@pytest.fixture(scope="module")
def model() -> Any:
    made = whisper(len(tokenizer()) + NUM_TIMESTAMPS)
    for parameter in made.parameters():
        parameter.data = parameter.data.half().float()
    return made


def source(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "model.whisper"
    path.write_bytes(content + tokenizer().backend_tokenizer.to_str().encode("utf-8"))
    return path


def test_the_folder_computes_what_the_model_did(model: Any, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    convert_whisper(source(tmp_path, written(model)), folder, progress=lambda *_: None)
    found = WhisperForConditionalGeneration.from_pretrained(folder).eval()
    features = torch.randn(1, 4, 3000, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        wanted, got = (one(input_features=features, decoder_input_ids=ids).logits for one in (model, found))
    torch.testing.assert_close(got, wanted)
    made = AutoTokenizer.from_pretrained(folder)
    assert len(made) == found.config.vocab_size
    assert made.convert_ids_to_tokens(len(made) - 1) == "<|30.00|>"
    settings = json.loads((folder / "generation_config.json").read_text("utf-8"))
    assert settings["no_timestamps_token_id"] == made.convert_tokens_to_ids("<|notimestamps|>")
    llm = LLM(folder, "none", dtype="float32")
    (done,) = llm.transcribe(features[0].numpy(), SamplingParams(temperature=0, max_tokens=6), timestamps=True)
    assert done.token_ids[0] >= made.convert_tokens_to_ids("<|0.00|>")


def test_other_files_are_refused(model: Any, tmp_path: Path) -> None:
    whole, folder = written(model), tmp_path / "folder"
    folder.mkdir()
    for content, kind, part in (
        (written(model, kind="TransformerSpec"), UnsupportedModelError, "WhisperSpec"),
        (written(model, version=5), UnsupportedModelError, "version 5"),
        (whole[: len(whole) // 2], ModelLoadError, "truncated"),
        (whole[:-4], ModelLoadError, "truncated|tokenizer"),
    ):
        path = tmp_path / "bad.whisper"
        path.write_bytes(content)
        with pytest.raises(kind, match=part):
            convert_whisper(path, folder, progress=lambda *_: None)
    path = source(tmp_path, written(whisper(len(tokenizer()))))
    with pytest.raises(UnsupportedModelError, match="English"):
        convert_whisper(path, folder, progress=lambda *_: None)


def test_values_are_checked(model: Any, tmp_path: Path) -> None:
    file = Ctranslate2File(source(tmp_path, written(model)))
    with pytest.raises(ModelLoadError, match="missing"):
        file.values("encoder/nothing")
    broken = whisper(len(tokenizer()) + NUM_TIMESTAMPS)
    broken.model.encoder.conv1.bias.data[0] = float("inf")
    file = Ctranslate2File(source(tmp_path, written(broken)))
    with pytest.raises(ModelLoadError, match="not finite"):
        file.values("encoder/conv1/bias")
