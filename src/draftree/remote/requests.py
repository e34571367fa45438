"""Sampling parameters on the way to a verify server, as plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from draftree.core.errors import InvalidRequestError, suggestion
from draftree.sampling.params import SamplingParams

__all__ = ["SENT", "read_params", "sendable_params"]

LOCAL = frozenset(
    {"n", "seed", "max_tokens", "prediction", "logprobs", "prompt_logprobs", "truncate_prompt_tokens", "detokenize"}
)
"""Parameters that the device applies, or that the request has in fields of its own."""
SENT = tuple(field.name for field in dataclasses.fields(SamplingParams) if field.name not in LOCAL)
"""Parameters on which the text depends."""


def sendable_params(params: SamplingParams) -> dict[str, Any]:
    """Return the parameters that differ from the defaults; mappings as lists of pairs."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(SamplingParams):
        value = getattr(params, field.name)
        if field.name in LOCAL or value == field.default or value is None:
            continue
        if isinstance(value, Mapping):
            value = [[key, item] for key, item in value.items()]
        found[field.name] = list(value) if isinstance(value, tuple) else value
    return found


def read_params(given: Mapping[str, Any], *, seed: int, max_tokens: int) -> SamplingParams:
    """Return the parameters of a request, checked as those of any request.

    Args:
        given: as returned by `sendable_params`.
        seed: of the text.
        max_tokens: most tokens of the text, those that are written already included.

    Raises:
        InvalidRequestError: an unknown parameter, or a wrong value.
    """
    values = dict(given)
    for name in values:
        if name not in SENT:
            raise InvalidRequestError(f"parameter {name[:60]!r} cannot be sent: {suggestion(name[:60], SENT)}")
    bias = values.get("logit_bias")
    if isinstance(bias, list):
        if not all(isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], int) for pair in bias):
            raise InvalidRequestError("logit_bias must be a list of pairs of token id and number", param="logit_bias")
        values["logit_bias"] = dict(bias)
    try:
        return SamplingParams(**values, seed=seed, max_tokens=max_tokens)
    except (TypeError, RecursionError) as error:
        raise InvalidRequestError(f"the parameters cannot be read ({type(error).__name__})") from error
