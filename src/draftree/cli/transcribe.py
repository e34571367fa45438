"""`draftree transcribe`: the text of sound files."""

from __future__ import annotations

import enum
from collections.abc import Sequence
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
    wanted: dict[str, Any] = {
        "language": language,
        "task": "translate" if translate else "transcribe",
        "prompt": prompt,
    }
    # short sounds are one batch and long ones another
    long = [llm.transcriber.is_long(sound) for sound in sounds]
    short = [sound for sound, is_long in zip(sounds, long, strict=True) if not is_long]
    rest = [sound for sound, is_long in zip(sounds, long, strict=True) if is_long]
    whole = iter(llm.transcribe(short, params, timestamps=form is not Format.TEXT, **wanted) if short else ())
    windowed = iter(
        llm.transcribe_long(rest, params, condition_on_previous=condition_on_previous, **wanted) if rest else ()
    )
    for file, sound, is_long in zip(files, sounds, long, strict=True):
        done = next(windowed) if is_long else next(whole)
        if len(files) > 1:
            note(f"--- {file} ---")
        seconds = len(sound) / rate
        if form is Format.TEXT:
            say(llm.transcriber.text(done.token_ids).strip() + "\n")
        elif form is Format.JSON:
            say(dump(_as_json(llm, done, file, seconds)) + "\n")
        else:
            say((srt if form is Format.SRT else vtt)(_segments(llm, done, seconds)))


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
    ends = [{"finish_reason": window.finish_reason, "stats": window.to_json().get("stats")} for window in windows]
    return {
        "file": str(file),
        "duration": round(seconds, 3),
        "text": llm.transcriber.text(done.token_ids),
        "segments": [
            {"start": round(segment.start, 3), "end": round(segment.end, 3), "text": segment.text}
            for segment in _segments(llm, done, seconds)
        ],
        **(ends[0] if len(ends) == 1 else {"windows": ends}),
    }
