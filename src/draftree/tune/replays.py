"""Replays of candidates on recorded texts: their rounds are exact, their seconds are predicted.

The drafter, the planner and the engine run for real; passes of the target take their measured time by rows. A draft
model may be faster here than beside the target, which uses the same caches: the best candidates are measured for real.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from draftree.assembly import choose_methods
from draftree.core.clock import SYSTEM_CLOCK, Clock
from draftree.core.errors import ConfigurationError, DraftreeError
from draftree.loading.loaded import LoadedModel
from draftree.models.replay.model import ReplayModel
from draftree.models.replay.text import RecordedText, ReplayClock, ReplayCosts
from draftree.models.source import EncoderDecoder
from draftree.text.tokenizer import Tokenizer
from draftree.tune.candidate_models import CandidateModels, sample_of
from draftree.tune.candidates import VERIFY, Candidate
from draftree.tune.contest import Sample

__all__ = ["Replays", "layers_of", "rows_of", "why_not_replayed"]


def why_not_replayed(candidate: Candidate, loaded: LoadedModel) -> str | None:
    """Return why a candidate cannot be replayed; None if nothing is known against it before it is built."""
    model = loaded.model
    if isinstance(model, EncoderDecoder):
        return "the target is an encoder-decoder model"
    if model.applies_controls:
        return "the target runs on another machine"
    if candidate.is_plain:
        return None
    traits = choose_methods(candidate.draft, VERIFY, candidate.plan).traits
    if traits.wants_picks:
        return "it learns from the target's picks beside the text"
    if traits.ahead or traits.alternates:
        return "it drafts while the target verifies"
    return None


def layers_of(candidates: Sequence[Candidate], loaded: LoadedModel) -> tuple[int, ...]:
    """Return the layers of the target whose states these candidates need, counted from 0."""
    needed: set[int] = set()
    for candidate in candidates:
        if not candidate.is_plain:
            features = choose_methods(candidate.draft, VERIFY, candidate.plan).traits.features
            needed |= {layer if layer >= 0 else loaded.model.num_layers + 1 + layer for layer in features}
    return tuple(sorted(needed))


def rows_of(candidates: Sequence[Candidate]) -> int:
    """Return the most tokens of a pass with these candidates."""
    nodes = [choose_methods(one.draft, VERIFY, one.plan).planner.default_nodes for one in candidates]
    return 1 + max(nodes, default=1)


class Replays:
    """Candidates on a replayed target.

    Args:
        loaded: the recorded target.
        tokenizer: its tokenizer.
        costs: seconds of its passes.
        trust_remote_code: whether Python code in folders of drafters may run.
        clock: measures drafts and planning.
    """

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
        """Replay a text with a candidate; the sample has predicted seconds.

        Raises:
            ConfigurationError: the drafter needs more of the target than a replay has.
            UnsupportedModelError: likewise, found during drafting.
        """
        self._model.text = text
        llm = self._models.get(candidate, text.prompt, text.params)
        (done,) = llm.generate([list(text.prompt)], text.params, progress=False)
        if tuple(done.token_ids) != text.tokens:
            raise ConfigurationError(f"the replay of {candidate.name} wrote another text: please report this")
        return sample_of(done)
