"""Speed of generation with and without the capture of training data, for several batch sizes.

    python benchmarks/capture_speed.py MODEL [--batch 16 --batch 32 …] [--passes 30] [--repeats 2] [--to FILE]

Both kinds generate the same texts: half of them greedily, half at temperature 0.8. Plain generation shares beginnings
of prompts; a capture reads every prompt completely.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from draftree.core.types import RoundRecord
from draftree.engine.engine import Engine
from draftree.llm import LLM
from draftree.loading.load import load_model
from draftree.loading.provenance import load_average, machine, now, versions
from draftree.options import EngineLimits
from draftree.train.data.capture import Capture, CaptureSettings
from draftree.train.data.prompts import prompt_set

KINDS = ("plain", "capture")


@dataclass(frozen=True)
class Speed:
    """One measurement: decode passes of a whole batch after its prompts were read."""

    batch: int
    kind: str
    repeat: int
    tokens_per_second: float
    pass_milliseconds: float
    prompt_seconds: float
    prompt_tokens: int
    score_milliseconds: float
    verify_milliseconds: float
    commit_milliseconds: float


def measure(capture: Capture, llm: LLM, batch: int, kind: str, *, repeat: int, passes: int) -> Speed:
    """Read the prompts of a batch, then time decode passes."""
    engine = (
        capture.engine()[1]
        if kind == "capture"
        else Engine(llm.engine.parts, EngineLimits(max_batch_size=batch, prefix_cache_size=0))
    )
    records: list[RoundRecord] = []
    engine.on_round(records.append)
    found = (capture.sequence(job) for job in capture.jobs[:batch])
    sequences = [sequence for sequence in found if not isinstance(sequence, str)]
    prompt_tokens = sum(len(sequence.history) for sequence in sequences)
    engine.add(*sequences)
    start = time.perf_counter()
    while not all(sequence.counts.rounds for sequence in sequences):
        engine.step()
    prompt_seconds = time.perf_counter() - start
    records.clear()
    tokens, start = 0, time.perf_counter()
    for _ in range(passes):
        tokens += len(engine.running)
        engine.step()
    seconds = time.perf_counter() - start
    engine.abort(sequences)
    score, verify, commit = (
        1000 * sum(getattr(record, f"{part}_seconds") for record in records) / passes
        for part in ("score", "verify", "commit")
    )
    return Speed(
        batch,
        kind,
        repeat,
        tokens_per_second=tokens / seconds,
        pass_milliseconds=1000 * seconds / passes,
        prompt_seconds=prompt_seconds,
        prompt_tokens=prompt_tokens,
        score_milliseconds=score,
        verify_milliseconds=verify,
        commit_milliseconds=commit,
    )


def measure_all(name: str, batches: list[int], *, repeats: int, passes: int) -> Iterator[dict[str, object]]:
    """Yield a header and all measurements, kinds alternating."""
    loaded = load_model(name)
    llm = LLM(loaded, "none")
    sets = [prompt_set("shipped"), prompt_set("expanded:2000")]
    yield {
        "kind": "header",
        "format": 1,
        "job": "capture speed",
        "date": now(),
        "machine": machine(loaded.model.device),
        "versions": versions(),
        "model": {"name": name},
        "kernels": loaded.kernels,
        "threads": torch.get_num_threads(),
        "passes": passes,
        "load_average": load_average(),
    }
    for batch in batches:
        capture = Capture(llm, loaded, sets, CaptureSettings(batch=batch))
        measure(capture, llm, batch, "plain", repeat=-1, passes=3)  # the first passes of a size are slower
        for repeat in range(repeats):
            for kind in KINDS:
                found = measure(capture, llm, batch, kind, repeat=repeat, passes=passes)
                print(f"{batch:3} {kind:8} {found.tokens_per_second:7.0f} tokens/s", flush=True)
                yield asdict(found) | {"measured": found.kind, "kind": "speed"}


def main() -> None:
    """Run the measurement of the command line."""
    parser = argparse.ArgumentParser(description="Speed of generation with and without the capture of training data.")
    parser.add_argument("model")
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--passes", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--to", type=Path)
    given = parser.parse_args()
    lines = measure_all(given.model, given.batch or [16, 32, 64], repeats=given.repeats, passes=given.passes)
    if given.to is None:
        for _ in lines:
            pass
        return
    with given.to.open("x", encoding="utf-8") as file:
        for line in lines:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
