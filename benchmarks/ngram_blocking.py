"""Time of n-gram blocking: ours, transformers' processor, and a loop over rows in Python.

    python benchmarks/ngram_blocking.py [--batch 128] [--beams 5] [--size 3] [--vocab 50000] [--out FILE]

Rows are beams: texts with repetitions, the same for every method. Ours writes into the scores. The methods take turns,
one call each, and the medians are reported. Without a GPU, `without a wait` shows what the path for GPUs costs on the
processor. `one step of a tree` is the control of one request: 16 nodes after a text of this length. `picks of a tree`
is the search of these nodes' logits in C, with the control.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import NoRepeatNGramLogitsProcessor

from draftree.loading.provenance import load_average, machine, now, versions
from draftree.models.native.library import RowsAt, library
from draftree.models.native.logits import NativeLogits
from draftree.sampling.controls import build_controls
from draftree.sampling.distributions import DistributionRows, Distributions
from draftree.sampling.history import History
from draftree.sampling.logits_processors import NoRepeatNgram, RowContext, ban_repeated_ngrams
from draftree.sampling.params import SamplingParams

LENGTHS = (64, 256, 1024, 2048)
NUM_NODES = 16
DEPTH = 4
Method = Callable[[], Any]


def texts(rows: int, length: int, vocab: int, seed: int) -> Tensor:
    """Random tokens in which the last 16 of every 32 repeat earlier ones."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocab, (rows, length))
    for start in range(16, length, 32):
        end = min(start + 16, length)
        source = rng.integers(0, start - (end - start) + 1) if start > end - start else 0
        tokens[:, start:end] = tokens[:, source : source + end - start]
    return torch.from_numpy(tokens)


def loop(scores: Tensor, tokens: Tensor, size: int) -> Tensor:
    """Ban with a dictionary for each row, made anew at each step."""
    for row, text in enumerate(tokens.tolist()):
        followers: dict[tuple[int, ...], list[int]] = {}
        for start in range(len(text) - size + 1):
            followers.setdefault(tuple(text[start : start + size - 1]), []).append(text[start + size - 1])
        banned = followers.get(tuple(text[len(text) - size + 1 :]), [])
        scores[row, banned] = -math.inf
    return scores


def batch_methods(scores: Tensor, tokens: Tensor, size: int) -> dict[str, Method]:
    """Blocking for all rows of a batch."""
    theirs = NoRepeatNGramLogitsProcessor(size)
    return {
        "ours": lambda: ban_repeated_ngrams(scores, tokens, size=size),
        "ours without a wait": lambda: ban_repeated_ngrams(scores, tokens, size=size, waits=False),
        "transformers": lambda: theirs(tokens, scores),
        "Python loop": lambda: loop(scores, tokens, size),
    }


def tree_methods(tokens: Tensor, vocab: int, size: int) -> dict[str, Method]:
    """Blocking for the nodes of one tree, after one more token was written than at the step before."""
    history = History(tokens[0].tolist(), capacity=2 * len(tokens[0]))
    paths = [tokens[0, : 1 + node % DEPTH].tolist() for node in range(NUM_NODES)]
    control, theirs = NoRepeatNgram(size), NoRepeatNGramLogitsProcessor(size)
    scores = torch.randn(NUM_NODES, vocab)
    written = iter(tokens[1:].flatten().tolist())

    def ours() -> None:
        history.append([next(written)])
        control.apply(scores, RowContext(history, paths))

    params = SamplingParams(temperature=0, no_repeat_ngram_size=size)
    rows = DistributionRows(history, build_controls(params, vocab_size=vocab, seed=0), paths)

    def picks_in_place() -> None:
        Distributions(in_c(scores), [rows]).picks()

    def picks_in_a_copy() -> None:
        distributions = Distributions(in_c(scores), [rows])
        assert distributions.logits is not scores
        distributions.picks()

    def by_transformers() -> None:
        for node, path in enumerate(paths):
            ids = torch.from_numpy(np.concatenate((history.tokens, path)))[None]
            theirs(ids, scores[node : node + 1])

    return {
        "ours, one step of a tree": ours,
        "transformers, one step of a tree": by_transformers,
        "picks of a tree, bans in place": picks_in_place,
        "picks of a tree, bans in a copy": picks_in_a_copy,
    }


def in_c(scores: Tensor) -> NativeLogits:
    """Return logits as a pass in C does."""
    at = RowsAt(scores.data_ptr(), scores.shape[0], scores.stride(0), scores.shape[1])
    return NativeLogits(library(), at, scores, num_threads=1)


def timed(methods: dict[str, Method], repeats: int) -> Iterator[tuple[str, list[float]]]:
    """Yield each method's times in seconds; the methods take turns after a call each that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for turn in range(repeats + 1):
        for name, method in methods.items():
            start = time.perf_counter()
            method()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    yield from seconds.items()


def check(tokens: Tensor, scores: Tensor, size: int) -> int:
    """Return how many scores are banned; all methods agree."""
    wanted = NoRepeatNGramLogitsProcessor(size)(tokens, scores)
    for name in batch_methods(scores, tokens, size):
        if not torch.equal(batch_methods(scores.clone(), tokens, size)[name](), wanted):
            raise SystemExit(f"error: {name} bans other tokens than transformers does")
    return int(wanted.isneginf().sum())


def measure(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a line for each length and method."""
    rows = given.batch * given.beams
    scores = torch.randn(rows, given.vocab)
    for length in given.lengths:
        tokens = texts(rows, length, given.vocab, seed=length)
        num_banned = check(tokens, scores, given.size)
        shared = {"kind": "ngram_blocking", "length": length, "size": given.size, "vocab": given.vocab}
        for name, seconds in timed(batch_methods(scores.clone(), tokens, given.size), given.repeats):
            yield {**shared, "rows": rows, "banned": num_banned, "method": name, **summary(seconds)}
        for name, seconds in timed(tree_methods(tokens, given.vocab, given.size), 10 * given.repeats):
            yield {**shared, "rows": NUM_NODES, "method": name, **summary(seconds)}


def summary(seconds: list[float]) -> dict[str, Any]:
    """Median and range of times, in milliseconds."""
    median, least, most = statistics.median(seconds), min(seconds), max(seconds)
    return {"calls": len(seconds), "median_ms": median * 1e3, "min_ms": least * 1e3, "max_ms": most * 1e3}


def header(given: argparse.Namespace) -> dict[str, Any]:
    """Return the machine and the run."""
    options = {name: value for name, value in vars(given).items() if name != "out"}
    return {
        "kind": "header",
        "job": "ngram_blocking",
        "date": now(),
        "machine": machine(torch.device("cpu")),
        "versions": versions(),
        "load_average": load_average(),
        **options,
    }


def main() -> None:
    """Measure, print a table and write JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("batch", 128), ("beams", 5), ("size", 3), ("vocab", 50_000), ("repeats", 9), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    lines: list[dict[str, Any]] = []
    for line in measure(given):
        lines.append(line)
        print(
            f"{line['length']:>6} {line['rows']:>4} rows  {line['method']:<34} {line['median_ms']:10.3f} ms", flush=True
        )
    if given.out is not None:
        given.out.write_text("".join(f"{json.dumps(line)}\n" for line in [header(given), *lines]), encoding="utf-8")


if __name__ == "__main__":
    main()
