"""Fixtures of the tests of weights: empty caches, and folders and files of tiny models."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from transformers import AutoConfig, AutoModelForCausalLM

from cli_samples import save_tiny_model
from draftree.weights.cache import silent
from draftree.weights.convert_llama2c import convert_llama2c
from weights_samples import PIECES, llama2c_file, random_weights, write_gguf


@pytest.fixture
def own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTREE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "my model"
    path.mkdir()
    source = tmp_path / "source"
    source.write_bytes(llama2c_file())
    convert_llama2c(source, path, progress=silent)
    return path


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    settings: dict[str, Any] = {"vocab_size": len(PIECES), "hidden_size": 32, "intermediate_size": 32, "head_dim": 16}
    config = AutoConfig.for_model(
        "llama", num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, **settings
    )
    path = tmp_path / "tiny model (Q4).gguf"
    write_gguf(random_weights(AutoModelForCausalLM.from_config(config), 0), path, "llama")
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("base"), chat=False)


@pytest.fixture
def copy(base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(base, tmp_path / "copy"))
