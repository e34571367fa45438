"""Malformed headers, indices and configurations of models are refused early, with the fault in the message."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from draftree.core.errors import ModelLoadError
from draftree.loading.load import load_model
from draftree.loading.resolve import resolve_model
from draftree.weights.folder_check import check_model_folder
from draftree.weights.safetensors_file import check_safetensors
from weights_samples import PIECES, random_weights, write_gguf

pytestmark = pytest.mark.usefixtures("own_caches")


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | values), "utf-8")


HEADERS: dict[str, tuple[Any, str]] = {
    "not an object": ([], "header"),
    "an entry that is none": ({"a": 5}, "does not describe 'a'"),
    "no dtype": ({"a": {"shape": [1], "data_offsets": [0, 4]}}, "does not describe"),
    "unknown type": ({"a": {"dtype": "\x1b[2JX", "shape": [2], "data_offsets": [0, 8]}}, "unknown type"),
    "a type that is no name": ({"a": {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}}, "unknown type"),
    "negative offsets": ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}, "not a list of sizes"),
    "offsets that are no numbers": ({"a": {"dtype": "F32", "shape": [2], "data_offsets": ["0", 8]}}, "list of sizes"),
    "three offsets": ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4, 8]}}, "does not describe"),
    "an end before the beginning": ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}, "does not take"),
    "a negative shape": ({"a": {"dtype": "F32", "shape": [-2, -1], "data_offsets": [0, 8]}}, "list of sizes"),
    "a shape of another size": ({"a": {"dtype": "F32", "shape": [10**9], "data_offsets": [0, 8]}}, "does not take"),
    "a shape beyond all bounds": ({"a": {"dtype": "F32", "shape": [10**30], "data_offsets": [0, 8]}}, "list of sizes"),
    "overlap": (
        {n: {"dtype": "F32", "shape": [1], "data_offsets": [s, s + 4]} for n, s in (("a", 0), ("b", 2))} | {},
        "begin at 2",
    ),
    "a hole": (
        {n: {"dtype": "F16", "shape": [1], "data_offsets": [s, s + 2]} for n, s in (("a", 0), ("b", 6))},
        "begin at 6",
    ),
    "an end beyond the file": ({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, "its header implies"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_malformed_safetensors_headers(name: str, tmp_path: Path) -> None:
    header, words = HEADERS[name]
    text = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    with pytest.raises(ModelLoadError, match=f"is damaged: .*{words}"):
        check_safetensors(path)


@pytest.mark.parametrize("raw", [b"", b"\xff" * 8, b"\xff" * 64, struct.pack("<Q", 100_000) + b"[" * 100_000])
def test_invalid_safetensors_headers(raw: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw)
    with pytest.raises(ModelLoadError, match="its header cannot be read"):
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
        ({"text_config": {"num_hidden_layers": 1_000_000}}, "num_hidden_layers=1000000"),
    ],
)
def test_absurd_configurations_are_refused_within_a_second(sizes: dict[str, Any], words: str, copy: Path) -> None:
    change(copy / "config.json", **sizes)
    start = time.process_time()
    with pytest.raises(ModelLoadError, match=words):
        load_model(copy)
    assert time.process_time() - start < 1


def test_the_command_line_refuses_absurd_configurations_without_torch(copy: Path) -> None:
    change(copy / "config.json", num_hidden_layers=1_000_000)
    code = (
        "import sys\n"
        "from draftree.cli.main import run\n"
        f"assert run(['generate', {str(copy)!r}, 'ab']) == 1\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr.decode()
    assert b"num_hidden_layers=1000000" in done.stderr


def test_settings_that_are_nested_without_end(copy: Path) -> None:
    (copy / "generation_config.json").write_text('{"a": ' + "[" * 100_000)
    with pytest.raises(ModelLoadError, match="nested too deeply"):
        check_model_folder(copy)


def test_a_gguf_file_of_absurd_sizes(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=len(PIECES), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
    )
    path = tmp_path / "model.gguf"
    model = random_weights(LlamaForCausalLM(config), 0)
    model.config.head_dim = 16
    write_gguf(model, path, "llama", block_count=1_000_000)
    start = time.process_time()
    with pytest.raises(ModelLoadError, match="1000000 layers"):
        resolve_model(path)
    assert time.process_time() - start < 20
