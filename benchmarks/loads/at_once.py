"""N requests arrive together, for each N and method, alternating: throughput and latencies."""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from loads.continuous import Marks, assisted, generate_batch

from draftree import LLM, SamplingParams
from draftree.core.types import RoundRecord
from draftree.lab.bench.workload import encode, read_workload


class Written(NamedTuple):
    """Arrival times of tokens, and scored nodes per text and round if known."""

    marks: list[Marks]
    nodes: float | None = None


def ours(llm: LLM, rounds: list[RoundRecord], prompts: Sequence[list[int]], max_tokens: int) -> Written:
    """All prompts at once through an engine, which notes its rounds."""
    llm.forget()
    rounds.clear()
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
    turns = [sequence for record in rounds for sequence in record.sequences]
    return Written(marks, sum(turn.num_drafted for turn in turns) / len(turns))


Writer = Callable[[Sequence[list[int]]], Written]


def methods(given: argparse.Namespace, loaded: Any, tokenizer: Any) -> dict[str, Writer]:
    """By name, what writes a group of prompts."""
    found: dict[str, Writer] = {}
    rounds: list[RoundRecord] = []
    for name in given.drafts:
        llm = LLM(loaded, name, tokenizer=tokenizer, max_batch_size=max(given.at_once), on_round=rounds.append)
        found[f"draftree {name}"] = lambda prompts, llm=llm: ours(llm, rounds, prompts, given.max_tokens)
    if given.peers:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        model = AutoModelForCausalLM.from_pretrained(
            loaded.folder, dtype=loaded.model.dtype, trust_remote_code=False
        ).eval()
        eos = list(loaded.eos_ids) or tokenizer.eos_token_id
        found["transformers generate_batch"] = lambda prompts: Written(
            generate_batch(model, prompts, given.max_tokens, eos)
        )
        again = AutoModelForCausalLM.from_pretrained(
            loaded.folder, dtype=loaded.model.dtype, trust_remote_code=False
        ).eval()
        found["transformers assisted"] = lambda prompts: Written(assisted(again, prompts, given.max_tokens, eos))
    return found


def measure(given: argparse.Namespace, loaded: Any, tokenizer: Any) -> Iterator[dict[str, Any]]:
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
                written = write(group)
                yield {
                    "method": name,
                    "at_once": count,
                    "repeat": repeat,
                    "seconds": time.perf_counter() - start,
                    "prompt_tokens": [len(ids) for ids in group],
                    **condensed(written.marks),
                    "nodes": written.nodes,
                }


def condensed(marks: Sequence[Marks]) -> dict[str, Any]:
    """What the table needs of the times of all tokens.

    Keys: `tokens` of all texts; `last_token`, seconds until the last one; `first_token`, seconds per text;
    `latencies`, inter-token latency in hundredths of a millisecond to number of tokens. A round brings several tokens
    at once: each counts with its share of the time.
    """
    texts = [text for text in marks if text]
    latencies = Counter(
        round(1e5 * (after[0] - before[0]) / (after[1] - before[1]))
        for text in texts
        for before, after in itertools.pairwise(text)
        for _ in range(after[1] - before[1])
    )
    return {
        "tokens": sum(text[-1][1] for text in texts),
        "last_token": max(text[-1][0] for text in texts),
        "first_token": [round(text[0][0], 5) for text in texts],
        "latencies": {str(step): latencies[step] for step in sorted(latencies)},
    }


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that is not below this share of all."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Medians and 99th percentiles by number of requests and method."""
    groups: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["at_once"], row["method"]].append(row)
    lines = [
        "| at once | method | tokens/s | first token, median (p99), s | between tokens, median (p99), ms "
        "| nodes scored for a text in a round |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for (count, name), group in sorted(groups.items(), key=lambda item: item[0][0]):
        tokens = sum(row["tokens"] for row in group)
        seconds = sum(row["last_token"] for row in group)
        first = [text for row in group for text in row["first_token"]]
        gaps = [int(step) / 1e5 for row in group for step, count in row["latencies"].items() for _ in range(count)]
        nodes = [row["nodes"] for row in group if row.get("nodes") is not None]
        lines.append(
            f"| {count} | {name} | {tokens / seconds:.1f} "
            f"| {statistics.median(first):.2f} ({percentile(first, 0.99):.2f}) "
            f"| {1000 * statistics.median(gaps):.0f} ({1000 * percentile(gaps, 0.99):.0f}) "
            f"| {f'{statistics.fmean(nodes):.2f}' if nodes else '-'} |"
        )
    return "\n".join(lines)
