"""Log-probabilities of written tokens and of prompts, under the model's own distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from draftree.core.errors import NonFiniteLogitsError
from draftree.engine.sequence import TokenLogprob, WritingSequence

EVERY_TOKEN = -1
PROMPT_LOGIT_BYTES = 32 * 2**20
"""Maximum size of prompt logits in one pass; their log-probabilities take as much again."""


def scored_rows(vocab_size: int) -> int:
    """Return the maximum number of prompt rows whose logits one pass computes."""
    return max(1, PROMPT_LOGIT_BYTES // (4 * vocab_size))


def score_prompt(sequence: WritingSequence, logits: Tensor) -> None:
    """Record log-probabilities of the next prompt tokens.

    Args:
        sequence: the sequence of the prompt.
        logits: logits that predict its next tokens without an entry, shape (tokens, vocab).

    Raises:
        NonFiniteLogitsError: a log-probability is NaN.
    """
    top = sequence.controls.params.prompt_logprobs
    assert top is not None, "the request wants log-probabilities of its prompt"
    first = len(sequence.prompt_logprobs)
    tokens = sequence.history.since(first)[: len(logits)]
    entries = token_logprobs(logits, tokens, top=top)
    for position, entry in enumerate(entries, first):
        if math.isnan(entry.logprob):
            raise NonFiniteLogitsError(
                f"request {sequence.request_id}: the log-probability of the prompt's token at position {position} is "
                "NaN: check weights and dtype (float16 overflows where bfloat16 does not)"
            )
    sequence.prompt_logprobs.extend(entries)


def token_logprobs(logits: Tensor, tokens: Sequence[int], *, top: int) -> list[TokenLogprob]:
    """Return one entry per token.

    Args:
        logits: the model's logits at each token's position, shape (tokens, vocab).
        tokens: the written tokens.
        top: how many of the most likely tokens to list; -1 lists all.
    """
    top = logits.shape[-1] if top == EVERY_TOKEN else top
    log_probs = torch.log_softmax(logits, dim=-1)
    chosen = log_probs.gather(-1, torch.tensor(tokens, device=logits.device).unsqueeze(-1))
    ranks = (log_probs > chosen).sum(-1) + 1
    best = log_probs.topk(top, dim=-1)
    rows = zip(
        tokens, chosen.squeeze(-1).tolist(), best.indices.tolist(), best.values.tolist(), ranks.tolist(), strict=True
    )
    return [
        TokenLogprob(token, logprob, tuple(zip(ids, values, strict=True)), rank)
        for token, logprob, ids, values, rank in rows
    ]
