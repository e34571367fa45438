"""Candidates of plain beam searches from the top scores of each row.

Only the best `count` tokens of a beam can be among the best `count` of all beams. Their search reads each row of logits
twice and writes nothing; log-probabilities of the whole vocabulary are never made. After a pass in C the search runs in
C, so that no threads of torch delay the next pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from draftree.beam.group import Beam, Columns
from draftree.beam.strategies.beam import BeamStrategy
from draftree.beam.trunk import gathered
from draftree.sampling.logits import Logits, Top

if TYPE_CHECKING:
    from draftree.beam.state import TextSearch


def is_quick(text: TextSearch) -> bool:
    """Whether the next candidates of a search depend on the plain log-probabilities of one model only."""
    params, step = text.params, text.num_tokens
    changes = (
        not isinstance(text.strategy, BeamStrategy),
        params.temperature != 1.0,
        params.models,
        params.lm_model is not None,
        params.unk_penalty,
        params.suppress_tokens,
        step < len(params.prefix_token_ids),
        text.is_last and params.force_eos != "none",
        step < text.minimum and text.ends,
        params.no_repeat_ngram_size,
        params.allowed_trie is not None,
        params.prefix_allowed_tokens_fn is not None,
        text.opening.rules is not None,
        params.reads_attention,
    )
    return not any(changes)


def quick_columns(
    logits: Logits, texts: Sequence[TextSearch], beams: Sequence[Sequence[Beam]]
) -> tuple[list[list[Columns]], list[bool]]:
    """Return the candidates of the scored beams of plain searches.

    Args:
        logits: of the last pass; rows of earlier passes are searched by the same implementation.
        texts: searches for which `is_quick` holds.
        beams: scored beams of each text.

    Returns:
        As `scoring.read`.
    """
    rows = [row for own in beams for beam in own if (row := beam.tips[0].row) is not None]
    with logits.computing():
        logits = logits.replaced(gathered(rows))
    width = logits.width
    counts = [text.strategy.num_candidates(text.params.beam_width, len(text.ends)) for text in texts]
    top = logits.top([None] * logits.num_rows, min(max(counts), width))
    found, is_nan, first = [], [], 0
    for text, own, count in zip(texts, beams, counts, strict=True):
        places = slice(first, first + len(own))
        first = places.stop
        columns, nan = _best(top, places, [beam.score for beam in own], count, width, text)
        found.append([columns])
        is_nan.append(nan)
    return found, is_nan


def _best(
    top: Top, rows: slice, scores: Sequence[float], count: int, width: int, text: TextSearch
) -> tuple[Columns, bool]:
    """Return the best candidates of some rows: by score, rank of the parent, token."""
    tokens = np.array([row[:count] for row in top.tokens[rows]], dtype=np.int64)
    logprobs = np.array([row[:count] for row in top.scores[rows]]) - np.array(top.totals[rows])[:, None]
    logprobs = np.minimum(logprobs, 0.0)  # a score bounds its continuations, rounding included
    totals = (logprobs + np.array(scores)[:, None]).ravel()
    places = (tokens + width * np.arange(len(tokens))[:, None]).ravel()
    order = np.lexsort((places, -totals))
    if text.params.eos_rule != "any":
        order = order[:count]
    columns = (totals[order].tolist(), places[order].tolist(), logprobs.ravel()[order].tolist())
    return columns, bool(np.isnan(logprobs).any())
