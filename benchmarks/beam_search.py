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
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftree import LLM, BeamSearchParams
from draftree.beam.loop import BeamSearch
from draftree.beam.state import TextSearch
from draftree.bench.provenance import load_average, machine, now, versions
from draftree.core.tree import ROOT
from draftree.loading.resolve import resolve_model
from draftree.models.base import Extend, LanguageModel, Pass

METHODS = ("transformers", "torch", "C")
ROOT_FOLDER = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Found:
    """One search: seconds in total, moments of its steps, and the best text."""

    seconds: float
    steps: list[float]
    tokens: list[int]


Method = Callable[[list[int], int, int], Found]


def ours(model: LanguageModel) -> Method:
    """Return our search on a model: a function of prompt, width and number of tokens."""

    def search(prompt: list[int], width: int, tokens: int) -> Found:
        moments: list[float] = []
        params = BeamSearchParams(beam_width=width, max_new_tokens=tokens, ignore_eos=True)
        start = time.perf_counter()
        found = BeamSearch(model, on_step=lambda _: moments.append(time.perf_counter())).run([prompt], [params])
        return Found(time.perf_counter() - start, moments, list(found[0].best.tokens))

    return search


def transformers_search(folder: Path, dtype: torch.dtype) -> Method:
    """Return transformers' beam search."""
    from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=False).eval()
    model.generation_config.eos_token_id = None
    moments: list[float] = []

    class Clock(LogitsProcessor):  # type: ignore[misc]
        def __call__(self, ids: Any, scores: Any) -> Any:
            moments.append(time.perf_counter())
            return scores

    def search(prompt: list[int], width: int, tokens: int) -> Found:
        moments.clear()
        ids = torch.tensor([prompt])
        start = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                num_beams=width,
                do_sample=False,
                max_new_tokens=tokens,
                pad_token_id=0,
                logits_processor=LogitsProcessorList([Clock()]),
            )
        end = time.perf_counter()
        return Found(end - start, [*moments[1:], end], out[0, len(prompt) :].tolist())

    return search


class Peer:
    """A process that searches: one JSON line for a search, one for its result."""

    def __init__(self, command: str) -> None:
        self._process = subprocess.Popen(
            shlex.split(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def __call__(self, prompt: list[int], width: int, tokens: int) -> Found:
        """Search."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps({"prompt": prompt, "width": width, "tokens": tokens}) + "\n")
        line = stdout.readline()
        if not line:
            raise SystemExit("error: the peer ended: run its command by hand to see why")
        found = json.loads(line)
        return Found(found["seconds"], [], found["tokens"])


def method_of(name: str, given: argparse.Namespace) -> Method:
    """Return a method by name; loads its weights."""
    folder, dtype = resolve_model(given.model), getattr(torch, given.dtype)
    if name == "transformers":
        return transformers_search(folder, dtype)
    kernels = "native" if name == "C" else "torch"
    return ours(LLM(given.model, dtype=given.dtype, kernels=kernels).model)


def prompt_of(given: argparse.Namespace, length: int) -> list[int]:
    """Return the beginning of a text of the repository as token ids."""
    from transformers import AutoTokenizer

    text = (ROOT_FOLDER / "docs/architecture.md").read_text("utf-8") + (ROOT_FOLDER / "docs/lossless.md").read_text(
        "utf-8"
    )
    ids: list[int] = AutoTokenizer.from_pretrained(resolve_model(given.model), trust_remote_code=False)(text)[
        "input_ids"
    ]
    if len(ids) < length:
        raise SystemExit(f"error: the text has {len(ids)} tokens: ask for a shorter prompt")
    return ids[:length]


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


def measure_steps(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the time of each step, and of computing everything again at some steps."""
    (width,), (length,) = given.widths, given.prompts
    prompt = prompt_of(given, length)
    shared = {"kind": "step", "prompt": length, "width": width}
    for name in given.methods:
        method = method_of(name, given)
        method(prompt, width, 3)
        runs = [method(prompt, width, given.tokens) for _ in range(given.repeats)]
        for step in range(1, given.tokens):
            times = [one.steps[step] - one.steps[step - 1] for one in runs]
            yield {**shared, "method": name, "step": step + 1, "ms": 1e3 * statistics.median(times)}
    model = LLM(given.model, dtype=given.dtype, kernels="native").model
    for step, beams in live_beams(model, prompt, width, given.tokens).items():
        if step % given.every == 0:
            for name, jobs in (("C, all again as a tree", as_tree), ("C, all again as rows", as_rows)):
                times = [again(model, jobs(prompt, beams)) for _ in range(given.repeats)]
                yield {**shared, "method": name, "step": step, "ms": 1e3 * statistics.median(times)}


Rows = list[tuple[list[int], list[int], list[int]]]
"""For each slot the tokens, their parents, and the places of which logits are needed."""


def live_beams(model: LanguageModel, prompt: list[int], width: int, tokens: int) -> dict[int, list[tuple[int, ...]]]:
    """Return the texts of the beams after each step."""
    found: dict[int, list[tuple[int, ...]]] = {}

    def note(text: TextSearch) -> None:
        found[text.num_steps] = [beam.tokens for beam in text.live]

    params = BeamSearchParams(beam_width=width, max_new_tokens=tokens, ignore_eos=True)
    BeamSearch(model, on_step=note).run([prompt], [params])
    return {step: beams for step, beams in found.items() if beams}


def as_tree(prompt: list[int], beams: Sequence[tuple[int, ...]]) -> Rows:
    """Return one slot with the prompt and the distinct prefixes of all beams."""
    tokens, parents = list(prompt), [ROOT, *range(len(prompt) - 1)]
    known: dict[tuple[int, ...], int] = {(): len(prompt) - 1}
    for beam in beams:
        for end in range(1, len(beam) + 1):
            if beam[:end] not in known:
                known[beam[:end]] = len(tokens)
                tokens.append(beam[end - 1])
                parents.append(known[beam[: end - 1]])
    return [(tokens, parents, [known[beam] for beam in beams])]


def as_rows(prompt: list[int], beams: Sequence[tuple[int, ...]]) -> Rows:
    """Return one slot with the prompt and all tokens for each beam."""
    return [
        ([*prompt, *beam], [ROOT, *range(len(prompt) + len(beam) - 1)], [len(prompt) + len(beam) - 1]) for beam in beams
    ]


def again(model: LanguageModel, rows: Rows) -> float:
    """Return the seconds of one pass over whole texts in new slots."""
    model.reserve(model.num_open + len(rows), max(len(tokens) for tokens, _, _ in rows) + 8)
    slots = [model.open() for _ in rows]
    start = time.perf_counter()
    model.run(Pass([Extend(slot, *one) for slot, one in zip(slots, rows, strict=True)])).logits.tensor()
    seconds = time.perf_counter() - start
    for slot in slots:
        model.close(slot)
    return seconds


def plot(files: Sequence[Path], out: Path) -> None:
    """Draw the cost of each step from results of `steps`."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "draftree", "svg.fonttype": "none", "font.size": 9})
    from matplotlib import pyplot

    lines = [json.loads(line) for file in files for line in file.read_text("utf-8").splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    figure, axes = pyplot.subplots(figsize=(6.4, 4.0), layout="constrained")
    for name in dict.fromkeys(line["method"] for line in steps):
        own = [line for line in steps if line["method"] == name]
        marker = "o" if "again" in name else None
        axes.plot([line["step"] for line in own], [line["ms"] for line in own], label=name, marker=marker, markersize=3)
    axes.set(xlabel="step", ylabel="ms", yscale="log")
    axes.set_title(f"{steps[0]['width']} beams after {steps[0]['prompt']} tokens")
    axes.grid(alpha=0.3, which="both")
    axes.legend(frameon=False)
    figure.savefig(out, metadata={"Date": None})


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
