"""How many clients a verify server serves at equal latency: devices that draft, beside clients that read a stream.

    python benchmarks/scale/verify_capacity.py record MODEL --prompts FILE --draft SPEC --texts texts.jsonl
    python benchmarks/scale/equal_latency.py MODEL --texts texts.jsonl --draft-ms 20 --out FILE \\
        --devices 1 2 4 8 16 --rtt 0 50 --server-core 1 --client-core 0

The server has one core for itself, and all clients are in one process on another. Devices replay recorded drafts and
wait for as long as a draft takes (`verify_capacity.py`), so their processors do not count. A client writes one text and
begins at a random time within `--spread` seconds; few clients repeat with other texts until `--least` were written.
Rows have milliseconds per token of each text, its first token included, the CPU time of the server per token, and what
the simulator predicts for the same clients. With `--passes` the passes are measured first, in this process on the
server's core; further runs may append to the same file. A run of one device and one of one reader without a round trip
give the server's time for a message of each kind, and the device's own time per round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import torch

sys.path.insert(0, str(Path(__file__).parent))
from client_predictions import Case, Found, calibrated, simulated
from end_and_cloud import served
from fleet import PREFIX, timed_passes, timed_prompts
from verify_capacity import Device, Recording, Text
from verify_paced import PacedCurve, replayed
from verify_paced import served as paced_server

from draftree.analysis.fleet.curves import MeasuredCurve, PassCurve
from draftree.bench.provenance import machine, now, shown_name, versions
from draftree.loading.load import load_model

GRID = {1: (1, 2, 3, 5, 9), 2: (1, 3, 5), 4: (1, 3, 5), 8: (1, 3, 5), 16: (1, 3, 5), 32: (1, 3)}
"""Rows of each sequence by the number of sequences."""
TICKS = os.sysconf("SC_CLK_TCK")


class Server:
    """A running server: its process and its counters.

    Args:
        url: of the server.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        port = url.rsplit(":", 1)[1]
        found = [int(one.name) for one in Path("/proc").iterdir() if one.name.isdigit() and _has(one, port)]
        (self.process,) = found

    def cpu_seconds(self) -> float:
        """CPU time so far."""
        fields = Path(f"/proc/{self.process}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def num_passes(self) -> float:
        """Passes so far."""
        lines = httpx.get(f"{self.url}/metrics", timeout=60).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if re.match(r"draftree_(passes|rounds)_total", line))


def _has(process: Path, port: str) -> bool:
    try:
        words = (process / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return port.encode() in words and bool({b"verify-server", b"--serve"} & set(words))


async def clients(url: str, texts: Sequence[Text], offsets: Sequence[float], case: Case, draft: float) -> list[Any]:
    """Run clients at the same time; returns seconds of each and the server's seconds of its rounds."""
    begin = asyncio.Event()

    async def one(text: Text, offset: float) -> tuple[float, list[float]]:
        device, mine = Device(url, text, round_trip=case.round_trip, draft_seconds=draft), asyncio.Event()

        async def later() -> None:
            await begin.wait()
            await asyncio.sleep(offset)
            mine.set()

        starting = asyncio.create_task(later())
        seconds = await device.run(mine, drafts=case.drafts)
        await starting
        return seconds, device.passed

    tasks = [asyncio.create_task(one(text, offset)) for text, offset in zip(texts, offsets, strict=True)]
    await asyncio.sleep(0.2)
    begin.set()
    return list(await asyncio.gather(*tasks))


def measure(server: Server, texts: Sequence[Text], case: Case, given: argparse.Namespace) -> Found:
    """Run a case in groups of clients until enough texts were written."""
    choose, place = random.Random(1000 * case.count), 0
    groups, offsets, seconds, times = list[list[Text]](), list[list[float]](), list[float](), list[float]()
    cpu, passes = server.cpu_seconds(), server.num_passes()
    while place < given.least:
        groups.append([texts[(place + number) % len(texts)] for number in range(case.count)])
        offsets.append([given.spread * choose.random() for _ in range(case.count)])
        found = asyncio.run(clients(server.url, groups[-1], offsets[-1], case, given.draft_ms / 1000))
        seconds += [one[0] for one in found]
        times += [took for one in found for took in one[1]]
        place += case.count
    return Found(seconds, offsets, groups, server.cpu_seconds() - cpu, server.num_passes() - passes, times)


def row_of(curve: PassCurve, found: Found, case: Case, host: dict[str, float], draft: float) -> dict[str, Any]:
    """A line of results."""
    tokens = [len(text.output) for group in found.texts for text in group]
    each = [1000 * one / count for one, count in zip(found.seconds, tokens, strict=True)]
    expected = [
        1000 * one / count for one, count in zip(simulated(curve, found, case, host, draft), tokens, strict=True)
    ]
    return {
        "kind": "clients",
        "arm": "drafts" if case.drafts else "streams",
        "rtt_ms": round(1000 * case.round_trip),
        "clients": case.count,
        "ms_per_token": round(statistics.median(each), 2),
        "mean": round(statistics.fmean(each), 2),
        "simulated": round(statistics.median(expected), 2),
        "simulated_mean": round(statistics.fmean(expected), 2),
        "ratio": round(statistics.fmean(expected) / statistics.fmean(each), 3),
        "server_cpu_ms_per_token": round(1000 * found.cpu / sum(tokens), 2),
        "rounds": len(found.times),
        "round_ms": round(1000 * statistics.median(found.times), 2) if found.times else None,
        "passes": found.passes,
        "offsets": [[round(one, 4) for one in group] for group in found.offsets],
        "each": [round(one, 2) for one in each],
    }


def rows(server: Server, texts: Sequence[Text], curve: PassCurve, given: argparse.Namespace) -> Iterator[Any]:
    """Read the prompts, calibrate, then measure and predict all cases."""
    draft = given.draft_ms / 1000
    for drafts in (False, True):
        asyncio.run(clients(server.url, texts, [0.0] * len(texts), Case(drafts, len(texts), 0.0), draft))
    known = {drafts: measure(server, texts, Case(drafts, 1, 0.0), given) for drafts in (False, True)}
    busy = measure(server, texts, Case(False, given.readers, 0.0), given)
    host = calibrated(curve, known[True], known[False], busy, draft)
    yield {"kind": "host", "draft_ms": given.draft_ms, **host}
    for milliseconds in given.rtt:
        for count in given.devices:
            for drafts in (False, True):
                case = Case(drafts, count, milliseconds / 1000)
                is_known = (count, milliseconds) == (1, 0)
                found = known[drafts] if is_known else measure(server, texts, case, given)
                yield row_of(curve, found, case, host, draft)


def passes(model: Any) -> Iterator[dict[str, Any]]:
    """Measure passes by sequences and rows, and passes over prompts."""
    for batch, counts in GRID.items():
        yield from timed_passes(model, batch, PREFIX, counts)
    yield from timed_passes(model, 1, 256, [5])
    for count in (16, 64, 128):
        yield {"kind": "pass", "prompt_rows": count, "milliseconds": [round(v, 3) for v in timed_prompts(model, count)]}


def serving(given: argparse.Namespace) -> AbstractContextManager[str]:
    """The server of a run, on the core of this process."""
    if given.paced is not None:
        given.pass_ms, given.row_ms = given.paced
        return paced_server(given)
    options = [] if given.quantization is None else [f"--quantization={given.quantization}"]
    options += [
        "--threads=1",
        "--max-concurrent-requests=64",
        "--max-sessions=128",
        f"--prefix-cache-size={given.kept}",
    ]
    return served(given.model, options)


def write_passes(given: argparse.Namespace, recording: Recording, write: Callable[[dict[str, Any]], None]) -> None:
    """Measure passes of the model."""
    loaded = load_model(given.model, quantization=given.quantization)
    footprint = loaded.model.footprint
    header = header_of(given) | {"kernels": loaded.kernels, "quantization": given.quantization}
    write(header | {"threads": 1, "token_share": footprint.token / footprint.weights})
    for row in passes(loaded.model):
        write(row)


def header_of(given: argparse.Namespace) -> dict[str, Any]:
    """The first line of a run."""
    header = {"kind": "header", "date": now(), "machine": machine(torch.device("cpu")), "versions": versions()}
    return header | {"model": "paced" if given.paced else shown_name(given.model), "paced_ms": given.paced}


def rounds_of(texts: Sequence[Text]) -> dict[str, Any]:
    """Drafted and written tokens of every round of the replayed texts."""
    return {
        "rounds": [
            [[len(tree), count] for tree, count in zip(text.trees, text.written, strict=True)] for text in texts
        ],
        "output": len(texts[0].output),
    }


def main() -> None:
    """Measure and write rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--quantization")
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--draft-ms", type=float, required=True, help="time of a draft on a device")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--rtt", type=float, nargs="+", default=[0, 50], help="milliseconds")
    parser.add_argument("--least", type=int, default=6, help="texts of a case at least")
    parser.add_argument("--readers", type=int, default=12, help="clients that read, for calibration")
    parser.add_argument("--spread", type=float, default=0.2)
    parser.add_argument("--kept", type=int, default=128, help="finished texts whose prompts are not read again")
    parser.add_argument("--passes", action="store_true", help="measure passes only")
    parser.add_argument("--paced", type=float, nargs=2, metavar=("PASS_MS", "ROW_MS"))
    parser.add_argument("--server-core", type=int, default=1)
    parser.add_argument("--client-core", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {given.server_core})
    recording = Recording.read(given.texts, given.draft_ms)
    with given.out.open("a", encoding="utf-8") as out:

        def write(row: dict[str, Any]) -> None:
            out.write(json.dumps(row) + "\n")
            out.flush()

        if given.passes:
            write_passes(given, recording, write)
            return
        texts = replayed(recording, max(given.devices)) if given.paced else recording.texts
        write(header_of(given) | rounds_of(texts) if given.paced else {"kind": "drafts"} | recording.line())
        curve = PacedCurve(*(one / 1000 for one in given.paced)) if given.paced else MeasuredCurve.read(given.out)
        with serving(given) as url:
            os.sched_setaffinity(0, {given.client_core})  # the server keeps its core
            start = time.perf_counter()
            for row in rows(Server(url), texts, curve, given):
                write(row)
                shown = {key: value for key, value in row.items() if key not in ("offsets", "each")}
                print(round(time.perf_counter() - start, 1), shown, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
