"""Cost of each step of a beam search against computing everything again, for `beam_search.py`."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from beam_methods import method_of, prompt_of

from draftree import LLM, BeamSearchParams
from draftree.beam.search import BeamSearch
from draftree.beam.sequence import SequenceSearch
from draftree.core.svg import save_svg
from draftree.core.tree import ROOT
from draftree.models.base import Extend, LanguageModel, Pass


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
    model = LLM(given.model, "none", dtype=given.dtype, kernels="native").model
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

    def note(text: SequenceSearch) -> None:
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
    save_svg(figure, out)
