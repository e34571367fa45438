"""Traces: every round of a run as a line of JSON, with its trees, paths and seconds. No torch in here.

The first line says what ran: model, draft, rule, plan, the drafters' sizes, and the seconds of passes that a planner
was told before the first round. Every other line is a round. Trees stand as they were drafted; `kept` names the nodes
that were scored, where the planner cut some.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from draftree.core.errors import ConfigurationError
from draftree.core.node_map import NodeMap
from draftree.core.tree import TokenTree, first_children
from draftree.core.types import DraftPart, RoundRecord, SequenceRecord

FORMAT = 1
SECONDS = ("plan", "draft", "score", "verify", "commit", "total")


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """What ran.

    Attributes:
        model: its name.
        draft: spec of the drafters.
        verify: spec of the rule.
        plan: spec of the planner.
        parts: the drafters' sizes.
        pass_seconds: what the planner was told of passes, by rows.
    """

    model: str
    draft: str
    verify: str
    plan: str
    parts: tuple[DraftPart, ...]
    pass_seconds: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Step:
    """One sequence in one round.

    Attributes:
        sequence: whose it is, unique within the trace.
        prefix: tokens before the round.
        room: tokens that could still be written.
        tree: as it was drafted.
        kept: nodes that were scored; None: all.
        path: accepted nodes, by their place in the drafted tree, before any cut by a stop or a limit.
        bonus: the token behind the path; None if the sequence failed.
        num_written: tokens that were written.
    """

    sequence: str
    prefix: int
    room: int
    tree: TokenTree
    kept: tuple[int, ...] | None
    path: tuple[int, ...]
    bonus: int | None
    num_written: int

    @property
    def tokens(self) -> tuple[int, ...]:
        """What the walk found, the bonus included."""
        bonus = () if self.bonus is None else (self.bonus,)
        return (*(self.tree.tokens[node] for node in self.path), *bonus)


@dataclass(frozen=True, slots=True)
class TracedRound:
    """One round: seconds by phase, those of merged drafters, and its sequences."""

    seconds: Mapping[str, float]
    part_seconds: tuple[float, ...]
    num_rows: int
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """A run."""

    header: TraceHeader
    rounds: tuple[TracedRound, ...]


class TraceWriter:
    """Writes rounds as they come, from `begin` on; an `on_round` of an `LLM`, whose planner the first line describes.

    Args:
        stream: a file that is open for writing.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._has_begun = False

    def begin(self, header: TraceHeader) -> None:
        """The first line, before any round."""
        self._has_begun = True
        line = dataclasses.asdict(header) | {"pass_seconds": {str(k): v for k, v in header.pass_seconds.items()}}
        self._write({"kind": "trace", "format": FORMAT, **line})

    def __call__(self, record: RoundRecord) -> None:
        """One more line; rounds before `begin`, such as a warm-up's, are left out."""
        if not self._has_begun:
            return
        self._write(
            {
                "kind": "round",
                "seconds": {name: getattr(record, f"{name}_seconds") for name in SECONDS},
                "part_seconds": record.part_seconds,
                "rows": record.num_rows,
                "sequences": [step_line(row) for row in record.sequences],
            }
        )

    def _write(self, line: Mapping[str, Any]) -> None:
        self._stream.write(json.dumps(line, separators=(",", ":")) + "\n")


def step_line(row: SequenceRecord) -> dict[str, Any]:
    """One sequence's part of a round's line."""
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
    }


def read_trace(path: Path) -> Trace:
    """A trace from its file.

    Raises:
        ConfigurationError: it is none, or of another format.
    """
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"'{path}' cannot be read as a trace: {error}") from error
    if not lines or lines[0].get("kind") != "trace" or lines[0].get("format") != FORMAT:
        raise ConfigurationError(f"'{path}' is no trace of format {FORMAT}: write one with --record")
    first = lines[0]
    header = TraceHeader(
        model=first["model"],
        draft=first["draft"],
        verify=first["verify"],
        plan=first["plan"],
        parts=tuple(DraftPart(**part) for part in first["parts"]),
        pass_seconds={int(rows): seconds for rows, seconds in first["pass_seconds"].items()},
    )
    return Trace(header, tuple(_round_of(line) for line in lines[1:]))


def _round_of(line: Mapping[str, Any]) -> TracedRound:
    steps = tuple(_step_of(entry) for entry in line["sequences"])
    return TracedRound(line["seconds"], tuple(line["part_seconds"]), line["rows"], steps)


def _step_of(entry: Mapping[str, Any]) -> Step:
    sources = tuple(tuple(names) for names in entry["sources"])
    tree = TokenTree(tuple(entry["tokens"]), tuple(entry["parents"]), tuple(entry["scores"]), sources=sources)
    kept = entry["kept"]
    return Step(
        sequence=entry["sequence"],
        prefix=entry["prefix"],
        room=entry["room"],
        tree=tree,
        kept=None if kept is None else tuple(kept),
        path=tuple(entry["path"]),
        bonus=entry["bonus"],
        num_written=entry["written"],
    )


def acceptance_length(rounds: Iterable[TracedRound]) -> float:
    """Tokens written a round and sequence."""
    written = [step.num_written for one in rounds for step in one.steps]
    return sum(written) / len(written) if written else 0.0
