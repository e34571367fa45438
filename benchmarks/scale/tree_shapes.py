"""Tokens per round, drafted nodes and time of drafts by the shape of the tree, with a target in memory.

Tokens per round of a greedy text do not depend on the machine. With weights that are read from a file in every pass,
bytes per token are the bytes of a pass divided by them (`offload.py` measures both).

python benchmarks/scale/tree_shapes.py MODEL --prompts FILE --category writing --out FILE \\
    --drafts 'model:NAME,k=8;model:NAME,tree=best-64-8,k=10'
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from draftree import LLM, SamplingParams
from draftree.bench.workload import encode, read_workload
from draftree.loading.load import load_model
from draftree.text.tokenizer import Tokenizer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--category", action="append", default=[])
    parser.add_argument("--count", type=int, default=1, help="prompts of each category")
    parser.add_argument("--drafts", required=True, help="specs, separated by semicolons")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    loaded = load_model(given.model, dtype=given.dtype)
    assert loaded.folder is not None, "it was loaded by name"
    tokenizer = Tokenizer.load(loaded.folder)
    tasks = read_workload(given.prompts).choose(given.category, given.count).tasks
    prompts = [encode(task, tokenizer)[0] for task in tasks]
    params = SamplingParams(max_tokens=given.max_tokens, temperature=given.temperature, seed=1, ignore_eos=True)
    wanted: list[Any] = []
    with given.out.open("a", encoding="utf-8") as out:
        for spec in given.drafts.split(";"):
            records: list[Any] = []
            llm = LLM(loaded, spec, plan="fixed", on_round=records.append, prefix_cache_size=0)
            texts = [llm.generate([prompt], params)[0].token_ids for prompt in prompts]
            wanted = wanted or texts
            rounds = len(records)
            line = {
                "model": given.model,
                "draft": spec,
                "dtype": str(loaded.model.dtype).removeprefix("torch."),
                "threads": torch.get_num_threads(),
                "prompts": len(prompts),
                "max_tokens": given.max_tokens,
                "temperature": given.temperature,
                "tokens_per_round": round(sum(map(len, texts)) / rounds, 2),
                "nodes_per_round": round(sum(row.num_drafted for one in records for row in one.sequences) / rounds, 1),
                "draft_ms": round(1000 * sum(one.draft_seconds for one in records) / rounds, 1),
                "same_texts": texts == wanted,
            }
            out.write(json.dumps(line) + "\n")
            print(line, flush=True)


if __name__ == "__main__":
    main()
