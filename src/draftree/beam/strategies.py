"""Strategies of a beam search: which continuations are candidates, and in which order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from draftree.beam.candidates import Candidate, Candidates, at_places, best, best_of_all, best_of_each, drawn, keep_top
from draftree.core.errors import InvalidRequestError
from draftree.core.tensors import to_device

if TYPE_CHECKING:
    from draftree.beam.candidates import Beam
    from draftree.beam.params import BeamSearchParams


@dataclass(frozen=True, slots=True)
class StepInfo:
    """Facts about a step that a strategy may read.

    Attributes:
        groups: live beams of each group; the rows of tensors are in their order.
        widths: maximum number of beams of each group.
        end_ids: tokens that end a sequence, int64 on the device of the log-probabilities.
        is_last: whether this is the last token before the limit.
    """

    groups: Sequence[Sequence[Beam]]
    widths: Sequence[int]
    end_ids: Tensor
    is_last: bool

    @property
    def beams(self) -> list[Beam]:
        """All live beams, in the order of the rows."""
        return [beam for group in self.groups for beam in group]

    def rows(self) -> list[slice]:
        """Return the rows of each group."""
        found = []
        start = 0
        for group in self.groups:
            found.append(slice(start, start + len(group)))
            start += len(group)
        return found


class Strategy(ABC):
    """Selection of candidates for one search. May keep state of its beams."""

    is_ranked: bool = True
    """Whether candidates are in the order in which they go on; otherwise the best go on."""

    def __init__(self, params: BeamSearchParams) -> None:
        self.params = params

    @property
    def is_bounded(self) -> bool:
        """Whether a beam that is worse than all candidates that a step needs may be left out of the step."""
        return False

    def group_widths(self) -> list[int]:
        """Return the number of beams of each group; groups are searched side by side, each with its own pool."""
        return [self.params.beam_width]

    def num_candidates(self, width: int, num_ends: int) -> int:
        """Return how many candidates of a group leave at least `width` that do not end."""
        return max(2, 1 + num_ends) * width

    def check(self, prompt: Sequence[int], end_ids: Sequence[int], vocab_size: int) -> None:  # noqa: B027
        """Check a request before the first pass.

        Raises:
            InvalidRequestError: it cannot be honoured.
        """

    def mask(self, logprobs: Tensor, step: StepInfo) -> None:  # noqa: B027
        """Write -inf over tokens that are not allowed; `logprobs` has shape (beams, vocab)."""

    def score(self, logprobs: Tensor, step: StepInfo) -> Tensor:
        """Return log-probabilities with the strategy's penalties, shape (beams, vocab)."""
        return logprobs

    @abstractmethod
    def select(self, logprobs: Tensor, scores: Tensor, step: StepInfo) -> list[Candidates]:
        """Return the candidates of each group.

        Args:
            logprobs: shape (beams, vocab).
            scores: cumulative scores of the beams, shape (beams,).
            step: the step.
        """

    def arrange(self, candidates: list[Candidate]) -> list[Candidate]:
        """Order the candidates of a group on the host, and drop some."""
        return candidates

    def meets_constraints(self, beam: Beam) -> bool:
        """Whether a finished beam contains all that is required."""
        return True

    def on_select(self, parent: Beam, beam: Beam) -> None:  # noqa: B027
        """Set the state of a beam from its parent's; called for beams that go on and for finished ones."""


@final
class BeamStrategy(Strategy):
    """The best continuations of all beams; with the rule "any" the best of each beam, as in vLLM."""

    @property
    def is_bounded(self) -> bool:
        """With the rule "any" every beam has candidates."""
        return self.params.eos_rule != "any"

    def select(self, logprobs: Tensor, scores: Tensor, step: StepInfo) -> list[Candidates]:
        """Return the candidates of the only group."""
        count = self.num_candidates(step.widths[0], len(step.end_ids))
        choose = best_of_each if self.params.eos_rule == "any" else best_of_all
        return [choose(logprobs, scores, count)]


@final
class BeamSampling(Strategy):
    """Draws from the softmax of the cumulative scores, as transformers with `do_sample` and `num_beams` > 1.

    The filters `top_k` and `top_p` act on each beam's row before the scores are added. Candidates stay in the order of
    their draws, so only the first `beam_width` draws can finish; of the others the best go on.
    """

    is_ranked = False

    def __init__(self, params: BeamSearchParams) -> None:
        super().__init__(params)
        self._generator = torch.Generator().manual_seed(params.seed)

    def score(self, logprobs: Tensor, step: StepInfo) -> Tensor:
        """Apply the filters."""
        return keep_top(logprobs, top_k=self.params.top_k, top_p=self.params.top_p, least=2)

    def select(self, logprobs: Tensor, scores: Tensor, step: StepInfo) -> list[Candidates]:
        """Draw the candidates of the only group."""
        count = self.num_candidates(step.widths[0], len(step.end_ids))
        return [drawn(logprobs, scores, count, self._generator, width=step.widths[0])]


@final
class IndependentSampling(Strategy):
    """Draws one token per beam. A score adds the log-probabilities before the filters."""

    def __init__(self, params: BeamSearchParams) -> None:
        super().__init__(params)
        self._generator = torch.Generator().manual_seed(params.seed)

    def group_widths(self) -> list[int]:
        """Each beam is a group."""
        return [1] * self.params.beam_width

    def select(self, logprobs: Tensor, scores: Tensor, step: StepInfo) -> list[Candidates]:
        """Draw a token for each beam; a beam without an allowed token has no candidate."""
        kept = keep_top(logprobs, top_k=self.params.top_k, top_p=self.params.top_p)
        weights = kept.softmax(dim=-1).nan_to_num(0.0).cpu()
        totals = logprobs + scores[:, None]
        # an impossible row draws token 0, whose score of -inf marks it
        weights[:, 0] += (weights.sum(dim=-1) == 0).to(weights.dtype)
        tokens = torch.multinomial(weights, 1, generator=self._generator)[:, 0].to(logprobs.device)
        return [
            at_places(totals[row : row + 1], logprobs[row : row + 1], tokens[row : row + 1])
            for row in range(len(tokens))
        ]


@final
class DiverseGroups(Strategy):
    """Diverse beam search: groups searched in order, each penalised for the tokens of earlier groups.

    The penalty is `diversity_penalty` for each such beam (Hamming diversity), times 1 plus the discounted number of
    equal earlier tokens of the two groups if there is a discount. It stays in the cumulative score.

    Source: arXiv 1610.02424.
    """

    @property
    def is_bounded(self) -> bool:
        """With a discount the tokens of all beams count."""
        return self.params.eos_rule != "any" and not self.params.diversity_discount

    def group_widths(self) -> list[int]:
        """Return equal widths."""
        groups = self.params.num_beam_groups
        return [self.params.beam_width // groups] * groups

    def select(self, logprobs: Tensor, scores: Tensor, step: StepInfo) -> list[Candidates]:
        """Return the candidates of each group."""
        vocab = logprobs.shape[-1]
        chosen: list[tuple[Tensor, Tensor]] = []
        found = []
        for group, rows in enumerate(step.rows()):
            own = logprobs[rows]
            if not len(own):
                found.append(Candidates(scores[rows], torch.empty_like(scores[rows], dtype=torch.int64), scores[rows]))
                chosen.append((scores.new_zeros(0, dtype=torch.int64), scores.new_zeros(0)))
                continue
            penalty = own.new_zeros(vocab)
            for earlier, (tokens, counted) in enumerate(chosen):
                weight = self._weight(step.groups[group], step.groups[earlier])
                penalty.index_add_(0, tokens, counted * (weight * self.params.diversity_penalty))
            own = own - penalty
            width = step.widths[group]
            candidates = best_of_all(own, scores[rows], self.num_candidates(width, len(step.end_ids)))
            tokens = candidates.places % vocab
            goes_on = ~torch.isin(tokens, step.end_ids) & candidates.scores.isfinite()
            counted = goes_on & (goes_on.cumsum(0) <= width)
            chosen.append((tokens, counted.to(own.dtype)))
            found.append(candidates)
        return found

    def _weight(self, own: Sequence[Beam], other: Sequence[Beam]) -> float:
        discount = self.params.diversity_discount
        if not discount or not own or not other:
            return 1.0
        pairs = zip(own, other, strict=False)
        overlap = 0.0
        count = 0
        for one, two in pairs:
            weight = 1.0
            for left, right in zip(reversed(one.tokens), reversed(two.tokens), strict=True):
                weight *= discount
                overlap += weight * (left == right)
            count += 1
        return 1.0 + overlap / count


@final
class DiverseSiblings(Strategy):
    """Subtracts `sibling_penalty` times the rank (1, 2, …) of a continuation among those of its beam.

    The first step is plain beam search. The penalty stays in the cumulative score. Source: arXiv 1611.08562.
    """

    @property
    def is_bounded(self) -> bool:
        """Penalties act within a beam."""
        return self.params.eos_rule != "any"

    def select(self, logprobs: Tensor, scores: Tensor, step: StepInfo) -> list[Candidates]:
        """Return the candidates of the only group."""
        count = self.num_candidates(step.widths[0], len(step.end_ids))
        if not step.groups[0][0].tokens:
            return [best_of_all(logprobs, scores, count)]
        beams, vocab = logprobs.shape
        each = min(count, vocab)
        places = torch.stack([best(logprobs[beam], each) for beam in range(beams)])
        penalties = self.params.sibling_penalty * torch.arange(
            1, each + 1, dtype=logprobs.dtype, device=logprobs.device
        )
        own = logprobs.gather(1, places) - penalties
        totals = (own + scores[:, None]).reshape(-1)
        flat = (places + torch.arange(beams, device=places.device)[:, None] * vocab).reshape(-1)
        chosen = best(totals, min(count, len(totals)))
        return [Candidates(totals[chosen], flat[chosen], own.reshape(-1)[chosen])]


Phrase = tuple[int, ...]


@final
@dataclass(frozen=True, slots=True)
class OrderedPhrases:
    """Phrases one after another, with any tokens between them.

    A token that breaks a phrase restarts this phrase; the `done` phrases before it stay met. The sequence ends with
    `place` tokens of the next phrase.
    """

    phrases: tuple[Phrase, ...]
    done: int = 0
    place: int = 0

    @staticmethod
    def root(phrases: Sequence[Phrase]) -> OrderedPhrases:
        """Return the state of an empty sequence."""
        return OrderedPhrases(tuple(phrases))

    @property
    def is_met(self) -> bool:
        """Whether the last phrase is met."""
        return self.done == len(self.phrases)

    @property
    def num_tokens(self) -> int:
        """Number of phrase tokens of the sequence, those of a phrase in progress included."""
        return sum(map(len, self.phrases[: self.done])) + self.place

    def next_tokens(self) -> list[int]:
        """Return the next token of the phrase in progress."""
        return [] if self.is_met else [self.phrases[self.done][self.place]]

    def advance(self, token: int) -> OrderedPhrases:
        """Return the state after a token."""
        if self.is_met:
            return self
        phrase = self.phrases[self.done]
        place = longest_end((*phrase[: self.place], token), phrase)
        if place == len(phrase):
            return OrderedPhrases(self.phrases, self.done + 1, 0)
        return OrderedPhrases(self.phrases, self.done, place)


@final
@dataclass(frozen=True, slots=True)
class UnorderedPhrases:
    """Phrases in any order; one that is given k times must occur k times, without overlap with others.

    `missing` has counts and is sorted, `met` is the number of tokens of phrases that are met, and `current` the tokens
    that the sequence ends with and that begin a missing phrase.
    """

    missing: tuple[tuple[Phrase, int], ...]
    met: int = 0
    current: Phrase = ()

    @staticmethod
    def root(phrases: Sequence[Phrase]) -> UnorderedPhrases:
        """Return the state of an empty sequence."""
        return UnorderedPhrases(tuple(sorted(Counter(phrases).items())))

    @property
    def is_met(self) -> bool:
        """Whether no phrase is missing."""
        return not self._after_current.missing

    @property
    def _after_current(self) -> UnorderedPhrases:
        """The state if the current tokens are taken for a phrase that they complete."""
        return self._completed(self.current) if any(self.current == phrase for phrase, _ in self.missing) else self

    @property
    def num_tokens(self) -> int:
        """Number of phrase tokens of the sequence, those of a phrase in progress included."""
        return self.met + len(self.current)

    def next_tokens(self) -> list[int]:
        """Return the tokens that continue the phrases in progress, and the first ones of all missing phrases."""
        size = len(self.current)
        going = {phrase[size] for phrase, _ in self.missing if len(phrase) > size and phrase[:size] == self.current}
        return sorted(going | {phrase[0] for phrase, _ in self._after_current.missing})

    def advance(self, token: int) -> UnorderedPhrases:
        """Return the state after a token. A phrase that begins a longer missing one is met when that is left."""
        longer = (*self.current, token)
        if any(phrase[: len(longer)] == longer for phrase, _ in self.missing):
            state = UnorderedPhrases(self.missing, self.met, longer)
        else:
            missing = {phrase for phrase, _ in self.missing}
            size = max((n for n in range(1, len(longer)) if longer[:n] in missing), default=0)
            if size:
                state = self._completed(longer[:size])
                for later in longer[size:]:
                    state = state.advance(later)
                return state
            place = max((longest_end(longer, phrase) for phrase in missing), default=0)
            state = UnorderedPhrases(self.missing, self.met, longer[len(longer) - place :])
        is_phrase = any(state.current == phrase for phrase, _ in state.missing)
        begins = any(
            len(phrase) > len(state.current) and phrase[: len(state.current)] == state.current
            for phrase, _ in state.missing
        )
        return state._completed(state.current) if is_phrase and not begins else state

    def _completed(self, phrase: Phrase) -> UnorderedPhrases:
        counts = dict(self.missing)
        counts[phrase] -= 1
        left = tuple((found, count) for found, count in self.missing if found != phrase or count > 1)
        left = tuple((found, counts[found]) for found, _ in left)
        return UnorderedPhrases(left, self.met + len(phrase))


def longest_end(tokens: Phrase, phrase: Phrase) -> int:
    """Return the length of the longest beginning of `phrase` that `tokens` end with."""
    for size in range(min(len(tokens), len(phrase)), 0, -1):
        if tokens[len(tokens) - size :] == phrase[:size]:
            return size
    return 0


PhraseState = OrderedPhrases | UnorderedPhrases
"""How much of the required phrases a sequence contains; immutable."""


@final
class LexicalConstraints(Strategy):
    """Lexical constraints: every sequence contains the given phrases.

    Candidates are the best of all beams, the best of each beam, and the next phrase tokens of each beam. Beams are
    grouped into banks by the number of phrase tokens that they contain, and the banks share the places.

    Source: arXiv 1804.06609, 1905.04519.
    """

    def __init__(self, params: BeamSearchParams) -> None:
        super().__init__(params)
        rule = OrderedPhrases if params.ordered else UnorderedPhrases
        self._root: PhraseState = rule.root([tuple(phrase) for phrase in params.force_words_ids])

    def check(self, prompt: Sequence[int], end_ids: Sequence[int], vocab_size: int) -> None:
        """Refuse phrases with a token that ends a sequence, or that does not exist."""
        for phrase in self.params.force_words_ids:
            for token in phrase:
                if token in end_ids:
                    raise InvalidRequestError(
                        f"a phrase of force_words_ids holds token {token}, which ends a sequence: "
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
        """Forbid the end of sequences that lack a phrase, except at the limit."""
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


def strategy_for(params: BeamSearchParams) -> Strategy:
    """Return a new strategy for one search; parameters that exclude each other were refused before."""
    if params.sampling == "beam":
        return BeamSampling(params)
    if params.sampling == "independent":
        return IndependentSampling(params)
    if params.num_beam_groups > 1:
        return DiverseGroups(params)
    if params.sibling_penalty:
        return DiverseSiblings(params)
    if params.force_words_ids:
        return LexicalConstraints(params)
    return BeamStrategy(params)
