"""Models that several processes compute: texts are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftree.loading.load import load_model
from draftree.parallel.options import ParallelOptions
from families import fresh
from parallel_jobs import all_texts, run

pytest.importorskip("accelerate", reason="transformers needs accelerate to divide a model: the extra parallel")

SYSTEM = [(7 * place) % 50 + 3 for place in range(40)]
PROMPTS = [[*SYSTEM, 5, 6, 5, 6], [*SYSTEM, 9, 9, 9], [4, 5, 6, 4, 5, 6, 4, 5], [11, 12]]
PARAMS = [{"max_tokens": 16, "temperature": 0.7 * (place % 2), "seed": place} for place in range(len(PROMPTS))]
DRAFTS = [None, "suffix,min=1", "ngram,min=1+suffix,min=1"]
SETTINGS = {"dtype": "float32", "device": "cpu", "kernels": "torch"}


def job(folder: Path, family: str, *, drafts: Any = DRAFTS, kernels: str = "torch", **options: Any) -> dict[str, Any]:
    return {
        "model": str(folder / family),
        "options": options,
        "settings": {**SETTINGS, "kernels": kernels},
        "prompts": PROMPTS,
        "params": PARAMS,
        "drafts": drafts,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("models")
    fresh("llama", num_hidden_layers=5).save_pretrained(where / "llama")
    fresh("qwen3").save_pretrained(where / "qwen3")
    fresh("gemma3_text", tie_word_embeddings=True).save_pretrained(where / "gemma3_text")
    fresh("qwen2", num_attention_heads=6, num_key_value_heads=3, hidden_size=48).save_pretrained(where / "qwen2")
    return where


def alone(of: dict[str, Any], kernels: str = "torch") -> dict[str, Any]:
    """The same job in this process."""
    return all_texts(load_model(of["model"], **{**SETTINGS, "kernels": kernels}, packed=False), of)


def require_same(jobs: list[dict[str, Any]], found: list[dict[str, Any]]) -> None:
    for one, other in zip(jobs, found, strict=True):
        wanted = alone({**one, "drafts": one["drafts"][:1]})
        plain = wanted["texts"][str(one["drafts"][0])]
        assert other["texts"] == dict.fromkeys(map(str, one["drafts"]), plain)
        assert (other["fingerprint"], other["length"]) == (wanted["fingerprint"], wanted["length"])
        assert other["open"] == 0
        options = ParallelOptions(**one["options"])
        assert 0 < other["token_bytes"] * options.tp <= wanted["token_bytes"]
        if options.pp == 1:
            assert other["token_bytes"] * options.tp == wanted["token_bytes"], "keys and values of its own heads only"
        assert other["messages"] > 30


def test_tensor_parallel(folder: Path, tmp_path: Path) -> None:
    jobs = [
        job(folder, "llama", tp=2),
        job(folder, "qwen3", drafts=[None, "suffix,min=1"], tp=2),
        job(folder, "gemma3_text", drafts=[None, "early-exit:1,tree=1-2"], tp=2),
    ]
    require_same(jobs, run(2, tmp_path, jobs))


def test_three_processes_with_sums_in_one_order(folder: Path, tmp_path: Path) -> None:
    jobs = [job(folder, "qwen2", drafts=[None, "suffix,min=1"], kernels="graphs", tp=3, strict_sums=True)]
    jobs[0]["sums"] = True
    found = run(3, tmp_path, jobs)
    require_same(jobs, found)
    assert found[0]["sums"] == [True, False], "an all-reduce of three parts depends on the number of rows"
    assert found[0]["exact"] is alone({**jobs[0], "drafts": [None]}, kernels="graphs")["exact"]


def test_stages_of_tensor_parallel_layers(folder: Path, tmp_path: Path) -> None:
    jobs = [
        job(folder, "llama", drafts=[None, "suffix,min=1"], tp=2, pp=2),
        job(folder, "gemma3_text", drafts=[None, "ngram,min=1"], tp=2, pp=2, strict_sums=True),
    ]
    require_same(jobs, run(4, tmp_path, jobs))


def test_stages_of_unequal_size(folder: Path, tmp_path: Path) -> None:
    jobs = [job(folder, "llama", pp=2), job(folder, "gemma3_text", drafts=[None, "suffix,min=1"], pp=2)]
    require_same(jobs, run(2, tmp_path, jobs))
