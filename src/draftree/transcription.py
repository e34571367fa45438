"""Transcription of speech by encoder-decoder models that read features of sound, such as Whisper."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from draftree.arguments import Params, params_for
from draftree.completion import Completion, completions_of
from draftree.core.errors import ConfigurationError, InvalidRequestError, suggestion
from draftree.engine.engine import Engine
from draftree.engine.sequence import Update
from draftree.models.base import Extend, Pass
from draftree.models.source import EncoderDecoder, FeatureSource
from draftree.progress import write_all
from draftree.requests import Requests
from draftree.sampling.decoding_rules import SpeechRules

TASKS = ("transcribe", "translate")


class Transcribes:
    """The method `transcribe` of `LLM`."""

    _transcriber: Transcriber

    def transcribe(
        self,
        audio: Any,
        params: Params = None,
        *,
        language: str | None = None,
        task: str = "transcribe",
        draft: str | None = None,
        on_update: Callable[[Update], None] | None = None,
        progress: bool | None = None,
    ) -> list[Completion]:
        """Transcribe speech without timestamps, with a model that reads features of sound, such as Whisper.

        Args:
            audio: samples of shape (samples,), float, at the model's sampling rate; or features of shape (channels,
                frames); or a list of either. At most what the model reads at once, 30 seconds for Whisper.
            params: as for `generate`.
            language: code of the spoken language, such as "en"; None detects it if the model knows several.
            task: "transcribe", or "translate" into English.
            draft: as for `generate`.
            on_update: as for `generate`.
            progress: as for `generate`.

        Raises:
            ConfigurationError: the model reads tokens, or samples are given and its folder has no feature extractor.
            InvalidRequestError: audio of another shape or too long, or an unknown language or task.
        """
        return self._transcriber.transcribe(
            audio, params, language=language, task=task, draft=draft, on_update=on_update, progress=progress
        )


class Transcriber:
    """Transcription for one engine.

    Args:
        engine: the engine.
        requests: the factory of its sequences.
        folder: the model's folder, which has the settings of its feature extractor; None if there is none.
    """

    def __init__(self, engine: Engine, requests: Requests, folder: Path | None) -> None:
        self._engine, self._requests, self._folder = engine, requests, folder
        self._extractor: Any = None

    @property
    def _target(self) -> EncoderDecoder:
        target = self._engine.parts.target
        if not isinstance(target, EncoderDecoder) or target.feature_shape is None:
            raise ConfigurationError("transcribe is for models that read features of sound: use generate")
        return target

    def transcribe(
        self,
        audio: Any,
        params: Params,
        *,
        language: str | None,
        task: str,
        draft: str | None,
        on_update: Callable[[Update], None] | None,
        progress: bool | None,
    ) -> list[Completion]:
        """Do as `Transcribes.transcribe`."""
        target = self._target
        several = isinstance(audio, (list, tuple)) and len(audio) > 0 and np.ndim(audio[0]) > 0
        items = audio if several else [audio]
        found = [FeatureSource(self._features(item)) for item in items]
        starts = [self._start(target, source, language, task) for source in found]
        each = params_for(params, len(found))
        batch = [
            self._requests.sequences(source, given, draft=draft, decoder_prompt=start)
            for source, start, given in zip(found, starts, each, strict=True)
        ]
        write_all(self._engine, batch, on_update=on_update, progress=progress)
        return completions_of(batch)

    def _features(self, audio: Any) -> np.ndarray:
        values = np.asarray(audio, dtype=np.float32)
        shape = self._target.feature_shape
        if values.ndim == 2:
            if values.shape != shape:
                raise InvalidRequestError(
                    f"the features have shape {values.shape}: this model reads (channels, frames) {shape}",
                    param="audio",
                )
            return values
        if values.ndim != 1 or not len(values):
            raise InvalidRequestError(
                f"the audio has shape {values.shape}: give samples of shape (samples,), or features of shape {shape}",
                param="audio",
            )
        extractor = self._feature_extractor()
        longest = int(extractor.n_samples)
        if len(values) > longest:
            raise InvalidRequestError(
                f"the audio has {len(values)} samples, but the model reads {longest} at once "
                f"({longest / extractor.sampling_rate:.0f} seconds): cut it into parts",
                param="audio",
            )
        found: np.ndarray = extractor(values, sampling_rate=extractor.sampling_rate, return_tensors="np")[
            "input_features"
        ]
        return found[0]

    def _feature_extractor(self) -> Any:
        if self._extractor is None:
            if self._folder is None or not (self._folder / "preprocessor_config.json").is_file():
                raise ConfigurationError(
                    "samples of sound need the settings of the feature extractor, preprocessor_config.json in the "
                    "model's folder: add it, or give features"
                )
            from transformers import AutoFeatureExtractor

            self._extractor = AutoFeatureExtractor.from_pretrained(
                self._folder, local_files_only=True, trust_remote_code=False
            )
        return self._extractor

    def _start(
        self, target: EncoderDecoder, source: FeatureSource, language: str | None, task: str
    ) -> Sequence[int] | None:
        """Return the tokens of language and task; None if the model has none."""
        rules = target.rules.speech
        if rules is None:
            if language is not None or task != TASKS[0]:
                raise InvalidRequestError(
                    "this model names no tokens of languages and tasks in its generation configuration: leave language "
                    "and task out",
                    param="language",
                )
            return None
        start = list(target.rules.start_ids)
        if rules.languages:
            if task not in rules.tasks:
                raise InvalidRequestError(f"unknown task {task!r}: {suggestion(task, list(rules.tasks))}", param="task")
            spoken = _detected(target, source, rules) if language is None else _named(language, rules.languages)
            start += [spoken, rules.tasks[task]]
        elif language not in (None, "en") or task != TASKS[0]:
            raise InvalidRequestError(
                "this model transcribes English only: leave language and task out", param="language"
            )
        return [*start, *(() if rules.no_timestamps is None else (rules.no_timestamps,))]


def _named(language: str, languages: Mapping[str, int]) -> int:
    found = languages.get(language.strip("<|>").lower())
    if found is None:
        raise InvalidRequestError(
            f"unknown language {language!r}: {suggestion(language, list(languages))}", param="language"
        )
    return found


def _detected(target: EncoderDecoder, source: FeatureSource, rules: SpeechRules) -> int:
    """Return the token of the most likely language after the start token."""
    slot = target.open_on(source)
    try:
        start = target.rules.start_ids
        last = len(start) - 1
        logits = target.run(Pass([Extend(slot, start, range(-1, last), logits_at=(last,))])).logits.tensor()[0]
    finally:
        target.close(slot)
    tokens = sorted(rules.languages.values())
    return tokens[int(logits[tokens].argmax())]
