"""Drafting ahead and alternating batches beside drafting in turn: speed, hit rate of predicted stops, wasted drafts.

The arms take turns, prompt by prompt (with `--batch`, batch by batch), in one process. An arm is a draft spec and a
number of threads of the target, `SPEC@THREADS`; a drafter in a process of its own has as many. With `--always` drafting
ahead and alternating batches are on even where the measurement at start finds that they do not pay; without it, `note`
in the output has the decision.

python benchmarks/scale/ahead.py MODEL --prompts FILE --out FILE \\
    --arms 'none@2;model:NAME,k=4@2;model:NAME,k=4,ahead=1@1' --always
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from draftree import LLM, SamplingParams
from draftree.bench.workload import encode, read_workload
from draftree.drafters.wrappers.ahead import AheadDrafter
from draftree.drafters.wrappers.overlap import Overlap
from draftree.engine.alternating import Alternation
from draftree.loading.load import LoadedModel, load_model
from draftree.text.tokenizer import Tokenizer


@dataclass
class Arm:
    """A drafter and its measurements."""

    name: str
    threads: int
    llm: LLM
    records: list[Any]
    seconds: float = 0.0
    texts: list[list[int]] = field(default_factory=list)

    def generate(self, prompts: list[list[int]], params: SamplingParams) -> None:
        torch.set_num_threads(self.threads)
        start = time.perf_counter()
        found = self.llm.generate(prompts, params)
        self.seconds += time.perf_counter() - start
        self.texts += [list(text.token_ids) for text in found]

    def result(self, plain: Arm) -> dict[str, Any]:
        tokens, rounds = sum(map(len, self.texts)), len(self.records)
        rows = [row for record in self.records for row in record.sequences]
        found: dict[str, Any] = {
            "draft": self.name,
            "threads": self.threads,
            "tokens": tokens,
            "tokens_per_second": round(tokens / self.seconds, 2),
            "speedup": round(plain.seconds / self.seconds, 3),
            "passes": rounds,
            "tokens_per_sequence_and_pass": round(sum(row.num_written for row in rows) / max(1, len(rows)), 2),
            "pass_ms": round(1000 * sum(record.score_seconds for record in self.records) / rounds, 1),
            "draft_ms_waited": round(1000 * sum(record.draft_seconds for record in self.records) / rounds, 1),
            "same_texts": self.texts == plain.texts,
            "note": self.llm.draft_note,
        }
        ahead = _ahead_in(self.llm.engine.parts.drafter)
        if ahead is not None and ahead.counts.hits + ahead.counts.misses:
            counts = ahead.counts
            ended = counts.hits + counts.misses
            found |= {
                "rounds_ahead": ended,
                "stop_predicted": round(counts.stops / ended, 3),
                "hit_rate": round(counts.hits / ended, 3),
                "nodes_ahead": counts.drafted,
                "wasted": round(counts.wasted / max(1, counts.drafted), 3),
            }
        alternation = self.llm.engine.alternation
        return found | ({} if alternation is None else {"alternated_passes": alternation.num_alternated})


def _ahead_in(drafter: Any) -> AheadDrafter | None:
    while drafter is not None and not isinstance(drafter, AheadDrafter):
        several = getattr(drafter, "_drafters", None)
        drafter = several[0] if several else getattr(drafter, "_drafter", None)
    return drafter


def build(loaded: LoadedModel, text: str, *, plan: str | None, is_always: bool) -> Arm:
    """Load the drafter of an arm, with its number of threads."""
    spec, _, threads = text.partition("@")
    torch.set_num_threads(int(threads))
    records: list[Any] = []
    llm = LLM(
        loaded,
        None if spec == "none" else spec,
        plan=None if spec == "none" else plan,
        on_round=records.append,
        prefix_cache_size=0,
    )
    if is_always and llm.engine.alternation is not None:
        llm.engine.alternation = Alternation(llm.engine.parts)
    return Arm(spec, int(threads), llm, records)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument(
        "--arms", required=True, help="SPEC@THREADS, separated by semicolons; the first is compared with"
    )
    parser.add_argument("--always", action="store_true")
    parser.add_argument("--category", action="append", default=[])
    parser.add_argument("--count", type=int, default=1, help="prompts of each category")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization")
    parser.add_argument("--plan", default="fixed")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    if given.always:
        Overlap.pays = property(lambda self: True)  # type: ignore[assignment, method-assign]
    loaded = load_model(given.model, dtype=given.dtype, quantization=given.quantization)
    assert loaded.folder is not None, "it was loaded by name"
    tokenizer = Tokenizer.load(loaded.folder)
    tasks = read_workload(given.prompts).choose(given.category, given.count).tasks
    prompts = [encode(task, tokenizer)[0] for task in tasks]
    params = SamplingParams(max_tokens=given.max_tokens, temperature=given.temperature, seed=1, ignore_eos=True)
    arms = [build(loaded, arm, plan=given.plan, is_always=given.always) for arm in given.arms.split(";")]
    for arm in arms:  # pages of weights, and the measurement of a first pass
        arm.generate(prompts[:1], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
        arm.seconds, arm.texts = 0.0, []
        arm.records.clear()
    for turn, first in enumerate(range(0, len(prompts), given.batch)):
        for place in range(len(arms)):
            arms[(turn + place) % len(arms)].generate(prompts[first : first + given.batch], params)
    facts = {
        "model": given.model,
        "kernels": loaded.kernels,
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "quantization": given.quantization,
        "temperature": given.temperature,
        "prompts": len(prompts),
        "batch": given.batch,
        "always": given.always,
    }
    with given.out.open("a", encoding="utf-8") as out:
        for arm in arms:
            line = facts | arm.result(arms[0])
            out.write(json.dumps(line) + "\n")
            print(line, flush=True)


if __name__ == "__main__":
    main()
