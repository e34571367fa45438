"""A second start from the record of the first one gives the same model; records are used only while they are valid."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import native_samples
from draftree import LLM, SamplingParams
from draftree.cli import models
from draftree.core.errors import ModelLoadError
from draftree.loading import lowering, native_start
from draftree.loading.load import load_model
from draftree.loading.loaded import LoadedModel
from families import drafter_folder, fresh
from native_samples import HYBRIDS, in_c
from second_starts import OPTIONS, SIZES, logits

pytestmark = [in_c, pytest.mark.usefixtures("store")]

WINDOW: dict[str, Any] = {
    "sliding_window": 37,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "query_pre_attn_scalar": 16,
    "tie_word_embeddings": True,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True, "attention_bias": True, "eos_token_id": [5, 7]},
    "qwen3": {},
    "phi3": {},
    "gemma3_text": WINDOW,
    "granite": {"residual_multiplier": 0.5, "embedding_multiplier": 3.0, "logits_scaling": 2.0},
    "smollm3": {"no_rope_layers": [0, 1, 1, 0]},
}


def facts(loaded: LoadedModel) -> list[Any]:
    model = loaded.model
    about = [model.vocab_size, model.max_length, model.fingerprint, model.num_layers, model.footprint, model.is_exact]
    about += [model.dtype, model.self_check, model.supports_trees, str(model.device)]
    return [*about, loaded.folder, loaded.eos_ids, loaded.name, loaded.kernels, loaded.quantization]


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_start_computes_the_very_same(tmp_path: Path, family: str, kind: str, reads: list[Path]) -> None:
    changes = SIZES | FAMILIES[family]
    fresh(family, **changes).save_pretrained(tmp_path / family)
    first = load_model(tmp_path / family, **OPTIONS[kind])
    assert first.kernels.startswith("native")
    second = load_model(tmp_path / family, **OPTIONS[kind])
    assert len(reads) == 1
    assert torch.equal(logits(first), logits(second))
    assert facts(first) == facts(second)
    assert second.eos_ids == ((5, 7) if family == "llama" else second.eos_ids)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_files_of_another_dtype(tmp_path: Path, dtype: torch.dtype, reads: list[Path]) -> None:
    fresh("llama", dtype=dtype, **SIZES).save_pretrained(tmp_path / "half")
    for options in OPTIONS.values():
        reads.clear()
        assert torch.equal(*(logits(load_model(tmp_path / "half", **options)) for _ in range(2)))
        assert len(reads) == 1


@pytest.mark.parametrize("family", ["qwen3_5_text", "falcon_h1", "lfm2", "lfm3", "nemotron_h", "zamba2"])
def test_recurrent_layers_whose_files_are_finer_than_the_model(tmp_path: Path, family: str, reads: list[Path]) -> None:
    fresh(family, **(native_samples.SIZES | HYBRIDS[family])).save_pretrained(tmp_path / family)
    for options in ({"dtype": "bfloat16"}, {"dtype": "bfloat16", "quantization": "int4"}):
        reads.clear()
        first, second = (load_model(tmp_path / family, **options) for _ in range(2))
        assert first.kernels.startswith("native")
        assert len(reads) == 1
        assert torch.equal(logits(first), logits(second))


def test_weights_in_several_files(tmp_path: Path, reads: list[Path]) -> None:
    fresh("qwen3", **SIZES).save_pretrained(tmp_path / "many", max_shard_size="100KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    assert torch.equal(*(logits(load_model(tmp_path / "many", dtype="float32")) for _ in range(2)))
    assert len(reads) == 1


def test_weights_that_are_renamed_while_they_are_read_are_read_so_every_time(
    tmp_path: Path, store: Path, reads: list[Path]
) -> None:
    model = fresh("llama", **SIZES | {"tie_word_embeddings": True})
    model.model.save_pretrained(tmp_path / "inner")  # without the prefix of the whole model
    assert torch.equal(*(logits(load_model(tmp_path / "inner", dtype="float32")) for _ in range(2)))
    assert len(reads) == 2
    assert not store.exists()


@pytest.mark.parametrize("draft", ["ngram,min=1", "suffix", "early-exit:2", "layer-skip,attention=1", "model:{}"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_are_the_same_with_every_kind_of_drafter(
    folder: Path, tmp_path: Path, draft: str, temperature: float, reads: list[Path]
) -> None:
    named = draft.format(drafter_folder("llama", tmp_path, **SIZES))
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=3)
    prompts = [[5, 6, 7, 5, 6, 7, 5], [40, 2, 9]]
    texts = [[one.token_ids for one in LLM(folder, named).generate(prompts, params)] for _ in range(2)]
    plain = [one.token_ids for one in LLM(folder, "none").generate(prompts, params)]
    assert texts == [plain, plain]
    assert len(reads) == len(set(reads))


def test_digests_do_not_depend_on_threads(folder: Path, reads: list[Path]) -> None:
    load_model(folder)
    torch.set_num_threads(3)
    load_model(folder)
    assert len(reads) == 1


def test_a_second_start_imports_nothing_of_transformers(folder: Path) -> None:
    lines = (
        "import sys; from draftree import LLM, SamplingParams",
        f"done = LLM({str(folder)!r}, 'ngram').generate([[5, 6, 7]], SamplingParams(max_tokens=8, temperature=0))",
        "print(done[0].token_ids, [name for name in sys.modules if name.startswith('transformers')])",
    )
    (first,) = LLM(folder, "ngram").generate([[5, 6, 7]], SamplingParams(max_tokens=8, temperature=0))
    program = [sys.executable, "-W", "ignore", "-c", "\n".join(lines)]
    second = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    assert second == f"{first.token_ids} []\n"


def touch(folder: Path) -> None:
    os.utime(folder / "model.safetensors", ns=(1, 1))


def other_settings(folder: Path) -> None:
    """Another content of the same size, at the same time."""
    path = folder / "config.json"
    status = path.stat()
    text = path.read_text()
    assert '"rms_norm_eps": 1e-06' in text
    path.write_text(text.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-01'))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def one_more_file(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": 9}')


@pytest.mark.parametrize("change", [touch, other_settings, one_more_file])
def test_a_folder_that_changed_is_read_anew(folder: Path, change: Any, reads: list[Path]) -> None:
    load_model(folder, dtype="float32")
    change(folder)
    found = load_model(folder, dtype="float32")
    assert len(reads) == 2
    wanted = load_model(folder, dtype="float32", kernels="torch")
    assert torch.allclose(logits(found), logits(wanted), atol=1e-3)
    assert found.eos_ids == wanted.eos_ids
    load_model(folder, dtype="float32")
    assert len(reads) == 3


def test_other_options_are_another_start(folder: Path, reads: list[Path]) -> None:
    for options in OPTIONS.values():
        load_model(folder, **options)
    assert len(reads) == len(OPTIONS)


@pytest.mark.parametrize("name", ["version", "__version__", "library"])
def test_other_versions_are_another_start(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch, reads: list[Path]
) -> None:
    load_model(folder)
    other: Any = {
        "version": lambda _: "0",
        "__version__": "0",
        "library": lambda: SimpleNamespace(path=Path("other.so")),
    }[name]
    monkeypatch.setattr(native_start, name, other)
    load_model(folder)
    assert len(reads) == 2


def test_weights_changed_with_equal_times_are_detected(
    folder: Path, reads: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    load_model(folder, dtype="float32")
    path = folder / "model.safetensors"
    status, weights = path.stat(), load_file(path)
    weights["model.layers.3.mlp.down_proj.weight"][5, 5] += 1
    save_file(weights, path, metadata={"format": "pt"})
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size
    for _ in range(2):
        with pytest.raises(ModelLoadError, match="is damaged: its content differs from the stored one"):
            load_model(folder, dtype="float32")
    assert "gives different logits now" in caplog.text
    assert len(reads) == 1
    os.utime(path)  # an intended change
    found = load_model(folder, dtype="float32")
    assert torch.allclose(logits(found), logits(load_model(folder, dtype="float32", kernels="torch")), atol=1e-3)


def test_a_record_of_the_wrong_weights_is_detected(
    folder: Path, store: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    places = lowering.places_in_files

    def swapped(*given: Any) -> Any:
        found = places(*given)
        first, second = (f"model.layers.{layer}.mlp.down_proj.weight" for layer in (0, 1))
        return found | {first: found[second], second: found[first]}

    monkeypatch.setattr(lowering, "places_in_files", swapped)
    first, second = (load_model(folder, dtype="float32") for _ in range(2))
    assert len(reads) == 2
    assert torch.equal(logits(first), logits(second))


def test_records_are_listed_and_removed(folder: Path, reads: list[Path]) -> None:
    load_model(folder, quantization="int8")
    main, runner = typer.Typer(), CliRunner()
    main.add_typer(models.models, name="models")
    main.callback()(lambda: None)
    shown = json.loads(runner.invoke(main, ["models", "cache", "--json"]).stdout)
    assert [(one["folder"], one["quantization"]) for one in shown["kept"]] == [(str(folder.resolve()), "int8")]
    lines = runner.invoke(main, ["models", "cache"]).stdout
    assert "int8" in lines
    assert "DRAFTREE_BLUEPRINTS" in lines
    assert runner.invoke(main, ["models", "cache", "--clear"]).exit_code == 0
    assert json.loads(runner.invoke(main, ["models", "cache", "--json"]).stdout)["kept"] == []
    load_model(folder, quantization="int8")
    assert len(reads) == 2


DAMAGES: dict[str, Any] = {
    "empty": lambda content: b"",
    "truncated": lambda content: content[: len(content) // 2],
    "one bit": lambda content: content[:500] + bytes([content[500] ^ 1]) + content[501:],
    "garbage": lambda content: os.urandom(3000),
    "something else": lambda content: b"\n{}",
    "another record": lambda content: hashlib.sha256(b"{}").hexdigest().encode() + b"\n{}",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_record_is_replaced(folder: Path, store: Path, damage: str, reads: list[Path]) -> None:
    wanted = logits(load_model(folder))
    (record,) = store.glob("*.json")
    record.write_bytes(DAMAGES[damage](record.read_bytes()))
    assert torch.equal(logits(load_model(folder)), wanted)
    assert len(reads) == 2
    load_model(folder)
    assert len(reads) == 2


def test_damaged_weights_are_refused_as_ever(folder: Path) -> None:
    load_model(folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelLoadError):
        load_model(folder)


def test_a_folder_that_cannot_be_written_changes_nothing(folder: Path, store: Path, reads: list[Path]) -> None:
    store.write_text("a file where the folder should be")
    assert torch.equal(*(logits(load_model(folder)) for _ in range(2)))
    assert len(reads) == 2


def test_nothing_is_recorded_if_recording_is_off(
    folder: Path, store: Path, monkeypatch: pytest.MonkeyPatch, reads: list[Path]
) -> None:
    monkeypatch.setenv("DRAFTREE_BLUEPRINTS", "0")
    for _ in range(2):
        load_model(folder)
    assert len(reads) == 2
    assert not store.exists()
