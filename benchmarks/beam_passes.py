"""Passes per step of beam searches with drafters, and the seconds of whole searches, beside plain search.

    python benchmarks/beam_passes.py --prompts spec_bench.jsonl [--category summarization] [--each 3]
        [--drafts ngram suffix runners-up suffix+runners-up] [--width 4] [--tokens 48] [--out FILE]

A prompt is one line of JSON with `category` and `turns` or `prompt`. Methods take turns for each prompt; the text of
every search is compared with that of plain search.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from draftree import LLM, BeamSearchParams
from draftree.loading.provenance import load_average, machine, now, versions

PLAIN = "none"


def prompts_of(path: Path, categories: list[str], each: int) -> list[tuple[str, str]]:
    """Return category and text of the first prompts of each category."""
    found: list[tuple[str, str]] = []
    for line in path.read_text("utf-8").splitlines():
        one = json.loads(line)
        category = one.get("category", "")
        if category in categories and sum(known == category for known, _ in found) < each:
            found.append((category, one["turns"][0] if "turns" in one else one["prompt"]))
    return found


def searches(llm: LLM, prompts: list[tuple[str, str]], given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a line for each search."""
    params = BeamSearchParams(beam_width=given.width, max_new_tokens=given.tokens)
    llm.beam_search("a", BeamSearchParams(beam_width=2, max_new_tokens=2))
    for number, (category, text) in enumerate(prompts):
        talk, plain = [{"role": "user", "content": text}], None
        for draft in (PLAIN, *given.drafts):
            start = time.perf_counter()
            (found,) = llm.beam_search(talk, params, draft=draft)
            seconds = time.perf_counter() - start
            plain = found.best.tokens if draft == PLAIN else plain
            yield {
                "kind": "search", "prompt": number, "category": category, "draft": draft, "seconds": seconds,
                "prompt_tokens": len(found.prompt_token_ids), "steps": found.num_steps, "passes": found.num_passes,
                "drafted": found.num_drafted, "used": found.num_used, "same_text": found.best.tokens == plain,
            }  # fmt: skip


def table(lines: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each category and drafter; the speed is the median of plain search's time over its own."""
    plain = {line["prompt"]: line["seconds"] for line in lines if line["draft"] == PLAIN}
    for category in dict.fromkeys(line["category"] for line in lines):
        for draft in dict.fromkeys(line["draft"] for line in lines):
            own = [line for line in lines if (line["category"], line["draft"]) == (category, draft)]
            steps, passes = sum(line["steps"] for line in own), sum(line["passes"] for line in own)
            speed = statistics.median(plain[line["prompt"]] / line["seconds"] for line in own)
            used = f"{sum(line['used'] for line in own)} of {sum(line['drafted'] for line in own)}"
            same = all(line["same_text"] for line in own)
            yield f"{category:<15} {draft:<20} {passes / steps:.2f} passes per step, speed {speed:.2f}, {used}, {same}"


def main() -> None:
    """Measure, print a table and write JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--category", nargs="+", default=["summarization", "translation"])
    parser.add_argument("--drafts", nargs="+", default=["ngram", "suffix", "runners-up", "suffix+runners-up"])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--kernels", default="native")
    for name, default in (("each", 3), ("width", 4), ("tokens", 48), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    llm = LLM(given.model, "none", dtype="float32", kernels=given.kernels)
    lines: list[dict[str, Any]] = []
    header = {
        "kind": "header", "job": "beam_passes", "date": now(), "machine": machine(torch.device("cpu")),
        "versions": versions(), "load_average": load_average(),
        **{name: str(value) for name, value in vars(given).items() if name not in ("out", "prompts")},
    }  # fmt: skip
    for line in searches(llm, prompts_of(given.prompts, given.category, given.each), given):
        lines.append(line)
        if given.out is not None:
            given.out.write_text("".join(f"{json.dumps(one)}\n" for one in (header, *lines)), encoding="utf-8")
    print("\n".join(table(lines)))


if __name__ == "__main__":
    main()
