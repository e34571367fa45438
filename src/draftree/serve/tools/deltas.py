"""The pieces of an answer that its parsers return."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from pydantic_core import from_json

__all__ = ["CallDelta", "Delta", "ReasoningDelta", "TextDelta", "call_arguments", "merged"]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Text of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of a call.

    Attributes:
        index: number of the call in the answer, from 0.
        arguments: a piece of the arguments, which are JSON text.
        id: of the call; only in its first delta.
        name: of the function; only in its first delta.
    """

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


Delta = TextDelta | ReasoningDelta | CallDelta


def call_arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call as an object; those that the limit of tokens cut, as far as they go."""
    try:
        found: dict[str, Any] = from_json(text or "{}", allow_partial=True)
    except ValueError:
        return {}
    return found


def merged(deltas: Iterable[Delta]) -> list[Delta]:
    """Join adjacent texts, adjacent reasoning, and adjacent pieces of the same call."""
    found: list[Delta] = []
    for delta in deltas:
        last = found[-1] if found else None
        if isinstance(delta, TextDelta) and isinstance(last, TextDelta):
            found[-1] = TextDelta(last.text + delta.text)
        elif isinstance(delta, ReasoningDelta) and isinstance(last, ReasoningDelta):
            found[-1] = ReasoningDelta(last.text + delta.text)
        elif (
            isinstance(delta, CallDelta)
            and isinstance(last, CallDelta)
            and delta.name is None
            and delta.index == last.index
        ):
            found[-1] = replace(last, arguments=last.arguments + delta.arguments)
        else:
            found.append(delta)
    return found
