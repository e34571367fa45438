"""Fields of replies that a device reads; the server is not trusted to send them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftree.remote.errors import FrameError, RefusedError

__all__ = ["results_of", "times_of"]


def results_of(reply: Mapping[str, Any]) -> list[Any]:
    """Return the results of a reply.

    Raises:
        RefusedError: it has none.
    """
    found = reply.get("x")
    if not isinstance(found, list):
        raise RefusedError("the server's reply has no results: it is no verify server", code="bad_reply")
    return found


def times_of(reply: Mapping[str, Any]) -> tuple[float, float]:
    """Return the server's seconds before the pass and in it.

    Raises:
        FrameError: the reply has no such numbers.
    """
    values = reply.get("us")
    if not isinstance(values, list) or len(values) != 2 or not all(isinstance(value, int) for value in values):
        raise FrameError("the server's reply has no times")
    return values[0] * 1e-6, values[1] * 1e-6
