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
from dataclasses import dataclass
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
        speedup: geometric mean of its speed divided by plain decoding's of the same text.
        out: why it was dropped; empty if it was not.
    """

    candidate: Candidate
    texts: int
    tokens_per_second: float
    speedup: float
    median: float
    low: float
    high: float
    acceptance_length: float
    differing: int
    out: str


class Contest:
    """Measurements of candidates, and which of them are left. Mutated by `run`.

    `samples` are those of an earlier run by cell and candidate, which are not repeated; `keep` is called with every new
    one. With `is_exact`, a candidate whose text differs from plain decoding's is dropped. No text is begun after
    `seconds`.
    """

    def __init__(
        self,
        write: Callable[[Candidate, Cell], Sample],
        cell: Callable[[int], Cell],
        *,
        samples: Mapping[tuple[int, str], Sample],
        keep: Callable[[Cell, Candidate, Sample], None],
        num_texts: int,
        is_exact: bool,
        seconds: float,
        clock: Clock,
        finalists: int = FINALISTS,
        slower: str = "slower",
    ) -> None:
        self._finalists = finalists
        self._slower = slower
        self._write = write
        self._cell = cell
        self._keep = keep
        self._known = dict(samples)
        self._samples: dict[str, dict[int, Sample]] = {PLAIN.name: {}}
        self._candidates: dict[str, Candidate] = {PLAIN.name: PLAIN}
        self._num_texts = num_texts
        self._is_exact = is_exact
        self._clock = clock
        self._end = clock() + seconds
        self._next = 0
        self.alive: list[Candidate] = []
        self.out: dict[str, str] = {}

    @property
    def is_over(self) -> bool:
        return self._clock() >= self._end

    @property
    def num_samples(self) -> int:
        return sum(map(len, self._samples.values()))

    def run(self, first: Sequence[Candidate], variants: Callable[[Candidate], Sequence[Candidate]]) -> Iterator[Cell]:
        """Measure; yields after every cell."""
        self.alive = list(first)
        yield from self._halve()
        known = self._candidates.keys()
        more = [one for best in self.alive for one in variants(best) if one.name not in known]
        if more and not self.is_over:
            self.alive += dict.fromkeys(more)
            yield from self._halve()
        while self.alive and not self.is_over and len(self._common()) < self._num_texts:
            yield self._measure()

    def best(self) -> Standing | None:
        """Return the fastest candidate that is left, plain decoding included; None before the first text."""
        ranked = [self.standing(one) for one in (*self.alive, PLAIN)]
        return max((one for one in ranked if one.texts), key=lambda one: one.speedup, default=None)

    def standings(self) -> list[Standing]:
        """Return all measured candidates: those that are left first, then by texts and speed."""
        found = [self.standing(one) for one in self._candidates.values()]
        return sorted((one for one in found if one.texts), key=lambda one: (bool(one.out), -one.texts, -one.speedup))

    def standing(self, candidate: Candidate) -> Standing:
        own = self._samples.get(candidate.name, {})
        plain = self._samples[PLAIN.name]
        cells = sorted(own.keys() & plain.keys())
        if not cells:
            return Standing(candidate, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, self.out.get(candidate.name, ""))
        ratios = [plain[cell].seconds_per_token / own[cell].seconds_per_token for cell in cells]
        low, median, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        return Standing(
            candidate,
            len(cells),
            statistics.median(1 / own[cell].seconds_per_token for cell in cells),
            geometric_mean(ratios),
            median,
            low,
            high,
            statistics.fmean(own[cell].acceptance_length for cell in cells),
            sum(own[cell].text != plain[cell].text for cell in cells),
            self.out.get(candidate.name, ""),
        )

    def _halve(self) -> Iterator[Cell]:
        """Drop the slower half after each rung, until the finalists are left or the time is over."""
        start = self._next
        size = FIRST_RUNG
        while len(self.alive) > self._finalists and not self.is_over:
            for _ in range(size):
                yield self._measure()
                if self.is_over:
                    break
            kept = max(self._finalists, (len(self.alive) + 1) // 2)
            ranked = sorted(self.alive, key=lambda one: self._score(one, start), reverse=True)
            # the time may end within a rung, and then a candidate may have been measured on few texts
            if self._next - start >= FIRST_RUNG:
                for one in ranked[kept:]:
                    self.out[one.name] = f"{self._slower} after {len(self._samples[one.name])} texts"
                self.alive = ranked[:kept]
            size *= 2

    def _score(self, candidate: Candidate, start: int) -> float:
        own = self._samples.get(candidate.name, {})
        plain = self._samples[PLAIN.name]
        cells = [cell for cell in own if cell >= start and cell in plain]
        ratios = [plain[cell].seconds_per_token / own[cell].seconds_per_token for cell in cells]
        return geometric_mean(ratios) if ratios else -math.inf

    def _common(self) -> set[int]:
        return set.intersection(*(set(self._samples.get(one.name, {})) for one in (*self.alive, PLAIN)))

    def _measure(self) -> Cell:
        cell = self._cell(self._next)
        self._next += 1
        turn = [PLAIN, *self.alive]
        shift = cell.number % len(turn)
        for candidate in [*turn[shift:], *turn[:shift]]:
            self._candidates.setdefault(candidate.name, candidate)
            try:
                sample = self._sample(candidate, cell)
            except DraftreeError as error:
                if candidate.is_plain:
                    raise
                self._drop(candidate, str(error))
                continue
            self._samples.setdefault(candidate.name, {})[cell.number] = sample
        plain = self._samples[PLAIN.name][cell.number].text
        for candidate in list(self.alive) if self._is_exact else ():
            if self._samples[candidate.name][cell.number].text != plain:
                self._drop(candidate, "its text differs from plain decoding's: please report this")
        return cell

    def _sample(self, candidate: Candidate, cell: Cell) -> Sample:
        found = self._known.get((cell.number, candidate.name))
        if found is None:
            found = self._write(candidate, cell)
            self._keep(cell, candidate, found)
        return found

    def _drop(self, candidate: Candidate, reason: str) -> None:
        self.out[candidate.name] = reason
        self.alive.remove(candidate)


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


logger = logging.getLogger(__name__)


class Journal:
    """The file of one model, one set of prompts and settings (`facts`), and one machine."""

    def __init__(self, fingerprint: str, facts: Mapping[str, Any]) -> None:
        key = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:12]
        self.path = journal_folder() / f"{fingerprint}-{key}.jsonl"

    def read(self) -> dict[tuple[int, str], Sample]:
        """Return the measurements by cell and candidate; a last line that was not completed is left out."""
        found: dict[tuple[int, str], Sample] = {}
        try:
            lines = self.path.read_text("utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return found
        for line in lines:
            try:
                values = parse_json(line)
                place = (values.pop("cell"), values.pop("candidate"))
                found[place] = Sample(**values)
            except MALFORMED:
                logger.info("%s: a line was not completed, and is left out", self.path)
        return found

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


def forget_journals(fingerprint: str) -> int:
    """Remove the journals of a model; returns their number."""
    found = list(journal_folder().glob(f"{fingerprint}-*.jsonl"))
    for path in found:
        path.unlink(missing_ok=True)
    return len(found)


@final
class CandidateModels:
    """One `LLM` for each candidate, created when it is first needed."""

    def __init__(
        self,
        loaded: LoadedModel,
        tokenizer: Tokenizer | None,
        *,
        trust_remote_code: bool = False,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._loaded = loaded
        self._tokenizer = tokenizer
        self._trusts = trust_remote_code
        self._clock = clock
        self._llms: dict[str, LLM] = {}

    def get(self, candidate: Candidate, prompt: Sequence[int], params: SamplingParams) -> LLM:
        """Return the target with the candidate's drafter, without state of earlier texts.

        `prompt` and `params` are of its first text, which is slower than later ones and is not measured.
        """
        found = self._llms.get(candidate.name)
        if found is None:
            found = LLM(
                self._loaded,
                None if candidate.is_plain else candidate.draft,
                plan=candidate.plan,
                tokenizer=self._tokenizer,
                max_batch_size=1,
                trust_remote_code=self._trusts,
                generation_config="none",
                clock=self._clock,
            )
            found.generate([list(prompt)], params, progress=False)
            self._llms[candidate.name] = found
        found.forget()
        return found

    def drop(self, candidate: Candidate) -> None:
        self._llms.pop(candidate.name, None)


def sample_of(done: Completion) -> Sample:
    """Return the measurement of a text: seconds per decoded token, tokens per round, and the digest of its tokens."""
    return Sample(1 / done.stats.tokens_per_second, done.stats.acceptance_length, text_digest(done.token_ids))


def text_digest(tokens: Sequence[int]) -> str:
    return hashlib.sha256(repr(tuple(tokens)).encode()).hexdigest()[:16]
