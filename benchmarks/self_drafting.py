"""Acceptance of the target's own layers as drafter, and layer executions per text: counts, no seconds.

python benchmarks/self_drafting.py MODEL --prompts FILE --exits 10,15,20 --out counts.jsonl
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from draftree import LLM, SamplingParams
from draftree.lab.bench.workload import encode, read_workload
from draftree.loading.load import load_model
from draftree.models.base import LayerSubset
from draftree.text.tokenizer import Tokenizer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--exits", required=True)
    parser.add_argument("--k", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    loaded = load_model(given.model, dtype=given.dtype)
    model = loaded.model
    tokenizer = Tokenizer.load(loaded.folder)
    prompts = [encode(task, tokenizer)[0] for task in read_workload(given.prompts).tasks]
    params = SamplingParams(max_tokens=given.max_tokens, temperature=0, ignore_eos=True)
    model.require_part(LayerSubset(end=1))
    wanted = None
    with given.out.open("x", encoding="utf-8") as out:
        for layers in [None, *map(int, given.exits.split(","))]:
            before = model.num_sublayer_runs
            done = LLM(loaded, layers and f"early-exit:{layers},k={given.k}").generate(prompts, params)
            texts = [one.token_ids for one in done]
            wanted = wanted or texts
            line = {
                "model": given.model,
                "dtype": given.dtype,
                "kernels": loaded.kernels,
                "num_layers": model.num_layers,
                "exit": layers,
                "k": given.k,
                "prompts": len(prompts),
                "tokens": sum(map(len, texts)),
                "prompt_tokens": sum(map(len, prompts)),
                "rounds": sum(one.stats.rounds for one in done),
                "draft_tokens": sum(one.stats.draft_tokens for one in done),
                "accepted_tokens": sum(one.stats.accepted_tokens for one in done),
                "sublayer_runs": model.num_sublayer_runs - before,
                "same_text": texts == wanted,
            }
            out.write(json.dumps(line) + "\n")
            print(line, flush=True)


if __name__ == "__main__":
    main()
