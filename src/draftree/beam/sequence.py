"""The search of one prompt: live beams, finished hypotheses, and one step on the host."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from draftree.beam.candidates import Beam, Candidate, Candidates, Columns
from draftree.beam.forest import BeamPrompt, Tip, require_source
from draftree.beam.params import BeamSearchParams
from draftree.beam.result import BeamResult, Hypothesis
from draftree.beam.strategies import StepInfo, strategy_for
from draftree.core.errors import GenerationError, InvalidRequestError, UnsatisfiableError
from draftree.core.tensors import to_device

if TYPE_CHECKING:
    from draftree.models.base import LanguageModel

Decode = Callable[[Sequence[int]], str]
"""Function from generated token ids to text."""
OnStep = Callable[["SequenceSearch"], None]
"""Function that is called with a search after each of its steps."""


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
    params = search.params
    if search.limit < 1:
        raise InvalidRequestError(
            f"the prompt has {len(search.prompt)} tokens, which leaves no room in a context of {max_length}: "
            "shorten it",
            param="prompt",
        )
    if search.minimum > search.limit:
        raise InvalidRequestError(
            f"a sequence needs at least {search.minimum} tokens, but the limit is {search.limit} here: lower the "
            "minimum, or raise the limit",
            param="min_new_tokens",
        )
    if params.force_eos != "none" and not search.ends:
        raise InvalidRequestError(
            f"force_eos='{params.force_eos}' needs an end token, and this search has none: give stop_token_ids, or "
            "set force_eos to 'none'",
            param="force_eos",
        )
    if params.allowed_trie is not None and params.allowed_trie.has_inner_ends and not search.ends:
        raise InvalidRequestError(
            "allowed_trie has a sequence that begins another, and this search has no end token that could end it: give "
            "stop_token_ids, or do not set ignore_eos",
            param="allowed_trie",
        )
    if params.stop and not has_text:
        raise InvalidRequestError("stop strings need a tokenizer: give stop_token_ids instead", param="stop")
    forced = params.prefix_token_ids
    if len(forced) > search.limit:
        raise InvalidRequestError(
            f"prefix_token_ids has {len(forced)} tokens, but the limit is {search.limit}: shorten it, or raise "
            "max_new_tokens",
            param="prefix_token_ids",
        )
    for token in forced[:-1]:
        if token in search.ends:
            raise InvalidRequestError(
                f"prefix_token_ids holds token {token}, which ends a sequence, before its last place: remove the "
                "tokens after it",
                param="prefix_token_ids",
            )
    for name, ids in (("prefix_token_ids", forced), ("unk_token_id", (params.unk_token_id or 0,))):
        if any(token >= vocab_size for token in ids):
            raise InvalidRequestError(
                f"{name} holds a token outside of the vocabulary, which ends at {vocab_size - 1}", param=name
            )


def require_models(model: LanguageModel, prompt: BeamPrompt, params: BeamSearchParams) -> None:
    """Check that all models of a search take its prompt and share their vocabulary."""
    require_source(model, prompt, "prompts")
    for other in params.models:
        require_source(other, prompt, "models")
    if params.lm_model is not None:
        require_source(params.lm_model, BeamPrompt(prompt.tokens), "lm_model")
    for name, others in (("models", params.models), ("lm_model", [params.lm_model])):
        for other in others:
            if other is not None and other.vocab_size != model.vocab_size:
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


@dataclass(frozen=True, slots=True)
class LengthScore:
    """Score of a hypothesis: its cumulative log-probability over length**penalty."""

    penalty: float
    basis: str
    prompt_length: int

    def score(self, total: float, num_tokens: int, *, has_end: bool) -> float:
        """Return the score of a hypothesis of `num_tokens` generated tokens; its length is at least 1."""
        if total == 0.0:
            return total
        length = num_tokens
        if self.basis != "generated":
            length -= has_end
        if self.basis == "prompt_and_generated":
            length += self.prompt_length
        return float(total / max(1, length) ** self.penalty)


def coverage(attention: Sequence[np.ndarray]) -> float:
    """Return the sum over the source of the logarithm of the attention that each position got, up to 1 each.

    Positions without any attention are left out, as in CTranslate2. Source: arXiv 1609.08144, equation 14.
    """
    total = np.stack(attention).sum(axis=0, dtype=np.float64)
    return float(np.log(np.minimum(total[total > 0], 1.0)).sum())


@dataclass(slots=True)
class Pool:
    """The finished hypotheses of a search or of a group of `width` beams, best first."""

    params: BeamSearchParams
    width: int
    limit: int
    lengths: LengthScore
    hypotheses: list[Hypothesis] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Number of hypotheses that are kept."""
        if self.params.early_stopping == "fcfs":
            return max(1, round(self.width * self.params.patience))
        return self.width

    @property
    def is_full(self) -> bool:
        """Whether as many hypotheses as are kept have finished."""
        return len(self.hypotheses) >= self.size

    def add(self, hypothesis: Hypothesis) -> None:
        """Add a hypothesis. If the pool is full, the worst is dropped, or with "fcfs" the new one."""
        if self.is_full and self.params.early_stopping == "fcfs":
            return
        place = len(self.hypotheses)
        while place and self._rank(hypothesis) > self._rank(self.hypotheses[place - 1]):
            place -= 1
        self.hypotheses.insert(place, hypothesis)
        del self.hypotheses[self.size :]

    @staticmethod
    def _rank(hypothesis: Hypothesis) -> tuple[bool, float]:
        return hypothesis.constraints_met, hypothesis.score

    def is_final(self, best_total: float, num_tokens: int) -> bool:
        """Whether the search ends by its stop rule, given the best score of the live beams and their length."""
        if not self.is_full:
            return False
        rule = self.params.early_stopping
        if rule in (True, "fcfs"):
            return True
        if rule == "never" and self.params.increments_may_be_positive:
            return False
        longest = rule == "never" and self.params.length_penalty > 0
        bound = self.lengths.score(best_total, self.limit if longest else num_tokens, has_end=False)
        return not bound > self.hypotheses[-1].score


@dataclass(slots=True)
class Group:
    """Beams that compete, and their finished hypotheses."""

    width: int
    beams: list[Beam]
    pool: Pool
    is_done: bool = False

    @property
    def best(self) -> float:
        """Highest cumulative log-probability of its beams; -inf without any."""
        return max((beam.score for beam in self.beams), default=-math.inf)

    @property
    def best_unscored(self) -> float:
        """Highest cumulative log-probability of its beams that are not scored."""
        return max((beam.score for beam in self.beams if not beam.is_scored), default=-math.inf)

    def candidates(self, beams: Sequence[Beam], columns: Columns, vocab_size: int) -> list[Candidate]:
        """Return the possible candidates of `beams`; a place is an index of them times `vocab_size` plus the token."""
        rank = {id(beam): index for index, beam in enumerate(self.beams)}
        found = []
        for score, place, logprob in zip(*columns, strict=True):
            if score > -math.inf:
                parent = beams[place // vocab_size]
                found.append(Candidate(parent, rank[id(parent)], place % vocab_size, score, logprob))
        return found


@dataclass(slots=True)
class Division:
    """Candidates of a step that finish, with the reason, and those that go on.

    `lowest` is the score of the last candidate that was needed; -inf if more candidates could change the division.
    """

    finished: list[tuple[Candidate, str]] = field(default_factory=list)
    going: list[Candidate] = field(default_factory=list)
    lowest: float = -math.inf


def divide(
    candidates: Sequence[Candidate],
    reason_of: Callable[[int], str | None],
    *,
    width: int,
    rule: str,
    is_last: bool,
    is_ranked: bool,
) -> Division:
    """Divide the candidates of a group, which are in the order of the strategy.

    `reason_of` returns why the candidate at a place ends, or None; `rule` is `BeamSearchParams.eos_rule`. Unless
    candidates are ranked, the best of all go on.
    """
    found = Division()
    room = width if is_ranked else len(candidates)
    for place, candidate in enumerate(candidates):
        is_beyond = rule == "walk" or place >= width
        if rule != "any" and is_beyond and (len(found.going) == room or (is_last and rule == "top_k")):
            found.lowest = candidates[place - 1].score
            break
        may_finish = rule != "top_k" or place < width
        reason = reason_of(place)
        if reason is not None and may_finish:
            found.finished.append((candidate, reason))
        elif reason is None and len(found.going) < room and (may_finish or not is_last):
            found.going.append(candidate)
            if is_last:
                found.finished.append((candidate, "length"))
    return found


class SequenceSearch:
    """Search of one prompt, the one with this index."""

    def __init__(
        self,
        index: int,
        opening: BeamPrompt,
        params: BeamSearchParams,
        *,
        end_ids: Sequence[int],
        vocab_size: int,
        max_length: int,
        device: torch.device,
        decode: Decode | None = None,
        hooks: Hooks | None = None,
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
        require_fit(self, vocab_size, max_length, has_text=decode is not None)
        self.strategy = strategy_for(params)
        self.strategy.check(self.prompt, self.ends, vocab_size)
        lengths = LengthScore(params.length_penalty, params.length_basis, len(self.prompt))
        self.groups = [
            Group(width, [], Pool(params, width, self.limit, lengths)) for width in self.strategy.group_widths()
        ]
        self.last_candidates: list[tuple[tuple[int, ...], int]] = []
        """Tokens of the parent, and token, of each candidate of the last step."""
        self.num_steps = self.num_passes = self.num_drafted = self.num_used = 0
        self.error: GenerationError | None = None
        """Why the search has no result; None if there is no reason."""
        self.on_step: OnStep | None = None
        """Called after every step."""

    def start(self, tips: Sequence[Tip]) -> None:
        """Put the first beam of each group at the end of the prompt."""
        for group in self.groups:
            group.beams = [Beam(list(tips))]

    @property
    def live(self) -> list[Beam]:
        """All live beams, groups in order."""
        return [beam for group in self.groups for beam in group.beams]

    @property
    def num_tokens(self) -> int:
        """Number of generated tokens of every live beam."""
        return self.num_steps

    @property
    def is_last(self) -> bool:
        """Whether the next token is the last before the limit."""
        return self.num_steps + 1 == self.limit

    @property
    def is_done(self) -> bool:
        """Whether the search has ended."""
        return all(group.is_done for group in self.groups)

    @property
    def going(self) -> list[Group]:
        """The groups that have not ended."""
        return [group for group in self.groups if not group.is_done]

    def ready(self) -> list[list[Beam]] | None:
        """Return the scored beams of each live group with which a step may be possible; None if none is.

        Without a bound every live beam must be scored. With it, a beam that is not scored may be worse than all
        candidates that a step needs; `advance` decides that.
        """
        found = []
        for group in self.going:
            scored = [beam for beam in group.beams if beam.is_scored]
            if len(scored) < len(group.beams):
                best = max((beam.score for beam in scored), default=-math.inf)
                if not self.has_bound or not best > group.best_unscored:
                    return None
            found.append(scored)
        return found

    @property
    def has_bound(self) -> bool:
        """Whether the score of a beam bounds the scores of its continuations, rounding included."""
        params = self.params
        is_exact = not params.models and not params.prefix_bias_beta and self._hooks is None
        return is_exact and self.strategy.is_bounded and not params.increments_may_be_positive

    def select(self, logprobs: Tensor, beams: Sequence[Sequence[Beam]]) -> list[Candidates]:
        """Return the candidates of each live group, on the device, from shaped rows of the beams that are `ready`."""
        step = StepInfo(beams, [group.width for group in self.going], self.end_ids, self.is_last)
        self.strategy.mask(logprobs, step)
        logprobs = self.strategy.score(logprobs, step)
        scores = to_device([beam.score for beam in step.beams], logprobs.device, dtype=logprobs.dtype)
        return self.strategy.select(logprobs, scores, step)

    def advance(self, found: Sequence[Columns], vocab_size: int, beams: Sequence[Sequence[Beam]]) -> bool:
        """Finish hypotheses and choose the next beams; False if a beam that is not scored could change the result."""
        going = self.going
        divisions = []
        for group, columns, own in zip(going, found, beams, strict=True):
            candidates = self.strategy.arrange(group.candidates(own, columns, vocab_size))
            division = self._divide(group, candidates)
            if len(own) < len(group.beams) and not division.lowest > group.best_unscored:
                return False
            divisions.append((candidates, division))
        for group, (candidates, division) in zip(going, divisions, strict=True):
            if candidates:
                self._take(group, division)
            else:
                self._exhaust(group)
        self.last_candidates = [(one.parent.tokens, one.token) for own, _ in divisions for one in own]
        self.num_steps += 1
        for group in going:
            group.is_done = not group.beams or group.pool.is_final(group.best, self.num_steps)
            if group.is_done:
                group.beams = []
        if self.on_step is not None:
            self.on_step(self)
        return True

    def _divide(self, group: Group, candidates: Sequence[Candidate]) -> Division:
        is_ended = None if self._hooks is None or not candidates else self._hooks.ends(self, candidates)

        def reason_of(place: int) -> str | None:
            return "stop" if is_ended is not None and is_ended[place] else self._end_reason(candidates[place])

        return divide(
            candidates,
            reason_of,
            width=group.width,
            rule=self.params.eos_rule,
            is_last=self.is_last,
            is_ranked=self.strategy.is_ranked,
        )

    def _take(self, group: Group, division: Division) -> None:
        for candidate, reason in division.finished:
            group.pool.add(self._hypothesis(self._beam(candidate), reason))
        survivors = [self._beam(candidate) for candidate in division.going]
        if not self.strategy.is_ranked:
            survivors.sort(key=lambda beam: -beam.score)
        group.beams = [] if self.is_last else survivors[: group.width]

    def _exhaust(self, group: Group) -> None:
        """Finish the live beams of a group in which no token is allowed."""
        if not self.num_steps:
            raise UnsatisfiableError(
                f"no token is allowed at the beginning of the sequence for prompt {self.index}: relax the constraints"
            )
        for beam in group.beams:
            group.pool.add(self._hypothesis(beam, "exhausted"))
        group.beams = []

    def _end_reason(self, candidate: Candidate) -> str | None:
        if candidate.token in self.ends:
            return "stop"
        trie = self.params.allowed_trie
        if trie is not None and not len(trie.children(trie.step(candidate.parent.trie_node, candidate.token))):
            return "stop"
        if self.params.stop and self._decode is not None and self.num_steps >= self.minimum:
            text = self._decode((*candidate.parent.tokens, candidate.token))
            if any(stop in text for stop in self.params.stop):
                return "stop"
        return None

    def _beam(self, candidate: Candidate) -> Beam:
        parent = candidate.parent
        beam = Beam(
            parent.tips,
            (*parent.tokens, candidate.token),
            candidate.score,
            (*parent.logprobs, candidate.logprob),
            (*parent.ranks, candidate.rank),
            draft_tips=parent.draft_tips,
        )
        if self.params.allowed_trie is not None:
            beam.trie_node = self.params.allowed_trie.step(parent.trie_node, candidate.token)
        row = parent.tips[0].row if self.params.reads_attention else None
        if row is not None and row.attention is not None:
            beam.attention = (*parent.attention, row.attention)
        self.strategy.on_select(parent, beam)
        return beam

    def _hypothesis(self, beam: Beam, reason: str) -> Hypothesis:
        has_end = beam.tokens[-1] in self.ends
        score = self.groups[0].pool.lengths.score(beam.score, len(beam.tokens), has_end=has_end)
        if self.params.coverage_penalty:
            score += self.params.coverage_penalty * coverage(beam.attention)
        weights = tuple(tuple(row.tolist()) for row in beam.attention) if self.params.return_attention else None
        return Hypothesis(
            tokens=beam.tokens,
            score=score,
            cumulative_logprob=beam.score,
            token_logprobs=beam.logprobs,
            beam_indices=beam.ranks,
            finish_reason=reason,
            constraints_met=self.strategy.meets_constraints(beam),
            attention=weights,
        )

    def result(self) -> BeamResult:
        """Return the best hypotheses; raises UnsatisfiableError if `strict` is set and none contains all phrases."""
        found = [hypothesis for group in self.groups for hypothesis in group.pool.hypotheses]
        found.sort(key=lambda hypothesis: (not hypothesis.constraints_met, -hypothesis.score))
        if self.params.strict:
            found = [hypothesis for hypothesis in found if hypothesis.constraints_met]
            if not found:
                raise UnsatisfiableError(
                    f"no sequence of prompt {self.index} contains all phrases of force_words_ids within {self.limit} "
                    "tokens: raise max_new_tokens or beam_width, or set strict to False"
                )
        best = [self._worded(hypothesis) for hypothesis in found[: self.params.num_return_sequences]]
        return BeamResult(
            self.opening.shown, tuple(best), self.num_steps, self.num_passes, self.num_drafted, self.num_used
        )

    def _worded(self, hypothesis: Hypothesis) -> Hypothesis:
        """Return a hypothesis with its text, and with what ended it."""
        tokens = hypothesis.tokens
        params = self.params
        has_end = tokens[-1] in self.ends
        is_stopped = hypothesis.finish_reason == "stop"
        reason: int | str | None = tokens[-1] if is_stopped and tokens[-1] in params.stop_token_ids else None
        if self._decode is None:
            return dataclasses.replace(hypothesis, stop_reason=reason)
        text = self._decode(tokens[:-1] if has_end else tokens)
        found = next((stop for stop in params.stop if stop in text), None) if is_stopped else None
        if found is not None:
            reason = found
            text = text[: text.index(found) + (len(found) if params.include_stop_str_in_output else 0)]
        return dataclasses.replace(hypothesis, text=text, stop_reason=reason)
