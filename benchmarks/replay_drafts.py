"""Gain of drafters on existing texts: tokens per round, without a model's pass.

    python benchmarks/replay_drafts.py texts.jsonl --draft ngram --draft suffix --draft suffix,memory=0
    python benchmarks/replay_drafts.py texts.jsonl --write smollm2-135m-instruct --prompts FILE --limit 3

A line of the file holds `prompt` and `output`, token ids, and `category`. With `--write` the texts are written
first, greedily. A prediction is the output itself with edits: at one place in twenty tokens are inserted, left out
or exchanged. Rounds are counted as the loop would have them at temperature 0; drafters' constants are fitted so.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

from draftree import LLM, SamplingParams
from draftree.build import choose_methods
from draftree.core.tree import follow
from draftree.core.types import Budget
from draftree.drafters.base import DraftContext, Drafter, LoadedDraftModel, SequenceView
from draftree.lab.bench.workload import encode, read_workload
from draftree.models.table import TableLM, hashed
from draftree.sampling.controls import Controls, build_controls
from draftree.sampling.history import History

EDIT_SHARE = 0.05
LONGEST_PROMPT = 1200
BATCH = 8


def write_texts(file: Path, given: argparse.Namespace) -> None:
    """Greedy texts of a workload, in batches of prompts that are about as long."""
    llm = LLM(given.write, "none", max_batch_size=BATCH)
    assert llm.tokenizer is not None, "named models have tokenizers"
    workload = read_workload(given.prompts) if given.prompts else read_workload()
    tasks = [(task.category, encode(task, llm.tokenizer)[0]) for task in workload.choose((), given.limit).tasks]
    tasks = sorted((task for task in tasks if len(task[1]) < LONGEST_PROMPT), key=lambda task: len(task[1]))
    with file.open("w", encoding="utf-8") as lines:
        for start in range(0, len(tasks), BATCH):
            group = tasks[start : start + BATCH]
            done = llm.generate([ids for _, ids in group], SamplingParams(max_tokens=given.max_tokens, temperature=0))
            for (category, ids), text in zip(group, done, strict=True):
                entry = {"category": category, "prompt": ids, "output": list(text.token_ids)}
                lines.write(json.dumps(entry) + "\n")


def edited(output: list[int], rng: random.Random) -> list[int]:
    """A plausible prediction of the output."""
    found: list[int] = []
    place = 0
    while place < len(output):
        if rng.random() < EDIT_SHARE:
            kind, count = rng.choice(("insert", "leave out", "exchange")), rng.choice((1, 1, 1, 2, 3, 6))
            if kind != "leave out":
                found += [rng.choice(output) for _ in range(count)]
            if kind != "insert":
                place += count
        found += output[place : place + 1]
        place += 1
    return found or output


def replay(
    drafter: Drafter[Any], controls: Controls, prompt: list[int], output: list[int], budget: Budget
) -> list[int]:
    """Nodes of every round's draft."""
    history = History(prompt)
    state = drafter.open(SequenceView(history, controls))
    nodes, written = [], 0
    while written < len(output):
        (tree,) = drafter.draft([state], [budget])
        nodes.append(len(tree))
        count = 1 + len(follow(tree, output[written:-1]))
        history.append(output[written : written + count])
        written += count
    drafter.close(state)
    return nodes


def report(draft: str, texts: list[dict[str, Any]], vocab_size: int) -> None:
    """One row."""

    def load(name: str) -> LoadedDraftModel:
        raise SystemExit(f"'{draft}' steps a model: only drafters without one can be replayed")

    methods = choose_methods(draft, "coupled", None)
    (method,) = methods.drafters
    drafter = method.cls(method.config, DraftContext(TableLM(hashed(4, seed=1)), None, methods.draw, True, load))
    budget = Budget(method.traits.nodes, method.traits.depth)
    rng, rounds, nodes, seconds = random.Random(0), 0, 0, 0.0
    for text in texts:
        prediction = edited(text["output"], rng) if method.traits.reads_predictions else None
        params = SamplingParams(temperature=0, prediction=prediction)
        controls = build_controls(params, vocab_size=vocab_size, seed=0)
        start = time.perf_counter()
        drafted = replay(drafter, controls, text["prompt"], text["output"], budget)
        seconds += time.perf_counter() - start
        rounds, nodes = rounds + len(drafted), nodes + sum(drafted)
    tokens = sum(len(text["output"]) for text in texts)
    print(f"| {draft} | {tokens / rounds:.2f} | {nodes / rounds:.2f} | {1e6 * seconds / rounds:.0f} |", flush=True)


def main() -> None:
    """Generate texts if requested, then replay them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("texts", type=Path)
    parser.add_argument("--draft", action="append", default=[])
    parser.add_argument("--write", metavar="MODEL")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--limit", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--times", type=int, default=1, help="the same texts again and again")
    given = parser.parse_args()
    if given.write:
        write_texts(given.texts, given)
    texts = [json.loads(line) for line in given.texts.read_text(encoding="utf-8").splitlines()] * given.times
    vocab_size = 1 + max(max(text["prompt"] + text["output"]) for text in texts)
    print(f"{len(texts)} texts, {sum(len(text['output']) for text in texts):,} tokens\n")
    print("| draft | tokens/round | nodes/round | us/round |\n| --- | ---: | ---: | ---: |")
    for draft in given.draft:
        report(draft, texts, vocab_size)


if __name__ == "__main__":
    main()
