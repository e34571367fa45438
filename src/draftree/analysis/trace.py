"""Traces: every round of a run as a line of JSON, with its trees, paths and seconds. No torch.

The first line describes the run: model, draft, verifier, plan, the drafters' sizes, and the pass times given to the
planner before the first round. Every other line is a round. Trees are stored as drafted; `kept` lists the nodes
that were scored, if the planner pruned some.
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
    """The description of a run.

    Attributes:
        model: name of the model.
        draft: spec of the drafters.
        verify: spec of the verifier.
        plan: spec of the planner.
        parts: the drafters' sizes.
        pass_seconds: pass times given to the planner, by rows.
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
        sequence: name of the sequence, unique within the trace.
        prefix: tokens before the round.
        room: tokens that could still be written.
        tree: the tree as drafted.
        kept: nodes that were scored; None: all.
        path: accepted nodes, as indices into the drafted tree, before any cut by a stop or a limit.
        bonus: the token after the path; None if the sequence failed.
        num_written: number of written tokens.
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
        """The accepted tokens and the bonus."""
        bonus = () if self.bonus is None else (self.bonus,)
        return (*(self.tree.tokens[node] for node in self.path), *bonus)


@dataclass(frozen=True, slots=True)
class TracedRound:
    """One round: seconds by phase, seconds of merged drafters, and its sequences."""

    seconds: Mapping[str, float]
    part_seconds: tuple[float, ...]
    num_rows: int
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """A recorded run."""

    header: TraceHeader
    rounds: tuple[TracedRound, ...]


class TraceWriter:
    """Writes rounds to a file from `begin` on; a callback for `on_round` of an `LLM`.

    Args:
        stream: a file opened for writing.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._has_begun = False

    def begin(self, header: TraceHeader) -> None:
        """Write the first line; call before any round."""
        self._has_begun = True
        line = dataclasses.asdict(header) | {"pass_seconds": {str(k): v for k, v in header.pass_seconds.items()}}
        self._write({"kind": "trace", "format": FORMAT, **line})

    def __call__(self, record: RoundRecord) -> None:
        """Write a round; rounds before `begin`, such as a warm-up's, are ignored."""
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
    }


def read_trace(path: Path) -> Trace:
    """Read a trace from its file.

    Raises:
        ConfigurationError: it is not a trace, or of another format.
    """
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"'{path}' cannot be read as a trace: {error}") from error
    if not lines or lines[0].get("kind") != "trace" or lines[0].get("format") != FORMAT:
        raise ConfigurationError(f"'{path}' is not a trace of format {FORMAT}: write one with --record")
    first = lines[0]
    header = TraceHeader(
        model=first["model"],
        draft=first["draft"],
        verify=first["verify"],
        plan=first["plan"],
        parts=tuple(_part_of(part) for part in first["parts"]),
        pass_seconds={int(rows): seconds for rows, seconds in first["pass_seconds"].items()},
    )
    return Trace(header, tuple(_round_of(line) for line in lines[1:]))


def _part_of(entry: Mapping[str, Any]) -> DraftPart:
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()}
    return DraftPart(**values)


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
    """Return the mean number of tokens written per round and sequence."""
    written = [step.num_written for one in rounds for step in one.steps]
    return sum(written) / len(written) if written else 0.0
