"""Tokens per round, nodes and time of drafts by the shape of the tree, on recorded texts of a target.

The drafter, the planner and the engine run. Passes of the target are not computed and take the time that
`stream_passes.py` measured for their rows. Tokens per round are exact: the target's text does not depend on drafts.
Milliseconds per token are a prediction from measured passes and drafts, without the time of the picks.

    python benchmarks/scale/tree_shapes.py MODEL --prompts FILE --texts OFFLOAD.jsonl --costs PASSES.jsonl --out FILE \\
        --drafts 'model:NAME,tree=best-64-8,k=10;model:NAME,tree=best-64-8,k=10@adaptive'

OFFLOAD.jsonl is a file of `offload.py`; the longest text of each prompt is used.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from draftree import LLM, SamplingParams
from draftree.core.types import RoundRecord
from draftree.lab.bench.workload import encode, read_workload
from draftree.loading.load import load_model
from draftree.models.replay import RecordedText, ReplayClock, ReplayModel
from draftree.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class MeasuredPasses:
    """Seconds of passes by rows, between which they are interpolated.

    Attributes:
        seconds: by rows.
    """

    seconds: Mapping[int, float]

    def pass_seconds(self, rows: int) -> float:
        """Return the seconds of a pass over so many tokens."""
        known = sorted(self.seconds)
        for low, high in pairwise(known):
            if rows <= high:
                share = max(0.0, (rows - low) / (high - low))
                return self.seconds[low] + share * (self.seconds[high] - self.seconds[low])
        return self.seconds[known[-1]] * rows / known[-1]

    def pick_seconds(self, rows: int, temperature: float) -> float:
        """Return no seconds: they were not measured."""
        return 0.0


def measured_passes(path: Path, arm: str, threads: int) -> MeasuredPasses:
    """Return the medians of an arm of a file of `stream_passes.py`."""
    found: dict[int, list[float]] = defaultdict(list)
    for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        if line["arm"] == arm and line["threads"] == threads:
            found[line["rows"]].append(line["seconds"])
    return MeasuredPasses({rows: median(times) for rows, times in found.items()})


def recorded_texts(path: Path) -> dict[str, list[int]]:
    """Return the longest text of each prompt in a file of `offload.py`."""
    found: dict[str, list[int]] = {}
    for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        found[line["prompt"]] = max(found.get(line["prompt"], []), line["token_ids"], key=len)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--costs", type=Path, required=True)
    parser.add_argument("--arm", default="streamed", help="of the costs: streamed or in memory")
    parser.add_argument("--drafts", required=True, help="SPEC or SPEC@PLAN, separated by semicolons")
    parser.add_argument("--memory", default="308MB", help="for the target's weights, which are not used")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    loaded = load_model(given.model, dtype=given.dtype, offload=given.memory)
    assert loaded.folder is not None, "it was loaded by name"
    tokenizer, written = Tokenizer.load(loaded.folder), recorded_texts(given.texts)
    tasks = {task.id: task for task in read_workload(given.prompts).tasks}
    texts = []
    for name, tokens in written.items():
        params = SamplingParams(max_tokens=len(tokens), temperature=0.0, seed=1, ignore_eos=True)
        texts.append(RecordedText(tuple(encode(tasks[name], tokenizer)[0]), tuple(tokens), params, 1))
    clock, costs = ReplayClock(), measured_passes(given.costs, given.arm, torch.get_num_threads())
    target = ReplayModel(loaded.model, costs, clock)
    with given.out.open("a", encoding="utf-8") as out:
        for arm in given.drafts.split(";"):
            line = replayed(LoadedTarget(target, loaded, clock), arm, texts)
            facts = {"model": given.model, "dtype": str(target.dtype).removeprefix("torch."), "passes": given.arm}
            out.write(json.dumps(facts | {"threads": torch.get_num_threads(), "prompts": len(texts)} | line) + "\n")
            out.flush()
            print(line, flush=True)


@dataclass(frozen=True, slots=True)
class LoadedTarget:
    """A replayed target, what it was loaded as, and its clock."""

    model: ReplayModel
    loaded: Any
    clock: ReplayClock


def replayed(target: LoadedTarget, arm: str, texts: list[RecordedText]) -> dict[str, Any]:
    """Replay the texts with a drafter. Sums leave out the first round of each text, which reads its prompt."""
    spec, _, plan = arm.partition("@")
    records: list[RoundRecord] = []
    llm = LLM(
        replace(target.loaded, model=target.model),
        spec,
        plan=plan or "fixed",
        on_round=records.append,
        prefix_cache_size=0,
        clock=target.clock,
    )
    later: list[RoundRecord] = []
    for text in texts:
        target.model.text = text
        records.clear()
        (done,) = llm.generate([list(text.prompt)], text.params, progress=False)
        assert tuple(done.token_ids) == text.tokens, "a replay writes the recorded text"
        later += records[1:]
    rows = [row for record in later for row in record.sequences]
    written, count = sum(row.num_written for row in rows), len(later)
    return {
        "draft": arm,
        "tokens": written,
        "tokens_per_round": round(written / count, 2),
        "nodes_per_round": round(sum(row.num_drafted for row in rows) / count, 1),
        "draft_ms": round(1000 * median(record.draft_seconds for record in later), 1),
        "pass_ms": round(1000 * sum(record.score_seconds for record in later) / count, 1),
        "predicted_ms_per_token": round(1000 * sum(record.total_seconds for record in later) / written, 1),
    }


if __name__ == "__main__":
    main()
