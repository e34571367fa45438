"""Settings and results of a transcription; audio and names of languages as models of speech read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from draftree.core.errors import InvalidRequestError

TASKS = ("transcribe", "translate")


@dataclass(frozen=True, slots=True)
class Speech:
    """How audio is transcribed.

    Attributes:
        language: code or English name of the spoken language; None detects it if the model knows several.
        task: "transcribe", or "translate" into English.
        timestamps: whether the text has timestamps.
        prompt: text before the audio, whose words and style the model continues; None for none.
    """

    language: str | None = None
    task: str = TASKS[0]
    timestamps: bool = False
    prompt: str | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a transcribed text.

    Attributes:
        start: seconds.
        end: seconds; the end of the audio if the text ends without a timestamp.
        text: without timestamps.
        first: index of its first token in the text's tokens.
        last: index after its last token.
    """

    start: float
    end: float
    text: str
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Detection:
    """Language and absence of speech, as a model detects them before the transcription.

    Attributes:
        language: code of the most likely language; None if the model knows one only.
        no_speech: probability that there is no speech; None if the model has no token for it.
    """

    language: str | None
    no_speech: float | None


def samples_or_features(
    audio: Any, shape: tuple[int, int], extractor: Callable[[], Any], *, is_long: bool = False
) -> np.ndarray:
    """Return features of shape (channels, frames), float32.

    Args:
        audio: samples of shape (samples,), or features.
        shape: the shape of features that the model reads.
        extractor: returns the feature extractor of transformers; called for samples only.
        is_long: whether there may be more frames than the model reads at once. Then there are as many frames as the
            samples fill; otherwise there are as many as the model reads.

    Raises:
        InvalidRequestError: audio of another shape, or too long.
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
    found = extractor()
    longest = int(found.n_samples)
    if is_long:
        given = found(values, sampling_rate=found.sampling_rate, truncation=False, padding="longest",
                      return_tensors="np")  # fmt: skip
        whole: np.ndarray = given["input_features"][0]
        return whole
    if len(values) > longest:
        raise InvalidRequestError(
            f"the audio has {len(values)} samples, but the model reads {longest} at once "
            f"({longest / found.sampling_rate:.0f} seconds): use transcribe_long, or cut it into parts",
            param="audio",
        )
    given = found(values, sampling_rate=found.sampling_rate, return_tensors="np")
    features: np.ndarray = given["input_features"][0]
    return features


def language_code(language: str) -> str:
    """Return the code of a language that is named by code, by Whisper's token of it, or by its English name."""
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

    name = language.strip().strip("<|>").lower()
    code: str = TO_LANGUAGE_CODE.get(name, name)
    return code


def language_name(code: str) -> str:
    """Return the English name of a language by its code; the code itself if it is unknown."""
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    name: str = LANGUAGES.get(code, code)
    return name
