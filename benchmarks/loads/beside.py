"""A long prompt that arrives during decoding, for several values of `prefill_chunk_size`."""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from draftree import LLM, SamplingParams
from draftree.engine.engine import Engine
from draftree.lab.bench.workload import encode, read_workload
from draftree.options import EngineLimits


def measure(given: argparse.Namespace, loaded: Any, tokenizer: Any) -> Iterator[dict[str, Any]]:
    """A long prompt arrives while three texts are decoded; the gaps between their tokens for each budget."""
    tasks = sorted((encode(task, tokenizer)[0] for task in read_workload().tasks), key=len)
    long = (tasks[-1] * 4)[: given.long_prompt]
    llm = LLM(loaded, None, tokenizer=tokenizer)
    for repeat in range(given.repeats):
        for budget in given.budgets:
            engine = Engine(
                llm.engine.parts, EngineLimits(max_batch_size=8, prefill_chunk_size=budget, prefix_cache_size=0)
            )
            params = SamplingParams(max_tokens=400, min_tokens=400, temperature=0)
            writing = [llm.requests.sequences(ids, params)[0] for ids in tasks[:3]]
            engine.add(*writing)
            for _ in range(8):
                engine.step()
            (late,) = llm.requests.sequences(long, SamplingParams(max_tokens=8, temperature=0))
            engine.add(late)
            start, gaps = time.perf_counter(), []
            before = start
            while not late.history.num_output_tokens:
                engine.step()
                gaps.append(time.perf_counter() - before)
                before = time.perf_counter()
            first = before - start
            engine.abort([*writing, late])
            yield {
                "prefill_chunk_size": budget,
                "repeat": repeat,
                "prompt": len(long),
                "first_token": first,
                "gaps": gaps,
            }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The cost of a budget for running sequences, and its gain for the new one."""
    groups: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["prefill_chunk_size"]].append(row)
    lines = [
        "| prefill_chunk_size | first token of the long prompt, s | between tokens beside it, median (longest), ms |",
        "| --- | --- | --- |",
    ]
    for budget, group in sorted(groups.items()):
        gaps = [gap for row in group for gap in row["gaps"]]
        first = statistics.median(row["first_token"] for row in group)
        lines.append(f"| {budget} | {first:.2f} | {1000 * statistics.median(gaps):.0f} ({1000 * max(gaps):.0f}) |")
    return "\n".join(lines)
