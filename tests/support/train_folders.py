"""A tiny model in a folder, and training data that it wrote through the command line. Not a test itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench_samples import write_model
from draftree import LLM, SamplingParams
from draftree.cli.main import run
from draftree.train.data.shards import TrainingData

WORDS = ("the", "fox", "dog", "sleeps", "runs", "quick", "lazy", "jumps", "over", "brown")
ANSWER = 40
DEPTH = 3
"""Length of the drafts of trained drafters."""
RUN = ["--dtype", "float32", "--kernels", "torch"]


def learnable_model(folder: Path) -> Path:
    """A random llama whose texts do not fall into a cycle at once, and depend mostly on the last tokens."""
    write_model(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            if parameter.dim() > 1:
                parameter.mul_(0.2)
        model.lm_head.weight.mul_(3)
    model.save_pretrained(folder)
    return folder


def prompts_file(path: Path, count: int) -> Path:
    lines = []
    for number in range(count):
        words = [WORDS[(number * step + number // 7) % len(WORDS)] for step in range(1, 5)]
        lines.append(json.dumps({"prompt": " ".join((str(number), *words))}))
    path.write_text("\n".join(lines) + "\n")
    return path


def write_data(model: Path, folder: Path, *, count: int = 300, temperatures: tuple[str, ...] = ("0", "0.8")) -> Path:
    """Training data of a model."""
    prompts = prompts_file(folder.with_suffix(".jsonl"), count)
    options = [option for one in temperatures for option in ("--temperature", one)]
    arguments = [
        "--prompts",
        str(prompts),
        "--raw",
        "--max-tokens",
        str(ANSWER),
        "--features",
        "0,1,-1",
        *options,
        *RUN,
    ]
    assert run(["train", "data", str(model), "--output", str(folder), *arguments]) == 0
    return folder


def lengths_of_unseen(model: Path, data: Path, spec: str, *, temperature: float) -> list[Any]:
    """Statistics of unseen texts that the engine writes again, with drafts of a fixed length; texts are compared."""
    texts = TrainingData(data)
    _, unseen = texts.split(0.2)
    llm = LLM(str(model), spec, plan=f"fixed:{DEPTH}", dtype="float32", kernels="torch")
    found = []
    for number in unseen:
        text = texts[number]
        if abs(text.temperature - temperature) > 1e-3:
            continue
        tokens = text.tokens.tolist()
        params = SamplingParams(temperature=temperature, seed=text.seed, max_tokens=len(tokens) - text.prompt_length)
        (completion,) = llm.generate([tokens[: text.prompt_length]], params)
        assert list(completion.token_ids) == tokens[text.prompt_length :]
        found.append(completion.stats)
    return found
