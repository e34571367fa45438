"""The race of the drafters that `draft="auto"` merged.

The planner compares them in every round by cost and acceptance, with each other and with plain decoding. What keeps
losing is released, and a drafter that is hardly ever right is reported: it may be of another revision of the model.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import final

from draftree.core.types import DraftPart, RoundRecord
from draftree.engine.sequence import DraftChoice
from draftree.planners.base import Standing

logger = logging.getLogger(__name__)

BEATEN_TRIALS = 8
"""Losing trials in a row after which a drafter is released while another one pays."""
USELESS_TRIALS = 32
"""The same while none pays, unless it was reported: there are several texts between so many."""
FIT_ACCEPTANCE = 0.6
"""Acceptance of the first token that is expected of a drafter for this model without a record of its own."""
UNFIT_SHARE = 0.25
"""Share of the expected acceptance below which a drafter is reported."""
FEWEST_DRAFTS = 8
"""Drafts before that."""


@final
class Race:
    """Judge of the parts of a merged drafter; a listener of rounds. `notes` says what it found, a sentence each.

    Args:
        choice: the merged drafter.
        published: acceptance of the first token that was published for drafters, by their specs.
    """

    def __init__(self, choice: DraftChoice, published: Mapping[str, float]) -> None:
        self._choice = choice
        self._published = published
        self._unfit: set[int] = set()
        self.notes: list[str] = []

    def observe(self, record: RoundRecord) -> None:
        if not any(len(row.drafted) for row in record.sequences):
            return
        standings = self._choice.planner.standings()
        winner = next((standing for standing in standings if standing.is_on), None)
        for standing in standings:
            self._report_unfit(standing)
            if standing is not winner:
                self._release_loser(standing, winner)

    def _report_unfit(self, standing: Standing) -> None:
        part = self._part(standing)
        records = [(rate, "were measured in its training") for rate in (part.greedy_rates or part.sampled_rates)[:1]]
        if part.name in self._published:
            records.append((self._published[part.name], "are published for it"))
        expected, source = (*records, (FIT_ACCEPTANCE, "are usual"))[0]
        # beside one hit and one miss, so that few drafts are no evidence
        rate = (standing.num_hits + 1) / (standing.num_drafts + 2)
        if standing.part in self._unfit or standing.num_drafts < FEWEST_DRAFTS or rate >= UNFIT_SHARE * expected:
            return
        self._unfit.add(standing.part)
        note = (
            f"drafter '{part.name}' was right in {standing.num_hits} of {standing.num_drafts} first tokens, where "
            f"{expected:.0%} {source}: it may belong to another revision of the model"
        )
        self.notes.append(note)
        logger.warning(note)

    def _release_loser(self, standing: Standing, winner: Standing | None) -> None:
        if len(self._choice.planner.parts) == 1:  # a drafter alone was measured here, and waits for other texts
            return
        is_unfit = standing.part in self._unfit
        needed = BEATEN_TRIALS if winner is not None or is_unfit else USELESS_TRIALS
        if standing.num_lost < needed and not (winner is not None and is_unfit):
            return
        than = "plain decoding" if winner is None else f"'{self._part(winner).name}'"
        reason = f"slower than {than}: right in {standing.num_hits} of {standing.num_drafts} first tokens"
        self._choice.release(standing.part, reason)
        note = f"drafter '{self._part(standing).name}' was released, {reason}"
        self.notes.append(note)
        logger.info(note)

    def _part(self, standing: Standing) -> DraftPart:
        return self._choice.planner.parts[standing.part]
