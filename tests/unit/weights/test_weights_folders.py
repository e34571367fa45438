"""Damaged, malformed or wrong folders and files of models are refused early, with a reason in one sentence."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from draftree.core.errors import ModelLoadError
from draftree.loading import load
from draftree.loading.resolve import resolve_model
from draftree.weights import convert_gguf
from draftree.weights.folders import check_model_folder
from draftree.weights.safetensors_file import check_safetensors

pytestmark = pytest.mark.usefixtures("own_caches")


@pytest.mark.parametrize(
    ("file", "content", "why"),
    [
        ("config.json", None, "is not a model folder: it lacks config.json; name a folder"),
        ("config.json", "{", r"config\.json' cannot be read \("),
        ("config.json", "[]", "does not hold a JSON object"),
        ("config.json", "{}", "lacks 'model_type'"),
        ("generation_config.json", "{,}", "cannot be read"),
        ("tokenizer_config.json", "\x00", "cannot be read"),
        ("model.safetensors", None, r"holds no weights: it lacks model\.safetensors"),
        ("generation_config.json", '{"a": ' + "[" * 100_000, "nested too deeply"),
        ("model.safetensors", "", "is damaged: .*header too small"),
        ("model.safetensors", "\x02\0\0\0\0\0\0\0{}more", "is damaged: .*file not fully covered"),
    ],
)
def test_a_damaged_folder_is_refused_in_one_sentence(folder: Path, file: str, content: str | None, why: str) -> None:
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_text(content)
    with pytest.raises(ModelLoadError, match=why) as error:
        resolve_model(folder)
    assert "\n" not in str(error.value)


def test_weights_cut_short_are_noticed(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ModelLoadError, match=r"is damaged: .*file not fully covered; copy the model"):
        resolve_model(folder)


def test_a_model_in_several_files_needs_all_of_them(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match=r"lacks 1 of the 2 weight files that its index names \(model-2\.safet"):
        resolve_model(folder)
    (folder / "model-2.safetensors").write_bytes((folder / "model-1.safetensors").read_bytes())
    assert resolve_model(folder) == folder


def test_pickled_weights_are_left_to_transformers(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert resolve_model(folder) == folder


def test_a_folder_of_a_related_kind_gives_a_suggestion(folder: Path, tmp_path: Path, gguf_file: Path) -> None:
    with pytest.raises(ModelLoadError, match=re.escape(f"to use the GGUF file in it, name '{gguf_file}'")):
        resolve_model(tmp_path)
    gguf_file.unlink()
    with pytest.raises(ModelLoadError, match=re.escape(f"did you mean '{folder}'?")):
        resolve_model(tmp_path)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="it holds an adapter; merge it into its base model"):
        resolve_model(adapter)


@pytest.mark.parametrize("name", ["broken.gguf", "notes.txt"])
def test_a_file_that_is_not_a_model_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("not a model at all, but text")
    with pytest.raises(ModelLoadError, match=r"is (not a readable|not a) GGUF file"):
        resolve_model(tmp_path / name)


HEADERS: dict[str, Any] = {
    "not an object": [],
    "an entry that is none": {"a": 5},
    "no dtype": {"a": {"shape": [1], "data_offsets": [0, 4]}},
    "unknown type": {"a": {"dtype": "\x1b[2JX", "shape": [2], "data_offsets": [0, 8]}},
    "negative offsets": {"a": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}},
    "an end before the beginning": {"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}},
    "a negative shape": {"a": {"dtype": "F32", "shape": [-2, -1], "data_offsets": [0, 8]}},
    "a shape of another size": {"a": {"dtype": "F32", "shape": [10**9], "data_offsets": [0, 8]}},
    "a shape beyond all bounds": {"a": {"dtype": "F32", "shape": [10**30], "data_offsets": [0, 8]}},
    "many dimensions": {"a": {"dtype": "F32", "shape": [2**62] * 200_000, "data_offsets": [0, 8]}},
    "overlap": {n: {"dtype": "F32", "shape": [1], "data_offsets": [s, s + 4]} for n, s in (("a", 0), ("b", 2))},
    "a hole": {n: {"dtype": "F16", "shape": [1], "data_offsets": [s, s + 2]} for n, s in (("a", 0), ("b", 6))},
    "an end beyond the file": {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}},
}


@pytest.mark.parametrize("name", HEADERS)
def test_malformed_safetensors_headers(name: str, tmp_path: Path) -> None:
    text = json.dumps(HEADERS[name]).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    with pytest.raises(ModelLoadError, match="is damaged") as refused:
        check_safetensors(path)
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("raw", [b"", b"\xff" * 8, b"\xff" * 64, struct.pack("<Q", 100_000) + b"[" * 100_000])
def test_invalid_safetensors_headers(raw: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw)
    with pytest.raises(ModelLoadError, match="is damaged"):
        check_safetensors(path)


@pytest.mark.parametrize(
    "index",
    [
        {"weight_map": {"a": "../copy/model.safetensors"}},
        {"weight_map": {"a": "/etc/passwd"}},
        {"weight_map": {"a": 5}},
        {"weight_map": ["model.safetensors"]},
        {},
    ],
)
def test_an_index_names_files_of_its_folder_only(index: Any, copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "part.safetensors")
    (copy / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    with pytest.raises(ModelLoadError, match=r"index\.json' is damaged"):
        check_model_folder(copy)


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | values), "utf-8")


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"num_hidden_layers": 1_000_000}, "num_hidden_layers=1000000"),
        ({"num_hidden_layers": 500}, "500 layers, and the weight files hold"),
        ({"num_hidden_layers": -1}, "num_hidden_layers=-1"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers=2.5"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers=two"),
        ({"vocab_size": 10**12}, "vocab_size=1000000000000"),
        ({"vocab_size": 90_000_000}, "embeddings of 90000000 tokens"),
        ({"vocab_size": 0}, "vocab_size=0"),
        ({"hidden_size": -32}, "hidden_size=-32"),
        ({"hidden_size": 9_000_000}, "9000000 values each"),
        ({"intermediate_size": 10**12}, "intermediate_size"),
        ({"num_attention_heads": 10**9}, "num_attention_heads"),
        ({"num_key_value_heads": -2}, "num_key_value_heads"),
        ({"head_dim": 10**9}, "head_dim"),
        ({"max_position_embeddings": 10**15}, "max_position_embeddings"),
        ({"num_labels": 10**7}, "num_labels=10000000"),
        ({"text_config": {"num_hidden_layers": 1_000_000}}, "num_hidden_layers=1000000"),
    ],
)
def test_absurd_configurations_are_refused_before_a_model_is_built(
    sizes: dict[str, Any], words: str, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(copy / "config.json", **sizes)
    monkeypatch.setattr(load, "read_model", lambda *_, **__: pytest.fail("the model is built"))
    with pytest.raises(ModelLoadError, match=words):
        load.load_model(copy)


def test_the_command_line_refuses_absurd_configurations_without_torch(copy: Path) -> None:
    change(copy / "config.json", num_hidden_layers=1_000_000)
    code = "import sys; from draftree.cli.main import run; run(sys.argv[1:]); print('torch' in sys.modules)"
    command = [sys.executable, "-c", code, "generate", str(copy), "ab"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert done.stdout == "False\n"
    assert "num_hidden_layers=1000000" in done.stderr


def test_a_gguf_file_of_absurd_sizes_is_refused_before_anything_is_made(
    gguf_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, absurd = (b"llama.block_count" + struct.pack("<II", 4, number) for number in (1, 1_000_000))
    gguf_file.write_bytes(gguf_file.read_bytes().replace(count, absurd))
    monkeypatch.setattr(convert_gguf, "save_gguf_tokenizer", lambda *_: pytest.fail("the folder is being made"))
    with pytest.raises(ModelLoadError, match="1000000 layers"):
        resolve_model(gguf_file)
