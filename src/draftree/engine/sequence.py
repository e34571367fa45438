"""What is being written: one sequence of a request, its tokens, text, limits and counts."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Series
from dataclasses import dataclass, field
from typing import Any

from draftree.drafters.base import SequenceView
from draftree.models.base import Slot
from draftree.sampling.controls import Controls
from draftree.sampling.history import History
from draftree.text.detokenize import Detokenizer
from draftree.text.stop import StopChecker
from draftree.verifiers.base import Promise


class FinishReason(enum.StrEnum):
    """Why a text ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probabilities under the model's own distribution, before any control.

    Attributes:
        token_id: the token that was written.
        logprob: its natural logarithm of probability.
        top: the likeliest tokens with theirs, best first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that may be shown.

    Attributes:
        text: never empty.
        drafted: whether its token was drafted and accepted; False: picked by the target.
    """

    text: str
    drafted: bool


@dataclass(slots=True)
class SequenceCounts:
    """Raw counts and seconds of one sequence. Mutated once a round.

    Seconds are those of the rounds in which the sequence took part: in a batch they are shared with others.
    """

    rounds: int = 0
    cached_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    first_tokens: int = 0
    plan_seconds: float = 0.0
    draft_seconds: float = 0.0
    score_seconds: float = 0.0
    verify_seconds: float = 0.0
    commit_seconds: float = 0.0
    accepted_by_depth: list[int] = field(default_factory=list)
    drafted_by_depth: list[int] = field(default_factory=list)
    drafted_by_source: Counter[str] = field(default_factory=Counter)
    accepted_by_source: Counter[str] = field(default_factory=Counter)
    explain: str = ""


class WritingSequence:
    """One sequence while it is written. Mutated by the engine only.

    Args:
        request_id: whose sequence it is.
        index: which of the request's n.
        prompt: token ids.
        controls: sampling controls.
        limit: tokens of prompt and output at most.
        detokenizer: turns tokens into text; None where the model has no tokenizer.
        draft_controls: what the drafter takes the controls to be, where they are not `controls`.
        priority: lower numbers are served first.
        promise: what its text has in common with that of plain decoding.
    """

    def __init__(
        self,
        request_id: str,
        index: int,
        prompt: Series[int],
        *,
        controls: Controls,
        limit: int,
        detokenizer: Detokenizer | None,
        draft_controls: Controls | None = None,
        priority: int = 0,
        promise: Promise = Promise.SAME_TEXT,
    ) -> None:
        self.request_id = request_id
        self.index = index
        self.history = History(prompt, capacity=limit)
        self.controls = controls
        self.view = SequenceView(self.history, draft_controls or controls)
        self.limit = limit
        self.priority = priority
        self.promise = promise
        self.rank = (priority, 0)
        """Its place in the order of service; the scheduler's."""
        self.slot: Slot | None = None
        self.opens: Callable[[], Slot] | None = None
        """Opens a slot that holds the beginning of the prompt, where tokens alone do not say what it is; else None."""
        self.draft_state: Any = None
        self.plan_state: Any = None
        self.counts = SequenceCounts()
        self.kernels = ""
        self.kernels_reason: str | None = None
        """Of the target's passes, for statistics."""
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        """The stop token or stop string of the request that ended the text; None for the model's end of text."""
        self.error: Exception | None = None
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob | None] = [None]
        """One entry for each prompt token that is scored; nothing predicts the first one."""
        self._num_scored = 0 if controls.params.prompt_logprobs is None else len(prompt)
        self.drafted: list[bool] = []
        self.texts: list[str] = []
        self._detokenizer = detokenizer
        params = controls.params
        self._stop = None
        if params.stop_strings:
            self._stop = StopChecker(params.stop_strings, include_in_output=params.include_stop_str_in_output)
        self._unshown: list[Piece] = []

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will be written."""
        return self.finish_reason is not None

    @property
    def num_pending(self) -> int:
        """Written tokens that the target's slot does not hold yet; at least one, the root."""
        return len(self.history) - (0 if self.slot is None else self.slot.length)

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of prompt tokens are wanted that are not known yet."""
        return len(self.prompt_logprobs) < self._num_scored

    @property
    def num_copyable(self) -> int:
        """Tokens that need not be read if another slot holds them: all but the root, or those without a wanted row."""
        return len(self.prompt_logprobs) - 1 if self.scores_prompt else len(self.history) - 1

    @property
    def room(self) -> int:
        """Tokens that may still be written."""
        return self.limit - len(self.history)

    def write(self, tokens: Series[int], num_drafted: int) -> int:
        """Append verified tokens up to the first that ends the text.

        Args:
            tokens: at least one; the first `num_drafted` were drafted and accepted, the last is the bonus.
            num_drafted: how many of them were drafted.

        Returns:
            How many were written.
        """
        for place, token in enumerate(tokens):
            drafted = place < num_drafted
            self.history.append([token])
            self.drafted.append(drafted)
            is_stop = token in self.controls.stop_ids
            if not is_stop or self.controls.params.include_stop_str_in_output:
                # one by one: bytes of a token behind the end must not reach the text through `finish`
                self._show("" if self._detokenizer is None else self._detokenizer.push((token,))[0], drafted)
            if not self.is_finished and (is_stop or self.room == 0):
                self._end(FinishReason.STOP if is_stop else FinishReason.LENGTH, drafted)
                if is_stop and self.stop_reason is None and token not in self.controls.eos_ids:
                    self.stop_reason = token
            if self.is_finished:
                return place + 1
        return len(tokens)

    def _show(self, text: str, drafted: bool) -> None:
        if not text:
            return
        if self._stop is None:
            self._add(text, drafted)
            return
        # as stop tokens, stop strings end the text behind the first `min_tokens` tokens only
        may_end = self.history.num_output_tokens > self.controls.params.min_tokens
        state = self._stop.push(text, may_end=may_end)
        self._add(state.text, drafted)
        if state.matched is not None:
            self.finish_reason, self.stop_reason = FinishReason.STOP, state.matched

    def _end(self, reason: FinishReason, drafted: bool) -> None:
        rest = "" if self._detokenizer is None else self._detokenizer.finish()
        if rest:
            self._show(rest, drafted)
        if self.finish_reason is None:
            self._add("" if self._stop is None else self._stop.flush(), drafted)
            self.finish_reason = reason

    def _add(self, text: str, drafted: bool) -> None:
        if text:
            self.texts.append(text)
            self._unshown.append(Piece(text, drafted))

    def end_at(self, length: int) -> None:
        """Write nothing behind this length of prompt and output."""
        self.limit = min(self.limit, length)

    def fail(self, error: Exception) -> None:
        """End the sequence with an error; what was written stays."""
        self.error = error
        self.finish_reason = FinishReason.ERROR

    def abort(self) -> None:
        """End the sequence on the user's word."""
        self.finish_reason = FinishReason.ABORT

    def take_pieces(self) -> tuple[Piece, ...]:
        """Text that became showable since the last call."""
        pieces, self._unshown = tuple(self._unshown), []
        return pieces
