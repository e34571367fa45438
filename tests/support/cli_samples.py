"""A tiny model folder with a tokenizer and a chat template for tests of the command line, and its texts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from draftree import LLM, SamplingParams
from draftree.cli.main import run

Generate = Callable[..., tuple[int, str, str]]

CONTEXT = 192
DEMO_CONTEXT = 1200
LONG_CONTEXT = 200_000
"""A text of so many tokens fills a pipe several times, so its writer waits for its reader."""
END = "<end>"
GREEDY = ["--temperature", "0", "--max-tokens", "60"]
TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def save_tiny_model(folder: Path, *, chat: bool, context: int = CONTEXT, seed: int = 1) -> Path:
    """A byte-level llama that sees the last token alone, so that its greedy text runs in a circle."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([END, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END)
    if chat:
        tokenizer.chat_template = TEMPLATE
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=context,
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    # the end of text is never the likeliest
    torch.nn.init.zeros_(model.lm_head.weight[:1])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def generating(capfd: pytest.CaptureFixture[str]) -> Generate:
    """Runs `draftree generate`: its exit status, standard output and standard error."""

    def call(*arguments: str) -> tuple[int, str, str]:
        status = run(["generate", *arguments])
        captured = capfd.readouterr()
        return status, captured.out, captured.err

    return call


@functools.cache
def expected(folder: str, prompt: str, **params: Any) -> str:
    """The text that the library writes."""
    return LLM(folder, "none").generate(prompt, SamplingParams(**params))[0].text
