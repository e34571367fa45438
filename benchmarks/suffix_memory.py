"""Cost of the suffix drafter's memory at a million tokens, compared with two other structures.

    python benchmarks/suffix_memory.py [--tokens 1000000] [--text FILE ...]

The tokens are words of the texts given (this repository's own, if none), numbered and read again and again, every
hundredth word another: they repeat much as answers do. Times are of one thread.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from draftree import SamplingParams
from draftree.core.tree import Draw
from draftree.core.types import Budget
from draftree.drafters.base import DraftContext, LoadedDraftModel, SequenceView
from draftree.drafters.lookup.occurrences import Occurrences
from draftree.drafters.suffix import SuffixDrafter
from draftree.models.table import TableLM, hashed
from draftree.sampling.controls import build_controls
from draftree.sampling.history import History

ROOT = Path(__file__).parents[1]
ORDERS = (8, 1)
ANSWER_LENGTH = 200
NUM_DRAFTS = 500
STRUCTURES = ("hash chains", "suffix array", "suffix automaton")


def read_tokens(paths: list[Path], count: int) -> np.ndarray:
    """Words as numbers, the texts over and over, one word in a hundred exchanged."""
    words = " ".join(path.read_text(encoding="utf-8") for path in paths).split(" ")
    numbers: dict[str, int] = {}
    once = np.array([numbers.setdefault(word, len(numbers)) for word in words])
    tokens = np.resize(once, count)
    rng = np.random.default_rng(0)
    places = rng.integers(0, count, count // 100)
    tokens[places] = rng.integers(0, len(numbers), len(places))
    return tokens


def build_chains(tokens: np.ndarray) -> object:
    """What the drafter has: answers are added one by one."""
    index = Occurrences(ORDERS, capacity=int(len(tokens) * 1.01) + 10)
    for start in range(0, len(tokens), ANSWER_LENGTH):
        index.add_text(tokens[start : start + ANSWER_LENGTH])
    return index


def build_array(tokens: np.ndarray) -> object:
    """All places in the order of what follows, compared over 32 tokens: doubling, by numpy's sort."""
    rank = np.unique(tokens, return_inverse=True)[1].astype(np.int64)
    order, step = rank.argsort(kind="stable"), 1
    while step < 32:
        next_rank = np.append(rank[step:] + 1, np.zeros(step, np.int64))
        key = rank * (len(tokens) + 1) + next_rank
        order = key.argsort(kind="stable")
        rank = np.empty_like(rank)
        rank[order] = np.append(0, np.cumsum(key[order][1:] != key[order][:-1]))
        step *= 2
    return tokens.astype(np.int32), order.astype(np.int32)


def build_automaton(tokens: np.ndarray) -> object:
    """States with a dictionary each, as an automaton is written in plain Python."""
    edges: list[dict[int, int]] = [{}]
    links, lengths, last = [-1], [0], 0
    for token in tokens.tolist():
        new = len(edges)
        edges.append({})
        lengths.append(lengths[last] + 1)
        links.append(0)
        state = last
        while state >= 0 and token not in edges[state]:
            edges[state][token] = new
            state = links[state]
        if state >= 0:
            target = edges[state][token]
            if lengths[target] == lengths[state] + 1:
                links[new] = target
            else:
                clone = len(edges)
                edges.append(dict(edges[target]))
                lengths.append(lengths[state] + 1)
                links.append(links[target])
                while state >= 0 and edges[state].get(token) == target:
                    edges[state][token] = clone
                    state = links[state]
                links[target] = links[new] = clone
        last = new
    return edges, links, lengths


BUILDERS: dict[str, Callable[[np.ndarray], object]] = dict(
    zip(STRUCTURES, (build_chains, build_array, build_automaton), strict=True)
)


def measure_build(name: str, tokens: np.ndarray) -> None:
    """Seconds, and memory by which the process grew, at its peak."""
    before, start = resident_bytes(), time.perf_counter()
    kept = BUILDERS[name](tokens)
    seconds = time.perf_counter() - start
    stays = resident_bytes() - before
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(f"| {name} | {seconds:.2f} | {stays / len(tokens):.0f} | {peak / len(tokens):.0f} |")
    del kept


def resident_bytes() -> int:
    """What the process holds now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def measure_drafts(tokens: np.ndarray, *, temperature: float) -> None:
    """One draft per token after prompts of several lengths, with a full memory and without."""

    def load(name: str) -> LoadedDraftModel:
        raise AssertionError("no model is needed")

    vocab_size = int(tokens.max()) + 1
    context = DraftContext(TableLM(hashed(4, seed=1)), None, Draw.FREE, True, load)
    controls = build_controls(SamplingParams(temperature=temperature), vocab_size=vocab_size, seed=1)
    for memory in (0, len(tokens) + len(tokens) // 50):
        drafter = SuffixDrafter(SuffixDrafter.Config(memory=memory), context)
        for start in range(0, len(tokens) if memory else 0, ANSWER_LENGTH):
            history = History(tokens[start : start + 1].tolist())
            history.append(tokens[start + 1 : start + ANSWER_LENGTH].tolist())
            drafter.close(drafter.open(SequenceView(history, controls)))
        for length in (100, 2_000, 30_000):
            report_drafts(drafter, tokens[-length - NUM_DRAFTS :], controls, length=length, memory=memory)


def report_drafts(drafter: SuffixDrafter, tokens: np.ndarray, controls: object, *, length: int, memory: int) -> None:
    """One row."""
    history = History(tokens[:length].tolist(), capacity=len(tokens))
    start = time.perf_counter()
    state = drafter.open(SequenceView(history, controls))  # type: ignore[arg-type]
    opening = time.perf_counter() - start
    seconds, nodes = [], 0
    for token in tokens[length:].tolist():
        start = time.perf_counter()
        nodes += len(drafter.draft_one(state, Budget(16, 16)))
        seconds.append(time.perf_counter() - start)
        history.append([token])
    start = time.perf_counter()
    drafter.close(state)
    closing = time.perf_counter() - start
    temperature = controls.params.temperature  # type: ignore[attr-defined]
    micros = 1e6 * np.quantile(seconds, [0.5, 0.95])
    print(
        f"| {memory:,} | {length:,} | {temperature:g} | {nodes / len(seconds):.1f} | {micros[0]:.0f} | {micros[1]:.0f} "
        f"| {1000 * opening:.2f} | {1000 * closing:.2f} |"
    )


def main() -> None:
    """Builds in processes of their own, then drafts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--text", type=Path, nargs="*", default=sorted(ROOT.rglob("docs/**/*.md")))
    parser.add_argument("--build", choices=STRUCTURES)
    given = parser.parse_args()
    tokens = read_tokens(given.text, given.tokens)
    if given.build:
        measure_build(given.build, tokens)
        return
    print(f"{len(tokens):,} tokens, {len(np.unique(tokens)):,} of them different\n")
    print("| structure | build s | bytes per token | at its peak |\n| --- | ---: | ---: | ---: |", flush=True)
    for name in STRUCTURES:
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--build", name], check=True)
    print("\n| memory | prompt | temperature | nodes | draft us, median | 95% | open ms | close ms |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for temperature in (0.0, 1.0):
        measure_drafts(tokens, temperature=temperature)


if __name__ == "__main__":
    main()
