"""Several requests with transformers: continuous batching, and prompt lookup one request at a time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

Marks = list[tuple[float, int]]
"""For one request: seconds since its arrival, and the number of its tokens then."""


def generate_batch(model: Any, prompts: Sequence[list[int]], max_tokens: int, eos: Any) -> list[Marks]:
    """All prompts at once through transformers' continuous batching, by its own clock, from when they were queued."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    config = GenerationConfig(max_new_tokens=max_tokens, do_sample=False, eos_token_id=eos, pad_token_id=0)
    found = model.generate_batch(
        [list(ids) for ids in prompts],
        generation_config=config,
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=512),
        record_timestamps=True,
        progress_bar=False,
    )
    outputs = [found[key] for key in sorted(found, key=lambda key: int(key.rsplit("_", 1)[1]))]
    start = min(output.created_time for output in outputs)
    return [[(t - start, i + 1) for i, t in enumerate(output.timestamps)] for output in outputs]


class Clock:
    """A streamer that records arrival times of tokens."""

    def __init__(self, start: float) -> None:
        self.marks: Marks = []
        self._start = start
        self._is_prompt = True

    def put(self, tokens: torch.Tensor) -> None:
        """Called by transformers; with the prompt first."""
        if not self._is_prompt:
            count = (self.marks[-1][1] if self.marks else 0) + tokens.numel()
            self.marks.append((time.perf_counter() - self._start, count))
        self._is_prompt = False

    def end(self) -> None:
        """Called by transformers."""


def assisted(model: Any, prompts: Sequence[list[int]], max_tokens: int, eos: Any) -> list[Marks]:
    """One prompt after the other through transformers' prompt lookup."""
    start, marks = time.perf_counter(), []
    for ids in prompts:
        clock = Clock(start)
        model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=max_tokens,
            do_sample=False,
            prompt_lookup_num_tokens=10,
            eos_token_id=eos,
            pad_token_id=0,
            streamer=clock,
        )
        marks.append(clock.marks)
    return marks
