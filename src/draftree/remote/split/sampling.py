"""Sampling parameters with which a server can pick without the text: those that depend on no token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftree.core.errors import InvalidRequestError
from draftree.remote.requests import sendable_params
from draftree.sampling.params import NEUTRAL, SamplingParams

__all__ = ["require_sendable", "text_free_params"]

SENT = frozenset({"temperature", "top_p", "top_k", "min_p"})
DEVICE = frozenset(
    {
        "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens",
        "spaces_between_special_tokens",
    }
)  # fmt: skip
"""Parameters that only the device applies: when a text ends, and how it is shown."""


def text_free_params(params: SamplingParams) -> dict[str, Any]:
    """Return the parameters that a server needs to pick.

    Raises:
        InvalidRequestError: a parameter depends on the tokens of the text, which the server does not have.
    """
    found = {
        name: value
        for name, value in sendable_params(params).items()
        if name in SENT or not (name in DEVICE or value == [] or value == getattr(NEUTRAL, name, None))
    }
    require_sendable(found)
    return found


def require_sendable(params: Mapping[str, Any]) -> None:
    """Raise InvalidRequestError if picks with these parameters need the tokens of the text."""
    for name in params:
        if name not in SENT:
            raise InvalidRequestError(
                f"{str(name)[:60]} needs the tokens of the text, which a server that picks after a split does not "
                "have: use picks=device in the address, or leave it out",
                param=str(name)[:60],
            )
