"""Tokens per round of a drafter here and of its export in llama.cpp and vLLM, on the same prompts, greedily.

    python exports.py here FOLDER --draft head:HEAD --prompts FILE --out FILE
    python exports.py llama.cpp FOLDER --draft FILE.gguf --target TARGET.gguf --type draft-eagle3 --program PROGRAM ...
    VENV_OF_VLLM/bin/python exports.py vllm FOLDER --draft FOLDER --type eagle3 ...

FOLDER is the target's. Drafts are chains of `--drafted` tokens; every prompt is the first of its category, and gets
`--tokens` tokens. PROGRAM is `llama-speculative-simple`. A row has tokens, rounds and their ratio: an export that is
read wrongly shows as a ratio near 1.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

Counts = tuple[int, int]


def prompts_of(path: Path, limit: int, tokenizer: Any) -> list[str]:
    """Chats with the first turn of each category, as text."""
    turns: dict[str, str] = {}
    for line in path.read_text("utf-8").splitlines():
        row = json.loads(line)
        turns.setdefault(row["category"], row["turns"][0])
    return [
        tokenizer.apply_chat_template([{"role": "user", "content": turn}], add_generation_prompt=True, tokenize=False)
        for turn in list(turns.values())[:limit]
    ]


def here(given: argparse.Namespace, prompts: list[list[int]]) -> list[Counts]:
    from draftree import LLM, SamplingParams

    llm = LLM(given.folder, draft=given.draft, plan=f"fixed:{given.drafted}", dtype=given.dtype, kernels="native")
    params = SamplingParams(temperature=0, max_tokens=given.tokens, ignore_eos=True)
    counts = []
    for prompt in prompts:
        stats = llm.generate([prompt], params)[0].stats
        # the first round has no draft: the head has not read the prompt
        counts.append((given.tokens, stats.rounds))
    return counts


def in_llama_cpp(given: argparse.Namespace, prompts: list[str]) -> list[Counts]:
    counts = []
    for prompt in prompts:
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write(prompt + "\n")  # the program drops the last newline of a file
            file.flush()
            command = [given.program, "-m", given.target, "-md", given.draft, "-f", file.name, "--temp", "0"]
            command += ["--spec-type", given.type, "--spec-draft-n-max", str(given.drafted), "-n", str(given.tokens)]
            command += ["-c", "2048", "-t", "1", "--ignore-eos", "--spec-draft-p-min", "0"]
            ended = subprocess.run(command, capture_output=True, text=True, check=True)
        words = dict(re.findall(r"(n_predict|n_accept)\s*=\s*(\d+)", ended.stdout + ended.stderr))
        tokens = int(words["n_predict"])
        counts.append((tokens, tokens - int(words["n_accept"])))
    return counts


def in_vllm(given: argparse.Namespace, prompts: list[list[int]]) -> list[Counts]:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1", VLLM_ENABLE_V1_MULTIPROCESSING="0")
    import vllm

    drafts = {"method": given.type, "model": given.draft, "num_speculative_tokens": given.drafted}
    llm = vllm.LLM(
        model=given.folder, dtype=given.dtype, max_model_len=2048, enforce_eager=True, max_num_seqs=1, seed=0,
        enable_prefix_caching=False, speculative_config=drafts,
    )  # fmt: skip
    params = vllm.SamplingParams(temperature=0, max_tokens=given.tokens, ignore_eos=True)
    counts = []
    for prompt in prompts:
        llm.llm_engine.add_request("text", {"prompt_token_ids": prompt}, params)
        tokens, steps, length = 0, 0, 0
        while llm.llm_engine.has_unfinished_requests():
            for output in llm.llm_engine.step():
                tokens = len(output.outputs[0].token_ids)
                steps, length = steps + (tokens > length), tokens
        counts.append((tokens, steps))
    return counts


def main() -> None:
    """Measure and write a row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("where", choices=["here", "llama.cpp", "vllm"])
    parser.add_argument("folder", help="folder of the target")
    parser.add_argument("--draft", required=True)
    parser.add_argument("--target", help="the target's GGUF file")
    parser.add_argument("--type", help="name of the method there")
    parser.add_argument("--program", help="llama-speculative-simple")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--drafted", type=int, default=4)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(given.folder, trust_remote_code=False)
    texts = prompts_of(given.prompts, given.limit, tokenizer)
    ids = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    if given.where == "llama.cpp":
        counts = in_llama_cpp(given, texts)
    else:
        counts = here(given, ids) if given.where == "here" else in_vllm(given, ids)
    tokens, rounds = sum(count[0] for count in counts), sum(count[1] for count in counts)
    row = {
        "kind": "export", "where": given.where, "draft": Path(given.draft).name, "target": Path(given.folder).name,
        "dtype": given.dtype, "drafted": given.drafted, "prompts": len(counts), "tokens": tokens, "rounds": rounds,
        "tokens_per_round": round(tokens / rounds, 3), "each": counts,
    }  # fmt: skip
    print(json.dumps(row))
    with given.out.open("a", encoding="utf-8") as out:
        out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
