"""How many prompt tokens each sequence reads in the next pass.

Running sequences wait for the pass, so the prefill budget is small while any is running and large otherwise. The
oldest prompt gets half of the budget, so that a long prompt always makes progress; the rest goes to the prompts with
the fewest unread tokens, so that a long prompt does not delay short ones.
"""

from __future__ import annotations

from collections.abc import Sequence

PREFILL_TOKENS_IDLE = 512
"""Prompt tokens per pass while no sequence is decoding."""
PREFILL_TOKENS_BUSY = 64
"""Prompt tokens that a pass reads while texts are being written, unless told otherwise: on two cores tokens then come
every 35 ms in place of 12, and a prompt of 1,024 is read in 0.6 s; 256 would take 95 ms and 0.4 s."""


def split_prefill_budget(pending: Sequence[int], budget: int) -> list[int]:
    """How many tokens each may read, none more than it has.

    Args:
        pending: unread tokens of each, in the order of service.
        budget: tokens of all together, at least 1.
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
