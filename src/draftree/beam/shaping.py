"""Rules that every strategy shares: log-probabilities of the next tokens, and tokens that are not allowed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftree.beam.rules import force, only, restrict
from draftree.core.transfer import to_device
from draftree.sampling.ngram_blocking import ban_repeated_ngrams

if TYPE_CHECKING:
    from draftree.beam.group import Beam
    from draftree.beam.state import TextSearch


def next_logprobs(logits: Tensor, temperatures: Sequence[float]) -> Tensor:
    """Return log-probabilities of the next token.

    Args:
        logits: shape (rows, vocab), float32 or float64; unchanged.
        temperatures: one for each row.
    """
    if set(temperatures) != {1.0}:
        logits = logits / to_device(temperatures, logits.device, dtype=logits.dtype)[:, None]
    return logits.log_softmax(dim=-1)


def shape(logprobs: Tensor, text: TextSearch, beams: Sequence[Beam]) -> None:
    """Write the penalties and bans of a text's parameters into the rows of these beams, shape (beams, vocab)."""
    params, step = text.params, text.num_tokens
    restrict(logprobs, text, beams)
    vocab = logprobs.shape[-1]
    if params.unk_penalty and params.unk_token_id is not None:
        logprobs[:, params.unk_token_id] -= params.unk_penalty
    if params.suppress_tokens:
        logprobs[
            :, to_device([token for token in params.suppress_tokens if token < vocab], logprobs.device)
        ] = -math.inf
    if step < len(params.prefix_token_ids) and params.prefix_bias_beta:
        _favour(logprobs, text, beams)
    elif step < len(params.prefix_token_ids):
        only(logprobs, params.prefix_token_ids[step : step + 1], None if params.count_prefix else 0.0)
    elif text.is_last and params.force_eos != "none":
        only(logprobs, text.ends, 0.0 if params.force_eos == "zero_score" else None)
    elif step < text.minimum and text.ends:
        logprobs[:, text.end_ids] = -math.inf
    if params.no_repeat_ngram_size:
        before = text.prompt if params.ngram_scope == "all" else ()
        tokens = to_device([(*before, *beam.tokens) for beam in beams], logprobs.device)
        ban_repeated_ngrams(logprobs, tokens, size=params.no_repeat_ngram_size)
    _allow(logprobs, text, beams)
    force(logprobs, text)


def _favour(logprobs: Tensor, text: TextSearch, beams: Sequence[Beam]) -> None:
    """Give the next token of the soft prefix a share of the probability, in beams that follow it so far."""
    prefix, step, share = text.params.prefix_token_ids, text.num_tokens, text.params.prefix_bias_beta
    rows = [row for row, beam in enumerate(beams) if beam.tokens == tuple(prefix[:step])]
    if not rows:
        return
    at = to_device(rows, logprobs.device)
    logprobs[at] += math.log1p(-share)
    own = logprobs[at, prefix[step]]
    logprobs[at, prefix[step]] = torch.logaddexp(own, torch.full_like(own, math.log(share)))


def combined(own: Tensor, others: Sequence[Tensor], fused: Tensor | None, weight: float) -> Tensor:
    """Return log-probabilities of an ensemble with shallow fusion.

    Args:
        own: log-probabilities of the model, shape (rows, vocab).
        others: those of the other models, same shape; the mean of the probabilities is taken.
        fused: those of a language model, same shape; None without one.
        weight: factor of `fused`.
    """
    if others:
        stacked = torch.stack([own, *(other.to(own) for other in others)])
        own = stacked.logsumexp(dim=0) - math.log(len(stacked))
    return own if fused is None else own + weight * fused.to(own)


def _allow(logprobs: Tensor, text: TextSearch, beams: Sequence[Beam]) -> None:
    """Keep what the trie or the function allows."""
    params, vocab = text.params, logprobs.shape[-1]
    if params.allowed_trie is not None:
        nodes = [beam.trie_node for beam in beams]
        rows, tokens = params.allowed_trie.allowed(nodes, vocab)
        ending = params.allowed_trie.inner_ends(nodes)
        if len(ending):
            # one end token, so that no text is found twice
            ends = text.end_ids[logprobs[ending][:, text.end_ids].argmax(dim=1)].cpu()
            rows, tokens = torch.cat([rows, torch.from_numpy(ending)]), torch.cat([tokens, ends])
    elif params.prefix_allowed_tokens_fn is not None:
        allowed = [
            [int(token) for token in params.prefix_allowed_tokens_fn(text.index, [*text.prompt, *beam.tokens])]
            for beam in beams
        ]
        pairs = [(row, token) for row, own in enumerate(allowed) for token in own if 0 <= token < vocab]
        rows, tokens = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).unbind(dim=1)
    else:
        return
    rows, tokens = rows.to(logprobs.device), tokens.to(logprobs.device)
    kept = logprobs[rows, tokens]
    logprobs.fill_(-math.inf)
    logprobs[rows, tokens] = kept
