"""Writer of traces: a callback that appends a line of JSON for every round. No torch."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from typing import IO, Any

from draftree.analysis.trace import FORMAT, TraceHeader
from draftree.core.node_map import NodeMap
from draftree.core.tree import first_children
from draftree.core.types import RoundRecord, SequenceRecord

__all__ = ["SECONDS", "TraceWriter"]

SECONDS = ("plan", "draft", "score", "verify", "commit", "total")


class TraceWriter:
    """Writes rounds to a file from `begin` on; a callback for `on_round` of an `LLM`.

    Args:
        stream: a file opened for writing.
        clock: seconds, for the start of each round.
    """

    def __init__(self, stream: IO[str], clock: Callable[[], float] = time.perf_counter) -> None:
        self._stream = stream
        self._clock = clock
        self._began: float | None = None
        self._met: set[int] = set()

    def begin(self, header: TraceHeader) -> None:
        """Write the first line; call before any round."""
        self._began = self._clock()
        line = dataclasses.asdict(header) | {"pass_seconds": {str(k): v for k, v in header.pass_seconds.items()}}
        self._write({"kind": "trace", "format": FORMAT, **line})

    def __call__(self, record: RoundRecord) -> None:
        """Write a round; rounds before `begin`, such as a warm-up's, are ignored."""
        if self._began is None:
            return
        for row in record.sequences:
            self._met.update(row.drafted.tokens, row.picks, () if row.bonus is None else (row.bonus,))
        self._write(
            {
                "kind": "round",
                # a record comes at the end of its round
                "start": round(self._clock() - record.total_seconds - self._began, 7),
                "seconds": {name: getattr(record, f"{name}_seconds") for name in SECONDS},
                "part_seconds": record.part_seconds,
                "rows": record.num_rows,
                "sequences": [step_line(row) for row in record.sequences],
            }
        )

    def end(self, text_of: Callable[[int], str]) -> None:
        """Write the texts of all tokens that occurred; call after the last round.

        Args:
            text_of: returns the text of a token id.
        """
        if self._began is not None:
            self._write({"kind": "tokens", "texts": {str(token): text_of(token) for token in sorted(self._met)}})

    def _write(self, line: Mapping[str, Any]) -> None:
        self._stream.write(json.dumps(line, separators=(",", ":")) + "\n")


def step_line(row: SequenceRecord) -> dict[str, Any]:
    """Return one sequence's part of a round's line."""
    tree, is_cut = row.drafted, len(row.tree) < len(row.drafted)
    nodes = NodeMap.identity(tree.parents)
    if is_cut:
        known = first_children(tree)
        nodes = NodeMap.by_tokens(row.tree.tokens, row.tree.parents, known, num_targets=len(tree))
    return {
        "sequence": f"{row.request_id}/{row.index}",
        "prefix": row.prefix_length,
        "room": row.room,
        "tokens": tree.tokens,
        "parents": tree.parents,
        "scores": tree.scores,
        "sources": tree.sources,
        "kept": nodes.targets if is_cut else None,
        "path": nodes.apply(row.path),
        "bonus": row.bonus,
        "written": row.num_written,
        "picks": row.picks,
    }
