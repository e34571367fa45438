"""How many clients a verify server serves at equal latency: devices that draft, beside clients that read a stream.

    python benchmarks/scale/equal_latency.py paced --paced 27 0.26 --texts equal-latency-tinyllama.jsonl \\
        --draft-ms 20 --devices 1 2 4 8 16 32 48 --rtt 0 50 --calibrate --out FILE
    python benchmarks/scale/verify_capacity.py record MODEL --prompts FILE --draft SPEC --texts texts.jsonl
    python benchmarks/scale/equal_latency.py MODEL --passes --texts texts.jsonl --draft-ms 20 --out FILE
    python benchmarks/scale/equal_latency.py MODEL --texts texts.jsonl --draft-ms 20 --out FILE
    python benchmarks/scale/client_predictions.py FILE

The server has one core for itself, and all clients are in one process on another. Devices replay recorded drafts and
wait for as long as a draft takes (`devices.py`), so their processors do not count. A client writes one text and begins
at a random time within `--spread` seconds. A run appends rows to the file, a group of texts in turn for the case that
has fewest, until every case has `--least` texts or the run has taken `--seconds`; the same command continues it.
Calibration runs (`--calibrate`) have CPU times of the server's threads, and are not among the cases. With `--passes`
the passes of a model are measured, in this process on the server's core.
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
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import torch

sys.path.insert(0, str(Path(__file__).parent))
import paced_server
from devices import Device, Recording, Text, read_patterns, run_devices
from end_and_cloud import served
from fleet import PREFIX, timed_passes, timed_prompts

from draftree.core.files import shown_name
from draftree.core.tree import TokenTree
from draftree.loading.load import load_model
from draftree.loading.provenance import machine, now, versions

GRID = {1: (1, 2, 3, 5, 9), 2: (1, 3, 5), 4: (1, 3, 5), 8: (1, 3, 5), 16: (1, 3, 5), 32: (1, 3)}
"""Rows of each sequence by the number of sequences."""
TICKS = os.sysconf("SC_CLK_TCK")
TEXTS, TEXTS_OF_ONE = 64, 4
"""Texts of a paced run, and those that one client writes in turn in a group."""
WIDE = 12
"""Nodes of wide trees."""
CALIBRATION = (
    ("streams", 1, 0), ("streams", 6, 0), ("streams", 24, 0), ("streams", 6, 100), ("drafts", 1, 0), ("drafts", 6, 0),
    ("drafts", 24, 0),
)  # fmt: skip
CALIBRATION_WIDE = (("wide", 1, 0), ("wide", 6, 0))
"""Kind, number of clients and milliseconds of the round trip of calibration runs."""


@dataclass(frozen=True)
class Case:
    """Clients at the same time.

    Attributes:
        arm: "streams", "drafts", or "wide": drafts with more nodes.
        clients: how many.
        rtt_ms: milliseconds of the round trip.
        kind: "clients", or "calibration".
    """

    arm: str
    clients: int
    rtt_ms: float
    kind: str = "clients"

    @property
    def num_texts(self) -> int:
        """Texts of a group."""
        return max(self.clients, TEXTS_OF_ONE // self.clients * self.clients)


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

    def meters(self) -> dict[str, float]:
        """CPU time and passes so far; of a paced server also those of its threads."""
        found = httpx.get(f"{self.url}/meters", timeout=60)
        own: dict[str, float] = found.json() if found.is_success else {"passes": self._num_passes()}
        fields = Path(f"/proc/{self.process}/stat").read_text().rsplit(")", 1)[1].split()
        return own | {"cpu": (int(fields[11]) + int(fields[12])) / TICKS, "client_cpu": time.process_time()}

    def _num_passes(self) -> float:
        lines = httpx.get(f"{self.url}/metrics", timeout=60).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if re.match(r"draftree_(passes|rounds)_total", line))


def _has(process: Path, port: str) -> bool:
    try:
        words = (process / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return port.encode() in words and any(
        word == b"verify-server" or word.endswith(b"paced_server.py") for word in words
    )


def widened(text: Text) -> Text:
    """The text with more wrong nodes in every tree, as children of the root; empty trees have no room for any."""
    trees = []
    for tree in text.trees:
        wrong = [token for token in range(2 * WIDE) if token not in (*text.output, *tree.tokens)][:WIDE]
        wrong = wrong if len(tree) else []
        trees.append(TokenTree((*tree.tokens, *wrong), (*tree.parents, *[-1] * len(wrong))))
    return Text(text.prompt, text.output, trees, text.written)


def measure(server: Server, texts: Sequence[Text], case: Case, first: int, given: argparse.Namespace) -> dict[str, Any]:
    """Run a group of texts, from the text with this number on, and return its row."""
    choose = random.Random(1000 * case.clients + first)
    each, offsets, rounds, late = list[float](), list[list[float]](), list[float](), list[float]()
    before = server.meters()
    for place in range(first, first + case.num_texts, case.clients):
        some = [texts[(place + number) % len(texts)] for number in range(case.clients)]
        some = [widened(text) for text in some] if case.arm == "wide" else some
        devices = [Device(server.url, text, case.rtt_ms / 1000, given.draft_ms / 1000) for text in some]
        offsets.append([round(given.spread * choose.random(), 4) for _ in some])
        seconds = asyncio.run(run_devices(devices, offsets[-1], drafts=case.arm != "streams"))
        each += [round(1000 * one / len(text.output), 3) for one, text in zip(seconds, some, strict=True)]
        rounds += [one for device in devices for one in device.passed]
        late += [one for device in devices for one in device.late]
    after = server.meters()
    return {
        "kind": case.kind, "arm": case.arm, "rtt_ms": case.rtt_ms, "clients": case.clients, "first": first,
        "ms_per_token": round(statistics.median(each), 2), "mean": round(statistics.fmean(each), 3),
        "rounds": len(rounds), "round_ms": round(1000 * statistics.median(rounds), 2) if rounds else None,
        "late_ms": round(1000 * statistics.fmean(late), 3) if late else 0.0,
        "known_pass": after.pop("known_pass", None),
        "meters": {name: round(after[name] - before.get(name, 0.0), 6) for name in after},
        "offsets": offsets, "each": each, "date": now(),
    }  # fmt: skip


def openings(server: Server, texts: Sequence[Text]) -> dict[str, Any]:
    """Open and close a text in turn in many sessions, and return a row with the server's CPU time."""
    before = server.meters()
    some = [Text(text.prompt, [], [], []) for text in texts[:16]]
    for text in some:
        asyncio.run(run_devices([Device(server.url, text, 0.0, 0.0)], [0.0], drafts=True))
    after = server.meters()
    meters = {name: round(after[name] - before.get(name, 0.0), 6) for name in after}
    return {"kind": "calibration", "arm": "openings", "clients": 1, "rtt_ms": 0, "texts": len(some), "meters": meters}


def rows(
    server: Server, texts: Sequence[Text], done: Sequence[dict[str, Any]], given: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Measure group after group, of all cases in turn."""
    start = time.monotonic()
    for drafts in (False, True):  # reads the prompts
        devices = [Device(server.url, text, 0.0, 0.0) for text in texts[:64]]
        asyncio.run(run_devices(devices, [0.0] * len(devices), drafts=drafts))
    server.meters()
    least = {Case(*one): given.least for one in product(("streams", "drafts"), given.devices, given.rtt)}
    if given.calibrate:
        has_trees = given.model == "paced"  # a wide tree has no known tokens for another model
        for kind in CALIBRATION + (CALIBRATION_WIDE if has_trees else ()):
            least[Case(*kind, kind="calibration")] = given.calibration_texts
        yield openings(server, texts)
    has = {case: sum(len(row["each"]) for row in done if case == case_of(row)) for case in least}

    def progress(case: Case) -> tuple[float, bool, int]:
        return has[case] / least[case], case.kind != "calibration", -case.clients

    while has[case := min(has, key=progress)] < least[case] and time.monotonic() - start < given.seconds:
        yield measure(server, texts, case, has[case], given)
        has[case] += case.num_texts


def case_of(row: dict[str, Any]) -> Case | None:
    """The case of a row; None for other rows."""
    if row.get("kind") not in ("clients", "calibration") or row["arm"] == "openings":
        return None
    return Case(row["arm"], row["clients"], row["rtt_ms"], row["kind"])


def passes(model: Any) -> Iterator[dict[str, Any]]:
    """Measure passes by sequences and rows, and passes over prompts."""
    for batch, counts in GRID.items():
        yield from timed_passes(model, batch, PREFIX, counts)
    yield from timed_passes(model, 1, 256, [5])
    for number in (16, 64, 128):
        found = [round(one, 3) for one in timed_prompts(model, number)]
        yield {"kind": "pass", "prompt_rows": number, "milliseconds": found}


def serving(given: argparse.Namespace) -> AbstractContextManager[str]:
    """The server of a run, on the core of this process."""
    if given.paced is not None:
        fixed, row = (one / 1000 for one in given.paced)
        return paced_server.served(fixed, row, given.kept)
    options = [] if given.quantization is None else [f"--quantization={given.quantization}"]
    options += ["--threads=1", "--max-concurrent-requests=64", "--max-sessions=128"]
    return served(given.model, [*options, f"--prefix-cache-size={given.kept}"])


def write_passes(given: argparse.Namespace, write: Callable[[dict[str, Any]], None]) -> None:
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


def main() -> None:
    """Measure and write rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model, or 'paced' with --paced")
    parser.add_argument("--quantization")
    parser.add_argument("--texts", type=Path, required=True, help="recorded texts; for paced passes also results")
    parser.add_argument("--draft-ms", type=float, required=True, help="time of a draft on a device")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--rtt", type=float, nargs="+", default=[0, 50], help="milliseconds")
    parser.add_argument("--least", type=int, default=64, help="texts of a case at least")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no group after so many")
    parser.add_argument("--calibrate", action="store_true", help="calibration runs, too")
    parser.add_argument("--calibration-texts", type=int, default=12, help="texts of each calibration run at least")
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
    done = [json.loads(line) for line in given.out.read_text("utf-8").splitlines()] if given.out.exists() else []
    with given.out.open("a", encoding="utf-8") as out:

        def write(row: dict[str, Any]) -> None:
            out.write(json.dumps(row) + "\n")
            out.flush()

        if given.passes:
            write_passes(given, write)
            return
        with serving(given) as url:
            os.sched_setaffinity(0, {given.client_core})  # the server keeps its core
            texts, line = texts_of(given)
            write(header_of(given) | {"draft_ms": given.draft_ms, "spread": given.spread} | line)
            start = time.perf_counter()
            for row in rows(Server(url), texts, done, given):
                write(row)
                shown = {key: value for key, value in row.items() if key not in ("offsets", "each", "meters")}
                print(round(time.perf_counter() - start, 1), shown, file=sys.stderr, flush=True)


def texts_of(given: argparse.Namespace) -> tuple[Sequence[Text], dict[str, Any]]:
    """The texts of a run, and the part of its header that describes them."""
    if given.paced:
        texts = paced_server.texts(read_patterns(given.texts), TEXTS)
    else:
        texts = Recording.read(given.texts, given.draft_ms).texts
    return texts, {"rounds": [text.pattern for text in texts], "output": len(texts[0].output)}


if __name__ == "__main__":
    main()
