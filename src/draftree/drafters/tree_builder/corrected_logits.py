"""Logits of the first level of trees, corrected by what was learned from verified tokens.

Logits are corrected before children are chosen, so that draft distributions are those that the children were drawn
from. Corrections change after verification only. The first level is ranked without and with the correction, and the
correction is used while its first choice is picked more often. A correction that is not used learns on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, final

import torch
from torch import Tensor

from draftree.core.host import single_threaded
from draftree.drafters.base import SequenceView
from draftree.drafters.learning.corrections import HeadCorrections
from draftree.heads.vocabulary import DraftVocabulary
from draftree.sampling.distributions import DistributionRows, Distributions
from draftree.sampling.logits import Logits

COMPARED_EVERY = 2
"""Drafts that are learned from, of which one is compared: a comparison costs two searches."""


class Stepped(Protocol):
    """State of a sequence in a stepper."""

    view: SequenceView
    fed: dict[int, int]
    """Nodes of the last tree that the model has read: tree index to the index of a parent in `feed`."""


@dataclass(slots=True)
class _Drafted:
    """Rows of the last tree of a sequence: the root's, then those of fed nodes."""

    state: Stepped
    name: str
    """Name of the correction."""
    start: int
    """Number of written tokens before the tree."""
    firsts: tuple[int, int] | None = None
    """First choices of the root's row without and with the correction; None if they are not compared."""
    logits: list[Tensor] = field(default_factory=list)
    """Without the correction, shape (rows, tokens) each."""
    states: list[Tensor] = field(default_factory=list)
    """Shape (rows, hidden) each."""

    def row(self, row: int) -> tuple[Tensor, Tensor]:
        """Return the logits and the state of a row, shape (1, tokens) and (1, hidden)."""
        for logits, states in zip(self.logits, self.states, strict=True):
            if row < len(logits):
                return logits[row : row + 1], states[row : row + 1]
            row -= len(logits)
        raise AssertionError("a fed node has a row")


@final
class LogitCorrector:
    """Corrects the logits of a head, or of the first layers of the target, and learns from verified tokens."""

    def __init__(self, corrections: HeadCorrections, vocabulary: DraftVocabulary) -> None:
        self._corrections = corrections
        self._pace = corrections.pace
        self._places = vocabulary.places(torch.arange(vocabulary.vocab_size))
        self._drafted: dict[int, _Drafted] = {}
        """Rows by the id of the sequence's state."""
        self._learns = False
        self._num_noted = 0

    def begin(self, states: Sequence[Stepped], logits: Logits, answered: Tensor) -> None:
        """Correct the logits after texts, one row per sequence, in place, by their states, shape (rows, hidden)."""
        self._learns = self._pace.allows()
        start = self._pace.clock()
        names = [self._corrections.named(state.view.owner) for state in states]
        self._drafted.clear()
        if self._learns:
            with logits.computing():
                unchanged = logits.columns().clone()
            self._num_noted += 1
            firsts: Sequence[tuple[int, int] | None] = [None] * len(states)
            if self._num_noted % COMPARED_EVERY:
                self._correct(names, logits, answered)
            else:
                firsts = self._compare(states, names, logits, unchanged, answered)
            for row, (state, name) in enumerate(zip(states, names, strict=True)):
                if name is not None:
                    kept = [unchanged[row : row + 1]], [answered[row : row + 1]]
                    self._drafted[id(state)] = _Drafted(state, name, len(state.view.history), firsts[row], *kept)
        else:
            self._correct(names, logits, answered)
        self._pace.spend(start)

    def _compare(
        self,
        states: Sequence[Stepped],
        names: Sequence[str | None],
        logits: Logits,
        unchanged: Tensor,
        answered: Tensor,
    ) -> list[tuple[int, int]]:
        """Return the first choices without and with the corrections, and correct the rows of those that are used."""
        with logits.computing():
            columns = logits.columns()
            base = _first_choices(states, logits)
            for name, _ in _by_name(names):
                self._corrections.open(name)
            self._correct(names, logits, answered, all_of_them=True)
            learned = _first_choices(states, logits)
            for name, rows in _by_name(names):
                if not self._corrections.open(name).comparison.is_better:
                    columns[rows] = unchanged[rows]
        return list(zip(base, learned, strict=True))

    def _correct(
        self, names: Sequence[str | None], logits: Logits, answered: Tensor, *, all_of_them: bool = False
    ) -> None:
        """Correct rows in place, those whose correction is used or all."""
        known = ((self._corrections.find(name), rows) for name, rows in _by_name(names))
        chosen = [
            (correction, rows)
            for correction, rows in known
            if correction is not None and (all_of_them or correction.comparison.is_better)
        ]
        if not chosen:
            return
        with logits.computing():
            columns = logits.columns()
            for correction, rows in chosen:
                if len(rows) == len(names):
                    correction.apply(columns, answered)
                else:
                    part = columns[rows]
                    correction.apply(part, answered[rows])
                    columns[rows] = part

    def note(
        self, states: Sequence[Stepped], tokens: Sequence[Sequence[int]], logits: Logits, answered: Tensor
    ) -> None:
        """Note the rows of fed nodes."""
        if not self._learns:
            return
        start = self._pace.clock()
        with logits.computing():
            unchanged = logits.columns().clone()
            first = 0
        for state, row in zip(states, tokens, strict=True):
            drafted = self._drafted.get(id(state))
            end = first + len(row)
            if drafted is not None:
                drafted.logits.append(unchanged[first:end])
                drafted.states.append(answered[first:end].clone())
            first = end
        self._pace.spend(start)

    @torch.inference_mode()
    def learn(self, states: Sequence[Stepped], paths: Sequence[Sequence[int]]) -> None:
        """Learn from the tokens after the visited rows; `paths` are the accepted nodes."""
        if not self._drafted:
            return
        start = self._pace.clock()
        batches: dict[str, list[tuple[Tensor, Tensor, int, float]]] = {}
        for state, path in zip(states, paths, strict=True):
            drafted = self._drafted.pop(id(state), None)
            if drafted is None:
                continue
            written: list[int] = state.view.history.tokens[drafted.start :].tolist()
            if drafted.firsts is not None:
                base, learned = (first == written[0] for first in drafted.firsts)
                self._corrections.compare(drafted.name, base=base, learned=learned)
            visited = [0, *(state.fed[node] + 1 for node in path if node in state.fed)]
            temperature = state.view.controls.temperature or 1.0
            for row, token in zip(visited, written, strict=False):
                column = int(self._places[token])
                if column >= 0:
                    batches.setdefault(drafted.name, []).append((*drafted.row(row), column, temperature))
        with single_threaded():
            for name, rows in batches.items():
                logits, hidden, columns, temperatures = zip(*rows, strict=True)
                self._corrections.learn(
                    name, _joined(logits), _joined(hidden), columns=columns, temperatures=temperatures
                )
        self._pace.spend(start)


def _joined(rows: Sequence[Tensor]) -> Tensor:
    return rows[0] if len(rows) == 1 else torch.cat(list(rows))


def _by_name(names: Sequence[str | None]) -> list[tuple[str, list[int]]]:
    """Return the rows of each correction."""
    rows: dict[str, list[int]] = {}
    for row, name in enumerate(names):
        if name is not None:
            rows.setdefault(name, []).append(row)
    return list(rows.items())


def _first_choices(states: Sequence[Stepped], logits: Logits) -> list[int]:
    """Return the first choice of every root under the noise of its request."""
    rows = [DistributionRows(state.view.history, state.view.controls, [()]) for state in states]
    with Distributions(logits, rows) as distributions:
        tokens, _ = distributions.ranked([state.view.controls.noise for state in states], 1)
    return [row[0] for row in tokens]
