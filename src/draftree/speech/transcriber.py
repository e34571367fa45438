"""Transcription for one engine: features, the language, the decoder's prompt, and segments of the text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from draftree.core.errors import ConfigurationError, InvalidRequestError, suggestion
from draftree.engine.engine import Engine
from draftree.engine.prompts import PromptEncoder
from draftree.engine.requests import SequenceFactory
from draftree.models.base import Extend, Pass
from draftree.models.source import EncoderDecoder, FeatureSource
from draftree.options import WholeStart
from draftree.sampling.decoding_rules import SpeechRules, spans_of

TASKS = ("transcribe", "translate")


@dataclass(frozen=True, slots=True)
class Speech:
    """How audio is transcribed."""

    # code or English name of the spoken language; None detects it if the model knows several
    language: str | None = None
    task: str = TASKS[0]
    timestamps: bool = False  # whether the text has timestamps
    prompt: str | None = None  # text before the audio, whose words and style the model continues; None for none


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a transcribed text."""

    start: float  # seconds
    end: float  # seconds; the end of the audio if the text ends without a timestamp
    text: str  # without timestamps
    first: int  # index of its first token in the text's tokens
    last: int  # index after its last token


@dataclass(frozen=True, slots=True)
class Detection:
    """Language and absence of speech, as a model detects them before the transcription."""

    language: str | None  # code of the most likely language; None if the model knows one only
    no_speech: float | None  # probability that there is no speech; None if the model has no token for it


def samples_or_features(
    audio: Any, shape: tuple[int, int], extractor: Callable[[], Any], *, is_long: bool = False
) -> np.ndarray:
    """Return features of shape (channels, frames), float32.

    `audio`: samples of shape (samples,), or features. `shape`: the shape of features that the model reads. `extractor`:
    returns the feature extractor of transformers; called for samples only. `is_long`: whether there may be more frames
    than the model reads at once. Then there are as many frames as the samples fill; otherwise there are as many as the
    model reads.
    """
    values = np.asarray(audio, dtype=np.float32)
    if values.ndim == 2:
        if values.shape != shape and not (is_long and values.shape[0] == shape[0] and values.shape[1] > 0):
            raise InvalidRequestError(
                f"the features have shape {values.shape}: this model reads (channels, frames) {shape}", param="audio"
            )
        return values
    if values.ndim != 1 or not len(values):
        raise InvalidRequestError(
            f"the audio has shape {values.shape}: give samples of shape (samples,), or features of shape {shape}",
            param="audio",
        )
    extract = extractor()
    longest = int(extract.n_samples)
    if not is_long and len(values) > longest:
        raise InvalidRequestError(
            f"the audio has {len(values)} samples, but the model reads {longest} at once "
            f"({longest / extract.sampling_rate:.0f} seconds): use transcribe_long, or cut it into parts",
            param="audio",
        )
    size = {"truncation": False, "padding": "longest"} if is_long else {}
    extracted = extract(values, sampling_rate=extract.sampling_rate, return_tensors="np", **size)
    return extracted["input_features"][0]


def language_code(language: str) -> str:
    """Return the code of a language that is named by code, by Whisper's token of it, or by its English name."""
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

    name = language.strip().strip("<|>").lower()
    return TO_LANGUAGE_CODE.get(name, name)


def language_name(code: str) -> str:
    """Return the English name of a language by its code; the code itself if it is unknown."""
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    return LANGUAGES.get(code, code)


class Transcriber:
    """The parts of a transcription for one engine.

    `requests`: the factory of its sequences. `folder`: the model's folder, which has the settings of its feature
    extractor; None if there is none.
    """

    def __init__(self, engine: Engine, requests: SequenceFactory, prompts: PromptEncoder, folder: Path | None) -> None:
        self.engine, self.requests, self._prompts, self._folder = engine, requests, prompts, folder
        self._extractor: Any = None

    @property
    def reads_sound(self) -> bool:
        target = self.engine.parts.target
        return isinstance(target, EncoderDecoder) and target.feature_shape is not None

    @property
    def target(self) -> EncoderDecoder:
        target = self.engine.parts.target
        if not isinstance(target, EncoderDecoder) or target.feature_shape is None:
            raise ConfigurationError("transcribe is for models that read features of sound: use generate")
        return target

    @property
    def shape(self) -> tuple[int, int]:
        """Channels and frames of the features that the model reads."""
        assert self.target.feature_shape is not None, "the model reads features"
        return self.target.feature_shape

    @property
    def rules(self) -> SpeechRules | None:
        """The model's tokens of languages, tasks and timestamps; None if it has none."""
        return self.target.rules.speech

    @property
    def sampling_rate(self) -> int:
        """Samples per second that the model reads."""
        return int(self._feature_extractor().sampling_rate)

    @property
    def longest(self) -> float:
        """Seconds of audio that the model reads at once; 30 if its folder has no feature extractor."""
        if not self._has_extractor:
            return 30.0
        extractor = self._feature_extractor()
        return float(extractor.n_samples / extractor.sampling_rate)

    @property
    def _has_extractor(self) -> bool:
        return self._folder is not None and (self._folder / "preprocessor_config.json").is_file()

    def is_long(self, audio: Any) -> bool:
        """Return whether samples or features are longer than what the model reads at once."""
        size = np.shape(audio)
        if len(size) == 2:
            return size[0] == self.shape[0] and size[1] > self.shape[1]
        return len(size) == 1 and size[0] > self.longest * self.sampling_rate

    def features(self, audio: Any) -> np.ndarray:
        """Return features of samples or features of any length, shape (channels, frames)."""
        return samples_or_features(audio, self.shape, self._feature_extractor, is_long=True)

    def source(self, audio: Any) -> FeatureSource:
        return FeatureSource(samples_or_features(audio, self.shape, self._feature_extractor))

    def _feature_extractor(self) -> Any:
        if self._extractor is None:
            if not self._has_extractor:
                raise ConfigurationError(
                    "samples of sound need the settings of the feature extractor, preprocessor_config.json in the "
                    "model's folder: add it, or give features"
                )
            from transformers import AutoFeatureExtractor

            self._extractor = AutoFeatureExtractor.from_pretrained(
                self._folder, local_files_only=True, trust_remote_code=False
            )
        return self._extractor

    def needs_language(self, speech: Speech) -> bool:
        """Return whether the language is to be detected by `detect`."""
        return speech.language is None and self.rules is not None and bool(self.rules.languages)

    def detect(self, source: FeatureSource) -> Detection:
        """Run a pass over the start token."""
        return self.engine.lock.run(lambda: self._detect(source))

    def _detect(self, source: FeatureSource) -> Detection:
        target, rules = self.target, self.rules
        slot = target.open_on(source)
        try:
            start = target.rules.start_ids
            last = len(start) - 1
            logits = target.run(Pass([Extend(slot, start, range(-1, last), logits_at=(last,))])).logits.tensor()[0]
        finally:
            target.close(slot)
        language, no_speech = None, None
        if rules is not None and rules.languages:
            language = max(rules.languages, key=lambda code: float(logits[rules.languages[code]]))
        if rules is not None and rules.no_timestamps:
            no_speech = float(logits.float().softmax(dim=-1)[rules.no_timestamps - 1])
        return Detection(language, no_speech)

    def start(
        self, speech: Speech, detected: Detection | None = None, *, earlier: Sequence[int] | None = None
    ) -> WholeStart | None:
        """Return the decoder's prompt; None if the model has no tokens of languages and tasks.

        `detected`: result of `detect`, if `needs_language`. `earlier`: tokens of the text before the audio, in place of
        the prompt of `speech`; None for that.
        """
        rules = self.rules
        if rules is None:
            self._require_plain(speech)
            return None
        before = self.text_ids(speech.prompt) if earlier is None else earlier
        start = list(self.target.rules.start_ids)
        if before:
            if rules.previous is None:
                raise InvalidRequestError("this model has no token for a prompt: leave it out", param="prompt")
            # as in `generate`, the last tokens that fill half of the context
            start = [rules.previous, *before[-(self.target.max_length // 2 - 1) :], *start]
        if rules.languages:
            if speech.task not in rules.tasks:
                raise InvalidRequestError(
                    f"unknown task {speech.task!r}: {suggestion(speech.task, list(rules.tasks))}", param="task"
                )
            language = detected.language if speech.language is None and detected is not None else speech.language
            assert language is not None, "the language was detected"
            token = rules.languages.get(language_code(language))
            if token is None:
                advice = suggestion(language, list(rules.languages))
                raise InvalidRequestError(f"unknown language {language!r}: {advice}", param="language")
            start += [token, rules.tasks[speech.task]]
        elif (speech.language is not None and language_code(speech.language) != "en") or speech.task != TASKS[0]:
            raise InvalidRequestError(
                "this model transcribes English only: leave language and task out", param="language"
            )
        if speech.timestamps and rules.timestamps is None:
            raise _no_timestamps()
        if not speech.timestamps and rules.no_timestamps is not None:
            start.append(rules.no_timestamps)
        return WholeStart(start)

    def _require_plain(self, speech: Speech) -> None:
        if speech.language is not None or speech.task != TASKS[0]:
            raise InvalidRequestError(
                "this model names no tokens of languages and tasks in its generation configuration: leave language "
                "and task out",
                param="language",
            )
        if speech.timestamps:
            raise _no_timestamps()
        if speech.prompt is not None:
            raise InvalidRequestError("this model has no token for a prompt: leave it out", param="prompt")

    def text_ids(self, prompt: str | None) -> list[int]:
        """Return the token ids of a text before the audio; empty if there is none."""
        if prompt is None or not prompt.strip():
            return []
        return self._prompts.encode_text(" " + prompt.strip(), add_special_tokens=False)

    def segments(self, tokens: Sequence[int], *, seconds: float | None = None) -> list[Segment]:
        """Return the parts of a text; arguments as for `LLM.segments`."""
        if self.rules is None or self.rules.timestamps is None:
            raise _no_timestamps()
        step = self.longest / self.target.max_source_length
        end = self.longest if seconds is None else seconds
        ids = list(tokens)
        while ids and ids[-1] in self.requests.eos_ids:
            ids.pop()
        return [
            Segment(
                span.start * step,
                max(end, span.start * step) if span.end is None else span.end * step,
                self.text(ids[span.first : span.last]),
                span.first,
                span.last,
            )
            for span in spans_of(ids, self.rules.timestamps.first)
        ]

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens without timestamps; empty if the model has no tokenizer."""
        rules, tokenizer = self.rules, self._prompts.tokenizer
        if tokenizer is None:
            return ""
        first = None if rules is None or rules.timestamps is None else rules.timestamps.first
        return tokenizer.decode([token for token in tokens if first is None or token < first], True)


def _no_timestamps() -> InvalidRequestError:
    return InvalidRequestError(
        "this model writes no timestamps: its generation configuration has no no_timestamps_token_id; leave them out",
        param="timestamps",
    )
