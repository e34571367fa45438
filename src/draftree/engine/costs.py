"""What a pass of the target and a drafter's level take here, measured by a few passes before the first round."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from draftree.core.types import Budget, Verdict
from draftree.drafters.base import Drafter, SequenceView
from draftree.models.base import Extend, LanguageModel
from draftree.sampling.controls import build_controls
from draftree.sampling.history import History
from draftree.sampling.params import SamplingParams

ROWS = (1, 4, 8, 16, 32, 64)
PREFIX = 64
UNREAD = 32

_MEASURED: WeakKeyDictionary[LanguageModel, dict[int, float]] = WeakKeyDictionary()
_DRAFTED: WeakKeyDictionary[LanguageModel, dict[tuple[str, int], Sequence[TimedDraft]]] = WeakKeyDictionary()


def costs_of(model: LanguageModel, *, max_rows: int) -> Mapping[int, float]:
    """Seconds of passes of so many rows at least; measured once for as long as the model lives."""
    known = _MEASURED.setdefault(model, {})
    needed = tuple(count for count in ROWS if count not in known and count <= _enough(max_rows, ROWS))
    if needed:
        known.update(measure_costs(model, max_rows=max_rows, rows=needed))
    return known


def measure_costs(model: LanguageModel, *, max_rows: int, rows: Sequence[int] = ROWS) -> dict[int, float]:
    """Seconds of one pass over so many rows each, behind a short prefix; rounds will know better.

    Args:
        model: whose passes.
        max_rows: no pass is longer than the next measured number of rows.
        rows: the numbers of rows.
    """
    longest = min(_enough(max_rows, rows), model.max_length // 2)
    prefix = min(PREFIX, model.max_length - longest)
    slot = model.open()
    model.extend([Extend(slot, [0] * prefix, range(-1, prefix - 1), logits_at=())])
    model.commit(slot, range(prefix))
    found: dict[int, float] = {}
    for count in (count for count in rows if count <= longest):
        start = time.perf_counter()
        model.extend([Extend(slot, [0] * count, range(-1, count - 1))])
        found[count] = time.perf_counter() - start
        model.commit(slot, ())
    model.close(slot)
    return found


@dataclass(frozen=True, slots=True)
class TimedDraft:
    """One draft before the first round.

    Attributes:
        seconds: that it took.
        depth: its levels.
        behind: tokens that the drafter had not read before.
    """

    seconds: float
    depth: int
    behind: int


def drafts_of(drafter: Drafter[Any], name: str, target: LanguageModel) -> Sequence[TimedDraft]:
    """What drafts of this name take; measured once for as long as the target lives."""
    known, key = _DRAFTED.setdefault(target, {}), (name, drafter.footprint.weights)
    if key not in known:
        known[key] = time_drafts(drafter, target)
    return known[key]


def time_drafts(drafter: Drafter[Any], target: LanguageModel) -> list[TimedDraft]:
    """Drafts of one level each: behind a text that is read for the first time, and behind one token more.

    A drafter whose level is too dear, whatever it guesses, is then known before it reads a prompt for nothing.
    """
    history = History(_some_tokens(target, 1), capacity=UNREAD + 4)
    controls = build_controls(SamplingParams(temperature=0), vocab_size=target.vocab_size, seed=0)
    slot = target.open()
    state = drafter.open(SequenceView(history, controls, slot))
    found = []
    for behind in (1, UNREAD, 1, 1):
        start = time.perf_counter()
        (tree,) = drafter.draft([state], [Budget(1, 1)])
        found.append(TimedDraft(time.perf_counter() - start, len(tree), behind))
        new = _some_tokens(target, UNREAD if len(found) == 1 else 1)
        history.append(new)
        drafter.observe([state], [tree], [Verdict((), new[0])])
    drafter.close(state)
    target.close(slot)
    return found[1:]  # the first also made what is made once


def _some_tokens(model: LanguageModel, count: int) -> list[int]:
    return [(11 + 97 * place) % model.vocab_size for place in range(count)]


def _enough(max_rows: int, rows: Sequence[int]) -> int:
    return next((count for count in rows if count >= max_rows), rows[-1])
