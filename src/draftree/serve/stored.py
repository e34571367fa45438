"""The conversations of recent responses, which later requests refer to: in memory, by API key, and bounded."""

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
        self._by_id: dict[tuple[str, str], tuple[str, Mapping[str, Any]]] = {}
        """Items that have an id, each with the last response whose conversation has it."""
        self._size = 0

    def put(self, key: str, response: str, items: Items) -> None:
        """Store the items of a conversation, the response's output included, for the API key of this name."""
        size = len(encode_json(items))
        if size > self._max_bytes:
            return
        _, replaced = self._kept.pop((key, response), ((), 0))
        self._kept[key, response] = items, size
        self._by_id |= {(key, item["id"]): (response, item) for item in items if isinstance(item.get("id"), str)}
        self._size += size - replaced
        while self._size > self._max_bytes:
            (owner, name), (gone, dropped) = self._kept.popitem(last=False)
            self._size -= dropped
            for place in ((owner, item["id"]) for item in gone if isinstance(item.get("id"), str)):
                if place in self._by_id and self._by_id[place][0] == name:
                    del self._by_id[place]

    def get(self, key: str, response: str) -> Items | None:
        """Return the items of a conversation; None if it is not stored, or belongs to another key."""
        if (key, response) not in self._kept:
            return None
        self._kept.move_to_end((key, response))
        return self._kept[key, response][0]

    def item(self, key: str, name: str) -> Mapping[str, Any] | None:
        """Return the item with an id; None if no stored conversation of the key has it."""
        response, item = self._by_id.get((key, name), ("", None))
        if item is not None:
            self._kept.move_to_end((key, response))
        return item
