"""Drafting ahead beside drafting in turn: speed, hit rate of predicted stops, wasted drafts.

The arms take turns, batch by batch (`--batch`, one prompt by default), in one process. An arm is a draft spec and a
number of threads of the target, `SPEC@THREADS`; a drafter in a process of its own has as many. With `--always`
drafting ahead is on even where the measurement at start finds that it does not pay; `note` has what was measured.
Every batch of an arm is a line of the output; `--summary` prints the sums of a file. A run goes on where an earlier
run with the same file ended.

    python benchmarks/scale/ahead.py MODEL --prompts FILE --out FILE \\
        --arms 'none@2;model:NAME,k=4@2;model:NAME,k=4,ahead=1@1' --always
    python benchmarks/scale/ahead.py --summary FILE
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from text_sums import are_same, arms_of, speeds, total
from text_turns import ResultsFile, TimedLLM

from draftree import SamplingParams
from draftree.drafters.wrappers.ahead import AheadCounts, AheadDrafter, Overlap
from draftree.lab.bench.workload import encode, read_workload
from draftree.loading.load import load_model
from draftree.loading.loaded import LoadedModel
from draftree.text.tokenizer import Tokenizer


@dataclass
class Arm:
    """A drafter with a number of threads.

    Attributes:
        name: as given.
        threads: of the target.
        timed: the engine.
    """

    name: str
    threads: int
    timed: TimedLLM

    def generate(self, prompts: list[list[int]], params: SamplingParams) -> dict[str, Any]:
        """Generate the texts of a batch; counters are those of this batch."""
        torch.set_num_threads(self.threads)
        before = self._counts()
        found = self.timed.generate(prompts, params)
        counts = {name: value - before[name] for name, value in self._counts().items()}
        return found | counts | {"note": self.timed.llm.draft_note}

    def _counts(self) -> dict[str, int]:
        """Return counters of drafts ahead since the start."""
        ahead = next((_ahead_in(one.drafter) for one in self.timed.llm.engine.parts.drafters), None)
        return asdict(AheadCounts() if ahead is None else ahead.counts)


def _ahead_in(drafter: Any) -> AheadDrafter | None:
    parts = getattr(drafter, "_drafters", [drafter])  # of merged drafters
    return next((part for part in parts if isinstance(part, AheadDrafter)), None)


def build(loaded: LoadedModel, text: str, *, plan: str | None) -> Arm:
    """Load the drafter of an arm, with its number of threads."""
    spec, _, threads = text.rpartition("@")
    torch.set_num_threads(int(threads))
    timed = TimedLLM(loaded, None if spec == "none" else spec, plan=None if spec == "none" else plan)
    return Arm(text, int(threads), timed)


def summarize(path: Path) -> None:
    """Print one line of JSON for each arm of a file; speeds are relative to the first one."""
    arms = arms_of(path)
    plain = next(iter(arms.values()))
    for name, texts in arms.items():
        rounds, ended = total(texts, "rounds"), total(texts, "hits") + total(texts, "misses")
        later = max(1, rounds - len(texts))
        row = {"arm": name, "batches": len(texts), "tokens": total(texts, "tokens"), "rounds": rounds}
        row |= {"tokens_per_round": round(total(texts, "tokens") / total(texts, "rounds_of_sequences"), 2)}
        row |= {"nodes_per_round": round(total(texts, "nodes") / total(texts, "rounds_of_sequences"), 1)}
        row |= {"pass_ms": round(1000 * total(texts, "score_seconds") / later, 1)}
        row |= {"draft_ms_waited": round(1000 * total(texts, "draft_seconds") / later, 1)}
        row |= speeds(texts, plain) | {"same_texts": are_same(texts, plain), "note": texts[-1]["note"]}
        if ended:
            row |= {"stop_predicted": round(total(texts, "stops") / ended, 3)}
            row |= {"hit_rate": round(total(texts, "hits") / ended, 3)}
            row |= {"wasted": round(total(texts, "wasted") / max(1, total(texts, "drafted")), 3)}
        print(json.dumps(row))


def measure(given: argparse.Namespace) -> None:
    """Append a line for every batch of every arm."""
    end = time.monotonic() + given.seconds
    if given.always:
        Overlap.pays = lambda self, hits=0.0: True  # type: ignore[method-assign]
    loaded = load_model(given.model, dtype=given.dtype, quantization=given.quantization)
    assert loaded.folder is not None, "it was loaded by name"
    tokenizer = Tokenizer.load(loaded.folder)
    tasks = read_workload(given.prompts).choose(given.category, given.count).tasks
    batches = [tasks[first : first + given.batch] for first in range(0, len(tasks), given.batch)]
    by_name = {",".join(task.id for task in batch): batch for batch in batches}
    params = SamplingParams(max_tokens=given.max_tokens, temperature=given.temperature, seed=1, ignore_eos=True)
    arms = [build(loaded, arm, plan=given.plan) for arm in given.arms.split(";")]
    facts = {
        "model": given.model,
        "kernels": loaded.kernels,
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "quantization": given.quantization,
        "temperature": given.temperature,
        "batch": given.batch,
        "always": given.always,
    }
    for arm in arms:  # pages of weights, and the first pass
        arm.generate([encode(tasks[0], tokenizer)[0]], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))

    def line_of(arm: Arm, name: str) -> dict[str, Any]:
        batch = by_name[name]
        prompts = [encode(task, tokenizer)[0] for task in batch]
        return facts | {"category": batch[0].category} | arm.generate(prompts, params)

    ResultsFile(given.out).take_turns(arms, list(by_name), line_of, end=end)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--summary", type=Path, help="print the sums of a file")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--arms", help="SPEC@THREADS, separated by semicolons; the first is compared with")
    parser.add_argument("--always", action="store_true")
    parser.add_argument("--category", action="append", default=[])
    parser.add_argument("--count", type=int, default=1, help="prompts of each category")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization")
    parser.add_argument("--plan", default="fixed")
    parser.add_argument("--seconds", type=float, default=86400, help="no batch begins that would end later")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.summary:
        summarize(given.summary)
    elif given.model and given.prompts and given.arms and given.out:
        measure(given)
    else:
        parser.error("give MODEL, --prompts, --arms and --out, or --summary")


if __name__ == "__main__":
    main()
