"""Transcription of audio that is longer than a model reads at once: consecutive windows, cut at timestamps.

The method is that of Whisper (arXiv 2212.04356, section 3.8), with the rules of `generate` of transformers for greedy
texts: a window is transcribed with timestamps. If its text has two timestamps in a row, the part after the last such
pair is dropped, and the next window begins at the time of that pair; otherwise it begins where the window ends.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TypeVar, final

import numpy as np

from draftree.core.errors import InvalidRequestError
from draftree.engine.sequence import TokenLogprob
from draftree.models.source import FeatureSource
from draftree.options import WholeStart
from draftree.outputs import Completion
from draftree.sampling.decoding_rules import cut_window
from draftree.sampling.params import SamplingParams
from draftree.speech.transcriber import Detection, Segment, Speech, Transcriber, language_code


@dataclass(frozen=True, slots=True)
class Transcript:
    text: str  # without timestamps
    # tokens of all windows that were kept, timestamps included; each window's timestamps begin at 0
    token_ids: tuple[int, ...]
    # parts of the text, with times from the beginning of the audio and places in `token_ids`
    segments: tuple[Segment, ...]
    seconds: float
    language: str | None  # code of the language; None if the model knows one only
    windows: tuple[Completion, ...]  # what was written for each window, in order
    logprobs: tuple[TokenLogprob, ...] | None = None  # one entry for each token, if they were requested


Params = TypeVar("Params", bound=SamplingParams)


@final
class LongSpeech:
    """The windows of one audio: call `window` and `take` in turns until `is_done`, then `transcript`.

    `features`: shape (channels, frames), any number of frames. `speech`: how it is transcribed; timestamps are always
    written. `detected`: the model's detection on the first window, if the language is to be detected. `conditioned`:
    whether the model is given the text of the windows before.
    """

    def __init__(
        self,
        work: Transcriber,
        features: np.ndarray,
        speech: Speech,
        *,
        detected: Detection | None = None,
        conditioned: bool = False,
    ) -> None:
        rules = work.rules
        if rules is None or rules.timestamps is None:
            raise InvalidRequestError(
                f"the audio is longer than the {work.longest:g} seconds that the model reads at once, and the model "
                "writes no timestamps at which it could be cut: cut it into parts",
                param="audio",
            )
        if conditioned and rules.previous is None:
            raise InvalidRequestError(
                "this model has no token for earlier text: leave condition_on_previous out",
                param="condition_on_previous",
            )
        self._work, self._features, self._conditioned = work, features, conditioned
        self._speech, self.detected = dataclasses.replace(speech, timestamps=True), detected
        self._first_timestamp = rules.timestamps.first
        self._size = work.shape[1]
        self._stride = self._size // work.target.max_source_length
        self._step = work.longest / work.target.max_source_length
        self._seek = 0
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._segments: list[Segment] = []
        self._windows: list[Completion] = []
        self._previous = work.text_ids(speech.prompt) if conditioned else []
        work.start(self._speech, detected)  # refuses what the model cannot do

    @property
    def is_done(self) -> bool:
        return self._seek >= self._features.shape[1]

    @property
    def seconds(self) -> float:
        return self._features.shape[1] * self._step / self._stride

    def window(self) -> tuple[FeatureSource, WholeStart]:
        """Return the source of the next window, with zeros after the end of the audio, and its decoder's prompt."""
        source = window_at(self._work, self._features, self._seek)
        earlier = self._previous if self._conditioned else None
        start = self._work.start(self._speech, self.detected, earlier=earlier)
        assert start is not None, "the model has tokens of timestamps"
        return source, start

    def params(self, params: Params, start: WholeStart) -> Params:
        """Return the sampling parameters of the next window.

        `params`: those of the request. The limit of tokens holds for each window, as far as the context allows. Each
        window draws with a seed of its own.
        """
        if params.n != 1:
            raise InvalidRequestError(f"n={params.n}: long audio has one text; set n to 1", param="n")
        changes: dict[str, int] = {}
        if params.max_tokens is not None:
            changes["max_tokens"] = min(params.max_tokens, self._work.target.max_length - len(start.tokens))
        if params.seed is not None and self._windows:
            changes["seed"] = (params.seed + len(self._windows)) % 2**63
        return dataclasses.replace(params, **changes)  # type: ignore[arg-type]

    def take(self, done: Completion) -> None:
        """Add the text of a window, and move to the next one.

        `done`: the text that followed the decoder's prompt of `window`.
        """
        self._windows.append(done)
        ids = list(done.token_ids)
        while ids and ids[-1] in self._work.requests.eos_ids:
            ids.pop()
        frames = min(self._size, self._features.shape[1] - self._seek)
        cut = cut_window(ids, self._first_timestamp, frames=frames, stride=self._stride)
        offset, before = self._seek * self._step / self._stride, len(self._tokens)
        for part in cut.parts:
            tokens = ids[part.first : part.last]
            if text := self._work.text(tokens):
                start, end = (offset + at * self._step for at in (part.start, part.end))
                self._segments.append(Segment(start, end, text, before + part.first, before + part.last))
            ends_twice = len(tokens) > 2 and tokens[-2] >= self._first_timestamp
            self._previous += tokens[:-1] if ends_twice else tokens
        kept = cut.parts[-1].last if cut.parts else 0
        self._tokens += ids[:kept]
        self._logprobs += (done.logprobs or ())[:kept]
        self._seek += cut.advance

    def transcript(self) -> Transcript:
        language = None if self.detected is None else self.detected.language
        if self._speech.language is not None:
            language = language_code(self._speech.language)
        return Transcript(
            text="".join(segment.text for segment in self._segments),
            token_ids=tuple(self._tokens),
            segments=tuple(self._segments),
            seconds=self.seconds,
            language=language,
            windows=tuple(self._windows),
            logprobs=tuple(self._logprobs) if self._windows and self._windows[0].logprobs is not None else None,
        )


def window_at(work: Transcriber, features: np.ndarray, start: int = 0) -> FeatureSource:
    """Return the source of the window of features from a frame on, with zeros after their end."""
    part = features[:, start : start + work.shape[1]]
    return FeatureSource(np.pad(part, ((0, 0), (0, work.shape[1] - part.shape[1]))))


def long_speech(work: Transcriber, features: np.ndarray, speech: Speech, *, conditioned: bool = False) -> LongSpeech:
    """Return the windows of features; a pass detects the language if it is not given."""
    detected = work.detect(window_at(work, features)) if work.needs_language(speech) else None
    return LongSpeech(work, features, speech, detected=detected, conditioned=conditioned)
