"""Text prompts of image-text models that `AutoModelForImageTextToText` reads: as written by transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draftree import LLM, SamplingParams
from dropin_samples import plain
from native_samples import in_c
from vision_samples import VISION, vision_model

PROMPTS = [[5, 6, 7, 8, 5, 6], [11, 3, 11, 3, 11], [40, 41, 42]]
NATIVE = [name for name in VISION if name != "gemma4"]  # its layers have sizes of their own


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vision")


def folder(name: str, where: Path) -> Path:
    path = where / name
    if not path.exists():
        vision_model(name, is_wide=True).save_pretrained(path)
    return path


def wanted(name: str) -> list[list[int]]:
    rows = []
    for prompt in PROMPTS:
        ids = plain(vision_model(name, is_wide=True), {"input_ids": torch.tensor([prompt])}, max_new_tokens=16)
        rows.append(ids[0, len(prompt) :].tolist())
    return rows


def texts(name: str, where: Path, **options: str) -> tuple[LLM, list[list[int]]]:
    llm = LLM(folder(name, where), dtype="float32", plan="fixed", **options)
    done = llm.generate(PROMPTS, SamplingParams(max_tokens=16, temperature=0.0))
    assert any(completion.stats.accepted_tokens for completion in done)
    return llm, [list(completion.token_ids) for completion in done]


@pytest.mark.parametrize("name", VISION)
def test_texts_through_torch(name: str, folders: Path) -> None:
    assert texts(name, folders, kernels="torch", draft="ngram,min=1")[1] == wanted(name)


@in_c
@pytest.mark.parametrize("name", NATIVE)
def test_texts_through_native_kernels(name: str, folders: Path) -> None:
    llm, written = texts(name, folders, kernels="native", draft="early-exit,layers=1")
    assert written == wanted(name)
    assert llm.is_exact


@in_c
@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("name", ["llava", "qwen3_vl"])
def test_a_second_start_reads_the_decoder_alone(name: str, folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = texts(name, folders, kernels="native", draft="ngram,min=1")[1]
    monkeypatch.setattr("draftree.loading.load.read_model", None)
    assert texts(name, folders, kernels="native", draft="ngram,min=1")[1] == first


@in_c
def test_weights_in_4_bits(folders: Path) -> None:
    llm = LLM(folder("qwen2_5_vl", folders), dtype="float32", quantization="int4", draft="none")
    assert llm.kernels.startswith("native")
