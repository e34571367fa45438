"""Generates greedily with vLLM on the processor, with and without drafts of an exported head.

Usage: with_vllm.py MODEL FOLDER|none METHOD
"""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1")
PROMPTS = ["The capital of France is", "def add(a, b):", "List three rivers:"]
TOKENS = 24


def parsed(folder: str) -> dict[str, object]:
    """What vLLM's parser makes of the configuration."""
    from vllm.transformers_utils.configs.speculators import SpeculatorsConfig

    values = json.loads((Path(folder) / "config.json").read_text())
    if "speculators_model_type" not in values:
        return {}
    asked = SpeculatorsConfig.extract_vllm_speculative_config(json.loads(json.dumps(values)))
    return {**asked, "layer": SpeculatorsConfig.extract_transformers_pre_trained_config(values)}


def main(model: str, folder: str, method: str) -> None:
    from vllm import LLM, SamplingParams

    found: dict[str, object] = {} if folder == "none" else {"parsed": parsed(folder)}
    speculation = {"model": folder, "num_speculative_tokens": 3, "method": method}
    more = {} if folder == "none" else {"speculative_config": speculation}
    llm = LLM(
        model=model, dtype="float32", max_model_len=256, enforce_eager=True, max_num_seqs=4, seed=0,
        disable_log_stats=False, **more,
    )  # fmt: skip
    answers = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=TOKENS))
    found["tokens"] = [list(answer.outputs[0].token_ids) for answer in answers]
    found["counters"] = {
        metric.name.removeprefix("vllm:spec_decode_"): metric.value
        for metric in llm.get_metrics()
        if "spec_decode" in metric.name and hasattr(metric, "value")
    }
    print("RESULT " + json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
