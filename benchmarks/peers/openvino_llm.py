"""OpenVINO GenAI as a peer of `beside.py`.

    optimum-cli export openvino --model FOLDER --task text-generation-with-past --weight-format int8 OUT
    python openvino_llm.py OUT --threads 2 [--lookup --draft 5 --match 3]

Reads a request a line: {"ids": [...], "max_tokens": 64}; writes an answer a line.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import openvino
import openvino_genai
from answering import answer, options


def main() -> None:
    """Answer until the input ends."""
    given = options(draft=5, action="store_true")
    settings = {"INFERENCE_NUM_THREADS": given.threads}
    if given.lookup:
        settings["prompt_lookup"] = True
    running = openvino_genai.LLMPipeline(given.model, "CPU", **settings)
    config = openvino_genai.GenerationConfig()
    config.do_sample, config.ignore_eos, config.apply_chat_template = False, True, False
    if given.lookup:
        config.num_assistant_tokens, config.max_ngram_size = given.draft, given.match

    def write(ids: list[int], max_tokens: int) -> dict[str, Any]:
        config.max_new_tokens = max_tokens
        tokens = openvino.Tensor(np.array([ids], dtype=np.int64))
        start = time.perf_counter()
        done = running.generate(tokens, config)
        seconds = time.perf_counter() - start
        first = done.perf_metrics.get_ttft().mean / 1000
        written = [int(token) for token in done.tokens[0]]
        times = {"seconds": seconds, "prompt_seconds": first, "decode_seconds": seconds - first}
        return {**times, "tokens": len(written), "ids": written}

    answer(f"openvino-genai {openvino_genai.__version__}", write)


if __name__ == "__main__":
    main()
