"""Rewriting of code with the given code as prediction, compared with plain decoding and with lookups.

    python benchmarks/predictions.py --threads 1 --out benchmarks/results/smollm2-predictions.jsonl

The prompts are those of the category rewrite-code of the package: the model is asked for the same code with a change,
and the prediction of a text is the code in its prompt. Methods take turns; the first texts are not counted.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch

from draftree import LLM, SamplingParams
from draftree.lab.bench.workload import SHIPPED, read_workload
from draftree.loading.load import load_model
from draftree.loading.provenance import load_average, machine, now, versions

NAME = "smollm2-135m-instruct"
CATEGORY = "rewrite-code"
DRAFTS = ("none", "prediction", "suffix", "ngram", "prediction+head:smollm2-135m-instruct")
CODE = re.compile(r"```\w*\n(.*?)```", re.DOTALL)


def conversations() -> list[tuple[list[dict[str, str]], str]]:
    """Return the messages of each prompt, and the code in them."""
    found = []
    for task in read_workload(SHIPPED).choose((CATEGORY,)).tasks:
        code = CODE.search(task.text)
        if task.messages is None or code is None:
            raise ValueError(f"prompt {task.id} has no code")
        found.append((list(task.messages), code[1]))
    return found


def written(llm: LLM, messages: list[dict[str, str]], prediction: str | None, max_tokens: int) -> dict[str, Any]:
    """Return one text and its counts; seconds are those after the first round."""
    llm.forget()
    params = SamplingParams(max_tokens=max_tokens, temperature=0, prediction=prediction)
    (done,) = llm.chat(messages, params)
    stats = done.stats
    return {
        "text": done.text,
        "tokens": len(done.token_ids),
        "rounds": stats.rounds,
        "seconds": sum(stats.phase_seconds.values()),
        "draft_tokens": stats.draft_tokens,
        "accepted_tokens": stats.accepted_tokens,
    }


def main() -> None:
    """Run interleaved and report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    loaded = load_model(NAME, dtype="bfloat16")
    llms = {draft: LLM(loaded, draft) for draft in DRAFTS}
    prompts = conversations()
    header = {"date": now(), "machine": machine(loaded.model.device), "versions": versions(), "model": NAME}
    header |= {"dtype": "bfloat16", "threads": given.threads, "max_tokens": given.max_tokens, "category": CATEGORY}
    with given.out.open("x", encoding="utf-8") as out:

        def keep(line: dict[str, Any]) -> None:
            out.write(json.dumps(line, ensure_ascii=False) + "\n")
            out.flush()

        keep(header | {"load_average": load_average()})
        for repeat in range(given.repeats + 1):
            chosen = prompts[:1] if repeat == 0 else prompts
            texts: dict[str, list[dict[str, Any]]] = {draft: [] for draft in DRAFTS}
            for number, (messages, code) in enumerate(chosen):
                turn = (number + repeat) % len(DRAFTS)
                for draft in (*DRAFTS[turn:], *DRAFTS[:turn]):
                    prediction = code if "prediction" in draft else None
                    texts[draft].append(written(llms[draft], messages, prediction, given.max_tokens))
            for draft, found in texts.items():
                if repeat:
                    keep({"method": "plain" if draft == "none" else draft, "repeat": repeat, "texts": found})
                tokens, seconds = (sum(one[key] for one in found) for key in ("tokens", "seconds"))
                rounds = sum(one["rounds"] for one in found)
                same = sum(one["text"] == plain["text"] for one, plain in zip(found, texts["none"], strict=True))
                line = f"repeat {repeat}: {draft:40} {tokens / seconds:6.1f} tokens/s, {tokens / rounds:.2f} per round"
                sys.stdout.write(f"{line}, {same} of {len(found)} texts as plain\n")


if __name__ == "__main__":
    main()
