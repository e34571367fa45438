"""Damaged or wrong folders and files of models are refused with a reason in one sentence."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from draftree.core.errors import ModelLoadError
from draftree.loading.resolve import resolve_model

pytestmark = pytest.mark.usefixtures("own_caches")


@pytest.mark.parametrize(
    ("file", "content", "why"),
    [
        ("config.json", None, "is not a model folder: it lacks config.json; name a folder"),
        ("config.json", "{", r"config\.json' cannot be read \("),
        ("config.json", "[]", "it holds no settings"),
        ("config.json", "{}", "lacks 'model_type'"),
        ("generation_config.json", "{,}", "cannot be read"),
        ("tokenizer_config.json", "\x00", "cannot be read"),
        ("model.safetensors", None, r"holds no weights: it lacks model\.safetensors"),
        ("model.safetensors", "", r"is damaged: its header cannot be read \(0 bytes\)"),
        ("model.safetensors", "garbage that is long enough", "is damaged: its header cannot be read"),
        ("model.safetensors", "\x02\0\0\0\0\0\0\0{}more", r"it has 14 bytes, and its header implies 10"),
        ("model.safetensors", '\x07\0\0\0\0\0\0\0{"a":1}', "its header does not describe 'a'"),
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
    with pytest.raises(
        ModelLoadError, match=r"is damaged: it has (\d+) bytes, and its header implies \d+; copy the model"
    ):
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
