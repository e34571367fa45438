"""Log-probabilities of written tokens, under the model's own law."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftree.engine.sequence import TokenLogprob


def token_logprobs(logits: Tensor, tokens: Sequence[int], *, top: int) -> list[TokenLogprob]:
    """One entry a token.

    Args:
        logits: the model's logits where each token was chosen, shape (tokens, vocab).
        tokens: what was written.
        top: how many of the likeliest tokens to name.
    """
    log_probs = torch.log_softmax(logits, dim=-1)
    chosen = log_probs.gather(-1, torch.tensor(tokens, device=logits.device).unsqueeze(-1)).squeeze(-1).tolist()
    best = log_probs.topk(top, dim=-1)
    return [
        TokenLogprob(token, logprob, tuple(zip(ids, values, strict=True)))
        for token, logprob, ids, values in zip(tokens, chosen, best.indices.tolist(), best.values.tolist(), strict=True)
    ]
