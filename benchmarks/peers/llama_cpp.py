"""llama.cpp, by the package `xllamacpp`, as a peer of `beside.py`.

    python llama_cpp.py MODEL.gguf --threads 2 [--lookup simple --draft 8] [--drafter SMALL.gguf --draft 8]

Reads a request a line: {"ids": [...], "max_tokens": 64}; writes an answer a line.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import xllamacpp
from answering import answer, options

LOOKUPS = {
    "simple": xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE,
    "mod": xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_MOD,
    "map": xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_MAP_K,
    "cache": xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_CACHE,
}


def server(given: argparse.Namespace) -> xllamacpp.Server:
    """One slot, no cache between requests."""
    params = xllamacpp.CommonParams()
    params.model.path = given.model
    params.n_ctx, params.n_parallel, params.n_predict = 8192, 1, -1
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = given.threads
    params.warmup, params.cache_prompt, params.cache_ram_mib = True, False, 0
    params.port = 0
    if given.lookup:
        params.speculative.types = [LOOKUPS[given.lookup]]
        for name in ("ngram_simple", "ngram_map_k"):
            found = getattr(params.speculative, name)
            found.size_n, found.size_m, found.min_hits = given.match, given.draft, 1
    if given.drafter:
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        drafter = params.speculative.draft
        drafter.mparams.path, drafter.n_max = given.drafter, given.draft
        drafter.cpuparams.n_threads = drafter.cpuparams_batch.n_threads = given.threads
    return xllamacpp.Server(params)


def main() -> None:
    """Answer until the input ends."""
    given = options(draft=8, choices=LOOKUPS)
    running = server(given)

    def write(ids: list[int], max_tokens: int) -> dict[str, Any]:
        start = time.perf_counter()
        done = running.handle_completions(
            {
                "prompt": ids,
                "n_predict": max_tokens,
                "temperature": 0.0,
                "ignore_eos": True,
                "cache_prompt": False,
                "stream": False,
                "return_tokens": True,
                "samplers": ["top_k"],
                "top_k": 1,
            }
        )
        seconds = time.perf_counter() - start
        found = json.loads(done) if isinstance(done, str) else done
        timings = found.get("timings", {})
        return {
            "seconds": seconds,
            "prompt_seconds": timings.get("prompt_ms", 0.0) / 1000,
            "decode_seconds": timings.get("predicted_ms", 0.0) / 1000,
            "tokens": timings.get("predicted_n"),
            "ids": found.get("tokens"),
            "drafted": timings.get("draft_n"),
            "accepted": timings.get("draft_n_accepted"),
            "error": found.get("error"),
        }

    answer(f"xllamacpp {xllamacpp.__version__}", write)


if __name__ == "__main__":
    main()
