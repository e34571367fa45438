"""Texts of a target whose weights are read from a file in every pass: plain and with drafters.

Bytes read per token do not depend on the machine; seconds do. Weights are read past the system's page cache where the
file system supports that (`direct` in the output); otherwise each layer is dropped from the cache after it was read, so
both arms read from the disk. Every line says whether the texts are those of plain decoding.

`--total` is the memory for all weights and the drafter's keys and values: plain decoding gives all of it to the target,
a drafter takes its part first. With `--offload` it is the target's alone. A draft spec may name its planner after `@`.

python benchmarks/scale/offload.py MODEL --prompts FILE --total 550MB --drafts 'none;suffix;model:NAME,bits=int8' \
    --out FILE
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from draftree import LLM, SamplingParams
from draftree.bench.workload import encode, read_workload
from draftree.loading.load import LoadedModel, load_model
from draftree.loading.resolve import resolve_model
from draftree.models.native.streaming.budget import parse_size
from draftree.models.native.streaming.model import StreamedModel
from draftree.text.tokenizer import Tokenizer

MAX_NODES = 1024


def drafter_bytes(target: str, spec: str, dtype: str, length: int) -> tuple[int, int]:
    """Return the bytes of a drafter's weights, and of its keys and values for a text with its tree."""
    draft, _, _ = spec.partition("@")
    if draft == "none":
        return 0, 0
    llm = LLM(load_model(target, dtype=dtype, offload="1TB"), draft, plan="fixed", prefix_cache_size=0)
    drafter = llm.engine.parts.drafter
    assert drafter is not None, "the spec names a drafter"
    tree = min(llm.planner.default_nodes, MAX_NODES)
    return drafter.footprint.weights, drafter.footprint.token * (length + tree)


def measure(loaded: LoadedModel, spec: str, prompts: list[list[int]], params: SamplingParams) -> dict[str, Any]:
    """Generate the texts one after the other; seconds and bytes include their prompts."""
    records: list[Any] = []
    draft, _, plan = spec.partition("@")
    start = time.perf_counter()
    llm = LLM(
        loaded,
        None if draft == "none" else draft,
        plan=plan or None,
        on_round=records.append,
        prefix_cache_size=0,
    )
    start_seconds, start_bytes = time.perf_counter() - start, _read_by(loaded)
    assert isinstance(loaded.model, StreamedModel), "the benchmark is for weights that are read in every pass"
    llm.generate([prompts[0]], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
    records.clear()
    before, start = _read_by(loaded), time.perf_counter()
    texts = [llm.generate([prompt], params)[0] for prompt in prompts]
    seconds = time.perf_counter() - start
    read = _read_by(loaded) - before
    written = sum(len(text.token_ids) for text in texts)
    drafting = sum(record.draft_seconds for record in records)
    scoring = sum(record.score_seconds for record in records)
    return {
        "draft": spec,
        "start_seconds": round(start_seconds, 1),
        "start_bytes": start_bytes,
        "rounds": len(records),
        "tokens": written,
        "tokens_per_round": round(written / len(records), 2),
        "nodes_per_round": round(sum(r.num_drafted for one in records for r in one.sequences) / len(records), 1),
        "bytes_per_token": round(read / written),
        "ms_per_token": round(1000 * seconds / written, 1),
        "draft_share": round(drafting / seconds, 3),
        "draft_ms_per_round": round(1000 * drafting / len(records), 1),
        "pass_ms_per_round": round(1000 * scoring / len(records), 1),
        "token_ids": [list(text.token_ids) for text in texts],
    }


def _read_by(loaded: LoadedModel) -> int:
    assert isinstance(loaded.model, StreamedModel), "the benchmark is for weights that are read in every pass"
    return loaded.model.stream_stats.read


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--prompts", type=Path, required=True)
    memory = parser.add_mutually_exclusive_group(required=True)
    memory.add_argument("--offload", help="memory for the target's weights")
    memory.add_argument("--total", help="memory for the weights of target and drafter, and the drafter's cache")
    parser.add_argument("--category", action="append", default=[], help="of the prompts; default all")
    parser.add_argument("--drafts", required=True, help="specs, separated by semicolons; the first is none")
    parser.add_argument("--count", type=int, default=2, help="prompts of each category; without one, of the file")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    tokenizer = Tokenizer.load(resolve_model(given.model))
    workload = read_workload(given.prompts)
    tasks = workload.choose(given.category, given.count).tasks if given.category else workload.tasks[: given.count]
    prompts = [encode(task, tokenizer)[0] for task in tasks]
    params = SamplingParams(max_tokens=given.max_tokens, temperature=given.temperature, seed=1, ignore_eos=True)
    longest = max(map(len, prompts)) + given.max_tokens
    wanted, plain_ms, plain_bytes = None, 0.0, 0
    with given.out.open("a", encoding="utf-8") as out:
        for spec in given.drafts.split(";"):
            weights, cache = drafter_bytes(given.model, spec, given.dtype, longest) if given.total else (0, 0)
            memory = given.offload or parse_size(given.total) - weights - cache
            loaded = load_model(given.model, dtype=given.dtype, offload=memory)
            assert isinstance(loaded.model, StreamedModel), "the memory holds all weights"
            stats = loaded.model.stream_stats
            facts = {
                "model": given.model,
                "kernels": loaded.kernels,
                "threads": torch.get_num_threads(),
                "dtype": str(loaded.model.dtype).removeprefix("torch."),
                "temperature": given.temperature,
                "prompts": len(prompts),
                "direct": loaded.model.reads_directly,
                "weight_bytes": stats.file,
                "target_bytes": stats.memory,
                "drafter_bytes": weights,
                "drafter_cache_bytes": cache,
                "memory_share": round((stats.memory + weights + cache) / stats.file, 4),
                "pass_bytes": stats.of_pass,
            }
            found = measure(loaded, spec, prompts, params)
            texts = found.pop("token_ids")
            wanted, plain_ms = wanted or texts, plain_ms or found["ms_per_token"]
            plain_bytes = plain_bytes or found["bytes_per_token"]
            line = facts | found
            line |= {"speedup": round(plain_ms / found["ms_per_token"], 2), "same_text": texts == wanted}
            line["fewer_bytes"] = round(plain_bytes / found["bytes_per_token"], 2)
            out.write(json.dumps(line) + "\n")
            out.flush()
            print(line, flush=True)
            del loaded


if __name__ == "__main__":
    main()
