"""OpenVINO GenAI as a peer of `beside.py`.

    optimum-cli export openvino --model FOLDER --task text-generation-with-past --weight-format int8 OUT
    python openvino_llm.py OUT --threads 2 [--lookup --draft 5 --match 3]

Reads a request a line: {"ids": [...], "max_tokens": 64}; writes an answer a line.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import numpy as np
import openvino
import openvino_genai


def main() -> None:
    """Answer until the input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lookup", action="store_true")
    parser.add_argument("--match", type=int, default=3)
    parser.add_argument("--draft", type=int, default=5)
    given = parser.parse_args()
    options = {"INFERENCE_NUM_THREADS": given.threads}
    if given.lookup:
        options["prompt_lookup"] = True
    running = openvino_genai.LLMPipeline(given.model, "CPU", **options)
    config = openvino_genai.GenerationConfig()
    config.do_sample, config.ignore_eos, config.apply_chat_template = False, True, False
    if given.lookup:
        config.num_assistant_tokens, config.max_ngram_size = given.draft, given.match
    print(json.dumps({"ready": f"openvino-genai {openvino_genai.__version__}"}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        config.max_new_tokens = asked["max_tokens"]
        tokens = openvino.Tensor(np.array([asked["ids"]], dtype=np.int64))
        start = time.perf_counter()
        answer = running.generate(tokens, config)
        seconds = time.perf_counter() - start
        metrics = answer.perf_metrics
        first = metrics.get_ttft().mean / 1000
        ids = [int(token) for token in answer.tokens[0]]
        found = {"seconds": seconds, "decode_seconds": seconds - first, "tokens": len(ids), "ids": ids}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
