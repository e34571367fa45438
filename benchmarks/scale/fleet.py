"""The simulated fleet against runs of this machine: passes are measured, then runs of several requests are predicted.

The host's seconds per round besides pass and draft come from the run of one request. The runs of more requests are
predictions: outcomes of rounds are replayed from the run itself, so the texts are the same and only times are
predicted.

python benchmarks/scale/fleet.py MODEL --prompts FILE --draft suffix --at-once 1 4 8 --out FILE
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from draftree import LLM, SamplingParams
from draftree.analysis.fleet.curves import MeasuredCurve
from draftree.analysis.fleet.simulation import Fleet, FleetSettings
from draftree.analysis.fleet.workload import RoundOutcome, SimulatedRequest
from draftree.bench.provenance import machine, now, shown_name, versions
from draftree.bench.workload import encode, read_workload
from draftree.loading.load import LoadedModel, load_model
from draftree.text.tokenizer import Tokenizer

sys.path.append(str(Path(__file__).parents[1]))


def curve_of(loaded: LoadedModel) -> MeasuredCurve:
    """Measure passes by sequences, rows and tokens before them."""
    from loads import costs

    rows = list(costs.measure(argparse.Namespace(), loaded, None))
    points = [(row["batch"], row["rows"], row["prefix"], statistics.median(row["milliseconds"]) / 1000) for row in rows]
    footprint = loaded.model.footprint
    return MeasuredCurve(points, token_share=footprint.token / footprint.weights)


def measured(llm: LLM, records: list[Any], prompts: list[list[int]], max_tokens: int) -> tuple[float, list[Any]]:
    """Run all prompts at once; return the seconds and the records of the rounds."""
    records.clear()
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    llm.forget()
    start = time.perf_counter()
    llm.generate(list(prompts), params)
    return time.perf_counter() - start, list(records)


def requests_of(records: list[Any], prompts: list[list[int]], max_tokens: int) -> list[SimulatedRequest]:
    """Return the requests with the outcomes of their recorded rounds, in the order of the prompts."""
    outcomes: dict[str, list[RoundOutcome]] = {}
    for record in records:
        each = record.draft_seconds / max(1, len(record.sequences))
        for row in record.sequences:
            outcomes.setdefault(row.request_id, []).append(RoundOutcome(row.num_drafted, row.num_written, each))
    by_length = sorted(outcomes.values(), key=len)
    return [
        SimulatedRequest(0.0, len(prompt), max_tokens, tuple(rounds))
        for prompt, rounds in zip(prompts, by_length, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--draft", default="suffix")
    parser.add_argument("--at-once", nargs="+", type=int, default=[1, 4, 8])
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    loaded = load_model(given.model, dtype=given.dtype)
    assert loaded.folder is not None, "it was loaded by name"
    tokenizer = Tokenizer.load(loaded.folder)
    tasks = read_workload(given.prompts).tasks[: max(given.at_once)]
    prompts = [encode(task, tokenizer)[0] for task in tasks]
    curve, records = curve_of(loaded), list[Any]()
    llm = LLM(loaded, given.draft, plan="fixed" if given.draft != "none" else None, on_round=records.append)
    measured(llm, records, prompts[:1], 8)
    overhead = None
    with given.out.open("a", encoding="utf-8") as out:
        header = {"kind": "header", "date": now(), "machine": machine(loaded.model.device), "versions": versions()}
        facts = {"model": shown_name(given.model), "draft": given.draft, "threads": torch.get_num_threads()}
        out.write(json.dumps(header | facts) + "\n")
        for count in [1, *(number for number in given.at_once if number > 1)]:
            runs = [measured(llm, records, prompts[:count], given.max_tokens) for _ in range(given.repeats)]
            seconds, rounds = sorted(runs, key=lambda run: run[0])[len(runs) // 2]
            own = statistics.median(one.total_seconds - one.draft_seconds - one.score_seconds for one in rounds)
            overhead = own if overhead is None else overhead
            fleet = Fleet(curve, FleetSettings(overhead=overhead))
            simulated = fleet.run(requests_of(rounds, prompts[:count], given.max_tokens)).seconds
            line = {"kind": "fleet", "at_once": count, "measured": round(seconds, 4), "simulated": round(simulated, 4)}
            line["ratio"] = round(simulated / seconds, 3)
            out.write(json.dumps(line) + "\n")
            print(line, flush=True)


if __name__ == "__main__":
    main()
