"""Time to first token of a fresh process with Draftree or with transformers, and its peak memory."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

PROMPT = "What is a prime number?"
START_TOKENS = 16
CACHE = Path(os.environ.get("DRAFTREE_CACHE", Path.home() / ".cache" / "draftree"))


def one_start(model: str, kind: str, engine: str) -> dict[str, Any]:
    start, cpu = time.perf_counter(), time.process_time()
    first = (with_draftree if engine == "draftree" else with_transformers)(model, kind)
    return {
        "kind": "start",
        "engine": engine,
        "weights": kind,
        "first_token_seconds": first - start,
        "cpu_seconds": time.process_time() - cpu,
        **memory(),
    }


def with_draftree(model: str, kind: str) -> float:
    from draftree import LLM, SamplingParams

    llm = LLM(model, "none", **weights(kind))
    pieces = llm.stream(PROMPT, SamplingParams(max_tokens=START_TOKENS, temperature=0, ignore_eos=True))
    next(pieces)
    first = time.perf_counter()
    for _ in pieces:
        pass
    return first


def with_transformers(model: str, kind: str) -> float:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = os.fspath(folder_of(model))
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, kind), trust_remote_code=False)
    clock = Clock()
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    limits = {"max_new_tokens": START_TOKENS, "min_new_tokens": START_TOKENS}
    loaded.generate(ids, do_sample=False, streamer=clock, **limits)
    assert clock.first is not None
    return clock.first


def folder_of(model: str) -> Path:
    # without Draftree's own imports, which would count for transformers
    found = CACHE / "models" / model
    return found if found.exists() else Path(model)


class Clock:
    """A streamer that records the time of the first token."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.prompt_seen = False

    def put(self, _: Any) -> None:
        if self.prompt_seen and self.first is None:
            self.first = time.perf_counter()
        self.prompt_seen = True

    def end(self) -> None:
        pass


def memory() -> dict[str, int]:
    """Peak and current resident bytes, anonymous and of files."""
    names = {"VmHWM": "peak_bytes", "RssAnon": "own_bytes", "RssFile": "file_bytes"}
    lines = (line.split(":") for line in Path("/proc/self/status").read_text("utf-8").splitlines())
    return {names[name]: 1024 * int(value.split()[0]) for name, value in lines if name in names}


def weights(kind: str) -> dict[str, Any]:
    """Options of a model with this kind of weights."""
    return {"dtype": "auto", "quantization": kind} if kind == "int8" else {"dtype": kind}
