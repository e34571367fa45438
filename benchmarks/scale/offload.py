"""Texts of a target whose weights are read from a file in every pass: plain and with drafters.

Bytes read per token do not depend on the machine; seconds do. Weights are read past the system's page cache where the
file system supports that (`direct` in the output); otherwise each layer is dropped from the cache after it was read, so
both arms read from the disk. Every line says whether the texts are those of plain decoding.

python benchmarks/scale/offload.py MODEL --prompts FILE --offload 550MB --drafts none,suffix,quantized:int8 --out FILE
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
from draftree.models.native.streaming.model import StreamedModel
from draftree.text.tokenizer import Tokenizer


def measure(loaded: LoadedModel, draft: str | None, prompts: list[list[int]], params: SamplingParams) -> dict[str, Any]:
    """Generate the texts one after the other; seconds and bytes include their prompts."""
    records: list[Any] = []
    llm = LLM(loaded, draft, on_round=records.append, prefix_cache_size=0)
    assert isinstance(loaded.model, StreamedModel), "the benchmark is for weights that are read in every pass"
    llm.generate([prompts[0]], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
    records.clear()
    before, start = loaded.model.stream_stats.read, time.perf_counter()
    texts = [llm.generate([prompt], params)[0] for prompt in prompts]
    seconds = time.perf_counter() - start
    read = loaded.model.stream_stats.read - before
    written = sum(len(text.token_ids) for text in texts)
    drafting = sum(record.draft_seconds for record in records)
    own = 0 if llm._parts.drafter is None else llm._parts.drafter.footprint.weights
    return {
        "draft": draft or "none",
        "rounds": len(records),
        "tokens": written,
        "tokens_per_round": round(written / len(records), 2),
        "nodes_per_round": round(sum(r.num_drafted for one in records for r in one.sequences) / len(records), 1),
        "bytes_per_token": round(read / written),
        "ms_per_token": round(1000 * seconds / written, 1),
        "draft_share": round(drafting / seconds, 3),
        "draft_bytes": own,
        "token_ids": [list(text.token_ids) for text in texts],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--offload", required=True)
    parser.add_argument("--drafts", required=True, help="specs, separated by semicolons; the first is none")
    parser.add_argument("--count", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    loaded = load_model(given.model, dtype=given.dtype, offload=given.offload)
    assert loaded.folder is not None, "it was loaded by name"
    assert isinstance(loaded.model, StreamedModel), "the memory holds all weights"
    tokenizer = Tokenizer.load(loaded.folder)
    prompts = [encode(task, tokenizer)[0] for task in read_workload(given.prompts).tasks[: given.count]]
    params = SamplingParams(max_tokens=given.max_tokens, temperature=given.temperature, seed=1, ignore_eos=True)
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
        "memory_bytes": stats.memory,
        "pass_bytes": stats.of_pass,
    }
    wanted, plain_ms = None, 0.0
    with given.out.open("a", encoding="utf-8") as out:
        for spec in given.drafts.split(";"):
            found = measure(loaded, None if spec == "none" else spec, prompts, params)
            texts = found.pop("token_ids")
            wanted, plain_ms = wanted or texts, plain_ms or found["ms_per_token"]
            line = facts | found | {"speedup": round(plain_ms / found["ms_per_token"], 2), "same_text": texts == wanted}
            out.write(json.dumps(line) + "\n")
            print(line, flush=True)


if __name__ == "__main__":
    main()
