"""Settings of a generation configuration in beam search, with the meaning that they have in transformers.

They act on log-probabilities. A parameter of the search takes precedence over a setting with the same meaning.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftree.core.transfer import to_device
from draftree.sampling.ngram_blocking import ban_ngrams_of_source, ban_repeated_ngrams

if TYPE_CHECKING:
    from draftree.beam.group import Beam
    from draftree.beam.state import TextSearch
    from draftree.sampling.decoding_rules import DecodingRules


def restrict(logprobs: Tensor, text: TextSearch, beams: Sequence[Beam]) -> None:
    """Apply penalties and bans that precede forced tokens to the rows of these beams, shape (beams, vocab)."""
    rules = text.opening.rules
    if rules is None or _is_given(text):
        return
    histories = [(*text.prompt, *beam.tokens) for beam in beams]
    tokens = to_device(histories, logprobs.device)
    if rules.repetition_penalty != 1.0:
        own = logprobs.gather(1, tokens)
        factor = rules.repetition_penalty
        logprobs.scatter_(1, tokens, torch.where(own < 0, own * factor, own / factor))
    if rules.no_repeat_ngram_size and not text.params.no_repeat_ngram_size:
        ban_repeated_ngrams(logprobs, tokens, size=rules.no_repeat_ngram_size)
    source = () if text.opening.source is None else text.opening.source.tokens
    if 0 < rules.source_ngram_size <= len(source):
        read = to_device([source] * len(beams), logprobs.device)
        ban_ngrams_of_source(logprobs, tokens, read, size=rules.source_ngram_size)
    _ban_words(logprobs, rules, histories)
    least = max(rules.min_length - len(text.prompt), rules.min_new_tokens)
    if text.num_tokens < least and text.ends:
        logprobs[:, text.end_ids] = -math.inf


def _ban_words(logprobs: Tensor, rules: DecodingRules, histories: Sequence[tuple[int, ...]]) -> None:
    vocab = logprobs.shape[-1]
    places = [
        (row, word[-1])
        for word in rules.bad_words
        for row, tokens in enumerate(histories)
        if len(word) <= max(1, len(tokens)) and word[-1] < vocab and tokens[len(tokens) - len(word) + 1 :] == word[:-1]
    ]
    if places:
        rows, tokens = zip(*places, strict=True)
        logprobs[to_device(rows, logprobs.device), to_device(tokens, logprobs.device)] = -math.inf


def force(logprobs: Tensor, text: TextSearch) -> None:
    """Write forced and suppressed tokens into rows of a text's beams, shape (beams, vocab)."""
    rules, step = text.opening.rules, text.num_tokens
    if rules is None or _is_given(text):
        return
    forced = text.opening.forced
    if step < len(forced):
        only(logprobs, forced[step : step + 1], 0.0)
    if rules.forced_last is not None and text.is_last and text.params.force_eos == "none":
        only(logprobs, (rules.forced_last,), 0.0)
    suppressed = (*rules.suppressed, *(rules.suppressed_first if step == len(forced) else ()))
    if suppressed:
        inside = sorted({token for token in suppressed if token < logprobs.shape[-1]})
        logprobs[:, to_device(inside, logprobs.device)] = -math.inf


def only(logprobs: Tensor, tokens: Sequence[int], value: float | None) -> None:
    """Write -inf over all tokens but these; they keep their log-probabilities, or get this value."""
    ids = to_device(list(tokens), logprobs.device)
    kept = logprobs[:, ids] if value is None else torch.full_like(logprobs[:, ids], value)
    logprobs.fill_(-math.inf)
    logprobs[:, ids] = kept


def _is_given(text: TextSearch) -> bool:
    """Whether the next token is one of `prefix_token_ids`, which settings do not restrict."""
    return text.num_tokens < len(text.params.prefix_token_ids) and not text.params.prefix_bias_beta
