"""Rounds with a head by part, for several drafters that share one target and take turns prompt by prompt.

python benchmarks/head_rounds.py smollm2-135m-instruct --prompts FILE --drafts head:HEAD,k=3 head:HEAD,k=4 --out FILE
    --levels adds each drafter with one call for each level in place of one for a tree
    DRAFT@adaptive, or another planner, in place of DRAFT with the planner of --plan
    --temperature 0 0.8 runs all drafters at each temperature, which share the target too

Prints and appends one JSON line for each drafter, plain decoding first: medians of rounds in milliseconds, tokens per
round and tokens per second of decoding, and whether all texts equal plain ones.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import torch

from draftree import LLM, SamplingParams
from draftree.core.types import RoundRecord
from draftree.heads.native_passes import NativePasses
from draftree.lab.bench.workload import encode, read_workload
from draftree.loading.load import load_model
from draftree.loading.loaded import LoadedModel
from draftree.text.tokenizer import Tokenizer

PARTS = ("plan", "draft", "score", "verify", "commit", "total")
BY_LEVEL = " by level"


@dataclass
class Method:
    """A drafter and its rounds."""

    name: str
    llm: LLM
    rounds: list[RoundRecord]
    texts: list[tuple[int, ...]] = field(default_factory=list)

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Grow trees level by level if the method is to."""
        if not self.name.endswith(BY_LEVEL):
            yield
            return
        with mock.patch.object(NativePasses, "most_children", 0):
            yield

    def result(self, wanted: list[tuple[int, ...]]) -> dict[str, object]:
        """Return the line of the results."""
        drafted = [one for one in self.rounds if one.num_prompt_rows == 0]
        seconds = sum(one.total_seconds for one in drafted)
        tokens = sum(one.sequences[0].num_written for one in drafted)
        parts = {
            part: round(1e3 * statistics.median(getattr(one, f"{part}_seconds") for one in drafted), 3)
            for part in PARTS
        }
        return {
            "method": self.name,
            "rounds": len(drafted),
            "tokens_per_round": round(tokens / len(drafted), 3),
            "tokens_per_second": round(tokens / seconds, 1),
            "milliseconds": parts,
            "same_texts": self.texts == wanted,
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--drafts", nargs="+", required=True)
    parser.add_argument("--plan", default="fixed")
    parser.add_argument("--levels", action="store_true")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization")
    parser.add_argument("--note", default="")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    loaded = load_model(given.model, dtype=given.dtype, quantization=given.quantization)
    assert loaded.folder is not None, "a model of the catalogue or of a folder"
    tokenizer = Tokenizer.load(loaded.folder)
    assert tokenizer is not None, "chats need a tokenizer"
    tasks = read_workload(given.prompts).tasks
    chosen = tasks[:: max(1, len(tasks) // given.limit)][: given.limit]
    prompts = [encode(task, tokenizer)[0][:512] for task in chosen]
    for temperature in given.temperature:
        methods = measured(given, loaded, prompts, temperature)
        with given.out.open("a", encoding="utf-8") as out:
            for method in methods:
                line = {
                    "model": given.model,
                    "dtype": given.dtype,
                    "quantization": given.quantization,
                    "kernels": loaded.kernels,
                    "threads": torch.get_num_threads(),
                    "temperature": temperature,
                    "prompts": [given.prompts.name, len(prompts)],
                    "note": given.note,
                    **method.result(methods[0].texts),
                }
                out.write(json.dumps(line) + "\n")
                print({key: line[key] for key in ("temperature", *list(line)[8:])}, flush=True)


def measured(
    given: argparse.Namespace, loaded: LoadedModel, prompts: list[list[int]], temperature: float
) -> list[Method]:
    """Return the methods after all prompts, plain decoding first."""
    methods = []
    for spec in ["", *given.drafts]:
        draft, _, plan = spec.partition("@")
        for suffix in ("", BY_LEVEL) if draft and given.levels else ("",):
            rounds: list[RoundRecord] = []
            llm = LLM(loaded, draft or None, plan=(plan or given.plan) if draft else None, on_round=rounds.append)
            methods.append(Method(f"{spec or 'plain'}{suffix}", llm, rounds))
    params = SamplingParams(max_tokens=given.max_tokens, temperature=temperature, seed=5)
    for number, prompt in enumerate([prompts[0], *prompts]):
        for method in methods:
            with method.ready():
                done = method.llm.generate([prompt], params)[0]
            if number:
                method.texts.append(done.token_ids)
            else:  # the first prompt warms up
                method.rounds.clear()
    return methods


if __name__ == "__main__":
    main()
