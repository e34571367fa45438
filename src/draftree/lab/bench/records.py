"""The lines of a results file: a header, one record per prompt, method and repeat, and an end. No torch."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from draftree.core.errors import ConfigurationError
from draftree.core.files import MALFORMED, JsonError, read_json_lines

FORMAT = 1
OURS = "draftree"
PEER = "transformers"


@dataclass(frozen=True, slots=True)
class Divergence:
    """The place where a text differs from the plain one.

    Attributes:
        index: the first output token that differs.
        gap: the largest score minus the second at that place, from the plain model in one pass over the common
            prefix; scores are logits at temperature 0, else logits divided by temperature plus the request's noise.
            None if one text ended and the other continued.
        between: score of the plain text's token minus that of the other text's; near 0 is a near-tie.
    """

    index: int
    gap: float | None
    between: float | None


@dataclass(frozen=True, slots=True)
class Record:
    """One text: a prompt, a method, a repeat.

    Attributes:
        place: position in the rotating order of methods, from 0.
        group: number of the group of concurrent prompts.
        seconds: wall time of the call, shared by the group.
        equal_to_plain: whether the tokens equal those of the same engine's plain method in its first repeat; None for
            transformers at a temperature above 0, where its methods draw differently from one another.
        equal_to_other_plain: the same for the other engine's plain method; None also if that does not run.
        first_turn: id of the prompt that began the conversation; None if this is a first turn.
    """

    task: str
    category: str
    form: str
    method: str
    repeat: int
    place: int
    group: int
    seconds: float
    finish_reason: str
    text_sha256: str
    tokens_sha256: str
    equal_to_plain: bool | None
    equal_to_other_plain: bool | None
    divergence: Divergence | None
    stats: dict[str, Any]
    first_turn: str | None = None


@dataclass(frozen=True, slots=True)
class PassRecord:
    """Times of a pass over `rows` tokens, a chain after `prefix` committed ones."""

    rows: int
    prefix: int
    milliseconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class TreeRecord:
    """Cost of scoring a tree.

    Attributes:
        how: "tree" (one pass over all nodes), "batched" (one pass with a row of the batch per leaf), "one by one"
            (a pass per leaf), or "chain" (a plain pass over as many tokens).
    """

    shape: str
    how: str
    rows: int
    leaves: int
    prefix: int
    milliseconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class DistributionRecord:
    """Comparison of target and drafter at every position of one text.

    Attributes:
        own_ranks: for every position the rank of the target token among the drafter's first guesses with the
            text's own noise, from 1; 0 if it is absent.
        shared_hits: number of positions at which the target token is the drafter's first, second, … guess, averaged
            over shared noise seeds.
        kept: by verifier, for every position, the probability that one of 1, 2 or 4 children is accepted (only the
            first if the verifier's closed form is for one child only).
    """

    task: str
    category: str
    temperature: float
    num_positions: int
    own_ranks: tuple[int, ...]
    shared_hits: tuple[float, ...]
    kept: dict[str, list[list[float]]]


@dataclass(frozen=True, slots=True)
class PerplexityRecord:
    """Perplexity of one kind of weights on a text.

    Attributes:
        ratio: perplexity divided by that of the first kind of weights.
        ratio_error: standard error of the ratio, from the differences token by token.
        num_other_tokens: places at which the most likely token differs from that of the first kind.
    """

    weights: str
    kernels: str
    num_tokens: int
    perplexity: float
    ratio: float
    ratio_error: float
    num_other_tokens: int
    fallback_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Results:
    """A results file: its header with the provenance, and its lines by kind. Without `end` the run was killed."""

    name: str
    header: dict[str, Any]
    records: tuple[Record, ...] = ()
    passes: tuple[PassRecord, ...] = ()
    trees: tuple[TreeRecord, ...] = ()
    distributions: tuple[DistributionRecord, ...] = ()
    perplexities: tuple[PerplexityRecord, ...] = ()
    end: dict[str, Any] | None = None

    @property
    def is_complete(self) -> bool:
        return self.end is not None and bool(self.end.get("complete"))


AnyRecord = Record | PassRecord | TreeRecord | DistributionRecord | PerplexityRecord
KINDS: dict[str, type[AnyRecord]] = {
    "record": Record,
    "pass": PassRecord,
    "tree": TreeRecord,
    "distribution": DistributionRecord,
    "perplexity": PerplexityRecord,
}
"""Class of each kind of line, in the order of the fields of `Results`."""


@dataclass(slots=True)
class RecordFile:
    """A results file during the run, flushed after every line. Also keeps the lines in memory."""

    stream: IO[str] | None
    lines: list[dict[str, Any]] = field(default_factory=list)

    def add(self, kind: str, entry: dict[str, Any] | AnyRecord) -> None:
        fields = entry if isinstance(entry, dict) else dataclasses.asdict(entry)
        self.lines.append({"kind": kind, **fields})
        if self.stream is not None:
            self.stream.write(json.dumps(self.lines[-1], ensure_ascii=False) + "\n")
            self.stream.flush()

    def results(self, name: str) -> Results:
        return _results(enumerate(json.loads(json.dumps(self.lines)), start=1), name)


def sha256_of(value: str | Sequence[int]) -> str:
    """Return the first 16 digits of the sha256 of a text, or of token ids written as a JSON list."""
    text = value if isinstance(value, str) else json.dumps(list(value))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_results(path: Path) -> Results:
    try:
        lines = read_json_lines(path, may_be_cut=True)  # a run may be killed during its last line
    except FileNotFoundError as error:
        raise ConfigurationError(f"results file '{path}' does not exist: check the path") from error
    except JsonError as error:
        raise ConfigurationError(f"results file '{path}' cannot be read: {error}") from error
    return _results(enumerate(lines, start=1), path.name)


def _results(entries: Iterable[tuple[int, Any]], name: str) -> Results:
    single: dict[str, dict[str, Any]] = {}
    lines: dict[str, list[Any]] = {kind: [] for kind in KINDS}
    for number, entry in entries:
        try:
            kind = entry.pop("kind")
            if kind in ("header", "end"):
                single[kind] = entry
            elif kind in KINDS:
                fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()}
                if kind == "record" and fields["divergence"] is not None:
                    fields["divergence"] = Divergence(**fields["divergence"])
                lines[kind].append(KINDS[kind](**fields))
            else:
                raise ValueError(f"unknown kind '{kind}'")
        except MALFORMED as error:
            raise ConfigurationError(
                f"results file '{name}', line {number} was not written by draftree bench: {error}"
            ) from error
        if kind == "header" and entry.get("format") != FORMAT:
            raise ConfigurationError(
                f"results file '{name}' has format {entry.get('format')}, this version reads {FORMAT}: "
                "use the version that wrote it"
            )
    if "header" not in single:
        raise ConfigurationError(f"results file '{name}' has no header line: it was not written by draftree bench")
    records, passes, trees, distributions, perplexities = (tuple(lines[kind]) for kind in KINDS)
    return Results(name, single["header"], records, passes, trees, distributions, perplexities, single.get("end"))
