"""Search of one text: live beams, finished hypotheses, and one step on the host."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftree.beam.candidates import Candidates
from draftree.beam.finished import LengthScore, Pool
from draftree.beam.fit import require_fit
from draftree.beam.forest import Tip
from draftree.beam.opening import BeamPrompt
from draftree.beam.params import BeamSearchParams
from draftree.beam.result import BeamResult, Hypothesis
from draftree.beam.strategies import of
from draftree.beam.strategies.base import Candidate, StepInfo
from draftree.core.errors import GenerationError
from draftree.core.transfer import to_device

Decode = Callable[[Sequence[int]], str]
"""Function from generated token ids to text."""

OnStep = Callable[["TextSearch"], None]
"""Function that is called with a search after each of its steps."""


class Hooks(ABC):
    """Rules from outside of the parameters."""

    @abstractmethod
    def process(self, text: TextSearch, logprobs: Tensor) -> Tensor:
        """Return changed log-probabilities of a text's live beams, shape (beams, vocab)."""

    @abstractmethod
    def ends(self, text: TextSearch, candidates: Sequence[Candidate]) -> Sequence[bool]:
        """Return whether each candidate ends, besides those with an end token."""


@dataclass(slots=True, eq=False)
class Beam:
    """A text in progress.

    Attributes:
        tips: end of the beam in the forest of each model.
        tokens: generated tokens.
        score: cumulative log-probability.
        logprobs: what each token added to it.
        ranks: for each token the rank of the beam that it continued.
        state: state of the strategy.
        trie_node: node of the trie that the text has reached.
    """

    tips: list[Tip]
    tokens: tuple[int, ...] = ()
    score: float = 0.0
    logprobs: tuple[float, ...] = ()
    ranks: tuple[int, ...] = ()
    state: Any = None
    trie_node: int = 0


@dataclass(slots=True)
class Group:
    """Beams that compete, and their finished hypotheses."""

    width: int
    beams: list[Beam]
    pool: Pool
    is_done: bool = False


class TextSearch:
    """Search of one prompt.

    Args:
        index: index of the prompt.
        opening: the prompt.
        params: parameters.
        end_ids: the model's end-of-text tokens.
        vocab_size: number of token ids.
        max_length: the model's maximum length.
        device: device of the log-probabilities.
        decode: for stop strings; None without a tokenizer.
        hooks: further rules; None for none.

    Raises:
        InvalidRequestError: the parameters do not fit the prompt or the model.
    """

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
        self.index, self.opening, self.params = index, opening, params
        self.prompt, count = list(opening.tokens), opening.length
        model_ends = () if params.ignore_eos else tuple(end_ids)
        self.ends = tuple(sorted(token for token in {*model_ends, *params.stop_token_ids} if 0 <= token < vocab_size))
        self.end_ids = to_device(self.ends, device)
        self.limit = min(params.limit(count), max_length - len(self.prompt) + 1)
        self.minimum = params.minimum(count)
        self._decode, self._hooks = decode, hooks
        require_fit(self, vocab_size, max_length, has_text=decode is not None)
        self.strategy = of(params)
        self.strategy.check(self.prompt, self.ends, vocab_size)
        lengths = LengthScore(params.length_penalty, params.length_basis, len(self.prompt))
        self.groups = [
            Group(width, [], Pool(params, width, self.limit, lengths)) for width in self.strategy.group_widths()
        ]
        self.num_steps = 0
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

    def select(self, logprobs: Tensor) -> list[Candidates]:
        """Return the candidates of each live group, on the device.

        Args:
            logprobs: rows of the live beams after `shape`, shape (beams, vocab).
        """
        going = [group for group in self.groups if not group.is_done]
        step = StepInfo([group.beams for group in going], [group.width for group in going], self.end_ids, self.is_last)
        self.strategy.mask(logprobs, step)
        logprobs = self.strategy.score(logprobs, step)
        scores = to_device([beam.score for beam in step.beams], logprobs.device, dtype=logprobs.dtype)
        return self.strategy.select(logprobs, scores, step)

    def advance(self, found: Sequence[tuple[list[float], list[int], list[float]]], vocab_size: int) -> None:
        """Finish texts and choose the next beams.

        Args:
            found: scores, places and log-probabilities of the candidates of each live group.
            vocab_size: width of the rows.
        """
        going = [group for group in self.groups if not group.is_done]
        for group, (scores, places, logprobs) in zip(going, found, strict=True):
            candidates = [
                Candidate(group.beams[place // vocab_size], place // vocab_size, place % vocab_size, score, logprob)
                for score, place, logprob in zip(scores, places, logprobs, strict=True)
                if score > -math.inf
            ]
            self._advance(group, self.strategy.arrange(candidates))
        self.num_steps += 1
        for group in going:
            best = max((beam.score for beam in group.beams), default=-math.inf)
            group.is_done = not group.beams or group.pool.is_final(best, self.num_steps)
            if group.is_done:
                group.beams = []
        if self.on_step is not None:
            self.on_step(self)

    def _advance(self, group: Group, candidates: Sequence[Candidate]) -> None:
        if not candidates:
            self._exhaust(group)
            return
        rule, width, last = self.params.eos_rule, group.width, self.is_last
        survivors: list[Beam] = []
        is_ended = None if self._hooks is None else self._hooks.ends(self, candidates)
        room = width if self.strategy.is_ranked else len(candidates)
        for place, candidate in enumerate(candidates):
            if len(survivors) == room and rule != "any" and (rule == "walk" or place >= width):
                break
            reason = "stop" if is_ended is not None and is_ended[place] else self._end_reason(candidate)
            may_finish = rule != "top_k" or place < width
            if reason is not None and may_finish:
                group.pool.add(self._hypothesis(self._beam(candidate), reason))
            elif reason is None and len(survivors) < room and (may_finish or not last):
                survivors.append(self._beam(candidate))
                if last:
                    group.pool.add(self._hypothesis(survivors[-1], "length"))
        if not self.strategy.is_ranked:
            survivors.sort(key=lambda beam: -beam.score)
        group.beams = [] if last else survivors[:width]

    def _exhaust(self, group: Group) -> None:
        """Finish the live beams of a group in which no token is allowed."""
        if not self.num_steps:
            raise GenerationError(
                f"no token is allowed at the beginning of the text for prompt {self.index}: relax the constraints"
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
        )
        if self.params.allowed_trie is not None:
            beam.trie_node = self.params.allowed_trie.step(parent.trie_node, candidate.token)
        self.strategy.on_select(parent, beam)
        return beam

    def _hypothesis(self, beam: Beam, reason: str) -> Hypothesis:
        has_end = beam.tokens[-1] in self.ends
        return Hypothesis(
            tokens=beam.tokens,
            score=self.groups[0].pool.lengths.score(beam.score, len(beam.tokens), has_end=has_end),
            cumulative_logprob=beam.score,
            token_logprobs=beam.logprobs,
            beam_indices=beam.ranks,
            finish_reason=reason,
            constraints_met=self.strategy.meets_constraints(beam),
        )

    def result(self) -> BeamResult:
        """Return the best hypotheses.

        Raises:
            GenerationError: `strict` is set, and no hypothesis contains all phrases.
        """
        found = [hypothesis for group in self.groups for hypothesis in group.pool.hypotheses]
        found.sort(key=lambda hypothesis: (not hypothesis.constraints_met, -hypothesis.score))
        if self.params.strict:
            found = [hypothesis for hypothesis in found if hypothesis.constraints_met]
            if not found:
                raise GenerationError(
                    f"no text of prompt {self.index} contains all phrases of force_words_ids within {self.limit} "
                    "tokens: raise max_new_tokens or beam_width, or set strict to False"
                )
        best = [self._worded(hypothesis) for hypothesis in found[: self.params.num_return_sequences]]
        return BeamResult(self.opening.shown, tuple(best), self.num_steps)

    def _worded(self, hypothesis: Hypothesis) -> Hypothesis:
        """Return a hypothesis with its text, and with what ended it."""
        tokens, params = hypothesis.tokens, self.params
        has_end, is_stopped = tokens[-1] in self.ends, hypothesis.finish_reason == "stop"
        reason: int | str | None = tokens[-1] if is_stopped and tokens[-1] in params.stop_token_ids else None
        if self._decode is None:
            return dataclasses.replace(hypothesis, stop_reason=reason)
        text = self._decode(tokens[:-1] if has_end else tokens)
        found = next((stop for stop in params.stop if stop in text), None) if is_stopped else None
        if found is not None:
            reason = found
            text = text[: text.index(found) + (len(found) if params.include_stop_str_in_output else 0)]
        return dataclasses.replace(hypothesis, text=text, stop_reason=reason)
