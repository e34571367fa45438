"""The simulated fleet against runs of this machine: passes are measured, then runs of several requests are predicted.

    python benchmarks/scale/fleet.py MODEL --prompts FILE --draft none --draft suffix --at-once 1 2 4 8 --out FILE

The first half of the prompts calibrates the host: its time per round besides the pass, per text, and per step that
reads prompts, from runs of one request and from runs of as many requests as there are prompts in this half. The texts
of the second half are written one by one, and their rounds are recorded. What runs of several of these prompts at once
take is then predicted from recorded rounds and measured passes, and compared with such runs, of which nothing enters
the prediction. `pass_ms` of a run is a pass over one row after it: the machine's speed at that time.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from measured_runs import host_costs, requests_of_texts, with_texts

from draftree import LLM, SamplingParams
from draftree.core.files import shown_name
from draftree.core.types import RoundRecord
from draftree.engine.trace import Trace, TraceHeader, TraceWriter, read_trace
from draftree.lab.bench.workload import encode, read_workload
from draftree.lab.fleet.curves import MeasuredCurve
from draftree.lab.fleet.measured import MeasuredDraft
from draftree.lab.fleet.simulation import Fleet, FleetSettings, HostCosts, outcomes_of
from draftree.loading.load import load_model
from draftree.loading.loaded import LoadedModel
from draftree.loading.provenance import machine, now, versions
from draftree.models.base import Commit, Extend, Pass
from draftree.text.tokenizer import Tokenizer

PREFIX, LONG_PREFIX = 64, 384
GRID = {1: (1, 2, 3, 5, 9, 17, 33, 64), 2: (1, 3, 5, 9), 4: (1, 3, 5, 9), 8: (1, 3, 5, 9), 16: (1, 3, 5)}
"""Rows of each sequence by the number of sequences."""
PROMPTS = (16, 64, 128, 256)
REPEATS = 5


def timed_passes(model: Any, batch: int, prefix: int, rows: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Passes over so many sequences, for each number of rows of a sequence."""
    slots = [model.open() for _ in range(batch)]
    for slot in slots:
        model.run(Pass([Extend(slot, [0] * prefix, range(-1, prefix - 1), logits_at=())]))
        model.commit(slot, range(prefix))
    for count in rows:
        found = []
        for _ in range(1 + REPEATS):
            start = time.perf_counter()
            model.run(Pass([Extend(slot, [0] * count, range(-1, count - 1)) for slot in slots]))
            found.append(round(1000 * (time.perf_counter() - start), 3))
            model.apply([Commit(slot, ()) for slot in slots])
        yield {"kind": "pass", "batch": batch, "prefix": prefix, "rows": count, "milliseconds": found[1:]}
    for slot in slots:
        model.close(slot)


def single_passes(model: Any) -> list[float]:
    """Milliseconds of passes over one row: what the machine's speed is at this time."""
    (found,) = timed_passes(model, 1, PREFIX, [1])
    times: list[float] = found["milliseconds"]
    return times


def timed_prompts(model: Any, rows: int) -> list[float]:
    """Milliseconds of passes that read a prompt, without logits."""
    found = []
    for _ in range(3):
        slot = model.open()
        start = time.perf_counter()
        model.run(Pass([Extend(slot, [0] * rows, range(-1, rows - 1), logits_at=())]))
        found.append(1000 * (time.perf_counter() - start))
        model.close(slot)
    return found


def passes(model: Any, most_rows: int = 80) -> Iterator[dict[str, Any]]:
    """Measure passes by sequences, rows and tokens before them, and passes over prompts.

    Args:
        model: the target.
        most_rows: of all sequences of a pass.
    """
    for batch, rows in GRID.items():
        yield from timed_passes(model, batch, PREFIX, [count for count in rows if batch * count <= most_rows])
    yield from timed_passes(model, 1, LONG_PREFIX, [9])
    for rows in PROMPTS:
        yield {"kind": "pass", "prompt_rows": rows, "milliseconds": [round(v, 3) for v in timed_prompts(model, rows)]}


class Recorder:
    """Runs prompts and returns seconds and traces. Called with every round.

    Args:
        max_tokens: tokens of every text.
    """

    def __init__(self, max_tokens: int) -> None:
        self._params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        self._records: list[RoundRecord] = []

    def __call__(self, record: RoundRecord) -> None:
        self._records.append(record)

    def run(self, llm: LLM, prompts: Sequence[list[int]]) -> tuple[float, Trace, list[list[int]]]:
        """Run prompts at once; return the seconds, the trace and the texts."""
        self._records.clear()
        llm.forget()
        start = time.perf_counter()
        done = llm.generate(list(prompts), self._params, progress=False)
        seconds = time.perf_counter() - start
        stream = io.StringIO()
        writer = TraceWriter(stream)
        writer.begin(TraceHeader("", "", "coupled", "fixed", llm.planner.parts, {}))
        for record in self._records:
            writer(record)
        with TemporaryDirectory() as where:
            path = Path(where) / "trace"
            path.write_text(stream.getvalue(), "utf-8")
            return seconds, read_trace(path), [list(one.token_ids) for one in done]


def calibrated(llm: LLM, recorder: Recorder, prompts: list[list[int]], curve: MeasuredCurve, given: Any) -> HostCosts:
    """The host's costs from runs of prompts one by one and at once; of runs at once, the one of median time counts."""
    alone = [recorder.run(llm, [prompt]) for prompt in prompts]
    crowds = sorted((recorder.run(llm, prompts) for _ in range(given.repeats)), key=lambda one: one[0])
    seconds, together, _ = crowds[len(crowds) // 2]
    host = host_costs([trace for _, trace, _ in alone], together, curve)
    outcomes = [next(iter(outcomes_of(trace).values())) for _, trace, _ in alone]
    requests = requests_of_texts([len(prompt) for prompt in prompts], given.max_tokens, outcomes)
    begun = [(request, own) for request, (own, _, _) in zip(requests, alone, strict=True)]
    return with_texts(host, curve, begun, (requests, seconds))


def rows_of(
    loaded: LoadedModel, prompts: list[list[int]], curve: MeasuredCurve, given: Any
) -> Iterator[dict[str, Any]]:
    """Measure and predict the runs of every drafter."""
    half = len(prompts) // 2
    for draft in given.draft:
        recorder = Recorder(given.max_tokens)
        plain = draft == "none"
        llm = LLM(loaded, None if plain else draft, plan=None if plain else "fixed", on_round=recorder)
        recorder.run(llm, prompts[:1])
        host = calibrated(llm, recorder, prompts[:half], curve, given)
        turns = [[recorder.run(llm, [prompt]) for prompt in prompts[half:]] for _ in range(given.repeats)]
        alone = turns[0]
        outcomes = [next(iter(outcomes_of(trace).values())) for _, trace, _ in alone]
        measured = MeasuredDraft(host, outcomes)
        yield measured.line(draft)
        settings = FleetSettings(host=host, opens=True)
        for count in given.at_once:
            some = prompts[half : half + count]
            if count == 1:  # all texts of the half, one after another
                simulated = sum(
                    Fleet(curve, settings).run(requests_of_texts([len(p)], given.max_tokens, [o])).seconds
                    for p, o in zip(prompts[half:], outcomes, strict=True)
                )
                seconds = [sum(one for one, _, _ in runs) for runs in turns]
                some, is_equal = prompts[half:], True
            else:
                found = [recorder.run(llm, some) for _ in range(given.repeats)]
                requests = requests_of_texts([len(prompt) for prompt in some], given.max_tokens, outcomes)
                simulated = Fleet(curve, settings).run(requests).seconds
                seconds = [one for one, _, _ in found]
                is_equal = all(texts == [one[2][0] for one in alone[:count]] for _, _, texts in found)
            middle = statistics.median(seconds)
            yield {
                "kind": "run",
                "draft": draft,
                "at_once": count,
                "prompt_tokens": [len(prompt) for prompt in some],
                "output": given.max_tokens,
                "seconds": [round(one, 4) for one in seconds],
                "simulated": round(simulated, 4),
                "ratio": round(simulated / middle, 3),
                "equal": is_equal,
                "pass_ms": round(statistics.median(single_passes(llm.model)), 3),
            }


def main() -> None:
    """Measure, predict and write rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--category", action="append", default=[])
    parser.add_argument("--draft", action="append", default=[])
    parser.add_argument("--at-once", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--longest", type=int, default=300, help="longest prompt, in tokens")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.draft = given.draft or ["none", "suffix"]
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    loaded = load_model(given.model, dtype=given.dtype, quantization=given.quantization)
    assert loaded.folder is not None, "it was loaded by name"
    tokenizer = Tokenizer.load(loaded.folder)
    tasks = read_workload(given.prompts).choose(tuple(given.category)).tasks
    encoded = [ids for ids in (encode(task, tokenizer)[0] for task in tasks) if len(ids) <= given.longest]
    prompts = encoded[:: max(1, len(encoded) // (2 * max(given.at_once)))][: 2 * max(given.at_once)]
    prompts = [*prompts[::2], *prompts[1::2]]  # both halves have prompts of all kinds
    footprint = loaded.model.footprint
    header = {"kind": "header", "date": now(), "machine": machine(loaded.model.device), "versions": versions()}
    header |= {"model": shown_name(given.model), "kernels": loaded.kernels, "threads": torch.get_num_threads()}
    header |= {"token_share": footprint.token / footprint.weights}
    gc.collect()
    gc.freeze()  # a full collection of these objects takes as long as several rounds
    with given.out.open("a", encoding="utf-8") as out:
        out.write(json.dumps(header) + "\n")
        for row in passes(loaded.model):
            out.write(json.dumps(row) + "\n")
        out.flush()
        for row in rows_of(loaded, prompts, MeasuredCurve.read(given.out), given):
            out.write(json.dumps(row) + "\n")
            out.flush()
            print({key: value for key, value in row.items() if key not in ("texts", "prompt_tokens")}, file=sys.stderr)


if __name__ == "__main__":
    main()
