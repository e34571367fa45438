"""Replays of candidates on recorded texts: their rounds are exact, their seconds are predicted.

The drafter, the planner and the engine run for real; passes of the target take their measured time by rows. A draft
model may be faster here than beside the target, which uses the same caches: the best candidates are measured for real.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import final

import numpy as np
import torch
from torch import Tensor

from draftree.build import choose_methods
from draftree.core.errors import ConfigurationError, DraftreeError
from draftree.core.host import SYSTEM_CLOCK, Clock
from draftree.lab.bench.benchmark import read_tokens
from draftree.lab.bench.passes import slot_after, some_tokens
from draftree.lab.tune.candidates import VERIFY, Candidate, variants_of
from draftree.lab.tune.contest import FIRST_RUNG, CandidateModels, Cell, Contest, Journal, Sample, sample_of
from draftree.llm import LLM
from draftree.loading.loaded import LoadedModel
from draftree.models.base import Extend, LanguageModel, Pass
from draftree.models.replay import RecordedText, ReplayClock, ReplayCosts, ReplayModel
from draftree.models.source import EncoderDecoder
from draftree.sampling.controls import build_controls
from draftree.sampling.distributions import DistributionRows, Distributions
from draftree.sampling.history import History
from draftree.sampling.params import SamplingParams
from draftree.text.tokenizer import Tokenizer

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
REPEATS = 5


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """Seconds of passes, and of target tokens by temperature, by rows; interpolated between the measured numbers."""

    passes: Mapping[int, float]
    picks: Mapping[float, Mapping[int, float]] = field(default_factory=dict)

    def pass_seconds(self, rows: int) -> float:
        return interpolated(self.passes, rows)

    def pick_seconds(self, rows: int, temperature: float) -> float:
        """Return the seconds of the target tokens of so many rows; 0 at a temperature that was not measured."""
        known = self.picks.get(temperature)
        return 0.0 if known is None else interpolated(known, rows)


def interpolated(known: Mapping[int, float], rows: int) -> float:
    """Return a value between the measured ones; beyond the last by its ratio per row."""
    counts = sorted(known)
    if rows > counts[-1]:
        return known[counts[-1]] * rows / counts[-1]
    return float(np.interp(rows, counts, [known[count] for count in counts]))


def record_text(llm: LLM, prompt: Sequence[int], params: SamplingParams, layers: Sequence[int] = ()) -> RecordedText:
    """Write a text and return it with the input of these layers; the number of layers is the output of the last one."""
    assert params.seed is not None, "a text that is replayed has a seed"
    (done,) = llm.generate([list(prompt)], params, progress=False)
    tokens = tuple(done.token_ids)
    wanted = tuple(sorted(set(layers)))
    hidden = states_of(llm.model, (*prompt, *tokens[:-1]), wanted) if wanted else None
    is_ended = done.finish_reason == "stop"
    return RecordedText(tuple(prompt), tokens, params, params.seed, is_ended, wanted, hidden)


def states_of(model: LanguageModel, tokens: Sequence[int], layers: tuple[int, ...]) -> Tensor:
    """Return hidden states of a text, shape (tokens, layers, hidden)."""
    model.reserve(model.num_open + 1, len(tokens))
    slot = model.open()
    states = []
    try:
        for _, result in read_tokens(model, slot, tokens, capture=layers):
            assert result.hidden is not None, "the pass captured layers"
            states.append(result.hidden.clone())
    finally:
        model.close(slot)
    return torch.cat(states)


def measure_round_costs(
    model: LanguageModel, *, max_rows: int, prefix: int, temperatures: Sequence[float], clock: Clock = SYSTEM_CLOCK
) -> MeasuredCosts:
    """Measure passes and target tokens by rows after a prefix; row counts alternate, and medians count."""
    widths = [rows for rows in ROWS if rows < max_rows] + [max_rows]
    prefix = max(1, min(prefix, model.max_length - max_rows))
    tokens = some_tokens(model, prefix + max_rows)
    model.reserve(model.num_open + 1, prefix + max_rows)
    slot = slot_after(model, prefix)
    passes: dict[int, list[float]] = {rows: [] for rows in widths}
    picks: dict[float, dict[int, list[float]]] = {
        temperature: {rows: [] for rows in widths} for temperature in temperatures
    }
    controls = {}
    for temperature in temperatures:
        params = SamplingParams(temperature=temperature, ignore_eos=True)
        controls[temperature] = build_controls(params, vocab_size=model.vocab_size, seed=0)
    try:
        for repeat in range(-1, REPEATS):
            for rows in widths:
                for temperature in temperatures:
                    chain = tokens[prefix : prefix + rows]
                    model.synchronize()
                    start = clock()
                    logits = model.run(Pass([Extend(slot, chain, range(-1, rows - 1))])).logits
                    model.synchronize()
                    between = clock()
                    paths = [chain[1:stop] for stop in range(1, rows + 1)]
                    distribution_rows = DistributionRows(History(tokens[: prefix + 1]), controls[temperature], paths)
                    with Distributions(logits, [distribution_rows]) as distributions:
                        distributions.picks()
                        distributions.finite([range(rows)])
                    end = clock()
                    model.commit(slot, ())
                    if repeat >= 0:  # the first passes of a shape are slower
                        passes[rows].append(between - start)
                        picks[temperature][rows].append(end - between)
    finally:
        model.close(slot)
    medians = [{rows: statistics.median(each) for rows, each in by.items()} for by in (passes, *picks.values())]
    return MeasuredCosts(medians[0], dict(zip(picks, medians[1:], strict=True)))


def why_not_replayed(candidate: Candidate, loaded: LoadedModel) -> str | None:
    model = loaded.model
    if isinstance(model, EncoderDecoder):
        return "the target is an encoder-decoder model"
    if model.applies_controls:
        return "the target runs on another machine"
    if candidate.is_plain:
        return None
    traits = choose_methods(candidate.draft, VERIFY, candidate.plan).traits
    if traits.wants_picks:
        return "it learns from target tokens off the accepted path"
    if traits.ahead:
        return "it drafts while the target verifies"
    return None


def layers_of(candidates: Sequence[Candidate], loaded: LoadedModel) -> tuple[int, ...]:
    """Return the layers of the target whose states these candidates need, counted from 0."""
    drafting = [candidate for candidate in candidates if not candidate.is_plain]
    layers = {
        layer
        for candidate in drafting
        for layer in choose_methods(candidate.draft, VERIFY, candidate.plan).traits.features
    }
    return tuple(sorted({layer if layer >= 0 else loaded.model.num_layers + 1 + layer for layer in layers}))


@final
class Replays:
    """Candidates on a replayed target."""

    def __init__(
        self,
        loaded: LoadedModel,
        tokenizer: Tokenizer | None,
        costs: ReplayCosts,
        *,
        trust_remote_code: bool = False,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        charged = ReplayClock(clock)
        self._model = ReplayModel(loaded.model, costs, charged)
        self._models = CandidateModels(
            replace(loaded, model=self._model), tokenizer, trust_remote_code=trust_remote_code, clock=charged
        )

    def why_not(self, candidate: Candidate, text: RecordedText) -> str | None:
        """Return why a candidate cannot be replayed, by replaying a text; None if it can."""
        try:
            self.write(candidate, text)
        except DraftreeError as error:
            self._models.drop(candidate)
            return str(error)
        return None

    def write(self, candidate: Candidate, text: RecordedText) -> Sample:
        """Replay a text with a candidate; the sample has predicted seconds."""
        self._model.text = text
        llm = self._models.get(candidate, text.prompt, text.params)
        (done,) = llm.generate([list(text.prompt)], text.params, progress=False)
        if tuple(done.token_ids) != text.tokens:
            raise ConfigurationError(f"the replay of {candidate.name} wrote another text: please report this")
        return sample_of(done)


NUM_BEST = 3
"""Candidates that are measured for real after the replays."""


@final
@dataclass(slots=True)
class Prediction:
    """Replays of all candidates, text by text; the slower half is dropped after each rung. Mutated by `run`.

    `record` writes the text of a cell plainly, with states of layers. Predictions of an earlier run are in the journal,
    and are not repeated. `prefix` is the typical number of tokens before a pass.

    Attributes:
        contest: predictions so far.
        unreplayed: for every candidate that cannot be replayed the reason; these are measured for real.
    """

    loaded: LoadedModel
    tokenizer: Tokenizer | None
    _: KW_ONLY
    record: Callable[[Cell, Sequence[int]], RecordedText]
    cell: Callable[[int], Cell]
    journal: Journal
    temperatures: Sequence[float]
    prefix: int
    seconds: float
    clock: Clock
    contest: Contest = field(init=False)
    unreplayed: dict[str, str] = field(init=False, default_factory=dict)
    _layers: tuple[int, ...] = field(init=False, default=())
    _max_rows: int = field(init=False, default=1)
    _text: tuple[int, RecordedText] | None = field(init=False, default=None)
    _replays: Replays | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.contest = Contest(
            lambda candidate, cell: self._built().write(candidate, self._recorded(cell)),
            self.cell,
            samples=self.journal.read(),
            keep=self.journal.add,
            num_texts=FIRST_RUNG,
            is_exact=False,
            seconds=self.seconds,
            clock=self.clock,
            finalists=NUM_BEST,
            slower="slower in replays",
        )

    def run(self, first: Sequence[Candidate]) -> Iterator[Cell]:
        """Replay; yields after every text. The best ones are `contest.alive` afterwards."""
        replayed = []
        for candidate in first:
            if (reason := why_not_replayed(candidate, self.loaded)) is None:
                replayed.append(candidate)
            else:
                self.unreplayed[candidate.name] = reason
        family = [*replayed, *(variant for candidate in replayed for variant in variants_of(candidate, self.loaded))]
        self._layers = layers_of(family, self.loaded)
        nodes = [choose_methods(candidate.draft, VERIFY, candidate.plan).planner.default_nodes for candidate in family]
        self._max_rows = 1 + max(nodes, default=1)
        for candidate in list(replayed):
            if (reason := self._built().why_not(candidate, self._recorded(self.cell(0)))) is not None:
                self.unreplayed[candidate.name] = reason
                replayed.remove(candidate)
        yield from self.contest.run(replayed, lambda candidate: variants_of(candidate, self.loaded))
        self._replays = self._text = None  # draft models of the candidates that were dropped

    def _built(self) -> Replays:
        """Return the replays; the first call measures the target's passes."""
        if self._replays is None:
            costs = measure_round_costs(
                self.loaded.model,
                max_rows=self._max_rows,
                prefix=self.prefix,
                temperatures=tuple(dict.fromkeys(self.temperatures)),
                clock=self.clock,
            )
            self._replays = Replays(
                self.loaded, self.tokenizer, costs, trust_remote_code=self.loaded.runs_code, clock=self.clock
            )
        return self._replays

    def _recorded(self, cell: Cell) -> RecordedText:
        """Return the text of a cell; only the last one is kept, with its states."""
        if self._text is None or self._text[0] != cell.number:
            self._text = cell.number, self.record(cell, self._layers)
        return self._text[1]
