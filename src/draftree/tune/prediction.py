"""The first stage of a search: candidates are halved by their predicted speed in replays of recorded texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from draftree.core.clock import Clock
from draftree.loading.loaded import LoadedModel
from draftree.models.replay.text import RecordedText
from draftree.text.tokenizer import Tokenizer
from draftree.tune.candidates import Candidate, variants_of
from draftree.tune.contest import FIRST_RUNG, Cell, Contest, Sample
from draftree.tune.journal import Journal
from draftree.tune.recording import measure_round_costs
from draftree.tune.replays import Replays, layers_of, rows_of, why_not_replayed

__all__ = ["NUM_BEST", "Prediction"]

NUM_BEST = 3
"""Candidates that are measured for real after the replays."""


class Prediction:
    """Replays of all candidates, text by text; the slower half is dropped after each rung. Mutated by `run`.

    Args:
        loaded: the target.
        tokenizer: its tokenizer.
        record: writes the text of a cell plainly, with states of layers, and returns it.
        cell: the cell of a number.
        journal: predictions of an earlier run, which are not repeated.
        temperatures: temperatures of the texts.
        prefix: typical number of tokens before a pass.
        seconds: duration after which no new text is begun.
        clock: returns seconds.

    Attributes:
        contest: predictions so far.
        unreplayed: for every candidate that cannot be replayed the reason; these are measured for real.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        tokenizer: Tokenizer | None,
        *,
        record: Callable[[Cell, Sequence[int]], RecordedText],
        cell: Callable[[int], Cell],
        journal: Journal,
        temperatures: Sequence[float],
        prefix: int,
        seconds: float,
        clock: Clock,
    ) -> None:
        self._loaded, self._tokenizer = loaded, tokenizer
        self._record, self._cell = record, cell
        self._temperatures, self._prefix, self._clock = tuple(dict.fromkeys(temperatures)), prefix, clock
        self.journal, known = journal, journal.read()
        self.num_known = len(known)
        self.unreplayed: dict[str, str] = {}
        self._layers: tuple[int, ...] = ()
        self._text: tuple[int, RecordedText] | None = None
        self._replays: Replays | None = None
        self._max_rows = 1
        self.contest = Contest(
            self._write,
            cell,
            samples=known,
            keep=journal.add,
            num_texts=FIRST_RUNG,
            is_exact=False,
            seconds=seconds,
            clock=clock,
            finalists=NUM_BEST,
            slower="slower in replays",
        )

    def run(self, first: Sequence[Candidate]) -> Iterator[Cell]:
        """Replay; yields after every text. The best ones are `contest.alive` afterwards.

        Args:
            first: the candidates, without plain decoding.
        """
        for one in first:
            reason = why_not_replayed(one, self._loaded)
            if reason is not None:
                self.unreplayed[one.name] = reason
        left = [one for one in first if one.name not in self.unreplayed]
        family = [*left, *(variant for one in left for variant in variants_of(one, self._loaded))]
        self._layers, self._max_rows = layers_of(family, self._loaded), rows_of(family)
        for one in left:
            reason = self._built().why_not(one, self._recorded(self._cell(0)))
            if reason is not None:
                self.unreplayed[one.name] = reason
        left = [one for one in left if one.name not in self.unreplayed]
        yield from self.contest.run(left, lambda one: variants_of(one, self._loaded))
        self._replays = self._text = None  # draft models of the candidates that were dropped

    def _write(self, candidate: Candidate, cell: Cell) -> Sample:
        return self._built().write(candidate, self._recorded(cell))

    def _built(self) -> Replays:
        """Return the replays; the first call measures the target's passes."""
        if self._replays is None:
            costs = measure_round_costs(
                self._loaded.model,
                max_rows=self._max_rows,
                prefix=self._prefix,
                temperatures=self._temperatures,
                clock=self._clock,
            )
            self._replays = Replays(
                self._loaded, self._tokenizer, costs, trust_remote_code=self._loaded.runs_code, clock=self._clock
            )
        return self._replays

    def _recorded(self, cell: Cell) -> RecordedText:
        """Return the text of a cell; only the last one is kept, with its states."""
        if self._text is None or self._text[0] != cell.number:
            self._text = cell.number, self._record(cell, self._layers)
        return self._text[1]
