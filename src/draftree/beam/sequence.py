"""The search of one prompt: live beams, finished hypotheses, and one step on the host."""

from __future__ import annotations

import bisect
import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from draftree.beam.forest import Tip, require_source
from draftree.beam.params import BeamSearchParams
from draftree.beam.phrases import OrderedPhrases, UnorderedPhrases
from draftree.beam.result import BeamResult, Hypothesis
from draftree.beam.strategies import Beam, Candidate, Candidates, Step, order_by_banks, strategy_for
from draftree.core.errors import GenerationError, InvalidRequestError, UnsatisfiableError
from draftree.core.tensors import to_device
from draftree.engine.sequence import DecoderInput

if TYPE_CHECKING:
    from draftree.models.base import LanguageModel

Columns = np.ndarray
"""Candidates of a group: scores, places (rank of the scored parent times the vocabulary plus the token) and
log-probabilities, shape (3, count)."""
Decode = Callable[[Sequence[int]], str]  # function from generated token ids to text
OnStep = Callable[["SequenceSearch"], None]  # function that is called with a search after each of its steps


class Hooks(ABC):
    """Rules from outside of the parameters."""

    @abstractmethod
    def process(self, search: SequenceSearch, logprobs: Tensor) -> Tensor:
        """Return changed log-probabilities of a search's live beams, shape (beams, vocab)."""

    @abstractmethod
    def ends(self, search: SequenceSearch, candidates: Sequence[Candidate]) -> Sequence[bool]:
        """Return whether each candidate ends, besides those with an end token."""


def require_fit(search: SequenceSearch, vocab_size: int, max_length: int, *, has_text: bool) -> None:
    """Check the parameters of a search against its prompt and its model."""
    for name, message in _misfits(search, vocab_size, max_length, has_text):
        raise InvalidRequestError(message, param=name)


def _misfits(search: SequenceSearch, vocab_size: int, max_length: int, has_text: bool) -> Iterator[tuple[str, str]]:
    params = search.params
    limit = search.limit
    prefix = params.prefix_token_ids
    trie = params.allowed_trie
    phrase_tokens = [token for phrase in params.force_words_ids for token in phrase]
    if limit < 1:
        text = f"the prompt has {len(search.prompt)} tokens, which leaves no room in a context of {max_length}"
        yield "prompt", f"{text}: shorten it"
    if search.minimum > limit:
        text = f"a sequence needs at least {search.minimum} tokens, but the limit is {limit} here"
        yield "min_new_tokens", f"{text}: lower the minimum, or raise the limit"
    if params.force_eos != "none" and not search.ends:
        text = f"force_eos='{params.force_eos}' needs an end token, and this search has none"
        yield "force_eos", f"{text}: give stop_token_ids, or set force_eos to 'none'"
    if trie is not None and trie.has_inner_ends and not search.ends:
        text = "allowed_trie has a sequence that begins another, and this search has no end token that could end it"
        yield "allowed_trie", f"{text}: give stop_token_ids, or do not set ignore_eos"
    if params.stop and not has_text:
        yield "stop", "stop strings need a tokenizer: give stop_token_ids instead"
    if len(prefix) > limit:
        text = f"prefix_token_ids has {len(prefix)} tokens, but the limit is {limit}"
        yield "prefix_token_ids", f"{text}: shorten it, or raise max_new_tokens"
    for token in search.ends:
        if token in prefix[:-1]:
            text = f"prefix_token_ids holds token {token}, which ends a sequence, before its last place"
            yield "prefix_token_ids", f"{text}: remove the tokens after it"
        if token in phrase_tokens:
            text = f"a phrase of force_words_ids holds token {token}, which ends a sequence"
            yield "force_words_ids", f"{text}: remove it from the phrase"
    unknown = (params.unk_token_id or 0,)
    for name, ids in (("prefix_token_ids", prefix), ("unk_token_id", unknown), ("force_words_ids", phrase_tokens)):
        if max(ids, default=0) >= vocab_size:
            yield name, f"{name} holds a token outside of the vocabulary, which ends at {vocab_size - 1}"


def require_models(model: LanguageModel, prompt: DecoderInput, params: BeamSearchParams) -> None:
    """Check that all models of a search take its prompt and share their vocabulary."""
    require_source(model, prompt, "prompts")
    others = [("models", other, prompt) for other in params.models]
    if params.lm_model is not None:
        others.append(("lm_model", params.lm_model, DecoderInput(prompt.tokens)))
    for name, other, opening in others:
        require_source(other, opening, name)
        if other.vocab_size != model.vocab_size:
            raise InvalidRequestError(
                f"a model of {name} has {other.vocab_size} tokens, and the model that is searched has "
                f"{model.vocab_size}: give a model with the same vocabulary",
                param=name,
            )
    if params.reads_attention and prompt.source is None:
        name = "coverage_penalty" if params.coverage_penalty else "return_attention"
        raise InvalidRequestError(
            f"{name} needs cross-attention, which encoder-decoder models have: leave it out", param=name
        )


def coverage(attention: Sequence[np.ndarray]) -> float:
    """Return the sum over the source of the logarithm of the attention that each position got, up to 1 each.

    Positions without any attention are left out, as in CTranslate2. Source: arXiv 1609.08144, equation 14.
    """
    total = np.stack(attention).sum(axis=0, dtype=np.float64)
    return float(np.log(np.minimum(total[total > 0], 1.0)).sum())


def ranking(hypothesis: Hypothesis) -> tuple[bool, float]:
    """Return the sort key of hypotheses, best first."""
    return not hypothesis.constraints_met, -hypothesis.score


@dataclass(slots=True)
class Group:
    """Beams that compete, at most `width`, and their finished hypotheses, best first."""

    width: int
    beams: list[Beam] = field(default_factory=list)
    hypotheses: list[Hypothesis] = field(default_factory=list)
    is_done: bool = False

    @property
    def best_unscored(self) -> float:
        """Highest cumulative log-probability of its beams that are not scored."""
        return max((beam.score for beam in self.beams if not beam.is_scored), default=-math.inf)


@dataclass(slots=True)
class Division:
    """The candidates of a group in a step: those that finish, with the reason, and those that go on.

    `lowest` is the score of the last candidate that was needed; -inf if more candidates could change the division.
    """

    candidates: Sequence[Candidate]
    finished: list[tuple[Candidate, str]] = field(default_factory=list)
    going: list[Candidate] = field(default_factory=list)
    lowest: float = -math.inf


class SequenceSearch:
    """Search of one prompt, the one with this index."""

    def __init__(
        self,
        index: int,
        opening: DecoderInput,
        params: BeamSearchParams,
        *,
        end_ids: Sequence[int],
        vocab_size: int,
        max_length: int,
        device: torch.device,
        decode: Decode | None = None,
        hooks: Hooks | None = None,
        on_step: OnStep | None = None,
    ) -> None:
        self.index = index
        self.opening = opening
        self.params = params
        self.prompt = list(opening.tokens)
        model_ends = () if params.ignore_eos else tuple(end_ids)
        self.ends = tuple(sorted(token for token in {*model_ends, *params.stop_token_ids} if 0 <= token < vocab_size))
        self.end_ids = to_device(self.ends, device)
        self.limit = min(params.limit(opening.length), max_length - len(self.prompt) + 1)
        self.minimum = params.minimum(opening.length)
        self._decode = decode
        self._hooks = hooks
        self._on_step = on_step
        require_fit(self, vocab_size, max_length, has_text=decode is not None)
        self.strategy = strategy_for(params)
        self._generator = torch.Generator().manual_seed(params.seed)
        num_groups = params.beam_width if params.sampling == "independent" else params.num_beam_groups
        self.groups = [Group(params.beam_width // num_groups) for _ in range(num_groups)]
        self.last_candidates: list[Candidate] = []
        self.num_steps = self.num_passes = self.num_drafted = self.num_used = 0
        self.error: GenerationError | None = None  # why the search has no result; None if there is no reason

    def start(self, tips: Sequence[Tip]) -> None:
        """Put the first beam of each group at the end of the prompt."""
        words = tuple(map(tuple, self.params.force_words_ids))
        phrases = (OrderedPhrases(words) if self.params.ordered else UnorderedPhrases(words)) if words else None
        for group in self.groups:
            group.beams = [Beam(list(tips), phrases=phrases)]

    @property
    def live(self) -> list[Beam]:
        return [beam for group in self.groups for beam in group.beams]

    @property
    def is_last(self) -> bool:
        """Whether the next token is the last before the limit."""
        return self.num_steps + 1 == self.limit

    @property
    def follows_prefix(self) -> bool:
        """Whether the next token is one of `prefix_token_ids`, which settings of the model do not restrict."""
        return self.num_steps < len(self.params.prefix_token_ids) and not self.params.prefix_bias_beta

    @property
    def is_done(self) -> bool:
        return not self.going

    @property
    def going(self) -> list[Group]:
        """The groups that have not ended."""
        return [group for group in self.groups if not group.is_done]

    def ready(self) -> list[list[Beam]] | None:
        """Return the scored beams of each live group with which a step may be possible; None if none is.

        Without a bound every live beam must be scored. With it, a beam that is not scored may be worse than all
        candidates that a step needs; `advance` decides that.
        """
        ready = []
        for group in self.going:
            scored = [beam for beam in group.beams if beam.is_scored]
            if len(scored) < len(group.beams):
                best = max((beam.score for beam in scored), default=-math.inf)
                if not self.has_bound or not best > group.best_unscored:
                    return None
            ready.append(scored)
        return ready

    @property
    def has_bound(self) -> bool:
        """Whether the score of a beam bounds the scores of its continuations, rounding included.

        Draws and phrases need all beams, and so do the rule "any" and the discount, by which the tokens of all count.
        """
        params = self.params
        is_exact = not params.models and not params.prefix_bias_beta and self._hooks is None
        takes_best = params.sampling == "none" and not params.force_words_ids and params.eos_rule != "any"
        return is_exact and takes_best and not params.diversity_discount and not params.increments_may_be_positive

    def select(self, logprobs: Tensor, beams: Sequence[Sequence[Beam]]) -> list[Candidates]:
        """Return the candidates of each live group, on the device, from shaped rows of the beams that are `ready`."""
        step = Step(self.params, beams, self.groups[0].width, self.end_ids, self.is_last, self._generator)
        scores = to_device([beam.score for beam in step.beams], logprobs.device, dtype=logprobs.dtype)
        return self.strategy(logprobs, scores, step)

    def advance(self, columns: Sequence[Columns], vocab_size: int, beams: Sequence[Sequence[Beam]]) -> bool:
        """Finish hypotheses and choose the next beams; False if a beam that is not scored could change the result."""
        going = self.going
        divisions = []
        for group, own_columns, scored in zip(going, columns, beams, strict=True):
            division = self._divide(group, self._candidates(group, own_columns, vocab_size, scored))
            if len(scored) < len(group.beams) and not division.lowest > group.best_unscored:
                return False
            divisions.append(division)
        for group, division in zip(going, divisions, strict=True):
            self._take(group, division)
        self.last_candidates = [candidate for division in divisions for candidate in division.candidates]
        self.num_steps += 1
        for group in going:
            group.is_done = not group.beams or self._is_final(group)
            if group.is_done:
                group.beams = []
        if self._on_step is not None:
            self._on_step(self)
        return True

    def _candidates(self, group: Group, columns: Columns, vocab_size: int, scored: Sequence[Beam]) -> list[Candidate]:
        """Return the possible candidates of the scored beams of a group, in the order of the strategy."""
        rank = {id(beam): index for index, beam in enumerate(group.beams)}
        candidates = []
        for score, place, logprob in columns.T.tolist():
            if score > -math.inf:
                index, token = divmod(int(place), vocab_size)
                candidates.append(Candidate(scored[index], rank[id(scored[index])], token, score, logprob))
        return order_by_banks(candidates) if self.params.force_words_ids else candidates

    def _divide(self, group: Group, candidates: Sequence[Candidate]) -> Division:
        """Divide the candidates of a group. Of draws the best of all go on, otherwise the first `width`."""
        ended = None if self._hooks is None or not candidates else self._hooks.ends(self, candidates)
        rule = self.params.eos_rule
        width = group.width
        is_last = self.is_last
        most_going = len(candidates) if self.params.sampling == "beam" else width
        division = Division(candidates)
        for place, candidate in enumerate(candidates):
            is_beyond = rule == "walk" or place >= width
            if rule != "any" and is_beyond and (len(division.going) == most_going or (is_last and rule == "top_k")):
                division.lowest = candidates[place - 1].score
                break
            may_finish = rule != "top_k" or place < width
            is_end = (ended is not None and ended[place]) or self._is_end(candidate)
            if is_end and may_finish:
                division.finished.append((candidate, "stop"))
            elif not is_end and len(division.going) < most_going and (may_finish or not is_last):
                division.going.append(candidate)
                if is_last:
                    division.finished.append((candidate, "length"))
        return division

    def _take(self, group: Group, division: Division) -> None:
        """Finish and continue the beams of a group; without an allowed token all of them finish."""
        if not division.candidates:
            if not self.num_steps:
                raise UnsatisfiableError(
                    f"no token is allowed at the beginning of the sequence for prompt {self.index}: relax the "
                    "constraints"
                )
            for beam in group.beams:
                self._finish(group, beam, "exhausted")
            group.beams = []
            return
        for candidate, reason in division.finished:
            self._finish(group, self._beam(candidate), reason)
        survivors = [] if self.is_last else [self._beam(candidate) for candidate in division.going]
        if self.params.sampling == "beam":
            survivors.sort(key=lambda beam: -beam.score)
        group.beams = survivors[: group.width]

    def _is_end(self, candidate: Candidate) -> bool:
        if candidate.token in self.ends:
            return True
        trie = self.params.allowed_trie
        if trie is not None and not len(trie.children(trie.step(candidate.parent.trie_node, candidate.token))):
            return True
        if not self.params.stop or self._decode is None or self.num_steps < self.minimum:
            return False
        text = self._decode((*candidate.parent.tokens, candidate.token))
        return any(stop in text for stop in self.params.stop)

    def _beam(self, candidate: Candidate) -> Beam:
        parent = candidate.parent
        trie = self.params.allowed_trie
        row = parent.tips[0].row if self.params.reads_attention else None
        return Beam(
            parent.tips,
            (*parent.tokens, candidate.token),
            candidate.score,
            (*parent.logprobs, candidate.logprob),
            (*parent.ranks, candidate.rank),
            phrases=None if parent.phrases is None else parent.phrases.advance(candidate.token),
            trie_node=0 if trie is None else trie.step(parent.trie_node, candidate.token),
            draft_tips=parent.draft_tips,
            attention=() if row is None or row.attention is None else (*parent.attention, row.attention),
        )

    @property
    def _num_kept(self) -> int:
        """Number of hypotheses that each group keeps."""
        return max(1, round(self.groups[0].width * self.params.patience))

    def _finish(self, group: Group, beam: Beam, reason: str) -> None:
        """Add a hypothesis. Beyond those that are kept the worst is dropped, or with "fcfs" the new one."""
        if self.params.early_stopping == "fcfs" and len(group.hypotheses) >= self._num_kept:
            return
        score = self._score(beam.score, len(beam.tokens), has_end=beam.tokens[-1] in self.ends)
        if self.params.coverage_penalty:
            score += self.params.coverage_penalty * coverage(beam.attention)
        hypothesis = Hypothesis(
            tokens=beam.tokens,
            score=score,
            cumulative_logprob=beam.score,
            token_logprobs=beam.logprobs,
            beam_indices=beam.ranks,
            finish_reason=reason,
            constraints_met=beam.meets_constraints,
            attention=tuple(tuple(row.tolist()) for row in beam.attention) if self.params.return_attention else None,
        )
        bisect.insort(group.hypotheses, hypothesis, key=ranking)
        del group.hypotheses[self._num_kept :]

    def _score(self, total: float, num_tokens: int, *, has_end: bool) -> float:
        """Return a cumulative log-probability over length**penalty; the length is at least 1."""
        basis = self.params.length_basis
        length = num_tokens - (has_end and basis != "generated")
        if basis == "prompt_and_generated":
            length += len(self.prompt)
        return float(total / max(1, length) ** self.params.length_penalty) if total else total

    def _is_final(self, group: Group) -> bool:
        """Whether a group with live beams ends by the stop rule."""
        rule = self.params.early_stopping
        if len(group.hypotheses) < self._num_kept:
            return False
        if rule in (True, "fcfs"):
            return True
        if rule == "never" and self.params.increments_may_be_positive:
            return False
        longest = rule == "never" and self.params.length_penalty > 0
        best = max(beam.score for beam in group.beams)
        bound = self._score(best, self.limit if longest else self.num_steps, has_end=False)
        return not bound > group.hypotheses[-1].score

    def result(self) -> BeamResult:
        """Return the best hypotheses; raises UnsatisfiableError if `strict` is set and none contains all phrases."""
        hypotheses = sorted((hypothesis for group in self.groups for hypothesis in group.hypotheses), key=ranking)
        if self.params.strict:
            hypotheses = [hypothesis for hypothesis in hypotheses if hypothesis.constraints_met]
            if not hypotheses:
                raise UnsatisfiableError(
                    f"no sequence of prompt {self.index} contains all phrases of force_words_ids within {self.limit} "
                    "tokens: raise max_new_tokens or beam_width, or set strict to False"
                )
        best = tuple(map(self._worded, hypotheses[: self.params.num_return_sequences]))
        return BeamResult(self.opening.shown, best, self.num_steps, self.num_passes, self.num_drafted, self.num_used)

    def _worded(self, hypothesis: Hypothesis) -> Hypothesis:
        """Return a hypothesis with its text, and with what ended it."""
        tokens = hypothesis.tokens
        params = self.params
        is_stopped = hypothesis.finish_reason == "stop"
        reason: int | str | None = tokens[-1] if is_stopped and tokens[-1] in params.stop_token_ids else None
        if self._decode is None:
            return dataclasses.replace(hypothesis, stop_reason=reason)
        text = self._decode(tokens[:-1] if tokens[-1] in self.ends else tokens)
        stop = next((stop for stop in params.stop if stop in text), None) if is_stopped else None
        if stop is not None:
            reason = stop
            text = text[: text.index(stop) + (len(stop) if params.include_stop_str_in_output else 0)]
        return dataclasses.replace(hypothesis, text=text, stop_reason=reason)
