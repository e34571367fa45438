"""The lines of a results file: a header, one record a prompt, method and repeat, and an end. No torch in here."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from draftree.core.errors import ConfigurationError

FORMAT = 1
OURS = "draftree"
PEER = "transformers"


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a text left the plain one.

    Attributes:
        index: the first output token that differs.
        gap: there, the largest score minus the second, as the plain model gives them in one pass over the common
            prefix; scores are logits at temperature 0, else logits over temperature plus the request's noise.
            None where one text ended and the other went on.
        between: score of the plain text's token minus that of the other's; near 0 is a near-tie.
    """

    index: int
    gap: float | None
    between: float | None


@dataclass(frozen=True, slots=True)
class Record:
    """One text: a prompt, a method, a repeat.

    Attributes:
        task: the prompt's id.
        category: the prompt's category.
        form: "chat" or "plain".
        method: name of the method.
        repeat: from 0.
        place: when in the rotating order it was its turn, from 0.
        group: prompts that were written at once have one number.
        seconds: wall time of the call, shared by the group.
        finish_reason: "stop" or "length".
        text_sha256: of the text.
        tokens_sha256: of the token ids.
        equal_to_plain: whether the tokens are those of the same engine's plain method in its first repeat; None for
            transformers at a temperature above 0, where its methods draw differently from one another.
        equal_to_other_plain: the same for the other engine's plain method; None also if that does not run.
        divergence: where it left its own engine's plain text.
        stats: all of `CompletionStats`; for transformers what can be seen from outside.
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


@dataclass(frozen=True, slots=True)
class PassRecord:
    """What a pass over some rows costs.

    Attributes:
        rows: tokens in the pass, a chain behind the prefix.
        prefix: committed tokens before it.
        milliseconds: of every repeat.
    """

    rows: int
    prefix: int
    milliseconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class TreeRecord:
    """What scoring a tree costs.

    Attributes:
        shape: as a draft spec writes it.
        how: "tree" (one pass over all nodes), "batched" (one pass, a row of the batch for each leaf), "one by one"
            (a pass for each leaf), or "chain" (a plain pass over as many tokens).
        rows: nodes of the tree.
        leaves: of the tree.
        prefix: committed tokens before it.
        milliseconds: of every repeat.
    """

    shape: str
    how: str
    rows: int
    leaves: int
    prefix: int
    milliseconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class DistributionRecord:
    """Target and drafter at every position of one text.

    Attributes:
        task: the prompt's id.
        category: the prompt's category.
        temperature: of the text and of both distributions.
        num_positions: tokens of the text.
        own_ranks: for every position the place of the target's pick among the drafter's first guesses under the
            text's own noise, from 1; 0 if it is not there.
        shared_hits: positions at which the pick is the drafter's first, second, … guess, averaged over noises that
            both share.
        kept: by rule, for every position, the chance that a child of 1, 2 or 4 is kept (only the first where the
            rule has a closed form for one child alone).
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
    """How one kind of weights foretells a text.

    Attributes:
        weights: their dtype or quantization.
        kernels: what computed the passes.
        num_tokens: that were foretold.
        perplexity: e to the mean of minus the log-probability of each token.
        ratio: over the perplexity of the first kind of weights.
        ratio_error: standard error of that, from the differences token by token.
        num_other_tokens: places at which the likeliest token is another one than that of the first kind.
    """

    weights: str
    kernels: str
    num_tokens: int
    perplexity: float
    ratio: float
    ratio_error: float
    num_other_tokens: int


@dataclass(frozen=True, slots=True)
class Results:
    """A results file.

    Attributes:
        name: the file's name.
        header: provenance.
        records: texts.
        passes: pass costs.
        trees: costs of scoring trees.
        distributions: target and drafter compared.
        perplexities: kinds of weights compared.
        end: the last line; None if the run was cut off before it.
    """

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
        """Whether the run came to its end."""
        return self.end is not None and bool(self.end.get("complete"))


AnyRecord = Record | PassRecord | TreeRecord | DistributionRecord | PerplexityRecord


@dataclass(slots=True)
class RecordFile:
    """A results file that is being written, line by line; what is written is on disk. Keeps the lines as well."""

    stream: IO[str] | None
    lines: list[dict[str, Any]] = field(default_factory=list)

    def add(self, kind: str, entry: dict[str, Any] | AnyRecord) -> None:
        """Append one line."""
        fields = entry if isinstance(entry, dict) else dataclasses.asdict(entry)
        self.lines.append({"kind": kind, **fields})
        if self.stream is not None:
            self.stream.write(json.dumps(self.lines[-1], ensure_ascii=False) + "\n")
            self.stream.flush()

    def results(self, name: str) -> Results:
        """What was written, as it would be read."""
        return _results(enumerate(json.loads(json.dumps(self.lines)), start=1), name)


def sha256_of(value: str | Sequence[int]) -> str:
    """The first 16 digits of the sha256 of a text, or of token ids written as a JSON list."""
    text = value if isinstance(value, str) else json.dumps(list(value))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_results(path: Path) -> Results:
    """Read a results file.

    Raises:
        ConfigurationError: no such file, or a line that no benchmark wrote, named by its number.
    """
    try:
        content = path.read_text("utf-8")
    except FileNotFoundError as error:
        raise ConfigurationError(f"results file '{path}' is not there: check the path") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"results file '{path}' cannot be read: {error}") from error
    lines = content.splitlines()
    entries = []
    for number, line in enumerate(lines, start=1):
        try:
            entries.append((number, json.loads(line)))
        except ValueError as error:
            if number == len(lines) and not content.endswith("\n"):
                break  # the run was killed while it wrote this line
            raise ConfigurationError(f"results file '{path}', line {number} is no JSON: {error}") from error
    return _results(entries, path.name)


def _results(entries: Iterable[tuple[int, Any]], name: str) -> Results:
    header: dict[str, Any] | None = None
    end: dict[str, Any] | None = None
    records: list[Record] = []
    passes: list[PassRecord] = []
    trees: list[TreeRecord] = []
    distributions: list[DistributionRecord] = []
    perplexities: list[PerplexityRecord] = []
    for number, entry in entries:
        try:
            kind = entry.pop("kind")
            if kind == "header" and entry["format"] != FORMAT:
                raise ConfigurationError(
                    f"results file '{name}' has format {entry['format']}, this version reads {FORMAT}: "
                    "use the version that wrote it"
                )
            if kind == "header":
                header = entry
            elif kind == "record":
                divergence = entry.pop("divergence")
                records.append(Record(**entry, divergence=None if divergence is None else Divergence(**divergence)))
            elif kind == "pass":
                passes.append(PassRecord(**{**entry, "milliseconds": tuple(entry["milliseconds"])}))
            elif kind == "tree":
                trees.append(TreeRecord(**{**entry, "milliseconds": tuple(entry["milliseconds"])}))
            elif kind == "distribution":
                distributions.append(_distribution(entry))
            elif kind == "perplexity":
                perplexities.append(PerplexityRecord(**entry))
            elif kind == "end":
                end = entry
            else:
                raise ValueError(f"unknown kind '{kind}'")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, ConfigurationError):
                raise
            raise ConfigurationError(
                f"results file '{name}', line {number} was not written by draftree bench: {error}"
            ) from error
    if header is None:
        raise ConfigurationError(f"results file '{name}' has no header line: it was not written by draftree bench")
    return Results(
        name, header, tuple(records), tuple(passes), tuple(trees), tuple(distributions), tuple(perplexities), end
    )


def _distribution(entry: dict[str, Any]) -> DistributionRecord:
    tuples = {name: tuple(entry[name]) for name in ("own_ranks", "shared_hits")}
    return DistributionRecord(**{**entry, **tuples})
