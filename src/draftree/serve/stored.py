"""The conversations of recent responses, for `previous_response_id`: in memory, by API key, and bounded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, final

from draftree.serve.json_text import encode_json

__all__ = ["ResponseStore"]

MAX_BYTES = 64 * 2**20
"""Size of all conversations as JSON text; the least recently used is dropped first."""

Items = Sequence[Mapping[str, Any]]


@final
class ResponseStore:
    """Items of conversations by the response that ended them.

    Args:
        max_bytes: size of all conversations; a larger one is not stored.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[tuple[str, str], tuple[Items, int]] = OrderedDict()
        self._size = 0

    def put(self, key: str, response: str, items: Items) -> None:
        """Store the items of a conversation, the response's output included, for the API key of this name."""
        size = len(encode_json(items))
        if size > self._max_bytes:
            return
        _, replaced = self._kept.pop((key, response), ((), 0))
        self._kept[key, response] = items, size
        self._size += size - replaced
        while self._size > self._max_bytes:
            _, (_, dropped) = self._kept.popitem(last=False)
            self._size -= dropped

    def get(self, key: str, response: str) -> Items | None:
        """Return the items of a conversation; None if it is not stored, or belongs to another key."""
        if (key, response) not in self._kept:
            return None
        self._kept.move_to_end((key, response))
        return self._kept[key, response][0]
