"""Models of transformers are read one at a time, whatever the number of threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from draftree.loading.reading import READING, read_model
from serving import tiny_model

CPU = torch.device("cpu")


def is_free() -> bool:
    """Whether another thread could read a model now."""

    def acquire() -> bool:
        if not READING.acquire(blocking=False):
            return False
        READING.release()
        return True

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(acquire).result()


def test_other_threads_wait_while_a_model_is_read(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    seen = []

    class Reader:
        @staticmethod
        def from_pretrained(folder: Path, **options: Any) -> Any:
            seen.append(is_free())
            return AutoModelForCausalLM.from_pretrained(folder, **options)

    read_model(tmp_path, torch.float32, CPU, reader=Reader)
    assert seen == [False]
    assert is_free()


def test_classes_of_transformers_are_unchanged_after_several_threads(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    before, barrier, found = PreTrainedModel.tie_weights, threading.Barrier(4), []

    def read() -> None:
        barrier.wait(60)
        found.append(read_model(tmp_path, torch.float32, CPU))

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(found) == 4
    assert PreTrainedModel.tie_weights is before
