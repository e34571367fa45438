"""Beam searches of several implementations as functions, for `beam_search.py`."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftree import LLM, BeamSearchParams
from draftree.beam.search import BeamSearch
from draftree.loading.resolve import resolve_model
from draftree.models.base import LanguageModel

METHODS = ("transformers", "torch", "C")
ROOT_FOLDER = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Found:
    """One search: seconds in total, moments of its steps, and the best text."""

    seconds: float
    steps: list[float]
    tokens: list[int]


Method = Callable[[list[int], int, int], Found]


def ours(model: LanguageModel) -> Method:
    """Return our search on a model: a function of prompt, width and number of tokens."""

    def search(prompt: list[int], width: int, tokens: int) -> Found:
        moments: list[float] = []
        params = BeamSearchParams(beam_width=width, max_new_tokens=tokens, ignore_eos=True)
        start = time.perf_counter()
        found = BeamSearch(model, on_step=lambda _: moments.append(time.perf_counter())).run([prompt], [params])
        return Found(time.perf_counter() - start, moments, list(found[0].best.tokens))

    return search


def transformers_search(folder: Path, dtype: torch.dtype) -> Method:
    """Return transformers' beam search."""
    from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=False).eval()
    model.generation_config.eos_token_id = None
    moments: list[float] = []

    class Clock(LogitsProcessor):  # type: ignore[misc]
        def __call__(self, ids: Any, scores: Any) -> Any:
            moments.append(time.perf_counter())
            return scores

    def search(prompt: list[int], width: int, tokens: int) -> Found:
        moments.clear()
        ids = torch.tensor([prompt])
        start = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                num_beams=width,
                do_sample=False,
                max_new_tokens=tokens,
                pad_token_id=0,
                logits_processor=LogitsProcessorList([Clock()]),
            )
        end = time.perf_counter()
        return Found(end - start, [*moments[1:], end], out[0, len(prompt) :].tolist())

    return search


class Peer:
    """A process that searches: one JSON line for a search, one for its result."""

    def __init__(self, command: str) -> None:
        self._process = subprocess.Popen(
            shlex.split(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def __call__(self, prompt: list[int], width: int, tokens: int) -> Found:
        """Search."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps({"prompt": prompt, "width": width, "tokens": tokens}) + "\n")
        line = stdout.readline()
        if not line:
            raise SystemExit("error: the peer ended: run its command by hand to see why")
        found = json.loads(line)
        return Found(found["seconds"], [], found["tokens"])


def method_of(name: str, given: argparse.Namespace) -> Method:
    """Return a method by name; loads its weights."""
    folder, dtype = resolve_model(given.model), getattr(torch, given.dtype)
    if name == "transformers":
        return transformers_search(folder, dtype)
    kernels = "native" if name == "C" else "torch"
    return ours(LLM(given.model, "none", dtype=given.dtype, kernels=kernels).model)


def prompt_of(given: argparse.Namespace, length: int) -> list[int]:
    """Return the beginning of a text of the repository as token ids."""
    from transformers import AutoTokenizer

    text = (ROOT_FOLDER / "docs/architecture.md").read_text("utf-8") + (ROOT_FOLDER / "docs/lossless.md").read_text(
        "utf-8"
    )
    ids: list[int] = AutoTokenizer.from_pretrained(resolve_model(given.model), trust_remote_code=False)(text)[
        "input_ids"
    ]
    if len(ids) < length:
        raise SystemExit(f"error: the text has {len(ids)} tokens: ask for a shorter prompt")
    return ids[:length]
