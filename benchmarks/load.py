"""Throughput and waiting times with several requests at once, beside transformers on the same prompts in the same run.

    python benchmarks/load.py smollm2-135m-instruct --out benchmarks/results/load-smollm2.jsonl
    python benchmarks/load.py smollm2-135m-instruct --scenario beside --out benchmarks/results/beside-smollm2.jsonl
    python benchmarks/load.py smollm2-135m-instruct --scenario costs --out benchmarks/results/costs-smollm2.jsonl

`at-once`: N requests arrive together, for each N and method, in turns. For each request the seconds at which its tokens
came are recorded. `beside`: texts are being written when a long prompt comes, for several budgets `read_beside`.
`costs`: passes by number of sequences, tokens before them and rows.

transformers: `generate_batch` is its continuous batching, `assisted` its prompt lookup, which takes one request at a
time, so that others wait. Tables are made of a file by `--table FILE`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from draftree import LLM, SamplingParams
from draftree.bench.provenance import load_average, machine, now, shown_name, versions
from draftree.bench.records import FORMAT
from draftree.bench.workload import encode, read_workload
from draftree.engine.engine import Engine, Limits
from draftree.models.base import Extend
from draftree.models.loading import load_model

Marks = list[tuple[float, int]]
"""For one request: seconds since it came, and how many tokens it had then."""


def ours(llm: LLM, prompts: Sequence[list[int]], max_tokens: int) -> list[Marks]:
    """All prompts at once through an engine."""
    llm.forget()
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    sequences = [llm.requests.sequences(ids, params)[0] for ids in prompts]
    start = time.perf_counter()
    llm.engine.add(*sequences)
    marks: list[Marks] = [[] for _ in sequences]
    while not llm.engine.is_idle:
        llm.engine.step()
        seconds = time.perf_counter() - start
        for own, sequence in zip(marks, sequences, strict=True):
            count = sequence.history.num_output_tokens
            if count > (own[-1][1] if own else 0):
                own.append((seconds, count))
    return marks


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
    """A streamer that notes when tokens come."""

    def __init__(self, start: float) -> None:
        self.marks: Marks = []
        self._start = start
        self._is_prompt = True

    def put(self, tokens: torch.Tensor) -> None:
        """Called by transformers; the prompt comes first."""
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


def methods(given: argparse.Namespace, loaded: Any, tokenizer: Any) -> dict[str, Callable[[Sequence[list[int]]], Any]]:
    """By name, what writes a group of prompts."""
    found: dict[str, Callable[[Sequence[list[int]]], Any]] = {}
    for name in given.drafts:
        llm = LLM(loaded, name, tokenizer=tokenizer, max_batch_size=max(given.at_once))
        found[f"draftree {name}"] = lambda prompts, llm=llm: ours(llm, prompts, given.max_tokens)
    if given.peers:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        model = AutoModelForCausalLM.from_pretrained(loaded.folder, dtype=loaded.model.dtype).eval()
        eos = list(loaded.eos_ids) or tokenizer.eos_token_id
        found["transformers generate_batch"] = lambda prompts: generate_batch(model, prompts, given.max_tokens, eos)
        again = AutoModelForCausalLM.from_pretrained(loaded.folder, dtype=loaded.model.dtype).eval()
        found["transformers assisted"] = lambda prompts: assisted(again, prompts, given.max_tokens, eos)
    return found


def at_once(given: argparse.Namespace, loaded: Any, tokenizer: Any) -> Iterator[dict[str, Any]]:
    """Every method with every number of requests, in turns."""
    tasks = [encode(task, tokenizer)[0] for task in read_workload().tasks]
    tasks = [ids for ids in tasks if len(ids) <= given.longest_prompt]
    every = methods(given, loaded, tokenizer)
    for write in every.values():
        write(tasks[:1])
    for count in given.at_once:
        for repeat in range(given.repeats if count > 1 else given.repeats_alone):
            group = [tasks[(repeat * count + i) % len(tasks)] for i in range(count)]
            for name, write in every.items():
                start = time.perf_counter()
                marks = write(group)
                yield {
                    "method": name,
                    "at_once": count,
                    "repeat": repeat,
                    "seconds": time.perf_counter() - start,
                    "prompt_tokens": [len(ids) for ids in group],
                    "marks": marks,
                }


def beside(given: argparse.Namespace, loaded: Any, tokenizer: Any) -> Iterator[dict[str, Any]]:
    """Three texts are being written when a long prompt comes; for each budget the gaps between their tokens."""
    tasks = sorted((encode(task, tokenizer)[0] for task in read_workload().tasks), key=len)
    long = (tasks[-1] * 4)[: given.long_prompt]
    llm = LLM(loaded, None, tokenizer=tokenizer)
    for repeat in range(given.repeats):
        for budget in given.budgets:
            engine = Engine(llm.engine.parts, Limits(8, read_beside=budget, keep_prefixes=0))
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
            yield {"read_beside": budget, "repeat": repeat, "prompt": len(long), "first_token": first, "gaps": gaps}


def costs(given: argparse.Namespace, loaded: Any, tokenizer: Any) -> Iterator[dict[str, Any]]:
    """A pass of the target over so many sequences, with so many tokens before them and so many rows of each."""
    model = loaded.model
    grid = [(batch, 256, 1) for batch in (1, 2, 4, 8, 16, 32)]
    grid += [(batch, 256, 8) for batch in (1, 2, 4, 8, 16)]
    grid += [(1, prefix, 8) for prefix in (32, 128, 512, 1024)]
    grid += [(1, 256, rows) for rows in (2, 4, 16, 32, 64)]
    for batch, prefix, rows in grid:
        slots = [model.open() for _ in range(batch)]
        for slot in slots:
            model.extend([Extend(slot, [0] * prefix, range(-1, prefix - 1), logits_at=())])
            model.commit(slot, range(prefix))
        seconds = []
        for _ in range(2 + 5):
            start = time.perf_counter()
            model.extend([Extend(slot, [0] * rows, range(-1, rows - 1)) for slot in slots])
            seconds.append(time.perf_counter() - start)
            model.commit_many(slots, [()] * batch)
        for slot in slots:
            model.close(slot)
        milliseconds = [1000 * value for value in seconds[2:]]
        yield {"batch": batch, "prefix": prefix, "rows": rows, "milliseconds": milliseconds}


def table_costs(rows: Sequence[dict[str, Any]]) -> str:
    """Medians, one line for each kind of pass."""
    lines = ["| sequences | tokens before | rows of each | milliseconds |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {row['batch']} | {row['prefix']} | {row['rows']} | {statistics.median(row['milliseconds']):.1f} |"
        for row in rows
    ]
    return "\n".join(lines)


def draw_costs(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Three panels: by sequences, by what stands before, by rows."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 3, figsize=(11, 3.2), sharey=True)
    choices: list[tuple[str, str, Callable[[dict[str, Any]], bool], str]] = [
        ("batch", "sequences", lambda row: row["prefix"] == 256 and row["rows"] == 1, "1 row each"),
        ("batch", "sequences", lambda row: row["prefix"] == 256 and row["rows"] == 8, "8 rows each"),
        ("prefix", "tokens before", lambda row: row["batch"] == 1 and row["rows"] == 8, "1 sequence, 8 rows"),
        ("rows", "rows of one sequence", lambda row: row["batch"] == 1 and row["prefix"] == 256, "256 tokens before"),
    ]
    for (key, label, wanted, name), panel in zip(choices, [panels[0], panels[0], panels[1], panels[2]], strict=True):
        points = sorted((row[key], statistics.median(row["milliseconds"])) for row in rows if wanted(row))
        panel.plot(*zip(*points, strict=True), marker="o", label=name)
        panel.set_xlabel(label)
        panel.legend()
    panels[0].set_ylabel("milliseconds of a pass")
    panels[0].set_ylim(bottom=0)
    figure.tight_layout()
    figure.savefig(file)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that is not below this share of all."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def table_at_once(rows: Sequence[dict[str, Any]]) -> str:
    """Medians and 99th percentiles by number of requests and method."""
    groups: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["at_once"], row["method"]].append(row)
    lines = [
        "| at once | method | tokens/s | first token, median (p99), s | between tokens, median (p99), ms |",
        "| --- | --- | --- | --- | --- |",
    ]
    for (count, name), group in sorted(groups.items(), key=lambda item: item[0][0]):
        requests = [marks for row in group for marks in row["marks"] if marks]
        tokens = sum(marks[-1][1] for marks in requests)
        seconds = sum(max(marks[-1][0] for marks in row["marks"] if marks) for row in group)
        first = [marks[0][0] for marks in requests]
        # a round brings several tokens at once: each token of it counts with its share of the wait
        gaps = [
            (after[0] - before[0]) / (after[1] - before[1])
            for marks in requests
            for before, after in itertools.pairwise(marks)
            for _ in range(after[1] - before[1])
        ]
        lines.append(
            f"| {count} | {name} | {tokens / seconds:.1f} "
            f"| {statistics.median(first):.2f} ({percentile(first, 0.99):.2f}) "
            f"| {1000 * statistics.median(gaps):.0f} ({1000 * percentile(gaps, 0.99):.0f}) |"
        )
    return "\n".join(lines)


def table_beside(rows: Sequence[dict[str, Any]]) -> str:
    """What a budget costs those who write, and gives to whom comes."""
    groups: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["read_beside"]].append(row)
    lines = [
        "| read_beside | first token of the long prompt, s | between tokens beside it, median (longest), ms |",
        "| --- | --- | --- |",
    ]
    for budget, group in sorted(groups.items()):
        gaps = [gap for row in group for gap in row["gaps"]]
        first = statistics.median(row["first_token"] for row in group)
        lines.append(f"| {budget} | {first:.2f} | {1000 * statistics.median(gaps):.0f} ({1000 * max(gaps):.0f}) |")
    return "\n".join(lines)


def table_of(rows: Sequence[dict[str, Any]]) -> str:
    """The table of whatever was measured."""
    if "read_beside" in rows[0]:
        return table_beside(rows)
    return table_costs(rows) if "batch" in rows[0] else table_at_once(rows)


def header(given: argparse.Namespace, loaded: Any) -> dict[str, Any]:
    """Where the numbers come from."""
    return {
        "kind": "header",
        "format": FORMAT,
        "job": f"load {given.scenario}",
        "date": now(),
        "machine": machine(loaded.model.device),
        "versions": versions(),
        "model": {"name": shown_name(given.model)},
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "kernels": loaded.kernels,
        "threads": torch.get_num_threads(),
        "max_tokens": given.max_tokens,
        "load_average": load_average(),
    }


def main() -> int:
    """Measure and write, or read and tabulate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument("--scenario", choices=("at-once", "beside", "costs"), default="at-once")
    parser.add_argument("--drafts", nargs="+", default=["none", "ngram", "suffix"])
    parser.add_argument("--at-once", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--budgets", nargs="+", type=int, default=[16, 32, 64, 128, 256, 512])
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--longest-prompt", type=int, default=200)
    parser.add_argument("--long-prompt", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--repeats-alone", type=int, default=6)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--plot", type=Path, help="with --table and a file of --scenario costs: where the drawing goes")
    given = parser.parse_args()
    if given.table is not None:
        rows = [json.loads(line) for line in given.table.read_text("utf-8").splitlines()]
        rows = [row for row in rows if row["kind"] != "header"]
        print(table_of(rows))
        if given.plot is not None:
            draw_costs(rows, given.plot)
        return 0
    loaded = load_model(given.model, dtype=given.dtype, kernels="auto")
    tokenizer = LLM(loaded).tokenizer
    lines = [header(given, loaded)]
    measure = {"at-once": at_once, "beside": beside, "costs": costs}[given.scenario]
    for entry in measure(given, loaded, tokenizer):
        lines.append({"kind": "load", **entry})
        if given.out is not None:  # what is measured is on disk, whatever comes next
            given.out.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    print(table_of(lines[1:]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
