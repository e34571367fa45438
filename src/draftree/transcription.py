"""Transcription of speech by encoder-decoder models that read features of sound, such as Whisper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from draftree.arguments import Params, params_for
from draftree.completion import Completion, completions_of
from draftree.engine.sequence import Update
from draftree.long_speech import Transcript, long_speech
from draftree.progress import write_all
from draftree.sampling.params import SamplingParams
from draftree.spoken import Segment, Speech
from draftree.transcriber import Transcriber


class Transcribes:
    """The methods of `LLM` that transcribe speech."""

    _transcriber: Transcriber

    @property
    def transcriber(self) -> Transcriber:
        """The parts of a transcription, for callers that submit requests themselves."""
        return self._transcriber

    def transcribe(
        self,
        audio: Any,
        params: Params = None,
        *,
        language: str | None = None,
        task: str = "transcribe",
        timestamps: bool = False,
        prompt: str | None = None,
        draft: str | None = None,
        on_update: Callable[[Update], None] | None = None,
        progress: bool | None = None,
    ) -> list[Completion]:
        """Transcribe speech with a model that reads features of sound, such as Whisper.

        Args:
            audio: samples of shape (samples,), float, at the model's sampling rate; or features of shape (channels,
                frames); or a list of either. At most what the model reads at once, 30 seconds for Whisper;
                `transcribe_long` takes longer audio.
            params: as for `generate`, but the temperature is 0 if it is not given; None is greedy to the end of the
                text, without a limit of tokens.
            language: code or English name of the spoken language, such as "en"; None detects it if the model knows
                several.
            task: "transcribe", or "translate" into English.
            timestamps: whether the text has timestamps; `segments` reads them.
            prompt: text before the audio, whose words and style the model continues.
            draft: as for `generate`.
            on_update: as for `generate`.
            progress: as for `generate`.

        Raises:
            ConfigurationError: the model reads tokens, or samples are given and its folder has no feature extractor.
            InvalidRequestError: audio of another shape or too long, or an unknown language or task, or timestamps or a
                prompt for a model that has no tokens for them.
        """
        work, speech = self._transcriber, Speech(language, task, timestamps, prompt)
        found = [work.source(item) for item in _each(audio)]
        starts = [work.start(speech, work.detect(source) if work.needs_language(speech) else None) for source in found]
        batch = [
            work.requests.sequences(source, given, draft=draft, decoder_prompt=start)
            for source, start, given in zip(found, starts, _params(params, len(found)), strict=True)
        ]
        write_all(work.engine, batch, on_update=on_update, progress=progress)
        return completions_of(batch)

    def transcribe_long(
        self,
        audio: Any,
        params: Params = None,
        *,
        language: str | None = None,
        task: str = "transcribe",
        prompt: str | None = None,
        condition_on_previous: bool = False,
        draft: str | None = None,
        on_update: Callable[[Update], None] | None = None,
        progress: bool | None = None,
    ) -> list[Transcript]:
        """Transcribe speech of any length, in windows of what the model reads at once, with timestamps.

        The text of a window ends at its last pair of timestamps, and the next window begins there. Windows of several
        audios form batches. Greedy texts equal those of `generate` of transformers for the same features.

        Args:
            audio: as for `transcribe`, of any length.
            params: as for `transcribe`; `max_tokens` holds for each window, and `n` is 1.
            language: as for `transcribe`; detected in the first window.
            task: as for `transcribe`.
            prompt: text before each window, or before the first one with `condition_on_previous`.
            condition_on_previous: whether a window continues the text of those before. Texts are more consistent, and
                a repetition is continued more often.
            draft: as for `generate`.
            on_update: as for `generate`.
            progress: as for `generate`.

        Raises:
            ConfigurationError: as for `transcribe`.
            InvalidRequestError: as for `transcribe`; or the model writes no timestamps.
        """
        work, speech = self._transcriber, Speech(language, task, timestamps=True, prompt=prompt)
        given = _each(audio)
        each_params = _params(params, len(given))
        audios = [long_speech(work, work.features(one), speech, conditioned=condition_on_previous) for one in given]
        while going := [pair for pair in zip(audios, each_params, strict=True) if not pair[0].is_done]:
            batch = []
            for one, own in going:
                source, start = one.window()
                own = one.params(own, start)
                batch.append(work.requests.sequences(source, own, draft=draft, decoder_prompt=start))
            write_all(work.engine, batch, on_update=on_update, progress=progress)
            for (one, _), done in zip(going, completions_of(batch), strict=True):
                one.take(done)
        return [one.transcript() for one in audios]

    def segments(self, completion: Completion, *, seconds: float | None = None) -> list[Segment]:
        """Return the parts of a text with timestamps.

        Args:
            completion: a text of `transcribe`.
            seconds: length of the audio, where a part without a timestamp at its end ends; None for the longest audio
                that the model reads at once.

        Raises:
            InvalidRequestError: the model has no tokens of timestamps.
        """
        return self._transcriber.segments(completion.token_ids, seconds=seconds)


def _params(params: Params, count: int) -> list[SamplingParams]:
    """Return the parameters of each audio: greedy if none name a temperature, and without a limit if there are none."""
    each = params_for(SamplingParams(max_tokens=None) if params is None else params, count)
    return [replace(one, temperature=0.0) if one.temperature is None else one for one in each]


def _each(audio: Any) -> list[Any]:
    """Return the items of a list of audios, or the audio as the only item."""
    several = isinstance(audio, (list, tuple)) and len(audio) > 0 and np.ndim(audio[0]) > 0
    return list(audio) if several else [audio]
