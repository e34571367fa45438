"""A verify server under many devices: measured with devices that replay recorded drafts, and simulated.

    python benchmarks/scale/verify_capacity.py record MODEL --prompts FILE --draft SPEC --texts texts.jsonl
    python benchmarks/scale/verify_capacity.py run MODEL --texts texts.jsonl --devices 1 2 4 8 --rtt 0 50 --out FILE

`record` writes texts on this machine, one by one, with the draft of every round; with `--patterns` all at once, with
drafts of as many right and wrong tokens as in an earlier recording. `run` starts a verify server, and
devices that send these drafts: a device waits for as long as its draft and the network take, and computes nothing, as
if it had a processor of its own. Each device writes one text; the texts of plain devices are written by the server
alone. Texts of one device without a round trip calibrate the server's and the device's time per round besides the
passes; the passes are measured in this process before. All rows are measurements with their predictions.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from devices import Device, Recording, Text, read_patterns, replayed, run_devices
from end_and_cloud import served
from fleet import passes
from measured_runs import client_seconds, streamed_seconds

from draftree import LLM, SamplingParams
from draftree.core.files import shown_name
from draftree.core.types import RoundRecord
from draftree.lab.bench.workload import encode, read_workload
from draftree.lab.fleet.curves import MeasuredCurve
from draftree.lab.fleet.simulation import PLAIN, Fleet, FleetSettings, HostCosts, SimulatedRequest
from draftree.loading.load import load_model
from draftree.loading.provenance import machine, now, versions


def record(given: argparse.Namespace) -> None:
    """Write the texts with their drafts to a file."""
    records: list[RoundRecord] = []
    draft = None if given.patterns else given.draft
    plan = None if draft is None else "fixed"
    llm = LLM(given.model, draft, plan=plan, quantization=given.quantization, on_round=records.append)
    assert llm.tokenizer is not None, "it was loaded by name"
    tasks = read_workload(given.prompts).choose(tuple(given.category), given.limit).tasks
    prompts = [ids for ids in (encode(task, llm.tokenizer)[0] for task in tasks) if len(ids) <= given.longest]
    with given.texts.open("w", encoding="utf-8") as out:
        if given.patterns:
            for text in replayed(llm, prompts, given.tokens, read_patterns(given.patterns)):
                rounds = [[t.tokens, t.parents, count] for t, count in zip(text.trees, text.written, strict=True)]
                line = {"prompt": text.prompt, "output": text.output, "draft": f"as in {given.patterns.name}"}
                out.write(json.dumps(line | {"rounds": rounds, "draft_ms": 0.0}) + "\n")
            return
        for ids in prompts:
            records.clear()
            llm.forget()
            params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=given.tokens)
            (found,) = llm.generate([ids], params, progress=False)
            rows = [row for one in records for row in one.sequences]
            line = {"prompt": ids, "output": list(found.token_ids), "draft": given.draft}
            line["rounds"] = [[list(row.tree.tokens), list(row.tree.parents), row.num_written] for row in rows]
            line["draft_ms"] = statistics.median(1000 * one.draft_seconds for one in records)
            out.write(json.dumps(line) + "\n")
            print(f"{len(rows)} rounds, {given.tokens / len(rows):.2f} tokens each", file=sys.stderr)


def measured(
    url: str, texts: Sequence[Text], *, rtt: float, draft: float, drafts: bool
) -> tuple[list[float], list[float]]:
    """Seconds of every device, and of the server's passes."""
    devices = [Device(url, text, round_trip=rtt, draft_seconds=draft) for text in texts]
    seconds = asyncio.run(run_devices(devices, [0.0] * len(devices), drafts=drafts))
    return seconds, [one for device in devices for one in device.passed]


def simulated(
    curve: MeasuredCurve, texts: Sequence[Text], settings: FleetSettings, *, rtt: float, draft: float
) -> list[float]:
    """Seconds of every device, as predicted."""
    drafts = settings.round_trip is not None
    requests = [
        SimulatedRequest(
            settings.jitter * place / len(texts),
            len(text.prompt),
            len(text.output),
            text.outcomes(draft) if drafts else PLAIN,
        )
        for place, text in enumerate(texts)
    ]
    ends = Fleet(curve, settings).run(requests).by_request
    if drafts:
        return [client_seconds(end, rtt, draft_seconds=draft, client_overhead=settings.client_overhead) for end in ends]
    return [streamed_seconds(end, rtt) for end in ends]


def calibrated(
    curve: MeasuredCurve, runs: Sequence[tuple[Text, list[float], list[float]]], draft: float
) -> tuple[float, float]:
    """Seconds per round of the server besides the pass, and of the device besides draft and server.

    Args:
        curve: cost of passes.
        runs: texts of one device without a round trip, with its seconds and those of the server's rounds.
        draft: seconds of a draft.
    """
    server, device = list[float](), list[float]()
    for text, seconds, passed in runs:
        place = len(text.prompt)
        for number, (tree, count, took) in enumerate(zip(text.trees, text.written, passed, strict=True)):
            if number:
                server.append(took - curve.seconds(1, 1 + len(tree), place))
            place += count
        device.append((seconds[0] - sum(passed)) / len(text.trees) - draft)
    return statistics.median(server), statistics.median(device)


def rows(
    url: str, curve: MeasuredCurve, recordings: list[Recording], given: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Calibrate with the first recording, then measure and predict all of them."""

    def run(of: Recording, count: int, rtt: float, *, drafts: bool) -> tuple[list[float], list[float]]:
        texts = [of.texts[place % len(of.texts)] for place in range(count)]
        return measured(url, texts, rtt=rtt, draft=of.draft_seconds, drafts=drafts)

    first = recordings[0]
    run(first, 1, 0.0, drafts=True)
    singles = []
    for text in first.texts[: given.calibrate]:
        alone = Recording(first.draft, first.draft_seconds, [text])
        singles.append((text, *run(alone, 1, 0.0, drafts=True)))
    server, device = calibrated(curve, singles, first.draft_seconds)
    yield {"kind": "host", "overhead": server, "client_overhead": device}
    cases = [(count, 0.0) for count in given.devices] + [(count, rtt) for rtt in given.rtt for count in given.far]
    for of in recordings:
        for count, milliseconds in cases if of is first else [case for case in cases if case[0] == 1]:
            for drafts in (False, True):
                rtt = milliseconds / 1000
                seconds, _ = run(of, count, rtt, drafts=drafts)
                settings = FleetSettings(
                    host=HostCosts(overhead=server),
                    round_trip=rtt if drafts else None,
                    client_overhead=device if drafts else 0.0,
                )
                some = [of.texts[place % len(of.texts)] for place in range(count)]
                expected = simulated(curve, some, settings, rtt=rtt, draft=of.draft_seconds)
                tokens = len(some[0].output)
                found, predicted = (1000 * statistics.fmean(each) / tokens for each in (seconds, expected))
                yield {
                    "kind": "clients",
                    "draft": of.draft,
                    "arm": "drafts" if drafts else "streams",
                    "rtt_ms": milliseconds,
                    "devices": count,
                    "ms_per_token": round(found, 3),
                    "simulated": round(predicted, 3),
                    "ratio": round(predicted / found, 3),
                    "tokens_per_second": round(count * tokens / max(seconds), 2),
                }


def run(given: argparse.Namespace) -> None:
    """Measure passes, then the server, and write rows."""
    torch.set_num_threads(given.threads)
    times = given.draft_ms or [None] * len(given.texts)
    recordings = [Recording.read(path, of) for path, of in zip(given.texts, times, strict=True)]
    loaded = load_model(given.model, quantization=given.quantization)
    footprint = loaded.model.footprint
    header = {"kind": "header", "date": now(), "machine": machine(torch.device("cpu")), "versions": versions()}
    header |= {"model": shown_name(given.model), "kernels": loaded.kernels, "threads": given.threads}
    header |= {"token_share": footprint.token / footprint.weights, "quantization": given.quantization}
    with given.out.open("a", encoding="utf-8") as out:

        def write(row: dict[str, Any]) -> None:
            out.write(json.dumps(row) + "\n")
            out.flush()

        write(header)
        for row in passes(loaded.model, given.most_rows):
            write(row)
        del loaded
        for of in recordings:
            write(of.line())
        options = [f"--threads={given.threads}"]
        options += [] if given.quantization is None else [f"--quantization={given.quantization}"]
        with served(given.model, options) as url:
            for row in rows(url, MeasuredCurve.read(given.out), recordings, given):
                write(row)
                print(row, file=sys.stderr, flush=True)


def main() -> None:
    """Record or run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(required=True)
    for name, action in (("record", record), ("run", run)):
        own = kinds.add_parser(name)
        own.set_defaults(action=action)
        own.add_argument("model")
        own.add_argument("--quantization")
    first, second = (kinds.choices[name] for name in ("record", "run"))
    first.add_argument("--prompts", type=Path, required=True)
    first.add_argument("--category", action="append", default=[])
    first.add_argument("--limit", type=int, default=1)
    first.add_argument("--longest", type=int, default=200, help="longest prompt, in tokens")
    drafts = first.add_mutually_exclusive_group(required=True)
    drafts.add_argument("--draft")
    drafts.add_argument("--patterns", type=Path, help="results whose drafted and accepted numbers of tokens are taken")
    first.add_argument("--tokens", type=int, default=32)
    first.add_argument("--texts", type=Path, required=True)
    second.add_argument("--texts", type=Path, nargs="+", required=True)
    second.add_argument("--draft-ms", type=float, nargs="+", help="time of a draft for each file, not the recorded one")
    second.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="without a round trip")
    second.add_argument("--rtt", type=float, nargs="*", default=[20, 50, 100, 200], help="milliseconds")
    second.add_argument("--far", type=int, nargs="+", default=[1], help="devices with a round trip")
    second.add_argument("--calibrate", type=int, default=3, help="texts for calibration")
    second.add_argument("--most-rows", type=int, default=80)
    second.add_argument("--threads", type=int, default=2)
    second.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.action(given)


if __name__ == "__main__":
    main()
