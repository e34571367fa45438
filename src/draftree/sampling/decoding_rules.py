"""Settings that an encoder-decoder model's generation configuration prescribes for every text.

The start of the decoder and forced first tokens become the decoder's prompt. The other settings become processors, with
the meaning that they have in `generate` of transformers; a request's own parameter takes precedence over a default.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftree.core.errors import UnsupportedModelError
from draftree.sampling.logits_processors import (
    BadWords,
    Ban,
    MinTokens,
    NoRepeatNgram,
    Processor,
    RepetitionPenalty,
    RowContext,
)
from draftree.sampling.params import SamplingParams

# Rules of timestamps in the texts of Whisper (arXiv 2212.04356), as its reference implementation applies them.


@dataclass(frozen=True, slots=True)
class TimestampTokens:
    """Tokens of a model that writes timestamps."""

    off: int  # token in the decoder's prompt that turns timestamps off; the token after it is the timestamp 0
    end: int  # token that ends a text; all tokens below it are text
    max_initial: int | None = None  # largest timestamp that may begin a text, counted in steps from 0; None for any

    @property
    def first(self) -> int:
        """The timestamp 0; all later tokens are timestamps."""
        return self.off + 1


@dataclass(frozen=True, slots=True)
class Timestamps(Processor):
    """Allows timestamps in pairs and in ascending order only, and prefers them if they are more likely than text.

    A text begins with a timestamp. After the first timestamp of a pair comes text, after text another one, then the
    first timestamp of the next pair or the end.
    """

    tokens: TimestampTokens

    def apply(self, logits: Tensor, context: RowContext) -> Tensor:
        first = self.tokens.first
        end = self.tokens.end
        logits[:, self.tokens.off] = -math.inf
        output: list[int] = context.history.output.tolist()
        written = _last_timestamp(output, first)
        for row, path in enumerate(context.paths):
            tail = [*output[-2:], *path][-2:]
            after_timestamp = bool(tail) and tail[-1] >= first
            after_pair = after_timestamp and (len(tail) < 2 or tail[-2] >= first)
            if after_pair:
                logits[row, first:] = -math.inf
            elif after_timestamp:
                logits[row, :end] = -math.inf
            last = _last_timestamp(path, first)
            last = written if last is None else last
            if last is not None:
                # the second timestamp of a pair may be followed by an equal one, which begins the next pair
                logits[row, first : last if after_timestamp and not after_pair else last + 1] = -math.inf
            if not output and not path:
                self._begin(logits[row])
        probs = torch.log_softmax(logits.float(), dim=-1)
        prefers = probs[:, first:].logsumexp(dim=-1) > probs[:, :first].amax(dim=-1)
        logits[:, :first].masked_fill_(prefers[:, None], -math.inf)
        return logits

    def _begin(self, row: Tensor) -> None:
        row[: self.tokens.first] = -math.inf
        if self.tokens.max_initial is not None:
            row[self.tokens.first + self.tokens.max_initial + 1 :] = -math.inf


def _last_timestamp(tokens: Sequence[int], first: int) -> int | None:
    return next((token for token in reversed(tokens) if token >= first), None)


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a text between two timestamps."""

    start: int  # in steps of the timestamps
    end: int | None  # in steps; None if the text ends without one
    first: int  # index of its first token of text
    last: int  # index after its last token of text


def spans_of(tokens: Sequence[int], first: int) -> list[Span]:
    """Return the parts of a text (without the end of text) by its timestamps, the first of which is `first`.

    Parts without text are left out.
    """
    spans: list[Span] = []
    start, begun = 0, 0
    for place, token in enumerate([*tokens, first]):
        if token < first:
            continue
        is_last = place == len(tokens)
        if place > begun:
            spans.append(Span(start, None if is_last else token - first, begun, place))
        start, begun = token - first, place + 1
    return spans


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the text of a window."""

    start: int  # in steps of the timestamps, from the beginning of the window
    end: int  # likewise
    first: int  # index of its first token, the timestamp at its beginning included
    last: int  # index after its last token, timestamps included


@dataclass(frozen=True, slots=True)
class WindowCut:
    """What is kept of the text of a window."""

    parts: tuple[Part, ...]  # of the text, in order
    advance: int  # frames from the beginning of the window to that of the next one; at least 1


def cut_window(tokens: Sequence[int], first: int, *, frames: int, stride: int) -> WindowCut:
    """Cut the text of a window of long audio into parts, as `generate` of transformers does.

    Two timestamps in a row end a part and begin the next one. What follows the last such pair is unfinished and is
    dropped, unless the text ends with a single timestamp, after which there is no speech. A text without such a pair is
    one part and is kept whole.

    Args:
        tokens: token ids of the text, without the end of text.
        first: the timestamp 0.
    """
    is_time = [token >= first for token in tokens]
    pairs = [place for place in range(1, len(tokens)) if is_time[place - 1] and is_time[place]]
    if not pairs:
        times = [token - first for token, timed in zip(tokens, is_time, strict=True) if timed]
        end = times[-1] if times and times[-1] > 0 else frames // stride
        return WindowCut((Part(0, end, 0, len(tokens)),) if tokens else (), frames)
    is_closed = is_time[-1] and not is_time[-2]
    bounds = [0, *pairs, len(tokens)] if is_closed else [0, *pairs[:-1], pairs[-1] + 1]
    parts = []
    for begin, bound in itertools.pairwise(bounds):
        # the last part of an open text holds both timestamps of the pair, so that they are kept
        last = tokens[bound - 2] if not is_closed and bound == bounds[-1] else tokens[bound - 1]
        parts.append(Part(tokens[begin] - first, last - first, begin, bound))
    reached = (tokens[pairs[-1] - 1] - first) * stride
    return WindowCut(tuple(parts), frames if is_closed or reached < 1 else reached)


_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "encoder_repetition_penalty": (None, 1.0),
    "sequence_bias": (None,),
    "exponential_decay_length_penalty": (None,),
    "guidance_scale": (None, 1.0),
    "renormalize_logits": (None, False),
    "remove_invalid_values": (None, False),
    "watermarking_config": (None,),
    "token_healing": (None, False),
    "stop_strings": (None,),
}
"""Settings that are not supported, with their values that have no effect."""
_OF_BEAMS = ("num_beams", "num_beam_groups")  # settings of beam search, which plain decoding does not use


@dataclass(frozen=True, slots=True)
class SpeechRules:
    """Tokens with which the decoder's prompt of a model of speech states language and task."""

    languages: Mapping[str, int]  # token of each language by its code; empty for models of one language
    tasks: Mapping[str, int]  # token of each task by name
    no_timestamps: int | None  # token that turns timestamps off; None if there is none
    timestamps: TimestampTokens | None = None  # tokens of timestamps; None for models that write none
    previous: int | None = None  # token that precedes the text before the audio; None if there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingRules:
    """Settings of a generation configuration."""

    start_ids: tuple[int, ...]  # tokens before every text: the start of the decoder
    forced_first: int | None = None  # token that follows the start; None if the model chooses it
    forced_last: int | None = None  # token that ends a text of maximum length; None if the model chooses it
    suppressed: tuple[int, ...] = ()  # tokens that are never written
    suppressed_first: tuple[int, ...] = ()  # tokens that are not written as the first token
    bad_words: tuple[tuple[int, ...], ...] = ()  # runs of tokens that are never written
    no_repeat_ngram_size: int = 0  # no run of this many tokens occurs twice; 0 is off
    source_ngram_size: int = 0  # no run of this many tokens of the source is written; 0 is off
    repetition_penalty: float = 1.0  # 1 is off
    min_length: int = 0  # minimum number of tokens, the decoder's prompt included
    min_new_tokens: int = 0  # minimum number of tokens after the decoder's prompt
    # maximum number of tokens, the decoder's prompt included, for requests without `max_tokens`; None for no limit
    max_length: int | None = None
    note: str = ""  # message about settings that concern beam search only; empty if there are none
    speech: SpeechRules | None = None  # tokens of languages and tasks; None for models that have none

    @property
    def prompt(self) -> tuple[int, ...]:
        """The decoder's prompt if the request has none of its own."""
        return self.start_ids if self.forced_first is None else (*self.start_ids, self.forced_first)

    def processors(
        self,
        params: SamplingParams,
        source: Sequence[int],
        *,
        prompt: Sequence[int],
        limit: int,
        ends: Sequence[int],
    ) -> Iterator[Processor]:
        """Yield the processors for a request.

        Args:
            params: the request's parameters; where it sets one, the default of the configuration is not used.
            prompt: the decoder's prompt. Without the token that turns timestamps off, models that have it write them.
        """
        prompt_length = len(prompt)
        if self.repetition_penalty != 1.0 and params.sampling.repetition_penalty == 1.0:
            yield RepetitionPenalty(self.repetition_penalty)
        if self.no_repeat_ngram_size and not params.no_repeat_ngram_size:
            yield NoRepeatNgram(self.no_repeat_ngram_size)
        size = self.source_ngram_size
        if 0 < size <= len(source):
            yield BadWords([source[start : start + size] for start in range(len(source) - size + 1)])
        if self.bad_words:
            yield BadWords(self.bad_words)
        least = max(self.min_length - prompt_length, self.min_new_tokens)
        if least > params.min_tokens and ends:
            yield MinTokens(least, ends)
        if self.suppressed:
            yield Suppressed(self.suppressed)
        if self.suppressed_first:
            yield Suppressed(self.suppressed_first, first_only=True)
        if self.speech is not None and self.speech.timestamps is not None and self.speech.no_timestamps not in prompt:
            yield Timestamps(self.speech.timestamps)
        if self.forced_last is not None:
            yield ForcedAt(limit - prompt_length - 1, self.forced_last)


@dataclass(frozen=True, slots=True)
class Suppressed(Ban):
    """Forbids tokens everywhere, or as the first token only."""

    tokens: Sequence[int]
    first_only: bool = False

    def places(self, context: RowContext) -> tuple[np.ndarray, np.ndarray]:
        lengths = context.num_output_tokens
        rows = np.flatnonzero(lengths == 0) if self.first_only else np.arange(len(lengths))
        tokens = np.array(sorted(set(self.tokens)), dtype=np.int64)
        return np.repeat(rows, len(tokens)), np.tile(tokens, len(rows))


@dataclass(frozen=True, slots=True)
class ForcedAt(Processor):
    """Allows one token only at one place of the output; its logit becomes 0."""

    place: int
    token: int

    def apply(self, logits: Tensor, context: RowContext) -> Tensor:
        rows = torch.from_numpy(np.flatnonzero(context.num_output_tokens == self.place)).to(logits.device)
        if len(rows):
            logits[rows] = -math.inf
            logits[rows, self.token] = 0.0
        return logits


def decoding_rules(model: Any) -> DecodingRules:
    """Read the generation configuration of an encoder-decoder model of transformers."""
    kind, config = type(model).__name__, model.generation_config
    for name, without_effect in _REFUSED.items():
        value = getattr(config, name, None)
        if value not in without_effect:
            raise UnsupportedModelError(
                f"the generation configuration of {kind} sets {name} to {value!r}, which is not supported: remove it "
                "from model.generation_config or generation_config.json"
            )
    values = {name: getattr(config, name, None) for name in _OF_BEAMS}
    beams = [f"{name}={value}" for name, value in values.items() if value not in (None, 1)]
    return DecodingRules(
        start_ids=_start_ids(model),
        forced_first=_one_id(kind, config, "forced_bos_token_id"),
        forced_last=_one_id(kind, config, "forced_eos_token_id"),
        suppressed=tuple(_value(config, "suppress_tokens", ())),
        suppressed_first=tuple(_value(config, "begin_suppress_tokens", ())),
        bad_words=_bad_words(config),
        no_repeat_ngram_size=int(_value(config, "no_repeat_ngram_size", 0)),
        source_ngram_size=int(_value(config, "encoder_no_repeat_ngram_size", 0)),
        repetition_penalty=float(_value(config, "repetition_penalty", 1.0)),
        min_length=int(_value(config, "min_length", 0)),
        min_new_tokens=int(_value(config, "min_new_tokens", 0)),
        max_length=_max_length(model),
        speech=_speech_rules(config),
        note=f"{kind} is configured for {', '.join(beams)}; texts are decoded without beams" if beams else "",
    )


def _speech_rules(config: Any) -> SpeechRules | None:
    no_timestamps = _value(config, "no_timestamps_token_id", None)
    languages = _value(config, "lang_to_id", {})
    if no_timestamps is None and not languages:
        return None
    codes = {name.strip("<|>").lower(): int(token) for name, token in languages.items()}
    ends: Any = _value(config, "eos_token_id", None)
    end = ends[0] if isinstance(ends, (list, tuple)) and ends else ends
    timestamps = None
    if no_timestamps is not None and end is not None:
        most = _value(config, "max_initial_timestamp_index", None)
        timestamps = TimestampTokens(int(no_timestamps), int(end), None if most is None else int(most))
    previous = _value(config, "prev_sot_token_id", None)
    suppressed = _value(config, "suppress_tokens", ())
    if previous is None and no_timestamps is not None and len(suppressed) > 1:
        previous = suppressed[-2]  # as in generate: the configurations of Whisper name it there
    return SpeechRules(
        codes if getattr(config, "is_multilingual", True) else {},
        dict(_value(config, "task_to_id", {})),
        no_timestamps,
        timestamps,
        None if previous is None else int(previous),
    )


def _value(config: Any, name: str, default: Any) -> Any:
    value = getattr(config, name, None)
    return default if value is None else value


def _start_ids(model: Any) -> tuple[int, ...]:
    for config in (model.generation_config, model.config):
        for name in ("decoder_start_token_id", "bos_token_id"):
            if isinstance(token := getattr(config, name, None), int):
                return (token,)
    raise UnsupportedModelError(
        f"{type(model).__name__} names no decoder_start_token_id: set it in model.generation_config or "
        "generation_config.json"
    )


def _one_id(kind: str, config: Any, name: str) -> int | None:
    token = getattr(config, name, None)
    if isinstance(token, (list, tuple)):
        if len(token) != 1:
            raise UnsupportedModelError(
                f"the generation configuration of {kind} sets {name} to {list(token)}: one token is supported"
            )
        token = token[0]
    return None if token is None else int(token)


def _bad_words(config: Any) -> tuple[tuple[int, ...], ...]:
    ends = _value(config, "eos_token_id", ())
    alone = [[end] for end in (ends if isinstance(ends, (list, tuple)) else (ends,))]
    # as in generate, the end of text alone is no bad word
    return tuple(tuple(word) for word in _value(config, "bad_words_ids", ()) if list(word) not in alone)


def _max_length(model: Any) -> int | None:
    """Return the configured maximum; None for the default of transformers, which is no property of the model."""
    from transformers import GenerationConfig

    config = model.generation_config
    new = getattr(config, "max_new_tokens", None)
    if new is not None:
        return int(new) + len(_start_ids(model))
    most = getattr(config, "max_length", None)
    return None if most in (None, GenerationConfig().max_length, 20) else int(most)
