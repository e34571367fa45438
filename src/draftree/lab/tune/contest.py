"""Successive halving of candidates by measured speed relative to plain decoding, interleaved text by text.

Each text is written plainly and with every candidate that is left, in a rotating order, so that a slower or faster
machine changes all of them. After each rung the slower half is dropped, and the next rung has twice as many texts. The
best ones get variants, which are halved in the same way. The last ones are measured until time or texts are used up.
Measurements are lines of a journal, so that an interrupted search continues.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, final

from draftree.core.errors import ConfigurationError, DraftreeError
from draftree.core.files import MALFORMED, parse_json
from draftree.core.host import SYSTEM_CLOCK, Clock
from draftree.lab.tune.candidates import PLAIN, Candidate
from draftree.llm import LLM
from draftree.loading.loaded import LoadedModel
from draftree.outputs import Completion
from draftree.sampling.params import SamplingParams
from draftree.text.tokenizer import Tokenizer
from draftree.weights.cache import Cache

FIRST_RUNG = 4
"""Texts of the first rung."""
FINALISTS = 2


@dataclass(frozen=True, slots=True)
class Cell:
    """One text to write, numbered in the order of use: the index of its prompt, temperature and seed."""

    number: int
    prompt: int
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One written text: decode seconds per token without the first round, tokens per round, digest of its tokens."""

    seconds_per_token: float
    acceptance_length: float
    text: str


@dataclass(frozen=True, slots=True)
class Standing:
    """The result of one candidate: medians, means and quartiles over its texts.

    Attributes:
        mean: geometric mean of its speed divided by plain decoding's of the same text: candidates are ranked by it.
        median: of the same; `low` and `high` are its quartiles.
        out: why it was dropped; empty if it was not.
    """

    candidate: Candidate
    out: str
    texts: int = 0
    tokens_per_second: float = 0.0
    mean: float = 0.0
    median: float = 0.0
    low: float = 0.0
    high: float = 0.0
    acceptance_length: float = 0.0
    differing: int = 0


@dataclass(slots=True)
class Contest:
    """Measurements of candidates, and which of them are left. Mutated by `run`.

    `samples` are those of an earlier run by cell and candidate, which are not repeated; `keep` is called with every new
    one. With `is_exact`, a candidate whose text differs from plain decoding's is dropped. No text is begun after
    `seconds`.

    Attributes:
        alive: the candidates that are left.
        out: why others were dropped, by name.
    """

    write: Callable[[Candidate, Cell], Sample]
    cell: Callable[[int], Cell]
    _: KW_ONLY
    samples: Mapping[tuple[int, str], Sample]
    keep: Callable[[Cell, Candidate, Sample], None]
    num_texts: int
    is_exact: bool
    seconds: float
    clock: Clock
    finalists: int = FINALISTS
    slower: str = "slower"
    alive: list[Candidate] = field(init=False, default_factory=list)
    out: dict[str, str] = field(init=False, default_factory=dict)
    _measured: dict[Candidate, dict[int, Sample]] = field(init=False, default_factory=lambda: {PLAIN: {}})
    _next: int = field(init=False, default=0)
    _end: float = field(init=False)

    def __post_init__(self) -> None:
        self._end = self.clock() + self.seconds

    @property
    def is_over(self) -> bool:
        return self.clock() >= self._end

    @property
    def num_samples(self) -> int:
        return sum(map(len, self._measured.values()))

    def run(self, first: Sequence[Candidate], variants: Callable[[Candidate], Sequence[Candidate]]) -> Iterator[Cell]:
        """Measure; yields after every cell."""
        self.alive = list(first)
        yield from self._halve()
        more = [variant for best in self.alive for variant in variants(best) if variant not in self._measured]
        if more and not self.is_over:
            self.alive += dict.fromkeys(more)
            yield from self._halve()
        while self.alive and not self.is_over and self._num_common() < self.num_texts:
            yield self._measure()

    def best(self) -> Standing | None:
        """Return the fastest candidate that is left, plain decoding included; None before the first text."""
        ranked = [self.standing(candidate) for candidate in (*self.alive, PLAIN)]
        return max(
            (standing for standing in ranked if standing.texts), key=lambda standing: standing.mean, default=None
        )

    def standings(self) -> list[Standing]:
        """Return all measured candidates: those that are left first, then by texts and speed."""
        ranked = [self.standing(candidate) for candidate in self._measured]
        return sorted(
            (standing for standing in ranked if standing.texts),
            key=lambda standing: (bool(standing.out), -standing.texts, -standing.mean),
        )

    def standing(self, candidate: Candidate) -> Standing:
        out = self.out.get(candidate.name, "")
        speedups = self._speedups(candidate)
        if not speedups:
            return Standing(candidate, out)
        samples = self._measured[candidate]
        plain = self._measured[PLAIN]
        ratios = list(speedups.values())
        low, median, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        return Standing(
            candidate,
            out,
            texts=len(speedups),
            tokens_per_second=statistics.median(1 / samples[cell].seconds_per_token for cell in speedups),
            mean=statistics.geometric_mean(ratios),
            median=median,
            low=low,
            high=high,
            acceptance_length=statistics.fmean(samples[cell].acceptance_length for cell in speedups),
            differing=sum(samples[cell].text != plain[cell].text for cell in speedups),
        )

    def _speedups(self, candidate: Candidate, start: int = 0) -> dict[int, float]:
        """Return the speed divided by plain decoding's of the same text, by cell from `start` on."""
        samples = self._measured.get(candidate, {})
        plain = self._measured[PLAIN]
        cells = sorted(cell for cell in samples.keys() & plain.keys() if cell >= start)
        return {cell: plain[cell].seconds_per_token / samples[cell].seconds_per_token for cell in cells}

    def _halve(self) -> Iterator[Cell]:
        """Drop the slower half after each rung, until the finalists are left or the time is over."""
        start = self._next
        size = FIRST_RUNG
        while len(self.alive) > self.finalists and not self.is_over:
            for _ in range(size):
                yield self._measure()
                if self.is_over:
                    break
            # the time may end within a rung, and then a candidate may have been measured on few texts
            if self._next - start >= FIRST_RUNG:
                kept = max(self.finalists, (len(self.alive) + 1) // 2)
                speeds = {
                    candidate: statistics.geometric_mean(speedups.values()) if speedups else -math.inf
                    for candidate in self.alive
                    for speedups in [self._speedups(candidate, start)]
                }
                ranked = sorted(self.alive, key=speeds.__getitem__, reverse=True)
                for candidate in ranked[kept:]:
                    self.out[candidate.name] = f"{self.slower} after {len(self._measured[candidate])} texts"
                self.alive = ranked[:kept]
            size *= 2

    def _num_common(self) -> int:
        return len(set.intersection(*(set(self._measured.get(candidate, ())) for candidate in (*self.alive, PLAIN))))

    def _measure(self) -> Cell:
        cell = self.cell(self._next)
        self._next += 1
        order = [PLAIN, *self.alive]
        shift = cell.number % len(order)
        for candidate in [*order[shift:], *order[:shift]]:
            samples = self._measured.setdefault(candidate, {})
            try:
                if (sample := self.samples.get((cell.number, candidate.name))) is None:
                    sample = self.write(candidate, cell)
                    self.keep(cell, candidate, sample)
                samples[cell.number] = sample
            except DraftreeError as error:
                if candidate.is_plain:
                    raise
                self._drop(candidate, str(error))
        plain = self._measured[PLAIN][cell.number].text
        for candidate in list(self.alive) if self.is_exact else ():
            if self._measured[candidate][cell.number].text != plain:
                self._drop(candidate, "its text differs from plain decoding's: please report this")
        return cell

    def _drop(self, candidate: Candidate, reason: str) -> None:
        self.out[candidate.name] = reason
        self.alive.remove(candidate)


logger = logging.getLogger(__name__)


class Journal:
    """The file of one model, one set of prompts and settings (`facts`), and one machine."""

    def __init__(self, fingerprint: str, facts: Mapping[str, Any]) -> None:
        key = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:12]
        self.path = journal_folder() / f"{fingerprint}-{key}.jsonl"

    def read(self) -> dict[tuple[int, str], Sample]:
        """Return the measurements by cell and candidate; a last line that was not completed is left out."""
        samples: dict[tuple[int, str], Sample] = {}
        try:
            lines = self.path.read_text("utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return samples
        for line in lines:
            try:
                values = parse_json(line)
                place = (values.pop("cell"), values.pop("candidate"))
                samples[place] = Sample(**values)
            except MALFORMED:
                logger.info("%s: a line was not completed, and is left out", self.path)
        return samples

    def add(self, cell: Cell, candidate: Candidate, sample: Sample) -> None:
        values = {"cell": cell.number, "candidate": candidate.name, **dataclasses.asdict(sample)}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(values) + "\n")
        except OSError as error:
            raise ConfigurationError(
                f"'{self.path}' cannot be written ({error.strerror}): set DRAFTREE_CACHE to a writable folder"
            ) from error

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def journal_folder() -> Path:
    return Cache().root / "tuned"


def forget_journals(fingerprint: str) -> None:
    """Remove the journals of a model."""
    for path in list(journal_folder().glob(f"{fingerprint}-*.jsonl")):
        path.unlink(missing_ok=True)


@final
@dataclass(frozen=True, slots=True)
class CandidateModels:
    """One `LLM` for each candidate, created when it is first needed."""

    loaded: LoadedModel
    tokenizer: Tokenizer | None
    _: KW_ONLY
    trust_remote_code: bool = False
    clock: Clock = SYSTEM_CLOCK
    _llms: dict[str, LLM] = field(init=False, default_factory=dict)

    def get(self, candidate: Candidate, prompt: Sequence[int], params: SamplingParams) -> LLM:
        """Return the target with the candidate's drafter, without state of earlier texts.

        `prompt` and `params` are of its first text, which is slower than later ones and is not measured.
        """
        llm = self._llms.get(candidate.name)
        if llm is None:
            llm = LLM(
                self.loaded,
                None if candidate.is_plain else candidate.draft,
                plan=candidate.plan,
                tokenizer=self.tokenizer,
                max_batch_size=1,
                trust_remote_code=self.trust_remote_code,
                generation_config="none",
                clock=self.clock,
            )
            llm.generate([list(prompt)], params, progress=False)
            self._llms[candidate.name] = llm
        llm.forget()
        return llm

    def drop(self, candidate: Candidate) -> None:
        self._llms.pop(candidate.name, None)


def sample_of(done: Completion) -> Sample:
    """Return the measurement of a text: seconds per decoded token, tokens per round, and the digest of its tokens."""
    return Sample(1 / done.stats.tokens_per_second, done.stats.acceptance_length, text_digest(done.token_ids))


def text_digest(tokens: Sequence[int]) -> str:
    return hashlib.sha256(repr(tuple(tokens)).encode()).hexdigest()[:16]
