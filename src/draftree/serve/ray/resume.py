"""Continuation of a streamed answer on another replica: what was sent is removed from the answer that starts again.

The same request with the same seed gives the same text on every replica, but cut into other pieces, with other ids. A
`StreamRecord` therefore tracks texts, not events: how much the client has of every text of the stream (an answer, the
arguments of a tool call, the pieces by origin). It removes that from the repeated stream and replaces new ids by the
first ones. A repeated text that differs is never sent: `DivergedError`.

Covers the streams of chat completions, completions and responses. Needs no ray.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, final

from draftree.core.errors import DraftreeError
from draftree.core.files import parse_json

TEXTS = frozenset({"content", "text", "delta", "arguments", "reasoning_content", "refusal"})
"""Keys whose strings are appended to earlier ones."""
ONCE = frozenset({"role", "type", "name", "finish_reason", "stop_reason"})
"""Keys whose values are sent once: clients append the parts of a delta."""
SUMMARIES = frozenset({"usage", "metrics", "explain", "stats"})
"""Keys whose values are of the whole answer: they come with other news, or in the last chunk, which has no choices."""
IDS = frozenset({"id", "item_id", "response_id", "call_id"})
TIMES = frozenset({"created", "created_at"})
DONE = "[DONE]"

Place = tuple[str | int, ...]


class DivergedError(DraftreeError):
    """The repeated stream differs from what the client has."""


@final
class StreamRecord:
    """The part of a stream that a client has received. Every replica that writes the stream begins with `restart`."""

    def __init__(self) -> None:
        self._texts: dict[Place, str] = {}
        self._counts: dict[Place, int] = {}
        self._ids: list[str] = []
        self._times: dict[str, Any] = {}
        self._sent: set[Place] = set()
        self._num_sent = 0
        self._is_repeated = False
        self._read_texts: dict[Place, int] = {}
        self._read_counts: dict[Place, int] = {}
        self._own_ids: dict[str, str] = {}

    def restart(self) -> None:
        """Begin with the stream of another replica."""
        self._is_repeated = True
        self._read_texts, self._read_counts, self._own_ids = {}, {}, {}

    def push(self, event: str) -> str | None:
        """Return what the client gets of a server-sent event, without its blank line; None if nothing is new.

        Raises:
            DivergedError: the event repeats a text that the client has with other characters.
        """
        name, data = _parse(event)
        if data is None:
            return event if not self._is_repeated or DONE in event else None
        reduced, is_new = self._typed(data) if _is_typed(data) else self._chunk(data)
        if not self._is_repeated:
            self._num_sent += 1
            return event
        if not is_new:
            return None
        if "sequence_number" in reduced:
            reduced["sequence_number"] = self._num_sent
        self._num_sent += 1
        head = f"event: {name}\n" if name else ""
        # ASCII: some clients take other line separators of Unicode for the end of a line
        return f"{head}data: {json.dumps(reduced, separators=(',', ':'))}"

    def _chunk(self, data: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        """Reduce a chunk of a completion; the last one, without choices, is sent once."""
        reduced, is_new = self._reduce(data, ())
        return reduced, self._once(("last",)) if data.get("choices") == [] else is_new

    def _typed(self, data: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        """Reduce an event of the responses API: deltas are texts, every other event of a place is sent once."""
        place: Place = tuple(data.get(key, "") for key in ("type", "output_index", "content_index", "summary_index"))
        if isinstance(data.get("delta"), str):
            kept, is_new = self._reduce({key: data[key] for key in ("delta", "logprobs") if key in data}, place)
            return self._renamed(data) | kept, is_new
        return self._renamed(data), self._once(place)

    def _renamed(self, value: Any) -> Any:
        """Copy a value with the ids and times of the first stream."""
        if isinstance(value, dict):
            return {key: self._constant(key, item) for key, item in value.items()}
        return [self._renamed(item) for item in value] if isinstance(value, list) else value

    def _constant(self, key: str, value: Any) -> Any:
        if key in IDS and isinstance(value, str):
            return self._first_id(value)
        if key in TIMES and isinstance(value, int | float):
            return self._times.setdefault(key, value)
        return self._renamed(value)

    def _first_id(self, own: str) -> str:
        """Return the id of the first stream with the same position in order of appearance."""
        if own not in self._own_ids:
            position = len(self._own_ids)
            if position == len(self._ids):
                self._ids.append(own)
            self._own_ids[own] = self._ids[position]
        return self._own_ids[own]

    def _reduce(self, node: dict[str, Any], place: Place) -> tuple[dict[str, Any], bool]:
        """Return the part of an object that the client lacks, and whether any of it is new."""
        kept: dict[str, Any] = {}
        any_new = False
        for key, value in node.items():
            if key in ONCE or (key in IDS and place):
                is_new = value is not None and self._once((*place, key))
                if is_new or key.endswith("_reason"):
                    kept[key] = self._constant(key, value) if is_new else None
            else:
                kept[key], is_new = self._reduce_value(key, value, (*place, key))
            any_new = any_new or is_new
        return kept, any_new

    def _reduce_value(self, key: str, value: Any, place: Place) -> tuple[Any, bool]:
        if value is None or key in IDS or key in TIMES:
            return self._constant(key, value), False
        if key in TEXTS and isinstance(value, str):
            new = self._new_text(place, value)
            return new, bool(new)
        if key in SUMMARIES:
            return value, False
        if isinstance(value, dict):
            return self._reduce(value, place)
        if isinstance(value, list):
            return self._reduce_list(value, place)
        return value, False

    def _reduce_list(self, items: list[Any], place: Place) -> tuple[list[Any], bool]:
        if place[-1] == "rounds":
            kept = [item for item in items if self._is_next_round(item, place)]
        elif all(isinstance(item, dict) and "index" in item for item in items):
            parts = [self._reduce(item, (*place, item["index"])) for item in items]
            kept = [part for part, is_new in parts if is_new]
        else:
            # one item per token: log-probabilities
            read = self._read_counts.get(place, 0)
            known = max(0, self._counts.get(place, 0) - read)
            kept = items[known:]
            self._read_counts[place] = read + len(items)
            self._counts[place] = max(self._counts.get(place, 0), read + len(items))
        return kept, bool(kept)

    def _is_next_round(self, item: dict[str, Any], place: Place) -> bool:
        """Whether a round begins after the rounds that were sent; rounds of another replica may be cut elsewhere."""
        key, position = (*place, item.get("index", 0)), item.get("position", 0)
        if position < self._counts.get(key, 0):
            return False
        self._counts[key] = position + 1
        return True

    def _new_text(self, place: Place, text: str) -> str:
        sent, read = self._texts.get(place, ""), self._read_texts.get(place, 0)
        known = sent[read : read + len(text)]
        if not text.startswith(known):
            raise DivergedError(
                "the replica that took over wrote another text than the one that was lost: repeat the request"
            )
        self._read_texts[place] = read + len(text)
        if new := text[len(known) :]:
            self._texts[place] = sent + new
        return new

    def _once(self, place: Place) -> bool:
        is_new = place not in self._sent
        self._sent.add(place)
        return is_new


def _is_typed(data: dict[str, Any]) -> bool:
    return isinstance(data.get("type"), str) and "sequence_number" in data


def _parse(event: str) -> tuple[str, dict[str, Any] | None]:
    """Return the name and the JSON object of a server-sent event; None for other data."""
    name, lines = "", []
    for field, value in _fields(event):
        if field == "event":
            name = value
        elif field == "data":
            lines.append(value)
    try:
        data = parse_json("\n".join(lines))
    except ValueError:
        return name, None
    return name, data if isinstance(data, dict) else None


def _fields(event: str) -> Iterator[tuple[str, str]]:
    for line in event.split("\n"):
        field, _, value = line.partition(":")
        yield field, value.removeprefix(" ")
