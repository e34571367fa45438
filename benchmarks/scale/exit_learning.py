#!/usr/bin/env python3
"""Acceptance of drafts of the first layers, without and with a correction of the exit that learns from verdicts.

Both are counted on the same rows: the share of first drafted tokens that the target picks. In one process: acceptance
does not depend on where the other layers run.

    python benchmarks/scale/exit_learning.py smollm2-135m-instruct --split 4 8 15 --prompts 16 --tokens 96

Writes one JSON line per number of layers to --out.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from end_and_cloud import prompts

from draftree import LLM, SamplingParams
from draftree.loading.provenance import machine, now, versions


def main() -> None:
    """Measure and write rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--split", type=int, nargs="+", default=[4, 8, 15])
    parser.add_argument("--learn", default="server,share=1")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=1, help="times that the prompts are answered")
    parser.add_argument("--file", type=Path, help="a workload, as for draftree bench run")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    facts = {
        "part": "exit learning",
        "model": given.model,
        "learn": given.learn,
        "prompts": given.prompts,
        "tokens": given.tokens,
        "machine": machine(torch.device("cpu")),
        "versions": versions(),
        "time": now(),
    }
    params = SamplingParams(max_tokens=given.tokens, temperature=0, ignore_eos=True)
    for split in given.split:
        llm = LLM(given.model, f"early-exit:{split},k=2", plan="fixed", learn=given.learn)
        for repeat in range(given.repeats):
            found = llm.generate(prompts(given.prompts, given.file), params)
            assert llm.learned is not None
            (stats,) = llm.learned.stats
            row = {
                "split": split,
                "repeat": repeat,
                "rows": stats.tokens,
                "base_acceptance": stats.base_acceptance,
                "learned_acceptance": stats.learned_acceptance,
                "active": stats.active,
                "tokens_per_round": sum(len(one.token_ids) for one in found) / sum(one.stats.rounds for one in found),
            }
            print(json.dumps(row), flush=True)
            if given.out is not None:
                with given.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(facts | row) + "\n")


if __name__ == "__main__":
    main()
