"""The conversation of a chat: exchanges, and the messages that are sent to the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from draftree.core.errors import InvalidRequestError

__all__ = ["INTERRUPTED", "Conversation", "Exchange"]

INTERRUPTED = "interrupted"
"""Finish reason of an answer that Ctrl-C ended."""
HEADROOM = 4
"""After turns are dropped, this fraction of the context is free: the next turns can use the prefix cache again."""

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Exchange:
    """A message of the user and its answer.

    Attributes:
        message: text of the user.
        answer: text of the model, up to the interruption if there was one.
        finish_reason: "stop", "length" or "interrupted".
    """

    message: str
    answer: str
    finish_reason: str


class Conversation:
    """All exchanges of a chat, and the index of the first one that is sent. Mutated by its methods.

    Args:
        system: system message; None for none.
    """

    def __init__(self, system: str | None = None) -> None:
        self.system = system
        self.exchanges: list[Exchange] = []
        self.first_sent = 0

    def messages(self, message: str) -> Messages:
        """Return the messages to send for a new message of the user."""
        sent = [] if self.system is None else [_said("system", self.system)]
        for exchange in self.exchanges[self.first_sent :]:
            sent += [_said("user", exchange.message), _said("assistant", exchange.answer)]
        return [*sent, _said("user", message)]

    def add(self, exchange: Exchange) -> None:
        """Append an exchange."""
        self.exchanges.append(exchange)

    def undo(self) -> Exchange:
        """Remove the last exchange and return it.

        Raises:
            InvalidRequestError: there is none.
        """
        if not self.exchanges:
            raise InvalidRequestError("the conversation is empty: there is no message to take back")
        last = self.exchanges.pop()
        self.first_sent = min(self.first_sent, len(self.exchanges))
        return last

    def clear(self) -> None:
        """Remove all exchanges; the system message stays."""
        self.exchanges.clear()
        self.first_sent = 0

    def drop_oldest(self, message: str, count: Callable[[Messages], int], *, limit: int, room: int) -> int:
        """Leave the oldest exchanges out of what is sent until a message and its answer fit.

        Args:
            message: new message of the user.
            count: returns the number of tokens of messages.
            limit: tokens of the context.
            room: tokens for the answer.

        Returns:
            Number of exchanges that are no longer sent; 0 if all fit.
        """
        if count(self.messages(message)) + room <= limit:
            return 0
        most = limit - max(room, limit // HEADROOM)
        before = self.first_sent
        while self.first_sent < len(self.exchanges) and count(self.messages(message)) > most:
            self.first_sent += 1
        return self.first_sent - before

    def to_json(self) -> list[dict[str, Any]]:
        """Return all messages as plain values, those that are no longer sent included; interrupted ones are marked."""
        written: list[dict[str, Any]] = [] if self.system is None else [_said("system", self.system)]
        for exchange in self.exchanges:
            answer: dict[str, Any] = _said("assistant", exchange.answer)
            if exchange.finish_reason == INTERRUPTED:
                answer["interrupted"] = True
            written += [_said("user", exchange.message), answer]
        return written


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
