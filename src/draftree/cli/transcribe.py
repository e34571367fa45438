"""`draftree transcribe`: the text of sound files."""

from __future__ import annotations

import enum
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftree.cli.flags import takes_sampling
from draftree.cli.generate import check_material
from draftree.cli.made import takes
from draftree.cli.options import OUTPUT, TEXT, Model
from draftree.cli.render import note, say
from draftree.cli.running import How, how_of
from draftree.core.errors import InvalidRequestError
from draftree.loading.resolve import require_sound
from draftree.sampling.params import SamplingParams

if TYPE_CHECKING:
    from draftree.completion import Completion
    from draftree.llm import LLM

__all__ = ["transcribe"]


class Format(enum.StrEnum):
    """Form of the output."""

    TEXT = "text"
    JSON = "json"
    SRT = "srt"
    VTT = "vtt"


Files = Annotated[
    list[Path],
    typer.Argument(
        help="Sound files: WAV; FLAC, OGG and MP3 if the package soundfile is installed.",
        metavar="FILE...",
        rich_help_panel="Arguments",
    ),
]
Language = Annotated[
    str | None,
    typer.Option(help="The spoken language, such as en or English; detected if not given.", rich_help_panel=TEXT),
]
Translate = Annotated[bool, typer.Option("--translate", help="Write English.", rich_help_panel=TEXT)]
Before = Annotated[
    str | None,
    typer.Option("--prompt", help="Text before the sound, whose words and style go on.", rich_help_panel=TEXT),
]
Form = Annotated[
    Format,
    typer.Option(
        "--format", help="text, json (segments with timestamps), srt or vtt.", metavar="NAME", rich_help_panel=OUTPUT
    ),
]
WITHOUT = ("n", "prompt_logprobs", "truncate_prompt_tokens", "prediction", "detokenize", "logprobs")
DEFAULTS: dict[str, Any] = {"max_tokens": None, "temperature": 0.0}


@functools.partial(takes_sampling, without=WITHOUT, defaults=DEFAULTS)
@takes("how", how_of, fixed={"learn": None, "allow_control_tokens": False})
def transcribe(
    model: Model,
    files: Files,
    *,
    language: Language = None,
    translate: Translate = False,
    prompt: Before = None,
    how: How,
    form: Form = Format.TEXT,
    params: SamplingParams,
) -> None:
    """Transcribe sound files as one batch. The text goes to standard output, everything else to standard error."""
    require_sound(model)
    for file in files:
        if not file.is_file():
            raise InvalidRequestError(f"'{file}' is no file: give a sound file")
    # imported after all checks that need no torch: torch takes seconds to import
    from draftree.cli.report import dump
    from draftree.cli.writing import fetch_and_load
    from draftree.serve.audio.sound import read_sound
    from draftree.serve.audio.subtitles import srt, vtt

    setup = how.setup(model)
    check_material(setup, params)
    loaded = fetch_and_load(setup)
    llm = setup.decided(loaded).over(loaded)
    if llm.draft_note:
        note(llm.draft_note)
    rate = llm.transcriber.sampling_rate
    sounds = [_read(read_sound, file, rate) for file in files]
    task, has_times = "translate" if translate else "transcribe", form is not Format.TEXT
    done = llm.transcribe(sounds, params, language=language, task=task, timestamps=has_times, prompt=prompt)
    for file, sound, one in zip(files, sounds, done, strict=True):
        if len(files) > 1:
            note(f"--- {file} ---")
        seconds = len(sound) / rate
        if form is Format.TEXT:
            say(llm.transcriber.text(one.token_ids).strip() + "\n")
        elif form is Format.JSON:
            say(dump(_as_json(llm, one, file, seconds)) + "\n")
        else:
            say((srt if form is Format.SRT else vtt)(llm.segments(one, seconds=seconds)))


def _read(read: Any, file: Path, rate: int) -> Any:
    try:
        return read(file.read_bytes(), rate)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"'{file}': {error}") from error
    except OSError as error:
        raise InvalidRequestError(f"'{file}' cannot be read: {error.strerror}") from error


def _as_json(llm: LLM, done: Completion, file: Path, seconds: float) -> dict[str, Any]:
    return {
        "file": str(file),
        "duration": round(seconds, 3),
        "text": llm.transcriber.text(done.token_ids),
        "segments": [
            {"start": round(one.start, 3), "end": round(one.end, 3), "text": one.text}
            for one in llm.segments(done, seconds=seconds)
        ],
        "finish_reason": done.finish_reason,
        "stats": done.to_json().get("stats"),
    }
