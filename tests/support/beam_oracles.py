"""Beam search by brute force and by plain loops, and random models for it. Not a test itself."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from draftree.beam.params import BeamSearchParams
from draftree.beam.result import BeamResult
from draftree.beam.search import BeamSearch
from draftree.loading.transformers_model import wrap_model
from draftree.models.base import LanguageModel
from draftree.models.table import Table

Scored = tuple[tuple[int, ...], float]
"""Tokens and cumulative log-probability."""
VOCAB_SIZE = 96


def search(
    model: LanguageModel, prompt: Sequence[int], *, ends: Sequence[int] = (), capacity: int | None = None, **given: Any
) -> BeamResult:
    """Search one prompt, and check that every slot is closed."""
    before = model.num_open
    params = BeamSearchParams(**given)
    (result,) = BeamSearch(model, end_ids=ends, capacity=capacity).run([prompt], [params])
    assert model.num_open == before
    return result


def logprobs(table: Table, context: Sequence[int]) -> list[float]:
    """Log-probabilities after a context."""
    row: list[float] = table(tuple(context)).log_softmax(dim=-1).tolist()
    return row


def all_texts(table: Table, prompt: Sequence[int], *, ends: Sequence[int], limit: int) -> list[Scored]:
    """Every text that ends with an end token, or has `limit` tokens without one; best sum first."""
    vocab = len(table(()))
    found = []
    for size in range(1, limit + 1):
        for tokens in itertools.product(range(vocab), repeat=size):
            if any(token in ends for token in tokens[:-1]) or (size < limit and tokens[-1] not in ends):
                continue
            found.append((tokens, rescored(table, prompt, tokens)))
    return sorted(found, key=lambda pair: -pair[1])


def rescored(table: Table, prompt: Sequence[int], tokens: Sequence[int]) -> float:
    """Cumulative log-probability of a text, token by token."""
    return sum(logprobs(table, (*prompt, *tokens[:place]))[token] for place, token in enumerate(tokens))


def narrow(
    table: Table, prompt: Sequence[int], width: int, *, ends: Sequence[int], limit: int, penalty: float, rule: str
) -> list[Scored]:
    """Beam search of any width, by the definition; returns tokens and scores.

    `rule` is "fcfs" or "never": stop at `width` texts, or when no beam can become better.
    """
    beams: list[Scored] = [((), 0.0)]
    pool: list[Scored] = []
    for step in range(1, limit + 1):
        extended = [
            ((*tokens, token), total + logprob)
            for tokens, total in beams
            for token, logprob in enumerate(logprobs(table, (*prompt, *tokens)))
        ]
        extended.sort(key=lambda pair: -pair[1])
        extended = extended[: max(2, 1 + len(ends)) * width]
        for tokens, total in extended[:width]:
            if (tokens[-1] in ends or step == limit) and not (rule == "fcfs" and len(pool) == width):
                pool.append((tokens, total / step**penalty))
        beams = [pair for pair in extended if pair[0][-1] not in ends][:width]
        pool = sorted(pool, key=lambda pair: -pair[1])[:width]
        if len(pool) == width:
            bound = beams[0][1] / (limit if penalty > 0 else step) ** penalty
            if rule == "fcfs" or bound <= pool[-1][1]:
                break
    return pool


@functools.cache
def peer(family: str, seed: int = 0) -> Any:
    """A random transformers model whose end tokens are likely."""
    common = {"vocab_size": VOCAB_SIZE, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    if family == "gpt2":
        kind: Any = GPT2LMHeadModel
        config: Any = GPT2Config(**common, n_positions=160, n_embd=32, n_layer=2, n_head=4)
    else:
        kind = LlamaForCausalLM
        config = LlamaConfig(
            **common,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=160,
        )
    with torch.random.fork_rng([]):  # a test's own seed stays as it is, whichever test makes the model
        torch.manual_seed(seed)
        model = kind(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(10)
    return model.eval()


@functools.cache
def target(family: str, seed: int = 0) -> LanguageModel:
    """The same model behind our seam."""
    fresh = type(peer(family, seed))(peer(family, seed).config).eval()
    fresh.load_state_dict(peer(family, seed).state_dict())
    return wrap_model(fresh, name=family).model
