"""`draftree transcribe`: the text of sound files."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftree.cli.flags import sampling_of
from draftree.cli.generate import check_material
from draftree.cli.layout import OUTPUT, argument, option
from draftree.cli.options import ALL_OPTIONS, Setup, import_engine, takes, takes_setup
from draftree.cli.render import note, say
from draftree.core.errors import InvalidRequestError
from draftree.loading.resolve import require_sound
from draftree.options import TEXT
from draftree.sampling.params import SamplingParams

if TYPE_CHECKING:
    from draftree.llm import LLM
    from draftree.outputs import Completion
    from draftree.speech.transcriber import Segment
    from draftree.speech.windows import Transcript


class Format(enum.StrEnum):
    TEXT = "text"
    JSON = "json"
    SRT = "srt"
    VTT = "vtt"


WITHOUT = ("n", "prompt_logprobs", "truncate_prompt_tokens", "prediction", "logprobs")
DEFAULTS: dict[str, Any] = {"max_tokens": None, "temperature": 0.0}


@takes("params", sampling_of(without=WITHOUT, defaults=DEFAULTS))
@takes_setup(*(name for name in ALL_OPTIONS if name not in ("learn", "allow_control_tokens")))
def transcribe(
    files: list[Path] = argument(
        ..., "Sound files: WAV; FLAC, OGG and MP3 if the package soundfile is installed.", "FILE..."
    ),
    *,
    language: str | None = option(
        None, "The spoken language, such as en or English; detected if not given.", panel=TEXT
    ),
    translate: bool = option(False, "Write English.", panel=TEXT, names="--translate"),
    prompt: str | None = option(
        None, "Text before the sound, whose words and style go on.", panel=TEXT, names="--prompt"
    ),
    condition_on_previous: bool = option(
        False,
        "For sounds longer than the model reads at once: each part continues the text of those before.",
        panel=TEXT,
        names="--condition-on-previous",
    ),
    setup: Setup,
    form: Format = option(
        Format.TEXT, "text, json (segments with timestamps), srt or vtt.", "NAME", OUTPUT, names="--format"
    ),
    params: SamplingParams,
) -> None:
    """Transcribe sound files as one batch. The text goes to standard output, everything else to standard error.

    Sounds longer than the model reads at once are transcribed in windows, cut at timestamps.
    """
    require_sound(setup.model)
    for file in files:
        if not file.is_file():
            raise InvalidRequestError(f"'{file}' is no file: give a sound file")
    import_engine()
    from draftree.cli.runs import dump, fetch_and_load
    from draftree.serve.audio import read_sound, srt, vtt

    check_material(setup, params)
    loaded = fetch_and_load(setup)
    llm = setup.decided(loaded).llm(loaded)
    if llm.draft_note:
        note(llm.draft_note)
    rate = llm.transcriber.sampling_rate
    sounds = [_read(read_sound, file, rate) for file in files]
    told: dict[str, Any] = {"language": language, "task": "translate" if translate else "transcribe", "prompt": prompt}
    done = _written(
        llm, sounds, params, told, timestamps=form is not Format.TEXT, condition_on_previous=condition_on_previous
    )
    for file, sound, one in zip(files, sounds, done, strict=True):
        if len(files) > 1:
            note(f"--- {file} ---")
        seconds = len(sound) / rate
        if form is Format.TEXT:
            say(_text(llm, one).strip() + "\n")
        elif form is Format.JSON:
            say(dump(_as_json(llm, one, file, seconds)) + "\n")
        else:
            say((srt if form is Format.SRT else vtt)(_segments(llm, one, seconds)))


def _written(
    llm: LLM,
    sounds: Sequence[Any],
    params: SamplingParams,
    told: Mapping[str, Any],
    *,
    timestamps: bool,
    condition_on_previous: bool,
) -> list[Completion | Transcript]:
    """Transcribe short sounds as one batch and long ones as another; results in the order of the sounds."""
    is_long = [llm.transcriber.is_long(sound) for sound in sounds]
    short = [sound for sound, long in zip(sounds, is_long, strict=True) if not long]
    rest = [sound for sound, long in zip(sounds, is_long, strict=True) if long]
    whole = iter(llm.transcribe(short, params, timestamps=timestamps, **told) if short else ())
    cut = iter(llm.transcribe_long(rest, params, condition_on_previous=condition_on_previous, **told) if rest else ())
    return [next(cut) if long else next(whole) for long in is_long]


def _text(llm: LLM, done: Completion | Transcript) -> str:
    return llm.transcriber.text(done.token_ids)


def _segments(llm: LLM, done: Completion | Transcript, seconds: float) -> Sequence[Segment]:
    # a short text has no segments of its own
    return done.segments if hasattr(done, "segments") else llm.segments(done, seconds=seconds)


def _read(read: Any, file: Path, rate: int) -> Any:
    try:
        return read(file.read_bytes(), rate)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"'{file}': {error}") from error
    except OSError as error:
        raise InvalidRequestError(f"'{file}' cannot be read: {error.strerror}") from error


def _as_json(llm: LLM, done: Completion | Transcript, file: Path, seconds: float) -> dict[str, Any]:
    windows = done.windows if hasattr(done, "windows") else (done,)
    ends: dict[str, Any] = {"finish_reason": windows[-1].finish_reason, "stats": windows[-1].to_json().get("stats")}
    if len(windows) > 1:
        ends = {
            "windows": [{"finish_reason": one.finish_reason, "stats": one.to_json().get("stats")} for one in windows]
        }
    return {
        "file": str(file),
        "duration": round(seconds, 3),
        "text": _text(llm, done),
        "segments": [
            {"start": round(one.start, 3), "end": round(one.end, 3), "text": one.text}
            for one in _segments(llm, done, seconds)
        ],
        **ends,
    }
