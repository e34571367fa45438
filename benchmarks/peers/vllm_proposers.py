"""Drafters of this package inside vLLM, beside vLLM's plain decoding and its own n-gram drafts.

    PYTHONPATH=src VENV_OF_VLLM/bin/python benchmarks/peers/vllm_proposers.py FOLDER --prompts FILE --out results.jsonl

Every arm is an engine of its own in the same run, and the arms take turns prompt by prompt, so that a loaded machine
loads all of them. Greedy. A row for each arm has tokens per second, the steps of vLLM's engine, and the texts that
differ from those of the plain arm.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1")
PATH = "draftree.dropin.vllm_proposer"
ARMS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "vllm ngram": {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2},
    "suffix": {"method": "custom_class", "model": f"{PATH}.SuffixProposer"},
    "suffix+ngram": {"method": "custom_class", "model": f"{PATH}.MergedProposer"},
}


def texts_of(path: Path, limit: int) -> list[str]:
    """First turns of a file, `limit` of each category, or the first `limit` prompts if there are no categories."""
    found: list[str] = []
    counts: dict[str, int] = {}
    for line in path.read_text("utf-8").splitlines():
        row = json.loads(line)
        name = row.get("category", "")
        counts[name] = counts.get(name, 0) + 1
        if counts[name] <= limit:
            found.append(row["turns"][0] if "turns" in row else row["prompt"])
    return found


def write(llm: Any, prompt: str, params: Any) -> tuple[list[int], int]:
    """Return the tokens of a text and the steps of the engine that wrote it."""
    chat = [{"role": "user", "content": prompt}]
    ids = llm.get_tokenizer().apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
    engine = llm.llm_engine
    engine.add_request("text", {"prompt_token_ids": list(ids)}, params)
    tokens, steps = list[int](), 0
    while engine.has_unfinished_requests():
        for found in engine.step():
            tokens, steps = list(found.outputs[0].token_ids), steps + 1
    return tokens, steps


def main() -> None:
    """Measure and write rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of the weights")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=1, help="prompts of each category")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--drafted", type=int, default=8)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--max-length", type=int, default=2048)
    parser.add_argument("--arm", action="append", choices=list(ARMS), default=[])
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    import vllm

    names = given.arm or list(ARMS)
    engines = {}
    for name in names:
        drafts = ARMS[name]
        more = {} if drafts is None else {"speculative_config": drafts | {"num_speculative_tokens": given.drafted}}
        engines[name] = vllm.LLM(
            model=given.model, dtype=given.dtype, max_model_len=given.max_length, enforce_eager=True, max_num_seqs=4,
            seed=0, disable_log_stats=False, enable_prefix_caching=False, **more,
        )  # fmt: skip
    params = vllm.SamplingParams(temperature=0, max_tokens=given.tokens, ignore_eos=True)
    prompts = texts_of(given.prompts, given.limit)
    found: dict[str, dict[str, Any]] = {name: {"seconds": 0.0, "texts": [], "steps": 0} for name in names}
    for llm in engines.values():
        write(llm, "Hello", params)
    for place, prompt in enumerate(prompts):
        for name in names[place % len(names) :] + names[: place % len(names)]:
            start = time.perf_counter()
            tokens, steps = write(engines[name], prompt, params)
            found[name]["seconds"] += time.perf_counter() - start
            found[name]["steps"] += steps
            found[name]["texts"].append(tokens)
        print(
            place + 1, "of", len(prompts), {name: round(one["seconds"], 1) for name, one in found.items()}, flush=True
        )
    with given.out.open("a", encoding="utf-8") as out:
        for name, one in found.items():
            out.write(json.dumps(row_of(name, one, found[names[0]]["texts"], given, vllm.__version__)) + "\n")


def row_of(
    name: str, one: dict[str, Any], plain: list[list[int]], given: argparse.Namespace, version: str
) -> dict[str, Any]:
    """Return the row of an arm."""
    tokens = sum(map(len, one["texts"]))
    return {
        "kind": "vllm proposer",
        "arm": name,
        "vllm": version,
        "python": sys.version.split()[0],
        "model": Path(given.model).name,
        "dtype": given.dtype,
        "prompts": len(one["texts"]),
        "tokens": tokens,
        "seconds": round(one["seconds"], 2),
        "tokens_per_second": round(tokens / one["seconds"], 2),
        "steps": one["steps"],
        "tokens_per_step": round(tokens / one["steps"], 3),
        "texts_that_differ": sum(a != b for a, b in zip(one["texts"], plain, strict=True)),
        "load_average": round(os.getloadavg()[0], 2),
        "cores": os.cpu_count(),
    }


if __name__ == "__main__":
    main()
