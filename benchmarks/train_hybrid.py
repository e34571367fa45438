"""Trains a small model with recurrent layers, and a draft model for it, on stories that `stories15m` writes.

    python benchmarks/train_hybrid.py FOLDER --family qwen3_5
    draftree bench run FOLDER/qwen3_5 --prompts FOLDER/prompts.jsonl \\
        --draft ngram --draft suffix --draft model:FOLDER/drafter

A random model accepts nothing, so that real acceptance needs a trained one. FOLDER gets `stories.txt`, one story per
line, the models, and `prompts.jsonl` with the beginnings of stories that no model was trained on. What is there already
is not made again. Twenty to thirty minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from torch import Tensor

END = "<|endoftext|>"
VOCAB = 2048
STORY_TOKENS = 220
TOGETHER = 64
HELD_OUT, START_WORDS = 60, 8
WINDOW, BATCH = 256, 8
RATE, WARM_UP = 3e-3, 0.05
FULL, RECURRENT = "full_attention", "linear_attention"

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
    "tie_word_embeddings": True,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": (
        "qwen3_5_text",
        {
            "hidden_size": 256,
            "intermediate_size": 768,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "layer_types": [RECURRENT, RECURRENT, FULL] * 2,
        },
    ),
    "lfm2": (
        "lfm2",
        {
            "hidden_size": 256,
            "intermediate_size": 768,
            "block_auto_adjust_ff_dim": False,
            "num_hidden_layers": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "layer_types": ["conv", "conv", FULL, "conv"] * 2,
        },
    ),
}
DRAFTER: tuple[str, dict[str, Any]] = (
    "llama",
    {
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
    },
)


@dataclass(frozen=True)
class Stories:
    """The tokens of all stories in one row, each after an end token; the last ones are for validation."""

    train: Tensor
    validation: Tensor


def write_stories(path: Path, count: int) -> None:
    from draftree import LLM, SamplingParams

    llm = LLM("stories15m", "none", quantization="int8")
    start = [llm.tokenizer.bos_token_id]
    lines: list[str] = []
    for first in range(0, count, TOGETHER):
        seeds = range(first, min(first + TOGETHER, count))
        params = [SamplingParams(max_tokens=STORY_TOKENS, temperature=0.9, seed=seed) for seed in seeds]
        lines += [" ".join(text.text.split()) for text in llm.generate([start] * len(params), params)]
        print(f"{len(lines)} of {count} stories", flush=True)
    path.write_text("".join(f"{line}\n" for line in lines), "utf-8")


def trained_tokenizer(stories: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        stories, BpeTrainer(vocab_size=VOCAB, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END).save_pretrained(folder)


def tokens_of(tokenizer: Tokenizer, stories: list[str]) -> Stories:
    rows = [torch.tensor([0, *encoding.ids]) for encoding in tokenizer.encode_batch(stories)]
    return Stories(torch.cat(rows[:-HELD_OUT]), torch.cat(rows[-HELD_OUT:]))


def train(name: str, model_type: str, settings: dict[str, Any], stories: Stories, minutes: float) -> Any:
    """Train for some minutes, with a rate that rises, then falls to zero by the clock."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(COMMON | settings)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.05)
    print(f"{name}: {sum(parameter.numel() for parameter in model.parameters()):,} parameters", flush=True)
    start, steps, place = time.perf_counter(), 0, 0.0
    while place < 1:
        firsts = torch.randint(len(stories.train) - WINDOW, (BATCH,)).tolist()
        ids = torch.stack([stories.train[first : first + WINDOW] for first in firsts])
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(place / WARM_UP, 1 - place)
        with torch.autocast("cpu", torch.bfloat16):  # half the time of float32
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps, place = steps + 1, (time.perf_counter() - start) / (60 * minutes)
        if steps % 50 == 0:
            print(f"{name}: step {steps}, loss {float(loss.detach()):.3f}, {place:.0%}", flush=True)
    print(f"{name}: {steps * WINDOW * BATCH:,} tokens, validation loss {validation_loss(model, stories):.3f}")
    return model


@torch.no_grad()
def validation_loss(model: Any, stories: Stories) -> float:
    """Return nats per token."""
    windows = stories.validation[: len(stories.validation) // WINDOW * WINDOW].view(-1, WINDOW)
    losses = [float(model(input_ids=ids[None], labels=ids[None], use_cache=False).loss) for ids in windows]
    return sum(losses) / len(losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--family", choices=FAMILIES, default="qwen3_5")
    parser.add_argument("--stories", type=int, default=4000)
    parser.add_argument(
        "--minutes", type=float, default=12, help="of training the model; a quarter for the draft model"
    )
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    given.folder.mkdir(parents=True, exist_ok=True)
    path = given.folder / "stories.txt"
    if not path.exists():
        write_stories(path, given.stories)
    lines = path.read_text("utf-8").splitlines()
    tokenizer = trained_tokenizer(lines[:-HELD_OUT])
    stories = tokens_of(tokenizer, lines)
    print(f"{len(stories.train):,} tokens", flush=True)
    for name, (model_type, settings), minutes in (
        (given.family, FAMILIES[given.family], given.minutes),
        ("drafter", DRAFTER, given.minutes / 4),
    ):
        target = given.folder / name
        if not target.exists():
            train(name, model_type, settings, stories, minutes).save_pretrained(target)
            save_tokenizer(tokenizer, target)
    with (given.folder / "prompts.jsonl").open("w", encoding="utf-8") as out:
        for line in lines[-HELD_OUT:]:
            out.write(json.dumps({"prompt": " ".join(line.split()[:START_WORDS])}) + "\n")


if __name__ == "__main__":
    main()
