"""Search of one text: live beams, finished hypotheses, and one step on the host."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from draftree.beam.candidates import Candidates
from draftree.beam.finished import LengthScore, Pool, coverage
from draftree.beam.fit import require_fit
from draftree.beam.group import Beam, Columns, Division, Group, divide
from draftree.beam.hooks import Decode, Hooks, OnStep
from draftree.beam.opening import BeamPrompt
from draftree.beam.params import BeamSearchParams
from draftree.beam.result import BeamResult, Hypothesis
from draftree.beam.strategies import of
from draftree.beam.strategies.base import Candidate, StepInfo
from draftree.beam.trunk import Tip
from draftree.core.errors import GenerationError, UnsatisfiableError
from draftree.core.transfer import to_device


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
                if not self.has_bound or not best > self._best_unscored(group):
                    return None
            found.append(scored)
        return found

    @staticmethod
    def _best_unscored(group: Group) -> float:
        return max((beam.score for beam in group.beams if not beam.is_scored), default=-math.inf)

    @property
    def has_bound(self) -> bool:
        """Whether the score of a beam bounds the scores of its continuations, rounding included."""
        params = self.params
        is_exact = not params.models and not params.prefix_bias_beta and self._hooks is None
        return is_exact and self.strategy.is_bounded and not params.increments_may_be_positive

    def select(self, logprobs: Tensor, beams: Sequence[Sequence[Beam]]) -> list[Candidates]:
        """Return the candidates of each live group, on the device.

        Args:
            logprobs: rows of the beams after `shape`, shape (beams, vocab).
            beams: scored beams of each live group, as returned by `ready`.
        """
        step = StepInfo(beams, [group.width for group in self.going], self.end_ids, self.is_last)
        self.strategy.mask(logprobs, step)
        logprobs = self.strategy.score(logprobs, step)
        scores = to_device([beam.score for beam in step.beams], logprobs.device, dtype=logprobs.dtype)
        return self.strategy.select(logprobs, scores, step)

    def advance(self, found: Sequence[Columns], vocab_size: int, beams: Sequence[Sequence[Beam]]) -> bool:
        """Finish texts and choose the next beams, unless a beam that is not scored could change the result.

        Args:
            found: scores, places and log-probabilities of the candidates of each live group.
            vocab_size: width of the rows.
            beams: scored beams of each live group.

        Returns:
            Whether the step was made.
        """
        going, divisions = self.going, []
        for group, columns, own in zip(going, found, beams, strict=True):
            candidates = self.strategy.arrange(group.candidates(own, columns, vocab_size))
            division = self._divide(group, candidates)
            if len(own) < len(group.beams) and not division.lowest > self._best_unscored(group):
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
        """Return the best hypotheses.

        Raises:
            UnsatisfiableError: `strict` is set, and no hypothesis contains all phrases.
        """
        found = [hypothesis for group in self.groups for hypothesis in group.pool.hypotheses]
        found.sort(key=lambda hypothesis: (not hypothesis.constraints_met, -hypothesis.score))
        if self.params.strict:
            found = [hypothesis for hypothesis in found if hypothesis.constraints_met]
            if not found:
                raise UnsatisfiableError(
                    f"no text of prompt {self.index} contains all phrases of force_words_ids within {self.limit} "
                    "tokens: raise max_new_tokens or beam_width, or set strict to False"
                )
        best = [self._worded(hypothesis) for hypothesis in found[: self.params.num_return_sequences]]
        return BeamResult(
            self.opening.shown, tuple(best), self.num_steps, self.num_passes, self.num_drafted, self.num_used
        )

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
