"""Traces: every round of a run as a line of JSON, with its trees, paths and seconds. Writer, reader, tables; no torch.

The first line describes the run: model, draft, verifier, plan, the drafters' sizes, the pass times given to the
planner before the first round, and free facts about the run. Then follows a line for every round. Trees are stored as
drafted; `kept` lists the nodes that were scored, if the planner pruned some. The last line has the texts of the tokens.
The format is described in docs/guides/traces.md. Traces of format 1 are read, too: they have no start times, target
tokens, facts and texts.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from draftree.core.errors import ConfigurationError, import_extra, suggestion
from draftree.core.files import MALFORMED, JsonError, read_json_lines
from draftree.core.node_map import NodeMap, prune
from draftree.core.tree import ROOT, TokenTree, depths, first_children
from draftree.core.types import DraftPart, RoundRecord, SequenceRecord

if TYPE_CHECKING:
    import pandas

FORMAT = 2
READ_FORMATS = (1, 2)


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """The description of a run."""

    model: str  # name of the model
    draft: str  # spec of the drafters
    verify: str  # spec of the verifier
    plan: str  # spec of the planner
    parts: tuple[DraftPart, ...]  # the drafters' sizes
    pass_seconds: Mapping[int, float]  # pass times given to the planner, by rows
    # facts about the run as JSON values, such as temperature, seed, dtype, kernels and processor
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Step:
    """One sequence in one round."""

    sequence: str  # name of the sequence, unique within the trace
    prefix: int  # tokens before the round
    room: int  # tokens that could still be written
    tree: TokenTree  # the tree as drafted
    kept: tuple[int, ...] | None  # nodes that were scored; None: all
    path: tuple[int, ...]  # accepted nodes, as indices into the drafted tree, before any cut by a stop or a limit
    bonus: int | None  # the token after the path; None if the sequence failed
    num_written: int  # number of written tokens
    # the target's own pick at every scored row: 0 is the root's, 1 + i that of the i-th scored node; empty if the trace
    # has none
    picks: tuple[int, ...] = ()

    @property
    def scored(self) -> TokenTree:
        return self.tree if self.kept is None else prune(self.tree, self.kept)

    @property
    def tokens(self) -> tuple[int, ...]:
        bonus = () if self.bonus is None else (self.bonus,)
        return (*(self.tree.tokens[node] for node in self.path), *bonus)


@dataclass(frozen=True, slots=True)
class TracedRound:
    """One round: seconds by phase, seconds of merged drafters, and its sequences."""

    seconds: Mapping[str, float]  # by phase, and in total
    part_seconds: tuple[float, ...]  # share of each merged drafter in the draft
    num_rows: int  # tokens in the target's pass
    steps: tuple[Step, ...]  # the sequences of the round
    # seconds from the beginning of the trace to the beginning of the round; None in traces of format 1
    start: float | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """A recorded run."""

    header: TraceHeader  # description of the run
    rounds: tuple[TracedRound, ...]  # the rounds in order
    # text of each token that occurs, by its id; empty if the trace has none
    texts: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: str | Path) -> Trace:
        """Read a trace from a file of `--record`."""
        return read_trace(Path(path))

    def text_of(self, token: int) -> str:
        """Return the text of a token; its id in brackets if the trace has no text for it."""
        return self.texts.get(token, f"[{token}]")

    def to_pandas(self, table: str = "rounds") -> pandas.DataFrame:
        """Return a table as a data frame; needs the package pandas.

        Args:
            table: "rounds" (one row per round), "steps" (per sequence and round) or "nodes" (per drafted token).
        """
        rows = rows_of(self, table)
        frames = import_extra("pandas", "data frames need", error=ConfigurationError)
        frame: pandas.DataFrame = frames.DataFrame(list(rows))
        return frame


def read_trace(path: Path) -> Trace:
    try:
        lines = read_json_lines(path, may_be_cut=True)
    except (OSError, JsonError) as error:
        raise ConfigurationError(f"'{path}' cannot be read as a trace: {error}") from error
    if not lines or lines[0].get("kind") != "trace":
        raise ConfigurationError(f"'{path}' is not a trace of format {FORMAT}: write one with --record")
    if lines[0].get("format") not in READ_FORMATS:
        known = " and ".join(map(str, READ_FORMATS))
        raise ConfigurationError(
            f"'{path}' is a trace of format {lines[0].get('format')}; this version reads formats {known}: "
            "record the run again, or read the trace with the version of draftree that wrote it"
        )
    try:
        return _trace_of(lines)
    except MALFORMED as error:
        raise ConfigurationError(f"'{path}' is damaged: a field of a line is missing or wrong ({error!r})") from error


def _trace_of(lines: list[dict[str, Any]]) -> Trace:
    first = lines[0]
    header = TraceHeader(
        model=first["model"],
        draft=first["draft"],
        verify=first["verify"],
        plan=first["plan"],
        parts=tuple(DraftPart(**{name: _frozen(value) for name, value in part.items()}) for part in first["parts"]),
        pass_seconds={int(rows): seconds for rows, seconds in first["pass_seconds"].items()},
        about=first.get("about", {}),
    )
    kinds = {kind: [line for line in lines[1:] if line["kind"] == kind] for kind in ("round", "tokens")}
    if sum(map(len, kinds.values())) != len(lines) - 1:
        raise ValueError("unknown kind of line")
    texts = {int(token): text for line in kinds["tokens"] for token, text in line["texts"].items()}
    return Trace(header, tuple(_round_of(line) for line in kinds["round"]), texts)


def _frozen(value: Any) -> Any:
    """Return a JSON value with tuples in place of lists."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _round_of(line: Mapping[str, Any]) -> TracedRound:
    steps = tuple(_step_of({name: _frozen(value) for name, value in entry.items()}) for entry in line["sequences"])
    return TracedRound(line["seconds"], tuple(line["part_seconds"]), line["rows"], steps, line.get("start"))


def _step_of(entry: Mapping[str, Any]) -> Step:
    tree = TokenTree(entry["tokens"], entry["parents"], entry["scores"], sources=entry["sources"])
    shared = {name: entry[name] for name in ("sequence", "prefix", "room", "kept", "path", "bonus")}
    return Step(tree=tree, num_written=entry["written"], picks=entry.get("picks", ()), **shared)


def acceptance_length(rounds: Iterable[TracedRound]) -> float:
    """Return the mean number of tokens written per round and sequence."""
    written = [step.num_written for traced in rounds for step in traced.steps]
    return sum(written) / len(written) if written else 0.0


SECONDS = ("plan", "draft", "score", "verify", "commit", "total")


class TraceWriter:
    """Writes rounds to a file from `begin` on; a callback for `on_round` of an `LLM`.

    Args:
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
        """Write the texts of all tokens that occurred; call after the last round."""
        if self._began is not None:
            self._write({"kind": "tokens", "texts": {str(token): text_of(token) for token in sorted(self._met)}})

    def _write(self, line: Mapping[str, Any]) -> None:
        self._stream.write(json.dumps(line, separators=(",", ":")) + "\n")


def step_line(row: SequenceRecord) -> dict[str, Any]:
    tree = row.drafted
    is_cut = len(row.tree) < len(row.drafted)
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


def starts_of(trace: Trace) -> list[float]:
    """Return the seconds at which the rounds began; without recorded times they follow one another without gaps."""
    starts = []
    now = 0.0
    for traced in trace.rounds:
        start = now if traced.start is None else traced.start
        starts.append(start)
        now = start + traced.seconds["total"]
    return starts


def write_csv(trace: Trace, table: str, stream: IO[str]) -> None:
    """Write a table as CSV with a line of names."""
    rows = list(rows_of(trace, table))
    writer = csv.DictWriter(stream, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def rows_of(trace: Trace, table: str) -> Iterator[Mapping[str, Any]]:
    if table not in TABLES:
        raise ConfigurationError(f"there is no table '{table}' of a trace: {suggestion(table, TABLES)}")
    return TABLES[table](trace)


def _rounds(trace: Trace) -> Iterator[dict[str, Any]]:
    for number, (traced, start) in enumerate(zip(trace.rounds, starts_of(trace), strict=True)):
        yield {
            "round": number,
            "start": start,
            **{f"{name}_seconds": value for name, value in traced.seconds.items()},
            "rows": traced.num_rows,
            "sequences": len(traced.steps),
            "drafted": sum(len(step.tree) for step in traced.steps),
            "accepted": sum(len(step.path) for step in traced.steps),
            "written": sum(step.num_written for step in traced.steps),
        }


def _steps(trace: Trace) -> Iterator[dict[str, Any]]:
    for number, traced in enumerate(trace.rounds):
        for step in traced.steps:
            yield {
                "round": number,
                "sequence": step.sequence,
                "prefix": step.prefix,
                "drafted": len(step.tree),
                "scored": len(step.scored),
                "depth": max(depths(step.tree.parents), default=0),
                "accepted": len(step.path),
                "written": step.num_written,
                "text": "".join(trace.text_of(token) for token in step.tokens[: step.num_written]),
            }


def _nodes(trace: Trace) -> Iterator[dict[str, Any]]:
    for number, traced in enumerate(trace.rounds):
        for step in traced.steps:
            yield from ({"round": number, "sequence": step.sequence, **row} for row in _nodes_of(trace, step))


def _nodes_of(trace: Trace, step: Step) -> Iterator[dict[str, Any]]:
    tree = step.tree
    ranks = [0] * (len(step.tree) + 1)
    scored = range(len(tree)) if step.kept is None else step.kept
    for node, depth in enumerate(depths(tree.parents)):
        parent = tree.parents[node]
        ranks[parent + 1] += 1
        score = tree.scores[node] if tree.scores else math.nan
        before = tree.scores[parent] if tree.scores and parent != ROOT else 0.0
        yield {
            "node": node,
            "parent": parent,
            "depth": depth,
            "rank": ranks[parent + 1],
            "token": tree.tokens[node],
            "text": trace.text_of(tree.tokens[node]),
            "score": score,
            "confidence": math.exp(min(0.0, score - before)) if tree.scores else math.nan,
            "sources": "+".join(tree.sources[node]) if tree.sources else "",
            "scored": node in scored,
            "accepted": node in step.path,
        }


TABLES: dict[str, Callable[[Trace], Iterator[dict[str, Any]]]] = {"rounds": _rounds, "steps": _steps, "nodes": _nodes}
