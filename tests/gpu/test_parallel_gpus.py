"""On several GPUs: texts of divided models are those of one GPU, and the loss of a rank ends the others."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from draftree import LLM, SamplingParams
from draftree.loading.load import load_model
from families import fresh
from parallel_jobs import SAMPLED, all_texts, ended, run, start

NUM_GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS < 2, reason="needs two CUDA devices"),
]

PROMPTS = [[(7 * place) % 50 + 3 for place in range(40)], [4, 5, 6, 4, 5, 6, 4, 5], [11, 12]]
PARAMS = [{"max_tokens": 16, "temperature": 0.7 * (place % 2), "seed": place} for place in range(len(PROMPTS))]
SETTINGS = {"dtype": "float32", "device": "cuda", "kernels": "torch"}
TWO = [{"tp": 2}, {"tp": 2, "strict_sums": True}, {"pp": 2}]


def job(folder: Path, **options: Any) -> dict[str, Any]:
    drafts = [None, "suffix,min=1"]
    return {
        "model": str(folder),
        "options": options,
        "settings": SETTINGS,
        "prompts": PROMPTS,
        "params": PARAMS,
        "drafts": drafts,
    }


def require_same(jobs: list[dict[str, Any]], found: list[dict[str, Any]]) -> None:
    loaded = load_model(jobs[0]["model"], **SETTINGS)
    wanted = all_texts(loaded, {**jobs[0], "drafts": [None]})
    for one in found:
        assert one["texts"] == dict.fromkeys(map(str, jobs[0]["drafts"]), wanted["texts"]["None"])
        assert (one["fingerprint"], one["length"], one["open"]) == (wanted["fingerprint"], wanted["length"], 0)


@pytest.mark.parametrize("options", TWO)
def test_two_gpus_write_the_texts_of_one(tmp_path: Path, options: dict[str, Any]) -> None:
    fresh("llama", num_hidden_layers=5).save_pretrained(tmp_path / "llama")
    jobs = [job(tmp_path / "llama", **options)]
    require_same(jobs, run(2, tmp_path, jobs))


@pytest.mark.skipif(NUM_GPUS < 4, reason="needs four CUDA devices")
def test_stages_of_tensor_parallel_layers_on_four_gpus(tmp_path: Path) -> None:
    fresh("llama", num_hidden_layers=5).save_pretrained(tmp_path / "llama")
    jobs = [job(tmp_path / "llama", tp=2, pp=2)]
    require_same(jobs, run(4, tmp_path, jobs))


def test_a_drafter_on_rank_0_and_its_hidden_states(tmp_path: Path) -> None:
    fresh("llama", num_hidden_layers=5).save_pretrained(tmp_path / "llama")
    jobs = [{**job(tmp_path / "llama", tp=2), "drafts": [None, "early-exit:1,tree=1-2"]}]
    require_same(jobs, run(2, tmp_path, jobs))


def test_the_end_of_a_rank_ends_requests_that_wait_for_it(tmp_path: Path) -> None:
    fresh("llama").save_pretrained(tmp_path / "llama")
    job = {
        "endless": "async",
        "model": str(tmp_path / "llama"),
        "prompt": [4, 5, 6],
        "options": {"tp": 2},
        "settings": SETTINGS,
    }
    processes = start(2, tmp_path, job)
    try:
        assert processes[0].stdout is not None
        line = processes[0].stdout.readline()
        assert line, ended(processes)
        plain = LLM(tmp_path / "llama", "none", **SETTINGS).generate([[4, 5, 6]], SamplingParams(**SAMPLED, seed=1))[0]
        assert json.loads(line)[1] == [list(plain.token_ids)] * 3
        processes[1].send_signal(signal.SIGKILL)
        errors, is_alive, failure = json.loads(processes[0].stdout.readline())
        assert {kind for kind, _ in errors} <= {"RankError", "EngineClosedError"}
        assert (is_alive, failure) == (False, "RankError")
    finally:
        for process in processes:
            process.kill()
            process.communicate()
