"""Error of a sequence that has no token to choose: the model's logits are at fault, or the request's controls."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from draftree.core.errors import NonFiniteLogitsError, UnsatisfiableError
from draftree.engine.sequence import WritingSequence
from draftree.sampling.distributions import DistributionRows, Distributions
from draftree.sampling.logits import TensorLogits
from draftree.sampling.params import SamplingParams

FORBIDDING = ("allowed_token_ids", "bad_words", "no_repeat_ngram_size", "min_tokens", "json_schema", "regex", "grammar")
"""Parameters that can forbid tokens, besides `logit_bias`."""


def no_token_error(
    sequence: WritingSequence, rows: DistributionRows, visited: Sequence[int], vocab_size: int
) -> NonFiniteLogitsError | UnsatisfiableError:
    """Return the error for a sequence whose distributions have a row without a token, or with NaN.

    Args:
        sequence: the sequence.
        rows: its rows.
        visited: the rows that count (0 the root's, 1 + i node i's).
        vocab_size: width of the logits.
    """
    equal = TensorLogits(torch.zeros(len(rows.paths), vocab_size))
    place = f"request {sequence.request_id}: at position {len(sequence.history)}"
    # if no token is left of equal logits either, the model's are not the reason
    if all(Distributions(equal, [rows]).finite([visited])):
        return NonFiniteLogitsError(
            f"{place} the model's logits are NaN or infinite for all tokens that the sampling controls allow: check "
            "weights and dtype (float16 overflows where bfloat16 does not)"
        )
    names = forbidding(sequence.controls.params)
    return UnsatisfiableError(
        f"{place} the sampling controls left no token: no token agrees with {' and '.join(names)}; "
        f"change {'one of them' if len(names) > 1 else 'it'}",
        param=names[0] if names else None,
    )


def forbidding(params: SamplingParams) -> list[str]:
    """Return the names of the parameters of a request that can forbid tokens."""
    names = [name for name in FORBIDDING if getattr(params, name) not in (None, 0, ())]
    if params.logit_bias and -math.inf in params.logit_bias.values():
        names.append("logit_bias")
    return names
