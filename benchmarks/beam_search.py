"""Beam search: ours through torch and in C, transformers' `generate(num_beams=...)`, and CTranslate2.

    python benchmarks/beam_search.py times  [--widths 1 4 8 16] [--prompts 64 512] [--repeats 3] [--peer COMMAND] [--out FILE]
    python benchmarks/beam_search.py memory [--widths 8] [--prompts 2048] [--out FILE]
    python benchmarks/beam_search.py steps  [--widths 4] [--prompts 512] [--tokens 64] [--out FILE]
    python benchmarks/beam_search.py plot FILE --out steps.svg

All methods search the same weights after the same prompt for the same number of tokens, and no token ends a text.
`times` lets the methods take turns, one search each, and reports medians of whole searches and of single steps.
`memory` runs each method in a process of its own and reports by how much its peak resident memory exceeds that before
the search. `steps` compares each step of a search with computing everything again: prompt and all beams in a new slot,
as one tree, and as rows. CTranslate2 runs in an environment of its own (`peers/ctranslate2_beams.py`).
"""  # noqa: E501

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from beam_methods import METHODS, Found, Method, Peer, method_of, prompt_of
from beam_steps import measure_steps, plot

from draftree.loading.provenance import load_average, machine, now, versions


def measure_times(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a line for each width, prompt and method; cells are left out once the time is used up."""
    methods: dict[str, Method] = {name: method_of(name, given) for name in given.methods}
    if given.peer:
        methods["CTranslate2"] = Peer(given.peer)
    end = time.monotonic() + given.seconds
    for method in methods.values():
        method(prompt_of(given, 16), 2, 3)
    for length, width in itertools.product(given.prompts, given.widths):
        prompt, found = prompt_of(given, length), {name: list[Found]() for name in methods}
        for _ in range(given.repeats):
            if time.monotonic() > end:
                break
            for name, method in methods.items():
                found[name].append(method(prompt, width, given.tokens))
        first = found[given.methods[0]]
        for name, runs in found.items():
            if runs:
                same = all(one.tokens == first[0].tokens for one in runs)
                yield {"kind": "time", "prompt": length, "width": width, "tokens": given.tokens, "method": name,
                       "same_text": same, **summary(runs, first)}  # fmt: skip


def summary(runs: Sequence[Found], first: Sequence[Found]) -> dict[str, Any]:
    """Median and range of whole searches, the median step, and ratios to the first method in the same turns."""
    seconds = [one.seconds for one in runs]
    ratios = [theirs.seconds / own.seconds for own, theirs in zip(runs, first, strict=True)]
    steps = step_seconds(runs)
    return {
        "searches": len(runs),
        "median_s": statistics.median(seconds),
        "min_s": min(seconds),
        "max_s": max(seconds),
        "step_ms": None if not steps else 1e3 * statistics.median(steps),
        "ratio": statistics.median(ratios),
        "step_ratio": None if not steps else statistics.median(step_seconds(first)) / statistics.median(steps),
    }


def step_seconds(runs: Sequence[Found]) -> list[float]:
    """Return the durations of all steps after the first."""
    return [late - early for one in runs for early, late in itertools.pairwise(one.steps)]


def measure_memory(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the peak of each method, measured in a process of its own."""
    for length, width, name in itertools.product(given.prompts, given.widths, given.methods):
        command = [sys.executable, __file__, "peak", "--methods", name, "--widths", str(width), "--prompts",
                   str(length), "--tokens", str(given.tokens), "--model", given.model, "--dtype", given.dtype,
                   "--threads", str(given.threads)]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"error: {name} failed: {done.stderr[-2000:]}")
        yield {"kind": "memory", "prompt": length, "width": width, "tokens": given.tokens, "method": name,
               **json.loads(done.stdout.splitlines()[-1])}  # fmt: skip


def peak(given: argparse.Namespace) -> dict[str, Any]:
    """Return by how much the peak of one search exceeds the memory before it, in MiB."""
    (name,), (width,), (length,) = given.methods, given.widths, given.prompts
    method = method_of(name, given)
    method(prompt_of(given, 16), 2, 3)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    found = method(prompt_of(given, length), width, given.tokens)
    return {"before_mib": before, "peak_mib": _status("VmHWM") - before, "seconds": found.seconds}


def _status(name: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) / 1024


def header(given: argparse.Namespace) -> dict[str, Any]:
    """Return the machine and the run."""
    options = {name: value for name, value in vars(given).items() if name not in ("out", "files")}
    return {
        "kind": "header", "job": "beam_search", "date": now(), "machine": machine(torch.device("cpu")),
        "versions": versions(), "load_average": load_average(), **options,
    }  # fmt: skip


def shown(line: dict[str, Any]) -> str:
    """Return a line of the table."""
    numbers = {name: value for name, value in line.items() if isinstance(value, float)}
    text = "  ".join(f"{name} {value:.3f}" for name, value in numbers.items())
    place = line.get("step", "")
    return f"{line['prompt']:>6} {line['width']:>3} {place:>4} {line['method']:<24} {text}"


def main() -> None:
    """Measure, print a table and write JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=("times", "memory", "steps", "peak", "plot"))
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--dtype", default="float32")
    for name, default in (("widths", [1, 4, 8, 16]), ("prompts", [64, 512, 2048])):
        parser.add_argument(f"--{name}", type=int, nargs="+", default=default)
    for name, default in (("tokens", 16), ("repeats", 3), ("threads", 2), ("every", 8), ("seconds", 3600)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--peer", help="command of another engine's process")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if given.job == "plot":
        plot(given.files, given.out or Path("steps.svg"))
        return
    if given.job == "peak":
        print(json.dumps(peak(given)))
        return
    jobs = {"times": measure_times, "memory": measure_memory, "steps": measure_steps}
    lines = [header(given)]
    for line in jobs[given.job](given):
        lines.append(line)
        print(shown(line), flush=True)
        if given.out is not None:
            given.out.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
