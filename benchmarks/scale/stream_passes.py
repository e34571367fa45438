"""Passes of a model whose layers are read from a file, beside the time of reading alone and of computing alone.

A pass that reads the next layers while one computes takes max(reading, computing) at best; the summary has that divided
by the measured time. Reading alone is the same file, read layer by layer by as many threads as stated, past the page
cache of the system. Computing alone is the same pass with all layers in memory. Arms take turns, repeat by repeat.
Every time is a line of the output; `--summary` prints the medians of a file.

    python benchmarks/scale/stream_passes.py MODEL --offload 308MB --rows 1,64,256 --threads 1,2 --out FILE
    python benchmarks/scale/stream_passes.py --summary FILE
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import torch

from draftree.loading.load import load_model
from draftree.models.base import Extend, LanguageModel, Pass
from draftree.models.native.packed import huge_pages
from draftree.models.native.streaming.model import StreamedModel
from draftree.models.native.streaming.store import PIECE, Extent

PREFIX = 128
BRANCHES = 3


class Passes:
    """Passes of a model after a prefix of one slot.

    Args:
        model: the model.
        most_rows: most rows of a pass.
    """

    def __init__(self, model: LanguageModel, most_rows: int) -> None:
        model.reserve(1, PREFIX + most_rows)
        self._model, self._slot = model, model.open()
        model.run(Pass([Extend(self._slot, [7] * PREFIX, range(-1, PREFIX - 1), logits_at=())]))
        model.commit(self._slot, range(PREFIX))

    def seconds(self, rows: int) -> float:
        """Run a pass over one row, then the measured one over a tree of `rows` nodes, with the logits of all of them.

        After the first, about as much is read ahead as in plain decoding.
        """
        self._run(1)
        start = time.perf_counter()
        self._run(rows)
        return time.perf_counter() - start

    def _run(self, rows: int) -> None:
        parents = [-1, *((node - 1) // BRANCHES for node in range(1, rows))]
        self._model.run(Pass([Extend(self._slot, [5 + node % 997 for node in range(rows)], parents)]))
        self._model.synchronize()
        self._model.commit(self._slot, ())


def seconds_of_reading(path: Path, extents: list[Extent], readers: int) -> float:
    """Read all layers once, each by one of `readers` threads."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
    buffers = [huge_pages(max(extent.size for extent in extents)) for _ in range(readers)]
    for buffer in buffers:
        buffer.zero_()  # its pages exist before the measurement

    def read(reader: int) -> None:
        for extent in extents[reader::readers]:
            view, done = buffers[reader].numpy().data[: extent.size], 0
            while done < extent.size:
                done += os.preadv(descriptor, [view[done : done + PIECE]], extent.start + done)

    try:
        with ThreadPoolExecutor(readers) as pool:
            start = time.perf_counter()
            list(pool.map(read, range(readers)))
            return time.perf_counter() - start
    finally:
        os.close(descriptor)


def loaded(name: str, dtype: str, offload: str) -> StreamedModel:
    model = load_model(name, dtype=dtype, offload=offload).model
    assert isinstance(model, StreamedModel), "native kernels read weights from a file"
    return model


def measure(given: argparse.Namespace) -> None:
    streamed, whole = loaded(given.model, given.dtype, given.offload), loaded(given.model, given.dtype, "1TB")
    stats, weights = streamed.stream_stats, streamed._weights
    extents = [weights._store.extents[layer] for layer in weights.placement.streamed]
    rows = [int(count) for count in given.rows.split(",")]
    threads = [int(count) for count in given.threads.split(",")]
    torch.set_num_threads(max(threads))
    arms = {"in memory": Passes(whole, max(rows)), "streamed": Passes(streamed, max(rows))}
    for passes in arms.values():
        passes.seconds(max(rows))  # checksums, and memory of the largest pass
    end = time.monotonic() + given.seconds
    facts = {"model": given.model, "dtype": given.dtype, "pass_bytes": stats.of_pass, "target_bytes": stats.memory}
    with given.out.open("a", encoding="utf-8") as out:

        def note(**line: Any) -> None:
            out.write(json.dumps(facts | line) + "\n")
            out.flush()

        for repeat in range(given.repeats):
            for readers in (1, 2, 4):
                seconds = seconds_of_reading(weights._store.file, extents, readers)
                note(arm="reading", readers=readers, repeat=repeat, seconds=round(seconds, 4))
            for count in rows:
                for number in threads:
                    for arm, passes in arms.items():
                        if time.monotonic() > end:
                            return
                        torch.set_num_threads(number)
                        seconds = passes.seconds(count)
                        note(arm=arm, rows=count, threads=number, repeat=repeat, seconds=round(seconds, 4))


def summary(path: Path) -> None:
    """Print medians in milliseconds, and the share of the best time that streamed passes reach."""
    found = defaultdict(list)
    for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        found[line["arm"], line.get("readers") or line["rows"], line.get("threads")].append(line["seconds"])
    times = {key: 1000 * median(values) for key, values in found.items()}
    for (arm, readers, _), ms in times.items():
        if arm == "reading":
            print(f"reading, {readers} threads: {ms:.0f} ms")
    reading = times["reading", 1, None]
    print("| rows | threads | in memory, ms | streamed, ms | share of the best |")
    for arm, rows, threads in sorted(key for key in times if key[0] == "streamed"):
        alone, ms = times["in memory", rows, threads], times[arm, rows, threads]
        print(f"| {rows} | {threads} | {alone:.0f} | {ms:.0f} | {max(alone, reading) / ms:.0%} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--summary", type=Path, help="print the medians of a file")
    parser.add_argument("--offload", help="memory for the target's weights")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rows", default="1,16,64,128,256,512,1024")
    parser.add_argument("--threads", default="1", help="numbers of threads, separated by commas")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3600, help="the last pass begins before that")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.summary:
        summary(given.summary)
    else:
        measure(given)


if __name__ == "__main__":
    main()
