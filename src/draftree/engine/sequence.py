"""A sequence during generation: its tokens, text, limits and counts, and the drafts of its client."""

from __future__ import annotations

import enum
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Any, final

from draftree.core.errors import InvalidRequestError, PromptTooLongError
from draftree.core.tree import EMPTY, Draw, TokenTree
from draftree.core.types import SequenceRecord
from draftree.drafters.base import Drafter, DraftTraits, SequenceView
from draftree.engine.forced_tokens import ForcedTokens
from draftree.models.base import LanguageModel, Slot
from draftree.models.images import ImagePrompt, ImageReader
from draftree.models.source import EncoderDecoder, FeatureSource, Source, TokenSource
from draftree.options import WholeStart
from draftree.planners.base import Planner
from draftree.sampling.controls import Controls
from draftree.sampling.decoding_rules import DecodingRules
from draftree.sampling.history import History
from draftree.text.detokenize import Detokenizer, StopChecker
from draftree.verifiers.base import Guarantee


@dataclass(slots=True, eq=False)
class DraftChoice:
    """A drafter that requests can choose, and what belongs to it. Mutated by `release` only."""

    name: str
    drafter: Drafter[Any]
    traits: DraftTraits
    planner: Planner[Any]
    draw: Draw = Draw.FREE  # how its children are drawn, as agreed with the verifier

    def release(self, part: int, reason: str) -> None:
        """Free one of several merged drafters; between rounds only."""
        self.planner.release(part, reason)
        self.traits = self.drafter.release(part)


@dataclass(frozen=True, slots=True)
class DraftState:
    """A drafter's state of one sequence. Another drafter never receives it: it opens a new one."""

    choice: DraftChoice
    own: Any


@dataclass(slots=True)
class SequenceCounts:
    """Raw counts and seconds of one sequence. Mutated once per round.

    Seconds are those of the sequence's rounds, which are shared with other sequences in a batch.
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


SourceOrTokens = Sequence[int] | FeatureSource
"""A request's prompt: token ids, or features for models that read features."""


DecoderPrompt = Sequence[int] | WholeStart


@dataclass(frozen=True, slots=True)
class DecoderInput:
    """The beginning of a text."""

    tokens: Sequence[int]  # the prompt of a causal model, or the decoder's prompt
    source: Source | None = None  # what the decoder decodes from; None for causal models
    source_length: int = 0  # number of positions of the source
    rules: DecodingRules | None = None  # settings of an encoder-decoder model; None for causal models
    forced: tuple[int, ...] = ()  # tokens with which every sequence of a beam search begins, with a score of 0

    @property
    def shown(self) -> tuple[int, ...]:
        """The tokens that the user gave: those of the source, or the prompt."""
        return tuple(self.tokens) if self.source is None else self.source.tokens

    @property
    def length(self) -> int:
        """Number of tokens to which limits of a search relate: those of the source, or of the prompt."""
        return len(self.tokens) if self.source is None else self.source_length


def decoder_input(
    target: LanguageModel, prompt: SourceOrTokens, decoder_prompt: DecoderPrompt | None = None
) -> DecoderInput:
    """Return the beginning of a request's text.

    Args:
        prompt: token ids or features; the source of an encoder-decoder model.
        decoder_prompt: tokens that the decoder continues, after its start token, which may be left out, or a whole
            start; None for the model's forced first token, if it has one.
    """
    if not isinstance(target, EncoderDecoder):
        if decoder_prompt is not None or isinstance(prompt, FeatureSource):
            name = "decoder_prompt" if decoder_prompt is not None else "prompt"
            raise InvalidRequestError(
                f"{name} is for encoder-decoder models, and this model is causal: give the whole text as prompt",
                param=name,
            )
        return DecoderInput(prompt)
    source = prompt if isinstance(prompt, FeatureSource) else TokenSource(tuple(prompt))
    if isinstance(source, TokenSource) != (target.feature_shape is None):
        wanted = "token ids" if target.feature_shape is None else "features; use transcribe"
        raise InvalidRequestError(f"the prompt is of the wrong kind: this model reads {wanted}", param="prompt")
    length = target.source_length(source)
    if length > target.max_source_length:
        raise PromptTooLongError(
            f"the prompt has {length} tokens, but the model's encoder reads {target.max_source_length} at most: "
            "shorten the prompt",
            param="prompt",
        )
    return DecoderInput(decoder_tokens(target, decoder_prompt), source, length, target.rules)


def decoder_tokens(target: EncoderDecoder, prompt: DecoderPrompt | None) -> Sequence[int]:
    """Return the tokens that the decoder continues; arguments as for `decoder_input`."""
    start = target.rules.start_ids
    if prompt is None:
        return target.rules.prompt
    tokens = prompt.tokens if isinstance(prompt, WholeStart) else prompt
    outside = [token for token in tokens if not 0 <= token < target.vocab_size]
    if outside:
        raise InvalidRequestError(
            f"decoder_prompt holds token {outside[0]}, but the vocabulary ends at {target.vocab_size - 1}",
            param="decoder_prompt",
        )
    is_whole = isinstance(prompt, WholeStart) or tuple(tokens[: len(start)]) == start
    return tokens if is_whole else (*start, *tokens)


_ROUND_NUMBERS = itertools.count()


class FinishReason(enum.StrEnum):
    """The reason why a text ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probabilities under the model's own distribution, before any sampling control.

    Attributes:
        token_id: the written token.
        logprob: natural logarithm of its probability.
        top: the most likely tokens with their log-probabilities, best first.
        rank: 1 for the most likely token; None where it was not computed.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of verified text.

    Attributes:
        text: never empty.
        drafted: whether its token was drafted and accepted; False: a target token.
    """

    text: str
    drafted: bool


@dataclass(frozen=True, slots=True)
class Update:
    """The output of one sequence since its last update.

    Attributes:
        sequence: the sequence.
        pieces: verified text; empty while characters are incomplete or may belong to a stop string.
        is_last: whether the sequence is finished.
        token_ids: verified tokens, the one that ended the text included.
        drafted: for each token whether it was drafted and accepted.
        logprobs: one entry per token, if requested; else empty.
        rounds: one record per round of the sequence, if the request is traced; else empty.
    """

    sequence: WritingSequence
    pieces: tuple[Piece, ...] = ()
    is_last: bool = False
    token_ids: tuple[int, ...] = ()
    drafted: tuple[bool, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    rounds: tuple[SequenceRecord, ...] = ()

    @classmethod
    def joined(cls, updates: Sequence[Update]) -> Update:
        """Return successive updates of one sequence as one."""
        if len(updates) == 1:
            return updates[0]
        names = ("pieces", "token_ids", "drafted", "logprobs", "rounds")
        whole = {
            name: tuple(itertools.chain.from_iterable(getattr(update, name) for update in updates)) for name in names
        }
        return cls(updates[-1].sequence, is_last=updates[-1].is_last, **whole)


@final
@dataclass(eq=False)
class ClientDrafts:
    """The trees of one sequence, one at a time, and when they come. Mutated on the engine's thread only."""

    # grows with every round of any such sequence; the smallest has waited longest
    since: int = field(default_factory=lambda: next(_ROUND_NUMBERS))
    arrived: float = 0.0  # time of the last tree
    left: float | None = None  # time of the last verdict; None before the first, and while a tree is there
    seconds: float | None = None  # between the last verdict and the tree after it; None before that
    has_taken: bool = False  # whether a tree was verified
    _tree: TokenTree | None = None

    @property
    def is_waiting(self) -> bool:
        return self._tree is None

    @property
    def due(self) -> float | None:
        """When the next tree is expected; None if that is unknown."""
        return None if self.left is None or self.seconds is None else self.left + self.seconds

    def put(self, tree: TokenTree, arrived: float) -> None:
        self._tree = tree
        if self.left is not None:
            self.seconds = max(0.0, arrived - self.left)
        self.arrived = arrived
        self.left = None

    def take(self) -> TokenTree:
        """Return the tree, and wait for the next one; an empty tree if none has arrived."""
        tree, self._tree = self._tree, None
        self.since = next(_ROUND_NUMBERS)
        self.has_taken = True
        return EMPTY if tree is None else tree


@dataclass(eq=False, repr=False)
class WritingSequence:
    """One sequence during generation. Mutated by the engine only."""

    request_id: str
    index: int
    prompt: InitVar[Sequence[int]]
    _: KW_ONLY
    controls: Controls
    limit: int
    detokenizer: Detokenizer | None  # converts tokens to text; None if the model has no tokenizer
    draft_controls: InitVar[Controls | None] = None  # the controls for the drafter, if they differ from `controls`
    draft: InitVar[str] = ""  # name of the chosen drafter; empty for the default
    owner: InitVar[str | None] = ""
    priority: int = 0
    promise: Guarantee = Guarantee.SAME_TEXT
    # what an encoder-decoder model decodes from, the prompt being the decoder's; None for causal models
    source: Source | None = None
    source_length: int = 0
    slot: Slot | None = None
    # opens a slot with the beginning of the prompt, if token ids alone do not determine it
    opens: Callable[[], Slot] | None = None
    images: ImagePrompt | None = None  # a prompt with images, whose first tokens the reader reads; None for no images
    image_reader: ImageReader | None = None
    read: Future[Any] | None = None  # what the reader has begun to read and is not in a slot yet
    client_drafts: ClientDrafts | None = None  # trees of a client, which replace the drafter's
    draft_state: DraftState | None = None  # None for plain decoding, and without a slot
    plan_state: Any = None
    counts: SequenceCounts = field(default_factory=SequenceCounts)
    kernels: str = ""  # of the target's passes, for statistics
    fallback_reason: str | None = None
    violations: tuple[str, ...] | None = None
    finish_reason: FinishReason | None = None
    # the stop token or stop string of the request that ended the text; None for the model's end of text
    stop_reason: int | str | None = None
    error: Exception | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    # one entry per scored prompt token; the first token has no prediction
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=lambda: [None])
    drafted: list[bool] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    # records of the rounds since the last update; None unless the request is traced
    rounds: list[SequenceRecord] | None = None
    is_collected: bool = False  # whether the caller waits for the whole text only
    records_picks: bool = False  # whether records of rounds have the target's picks anyway
    _unshown: list[Piece] = field(default_factory=list)
    _num_shown: int = 0

    def __post_init__(
        self, prompt: Sequence[int], draft_controls: Controls | None, draft: str, owner: str | None
    ) -> None:
        controls = self.controls
        params = self.controls.params
        self.history = History(prompt, capacity=self.limit)
        source = () if self.source is None else self.source.tokens
        self.view = SequenceView(
            self.history, draft_controls or controls, draft=draft, owner=owner, source=source, encoded=self.source
        )
        self.rank = (self.priority, 0)  # position in the order of service; set by the scheduler
        # fits drafts to the grammar; None without one
        self.forced = None if controls.guide is None else ForcedTokens(controls.guide, self.history)
        self._num_scored = 0 if params.prompt_logprobs is None else len(prompt)
        self._stop: StopChecker | None = None
        if params.stop_strings:
            self._stop = StopChecker(params.stop_strings, include_in_output=params.include_stop_str_in_output)

    @property
    def prefix_key(self) -> Source | str | None:
        """What a slot's contents depend on besides token ids: slots are shared where it is equal."""
        return self.source if self.images is None else self.images.digest

    @property
    def shares_slots(self) -> bool:
        """Whether tokens, with the key, determine the contents of the slot."""
        return self.opens is None

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def is_paused(self) -> bool:
        """Whether the sequence waits for a tree of its client."""
        return self.client_drafts is not None and self.client_drafts.is_waiting

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """Token ids of the user's prompt: the source, if there is one."""
        if self.source is not None:
            return self.source.tokens
        return tuple(self.history.tokens[: self.history.prompt_length].tolist())

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the user's prompt: positions of the source, if there is one."""
        return self.history.prompt_length if self.source is None else self.source_length

    @property
    def num_pending(self) -> int:
        """Tokens that the target's slot does not contain yet; at least one, the root."""
        return len(self.history) - (0 if self.slot is None else self.slot.length)

    @property
    def scores_prompt(self) -> bool:
        """Whether requested log-probabilities of prompt tokens are still missing."""
        return len(self.prompt_logprobs) < self._num_scored

    @property
    def num_copyable(self) -> int:
        """Tokens that can be copied from another slot: all but the root, or those without a requested row."""
        return len(self.prompt_logprobs) - 1 if self.scores_prompt else len(self.history) - 1

    @property
    def room(self) -> int:
        """Number of tokens that may still be written."""
        return self.limit - len(self.history)

    def write(self, tokens: Sequence[int], num_drafted: int) -> int:
        """Append verified tokens up to the first that ends the text.

        Args:
            tokens: at least one; the first `num_drafted` were drafted and accepted, the last is the bonus.
        """
        for place, token in enumerate(tokens):
            drafted = place < num_drafted
            self.history.append([token])
            self.drafted.append(drafted)
            is_stop = token in self.controls.stop_ids
            if not is_stop or self.controls.params.include_stop_str_in_output:
                # one by one: bytes of a token after the end must not reach the text through `finish`
                self._show("" if self.detokenizer is None else self.detokenizer.push(token), drafted)
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
        # like stop tokens, stop strings end the text only after the first `min_tokens` tokens
        may_end = self.history.num_output_tokens > self.controls.params.min_tokens
        self._add(self._stop.push(text, may_end=may_end), drafted)
        if self._stop.matched is not None:
            self.finish_reason = FinishReason.STOP
            self.stop_reason = self._stop.matched

    def _end(self, reason: FinishReason, drafted: bool) -> None:
        rest = "" if self.detokenizer is None else self.detokenizer.finish()
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
        """Limit prompt and output to this length."""
        self.limit = min(self.limit, length)

    def fail(self, error: Exception) -> None:
        """End the sequence with an error; the written tokens stay."""
        self.error = error
        self.finish_reason = FinishReason.ERROR

    def abort(self) -> None:
        """End the sequence by request of the user."""
        self.finish_reason = FinishReason.ABORT

    def take_update(self) -> Update | None:
        """Return the output since the last call; None if there is none, and the sequence is not finished."""
        first, end = self._num_shown, len(self.drafted)
        if first == end and not self.is_finished:
            return None
        update = Update(
            self,
            tuple(self._unshown),
            self.is_finished,
            tuple(self.history.output[first:end].tolist()),
            tuple(self.drafted[first:end]),
            tuple(self.logprobs[first:end]),
            tuple(self.rounds or ()),
        )
        self._unshown = []
        self._num_shown = end
        if self.rounds:
            self.rounds = []
        return update


def slot_of(sequence: WritingSequence) -> Slot:
    """Return the target's slot of a sequence in a round."""
    assert sequence.slot is not None, "a sequence in a round has a slot"
    return sequence.slot
