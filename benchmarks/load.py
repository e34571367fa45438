"""Throughput and latencies of concurrent requests, compared with transformers on the same prompts in the same run.

    python benchmarks/load.py smollm2-135m-instruct --out benchmarks/results/load-smollm2.jsonl
    python benchmarks/load.py smollm2-135m-instruct --scenario beside --out benchmarks/results/beside-smollm2.jsonl
    python benchmarks/load.py smollm2-135m-instruct --scenario costs --out benchmarks/results/costs-smollm2.jsonl

`at-once`: N requests arrive together, for each N and method, in turns. For each request the seconds at which its tokens
came are recorded. `beside`: a long prompt arrives during decoding, for several budgets `prefill_chunk_size`.
`costs`: passes by number of sequences, tokens before them and rows.

transformers: `generate_batch` is its continuous batching, `assisted` its prompt lookup, which takes one request at a
time, so that others wait. Tables are made of a file by `--table FILE`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from loads import at_once, beside, costs

from draftree import LLM
from draftree.core.files import shown_name
from draftree.lab.bench.records import FORMAT
from draftree.loading.load import load_model
from draftree.loading.provenance import load_average, machine, now, versions

SCENARIOS = MappingProxyType({"at-once": at_once, "beside": beside, "costs": costs})
"""Each has `measure`, which yields rows, and `table`, which shows them."""


def scenario_of(rows: Sequence[dict[str, Any]]) -> ModuleType:
    """Which scenario rows are of."""
    if "prefill_chunk_size" in rows[0]:
        return beside
    return costs if "batch" in rows[0] else at_once


def header(given: argparse.Namespace, loaded: Any) -> dict[str, Any]:
    """The provenance of the numbers."""
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
    parser.add_argument("--scenario", choices=tuple(SCENARIOS), default="at-once")
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
        print(scenario_of(rows).table(rows))
        if given.plot is not None:
            costs.draw(rows, given.plot)
        return 0
    loaded = load_model(given.model, dtype=given.dtype, kernels="auto")
    tokenizer = LLM(loaded, "none").tokenizer
    lines = [header(given, loaded)]
    for entry in SCENARIOS[given.scenario].measure(given, loaded, tokenizer):
        lines.append({"kind": "load", **entry})
        if given.out is not None:  # results are written immediately
            given.out.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    print(SCENARIOS[given.scenario].table(lines[1:]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
