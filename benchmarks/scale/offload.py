"""Texts of a target whose weights are read from a file in every pass: plain and with drafters.

Bytes read per token do not depend on the machine; seconds do. Weights are read past the system's page cache where the
file system supports that (`direct` in the output); otherwise each layer is dropped from the cache after it was read, so
all arms read from the disk. Arms take turns, prompt by prompt. Every text is a line of the output; `--summary` prints
the sums of a file with 95% intervals over prompts. A run goes on where an earlier run with the same file ended.

An arm is `SPEC@PLAN|MEMORY`; plan and memory may be left out. Memory is `total=SIZE`, for all weights and the drafter's
keys and values (a drafter takes its part first), or `target=SIZE`, for the target's weights alone. The arm
`none|target=1TB` has all weights in memory.

    python benchmarks/scale/offload.py MODEL --prompts FILE --memory total=550MB --out FILE \\
        --arms 'none;model:NAME,tree=best-64-8,k=10,bits=int8;none|target=1TB'
    python benchmarks/scale/offload.py --summary FILE
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from offload_summary import summarize
from text_turns import ResultsFile, TimedLLM

from draftree import LLM, SamplingParams
from draftree.lab.bench.workload import Task, encode, read_workload
from draftree.loading.load import load_model
from draftree.loading.resolve import resolve_model
from draftree.models.memory import total
from draftree.models.native.streaming.model import StreamedModel, parse_size
from draftree.text.tokenizer import Tokenizer

MAX_NODES = 1024


def drafter_bytes(llm: LLM, length: int) -> tuple[int, int]:
    """Return the bytes of a drafter's weights, and of its keys and values for a text with its tree."""
    footprint = total(choice.drafter.footprint for choice in llm.engine.parts.drafters)
    return footprint.weights, footprint.token * (length + min(llm.planner.default_nodes, MAX_NODES))


@dataclass
class Arm:
    """A drafter with a target of its own.

    Attributes:
        name: as given.
        timed: the engine.
        model: its target.
        facts: part of every line.
    """

    name: str
    timed: TimedLLM
    model: StreamedModel
    facts: dict[str, Any]

    @property
    def is_plain(self) -> bool:
        """Whether it decodes plainly and reads weights."""
        return self.facts["draft"] == "none" and bool(self.model.stream_stats.of_pass)

    def generate(self, prompt: list[int], params: SamplingParams) -> dict[str, Any]:
        """Generate a text; `read` are bytes of weights, those for its prompt included."""
        before = self.model.stream_stats.read
        found = self.timed.generate([prompt], params)
        read = self.model.stream_stats.read - before
        return found | {"read": read, "token_ids": found["token_ids"][0]}


def build(given: argparse.Namespace, name: str, longest: int, sizes: dict[str, int]) -> Arm:
    """Load the target and the drafter of an arm; `sizes` are of drafters that were loaded before."""
    rest, _, memory = name.partition("|")
    draft, _, plan = rest.partition("@")
    kind, _, size = (memory or given.memory).partition("=")
    if kind not in ("total", "target"):
        raise SystemExit(f"memory '{memory or given.memory}': write total=SIZE or target=SIZE")
    drafter = None if draft == "none" else draft
    budget = parse_size(size)
    if kind == "total" and drafter is not None:
        if draft not in sizes:
            target = load_model(given.model, dtype=given.dtype, offload=budget)  # which is more than it will have
            sizes[draft] = sum(drafter_bytes(LLM(target, drafter, plan="fixed", prefix_cache_size=0), longest))
        budget -= sizes[draft]
    loaded = load_model(given.model, dtype=given.dtype, offload=budget)
    model = loaded.model
    assert isinstance(model, StreamedModel), "native kernels read the weights"
    start = time.perf_counter()
    timed = TimedLLM(loaded, drafter, plan=plan or None)
    weights, cache = drafter_bytes(timed.llm, longest)
    stats = model.stream_stats
    facts = {
        "model": given.model,
        "arm": name,
        "draft": draft,
        "plan": plan or ("" if draft == "none" else "auto"),
        "kernels": loaded.kernels,
        "threads": torch.get_num_threads(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "temperature": given.temperature,
        "direct": model.reads_directly,
        "weight_bytes": stats.file,
        "target_bytes": stats.memory,
        "drafter_bytes": weights,
        "drafter_cache_bytes": cache,
        "pass_bytes": stats.of_pass,
    }
    timed.llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
    facts |= {"start_seconds": round(time.perf_counter() - start, 1), "start_bytes": model.stream_stats.read}
    return Arm(name, timed, model, facts)


def chosen(given: argparse.Namespace) -> list[Task]:
    workload = read_workload(given.prompts)
    return list(workload.choose(given.category, given.count).tasks if given.category else workload.tasks[: given.count])


def measure(given: argparse.Namespace) -> None:
    end = time.monotonic() + given.seconds
    tokenizer, tasks = Tokenizer.load(resolve_model(given.model)), chosen(given)
    prompts = {task.id: encode(task, tokenizer)[0] for task in tasks}
    longest = max(map(len, prompts.values())) + given.max_tokens
    file, names = ResultsFile(given.out), given.arms.split(";")
    by_name = {task.id: task for task in tasks if any(file.lacks(name, task.id) for name in names)}
    if not by_name:
        return
    sizes: dict[str, int] = {}
    arms = [build(given, name, longest, sizes) for name in names]

    def line_of(arm: Arm, name: str) -> dict[str, Any]:
        length = given.plain_tokens if arm.is_plain and given.plain_tokens else given.max_tokens
        params = SamplingParams(max_tokens=length, temperature=given.temperature, seed=1, ignore_eos=True)
        text = {"category": by_name[name].category, "prompt_tokens": len(prompts[name])}
        return arm.facts | text | arm.generate(prompts[name], params)

    file.take_turns(arms, list(by_name), line_of, end=end)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--summary", type=Path, help="print the sums of a file")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--memory", default="total=1TB", help="of arms that name none")
    parser.add_argument("--category", action="append", default=[], help="of the prompts; default all")
    parser.add_argument("--arms", help="separated by semicolons")
    parser.add_argument("--count", type=int, default=2, help="prompts of each category; without one, of the file")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--plain-tokens", type=int, help="of arms that decode plainly and read weights")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--seconds", type=float, default=86400, help="no prompt begins that would end later")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.summary:
        summarize(given.summary)
    elif given.model and given.prompts and given.arms and given.out:
        measure(given)
    else:
        parser.error("give MODEL, --prompts, --arms and --out, or --summary")


if __name__ == "__main__":
    main()
