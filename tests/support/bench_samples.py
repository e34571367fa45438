"""A tiny model folder with a tokenizer, and made-up records, for the tests of the benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from draftree.lab.bench.records import OURS, PEER, Record
from text_backends import byte_level

CONTEXT = 160


def write_model(
    folder: Path,
    *,
    seed: int = 0,
    chat_template: str | None = None,
    eos: int | None = None,
    tokenizer: Any = None,
) -> Path:
    """A random llama with 420 tokens or so; another seed is another model with the same tokens."""
    tokenizer = byte_level(chat_template) if tokenizer is None else tokenizer
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=eos,
        pad_token_id=0,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


METHODS: list[dict[str, Any]] = [
    {"name": "plain", "engine": OURS, "job": "plain", "draft_is_pass": False},
    {"name": "ngram", "engine": OURS, "job": "ngram", "draft_is_pass": False},
    {"name": "hf", "engine": PEER, "job": "plain"},
    {"name": "hf lookup a", "engine": PEER, "job": "ngram"},
    {"name": "hf lookup b", "engine": PEER, "job": "ngram"},
]
MACHINE = {"cpu": "a processor", "usable_cores": 2}
VERSIONS = {"draftree": "0", "commit": "0123456789abcdef", "dirty": False, "torch": "2", "transformers": "5"}
HEADER: dict[str, Any] = {
    "format": 1,
    "job": "texts",
    "date": "2026-01-01T00:00:00+00:00",
    "machine": MACHINE,
    "versions": VERSIONS,
    "model": {"name": "tiny"},
    "dtype": "float32",
    "threads": 1,
    "prompts": {"name": "p.jsonl", "written": 2},
    "methods": METHODS,
    "max_tokens": 64,
    "temperature": 0.0,
    "batch": 1,
    "repeats": 1,
    "load_average": [0.5, 0.5, 0.5],
    "notes": [],
}


def record(method: str, task: str = "a", **changed: Any) -> Record:
    """A text of 21 tokens: 1 in the first round, 20 in 2 seconds, 1 second before and 0.5 outside the rounds."""
    stats = {
        "rounds": 21,
        "completion_tokens": 21,
        "prefill_seconds": 1.0,
        "decode_seconds": 2.0,
        "tokens_per_second": 10.0,
        "phase_seconds": {"plan": 0.02, "draft": 0.08, "score": 1.8, "verify": 0.06, "commit": 0.04},
    }
    stats.update(changed.pop("stats", {}))
    fields: dict[str, Any] = {
        "task": task,
        "category": "story",
        "form": "plain",
        "method": method,
        "repeat": 0,
        "place": 0,
        "group": 0,
        "seconds": 3.5,
        "finish_reason": "length",
        "text_sha256": "0",
        "tokens_sha256": "0",
        "equal_to_plain": True,
        "equal_to_other_plain": None,
        "divergence": None,
        "stats": stats,
    }
    return Record(**{**fields, **changed})
