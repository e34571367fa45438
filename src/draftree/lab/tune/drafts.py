"""Search for the fastest drafter of a model on this machine, for given prompts.

First all candidates are replayed on recorded texts of the target, which predicts their speed without its passes; then
the best three, and those that cannot be replayed, are measured for real.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from draftree.build import choose_methods, load_for, require_positive
from draftree.core.errors import ConfigurationError
from draftree.core.files import expanded
from draftree.core.host import SYSTEM_CLOCK, Clock
from draftree.heads.shipped import head_folder
from draftree.lab.bench.benchmark import prompts_of, tokenizer_of
from draftree.lab.bench.workload import SHIPPED, Prompt, read_workload
from draftree.lab.tune.candidates import PLAIN, VERIFY, Candidate, first_candidates, own_candidates, variants_of
from draftree.lab.tune.contest import FINALISTS, CandidateModels, Cell, Contest, Journal, Sample, Standing, sample_of
from draftree.lab.tune.replays import NUM_BEST, Prediction, record_text, why_not_replayed
from draftree.llm import LLM
from draftree.loading.auto_draft import TunedDraft, conditions_of
from draftree.loading.provenance import now
from draftree.loading.resolve import resolve_model
from draftree.models.replay import RecordedText
from draftree.options import ModelOptions
from draftree.sampling.params import SamplingParams
from draftree.weights.catalogue import CATALOGUE

WARM_UP_TOKENS = 8
MIN_TEXTS = 8
"""Texts of the last candidates, if there are fewer prompts."""
REPLAY_SHARE = 0.5
"""Share of the time that replays may take."""


@dataclass(frozen=True, slots=True)
class DraftTuneSettings:
    """Settings of a search.

    Attributes:
        replay: whether candidates are first replayed on recorded texts; otherwise all are measured for real.
    """

    options: ModelOptions
    prompts: Path | None = None
    drafts: tuple[str, ...] = ()
    temperatures: tuple[float, ...] = (0.0, 0.8)
    limit: int | None = None
    max_tokens: int = 96
    minutes: float = 10.0
    seed: int = 0
    replay: bool = True

    def __post_init__(self) -> None:
        require_positive(self, "limit")
        if self.max_tokens < 2:
            raise ConfigurationError(f"max_tokens is {self.max_tokens}: it must be at least 2 to measure decoding")
        if not self.minutes > 0:
            raise ConfigurationError(f"minutes is {self.minutes}: it must be positive")
        if not self.temperatures or min(self.temperatures) < 0:
            raise ConfigurationError(f"temperatures are {self.temperatures}: give at least one, none below 0")


class DraftSearch:
    """A search that can be continued. Loads the model."""

    def __init__(
        self,
        settings: DraftTuneSettings,
        *,
        fetch: Callable[[str], object] = resolve_model,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        candidates = own_candidates(settings.drafts)
        workload = read_workload(settings.prompts or SHIPPED).choose((), settings.limit)
        models = [
            name
            for candidate in candidates
            for name in choose_methods(candidate.draft, VERIFY, candidate.plan).draft_models
        ]
        for name in dict.fromkeys((settings.options.model, *models)):
            fetch(name)
        self._settings = settings
        self._loaded = load_for(settings.options)
        self._tokenizer = tokenizer_of(self._loaded)
        room = self._loaded.model.max_length - settings.max_tokens
        prompts, self.notes = prompts_of(workload, self._tokenizer, room)
        self._prompts = across_categories(prompts)
        self.first, self.refused = first_candidates(self._loaded, candidates)
        self._models = CandidateModels(
            self._loaded, self._tokenizer, trust_remote_code=settings.options.trust_remote_code
        )
        self._conditions = conditions_of(self._loaded)
        shared = (workload.sha256, settings.limit, settings.max_tokens, settings.temperatures, settings.seed)
        facts = {"settings": shared, **self._conditions}
        self.journal = Journal(self._loaded.model.fingerprint, facts)
        kept = self.journal.read()
        self.prediction = self._predicting(facts, clock)
        self.num_known = len(kept) + (0 if self.prediction is None else len(self.prediction.contest.samples))
        self.contest = Contest(
            self._write,
            self._cell,
            samples=kept,
            keep=self.journal.add,
            num_texts=max(MIN_TEXTS, len(prompts)),
            is_exact=self._loaded.model.is_exact,
            seconds=60 * settings.minutes,
            clock=clock,
            finalists=FINALISTS if self.prediction is None else NUM_BEST,
        )

    def _predicting(self, facts: dict[str, Any], clock: Clock) -> Prediction | None:
        """Return the stage of replays; None if it was not requested, or is not possible for the target."""
        settings = self._settings
        if not settings.replay:
            return None
        reason = why_not_replayed(PLAIN, self._loaded)
        if reason is not None:
            self.notes += (f"all drafters are measured for real, none is replayed: {reason}",)
            return None
        return Prediction(
            self._loaded,
            self._tokenizer,
            record=self._record,
            cell=self._cell,
            journal=Journal(self._loaded.model.fingerprint, {**facts, "stage": "replay"}),
            temperatures=settings.temperatures,
            prefix=statistics.median_high(len(prompt.ids) for prompt in self._prompts) + settings.max_tokens // 2,
            seconds=60 * settings.minutes * REPLAY_SHARE,
            clock=clock,
        )

    @property
    def current(self) -> Contest:
        """The stage that runs: replays until the first text is measured for real."""
        return self.contest if self.prediction is None or self.contest.num_samples else self.prediction.contest

    @property
    def num_samples(self) -> int:
        """Number of texts so far, replayed ones included."""
        replayed = 0 if self.prediction is None else self.prediction.contest.num_samples
        return self.contest.num_samples + replayed

    @property
    def predicted(self) -> list[Standing]:
        return [] if self.prediction is None else self.prediction.contest.standings()

    def run(self) -> Iterator[Cell]:
        """Replay, then measure; yields after every text. Measurements are kept if the iteration stops early."""
        first = self.first
        unreplayed = {candidate.name for candidate in self.first}
        if self.prediction is not None:
            yield from self.prediction.run(self.first)
            unreplayed = set(self.prediction.unreplayed)
            first = [
                *self.prediction.contest.alive,
                *(candidate for candidate in self.first if candidate.name in unreplayed),
            ]
        yield from self.contest.run(
            first, lambda candidate: variants_of(candidate, self._loaded) if candidate.name in unreplayed else []
        )

    def forget(self) -> None:
        self.journal.remove()
        if self.prediction is not None:
            self.prediction.journal.remove()

    def result(self) -> TunedDraft | None:
        """Return the fastest drafter; None before the first text. Plain decoding if no drafter is faster."""
        best = self.contest.best()
        if best is None:
            return None
        return TunedDraft(
            model=self._settings.options.model,
            fingerprint=self._loaded.model.fingerprint,
            draft=with_full_paths(best.candidate.draft),
            plan=best.candidate.plan,
            speedup=round(best.median, 4),
            spread=(round(best.low, 4), round(best.high, 4)),
            texts=best.texts,
            prompts=(self._settings.prompts or SHIPPED).name,
            temperatures=self._settings.temperatures,
            conditions=self._conditions,
            date=now(),
        )

    def _cell(self, number: int) -> Cell:
        """Return a cell: prompts in turn, and temperatures in turn, shifted when the prompts begin again."""
        repeat, prompt = divmod(number, len(self._prompts))
        temperatures = self._settings.temperatures
        shift = repeat * (len(self._prompts) % len(temperatures) == 0)
        return Cell(number, prompt, temperatures[(number + shift) % len(temperatures)], self._settings.seed + repeat)

    def _params(self, cell: Cell) -> SamplingParams:
        return SamplingParams(
            max_tokens=self._settings.max_tokens, temperature=cell.temperature, seed=cell.seed, ignore_eos=True
        )

    def _record(self, cell: Cell, layers: Sequence[int]) -> RecordedText:
        return record_text(self._llm(PLAIN), self._prompts[cell.prompt].ids, self._params(cell), layers)

    def _write(self, candidate: Candidate, cell: Cell) -> Sample:
        (done,) = self._llm(candidate).generate([list(self._prompts[cell.prompt].ids)], self._params(cell))
        return sample_of(done)

    def _llm(self, candidate: Candidate) -> LLM:
        """Return the model with a drafter, without state of earlier texts."""
        params = SamplingParams(max_tokens=WARM_UP_TOKENS, temperature=0, ignore_eos=True)
        return self._models.get(candidate, self._prompts[0].ids, params)


def across_categories(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts with categories in turn, so that few prompts are of many categories."""
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.task.category, []).append(prompt)
    return [prompt for row in zip_longest(*groups.values()) for prompt in row if prompt is not None]


def with_full_paths(draft: str) -> str:
    """Return a spec whose paths do not depend on the working folder."""
    parts = []
    for part in draft.split("+"):
        head, comma, options = part.partition(",")
        name, colon, argument = head.partition(":")
        if name in ("head", "model") and colon and expanded(argument).exists():
            # a name of the package precedes a folder of that name
            is_known = argument in CATALOGUE if name == "model" else head_folder(argument) != Path(argument)
            argument = argument if is_known else str(expanded(argument).resolve())
        parts.append(f"{name}{colon}{argument}{comma}{options}")
    return "+".join(parts)
