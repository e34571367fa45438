"""Lexical constraints (arXiv 1804.06609, 1905.04519): every text contains the given phrases.

Beams are grouped into banks by the number of phrase tokens that they contain, and the places are shared between banks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from draftree.beam.candidates import Candidates, best, best_of_all
from draftree.beam.strategies.base import Candidate, StepInfo, Strategy
from draftree.beam.strategies.phrases import OrderedPhrases, PhraseState, UnorderedPhrases
from draftree.core.errors import InvalidRequestError
from draftree.core.transfer import to_device

if TYPE_CHECKING:
    from draftree.beam.group import Beam
    from draftree.beam.params import BeamSearchParams


@final
class LexicalConstraints(Strategy):
    """Candidates are the best of all beams, the best of each beam, and the next phrase tokens of each beam."""

    def __init__(self, params: BeamSearchParams) -> None:
        super().__init__(params)
        rule = OrderedPhrases if params.ordered else UnorderedPhrases
        self._root: PhraseState = rule.root([tuple(phrase) for phrase in params.force_words_ids])

    def check(self, prompt: Sequence[int], end_ids: Sequence[int], vocab_size: int) -> None:
        """Refuse phrases with a token that ends a text, or that does not exist."""
        for phrase in self.params.force_words_ids:
            for token in phrase:
                if token in end_ids:
                    raise InvalidRequestError(
                        f"a phrase of force_words_ids holds token {token}, which ends a text: "
                        "remove it from the phrase",
                        param="force_words_ids",
                    )
                if token >= vocab_size:
                    raise InvalidRequestError(
                        f"a phrase of force_words_ids holds token {token}, but the vocabulary ends at {vocab_size - 1}",
                        param="force_words_ids",
                    )

    def state(self, beam: Beam) -> PhraseState:
        """Return how far a beam is."""
        return self._root if beam.state is None else beam.state

    def mask(self, logprobs: Tensor, step: StepInfo) -> None:
        """Forbid the end of texts that lack a phrase, except at the limit."""
        if step.is_last or not len(step.end_ids):
            return
        rows = [row for row, beam in enumerate(step.beams) if not self.state(beam).is_met]
        if rows:
            logprobs[to_device(rows, logprobs.device)[:, None], step.end_ids] = -torch.inf

    def select(self, logprobs: Tensor, scores: Tensor, step: StepInfo) -> list[Candidates]:
        """Return the candidates of the only group; some may occur twice."""
        vocab = logprobs.shape[-1]
        count = self.num_candidates(step.widths[0], len(step.end_ids))
        found = best_of_all(logprobs, scores, count)
        forced = [
            row * vocab + token for row, beam in enumerate(step.beams) for token in self.state(beam).next_tokens()
        ]
        tops = torch.cat([best(logprobs[row], 1) + row * vocab for row in range(len(logprobs))])
        places = torch.cat((found.places, tops, to_device(forced, logprobs.device)))
        totals = logprobs + scores[:, None]
        return [Candidates(totals.reshape(-1)[places], places, logprobs.reshape(-1)[places])]

    def arrange(self, candidates: list[Candidate]) -> list[Candidate]:
        """Order candidates by rank within their bank, the fullest bank first."""
        distinct = {(candidate.rank, candidate.token): candidate for candidate in candidates}
        banks: dict[int, list[Candidate]] = {}
        for candidate in distinct.values():
            bank = self.state(candidate.parent).advance(candidate.token).num_tokens
            banks.setdefault(bank, []).append(candidate)
        order = []
        for bank, members in banks.items():
            members.sort(key=lambda candidate: (-candidate.score, candidate.rank, candidate.token))
            order += [(place, -bank, candidate) for place, candidate in enumerate(members)]
        order.sort(key=lambda entry: entry[:2])
        return [candidate for _, _, candidate in order]

    def meets_constraints(self, beam: Beam) -> bool:
        """Whether a beam contains all phrases."""
        return self.state(beam).is_met

    def on_select(self, parent: Beam, beam: Beam) -> None:
        """Advance the state by the beam's last token."""
        beam.state = self.state(parent).advance(beam.tokens[-1])
