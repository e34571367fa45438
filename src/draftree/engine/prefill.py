"""The number of prompt tokens that each sequence prefills in the next pass.

Running sequences wait for the pass, so the prefill budget is small while any is running and large otherwise. The
oldest prompt gets half of the budget, so that a long prompt always makes progress; the rest goes to the prompts with
the fewest unread tokens, so that a long prompt does not delay short ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from draftree.engine.given import is_held
from draftree.engine.logprobs import scored_rows
from draftree.engine.sequence import WritingSequence

PREFILL_TOKENS_IDLE = 512
"""Prompt tokens per pass while no sequence is decoding."""
PREFILL_TOKENS_BUSY = 64
"""Default prompt tokens per pass while any sequence is decoding: on two cores the inter-token latency is then 35 ms
instead of 12, and a prompt of 1,024 tokens takes 0.6 s; 256 would give 95 ms and 0.4 s."""


def split_prefill_budget(pending: Sequence[int], budget: int) -> list[int]:
    """Return how many tokens each sequence may prefill, at most its unread ones.

    Args:
        pending: unread tokens per sequence, in the order of service.
        budget: total tokens, at least 1.
    """
    given = [0] * len(pending)
    if not pending:
        return given
    left = budget
    given[0] = min(pending[0], -(-budget // 2))
    left -= given[0]
    for place in sorted(range(1, len(pending)), key=lambda place: (pending[place], place)):
        given[place] = min(pending[place], left)
        left -= given[place]
    given[0] += min(pending[0] - given[0], left)
    return given


def reading_sizes(reading: Sequence[WritingSequence], budget: int, *, vocab_size: int) -> list[int]:
    """Return how many tokens each sequence prefills; scored prompts are limited by the memory for logits.

    Args:
        reading: sequences with unread tokens, in the order of service.
        budget: as for `split_prefill_budget`.
        vocab_size: width of a row of logits.
    """
    rows = scored_rows(vocab_size)
    given = split_prefill_budget([_wanted(sequence, rows) for sequence in reading], budget)
    for place, sequence in enumerate(reading):
        if sequence.scores_prompt:
            given[place] = min(given[place], rows)
            rows -= given[place]
    return given


def _wanted(sequence: WritingSequence, rows: int) -> int:
    # the root is not part of a scored chunk, nor read before the client's tree: a round reads it
    if sequence.scores_prompt:
        return min(sequence.num_pending - 1, rows)
    return sequence.num_pending - is_held(sequence)
