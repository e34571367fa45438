"""POST /v1/audio/transcriptions and /v1/audio/translations."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from email.message import Message
from email.parser import HeaderParser
from functools import partial
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
from fastapi import APIRouter, Request, Response
from pydantic import ConfigDict, Field
from starlette.responses import PlainTextResponse

from draftree.core.errors import ConfigurationError
from draftree.models.source import FeatureSource
from draftree.options import WholeStart
from draftree.outputs import Completion
from draftree.serve.audio import read_sound, segments_json, srt, vtt
from draftree.serve.errors import JsonResponse, invalid
from draftree.serve.job import Job
from draftree.serve.pool import ServedModel
from draftree.serve.request import ERRORS, checked_options, model_of, running_job, server_of
from draftree.serve.schema import Body, Effect, refused, validated
from draftree.serve.streams import respond
from draftree.speech.transcriber import Detection, Segment, Speech, language_code, language_name
from draftree.speech.windows import LongSpeech, Transcript

MAX_FIELDS = 64


def parse_form(content_type: str, body: bytes) -> list[tuple[str, bytes]]:
    """Return names and contents of the fields of a form, whose whole body is in memory.

    python-multipart would copy it to files.
    """
    header = Message()
    header["Content-Type"] = content_type
    boundary = header.get_param("boundary")
    if header.get_content_type() != "multipart/form-data" or not isinstance(boundary, str) or not boundary:
        raise invalid("the body must be a form with a file: send it as multipart/form-data", None)
    # the line break before a boundary belongs to the boundary
    parts = (b"\r\n" + body).split(b"\r\n--" + boundary.encode("latin-1", "replace"))
    if len(parts) < 3 or not parts[-1].startswith(b"--"):
        raise _malformed("the last boundary is missing")
    if len(parts) - 2 > MAX_FIELDS:
        raise _malformed(f"it has more than {MAX_FIELDS} fields")
    fields = []
    for part in parts[1:-1]:
        head, blank, data = part.partition(b"\r\n\r\n")
        if not blank:
            raise _malformed("a field has no empty line after its headers")
        headers = HeaderParser().parsestr(head.decode("utf-8", "replace").lstrip())
        name = headers.get_param("name", header="Content-Disposition")
        if headers.get_content_disposition() != "form-data" or not isinstance(name, str):
            raise _malformed("a field has no name")
        fields.append((name, data))
    return fields


def _malformed(reason: str) -> Exception:
    return invalid(f"the form cannot be read: {reason}", None, code="invalid_form")


FILE = "file"
LISTS = ("timestamp_granularities[]", "include[]", "known_speaker_names[]", "known_speaker_references[]")
WITH_TIMESTAMPS = ("verbose_json", "srt", "vtt")


class AudioForm(Body):
    """The fields of a form besides the file."""

    model_config = ConfigDict(extra="forbid", strict=False, protected_namespaces=())

    elsewhere: ClassVar[Mapping[str, Effect]] = {
        "stream": refused("the text is sent when it is complete; leave it out", "false", "False", "0"),
        "chunking_strategy": refused("long audio is cut at timestamps; leave it out", "auto"),
        "include[]": refused("log-probabilities of segments are in verbose_json"),
        "known_speaker_names[]": refused("speakers are not told apart"),
        "known_speaker_references[]": refused("speakers are not told apart"),
    }
    model: str | None = None
    prompt: str | None = None
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] = "json"
    temperature: float = Field(0.0, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    draft: str | None = None
    max_tokens: int | None = Field(None, ge=1)

    @property
    def has_timestamps(self) -> bool:
        return self.response_format in WITH_TIMESTAMPS


class TranscriptionForm(AudioForm):
    """Speech to text in its own language."""

    language: str | None = None
    timestamp_granularities: list[Literal["segment", "word"]] | None = Field(None, alias="timestamp_granularities[]")


class TranslationForm(AudioForm):
    """Speech to English text."""

    elsewhere: ClassVar[Mapping[str, Effect]] = {
        **AudioForm.elsewhere,
        "language": refused("the spoken language is detected, and the text is English"),
        "timestamp_granularities[]": refused("segments have timestamps in verbose_json"),
    }


Form = TypeVar("Form", bound=AudioForm)


async def _read_form(kind: type[Form], request: Request) -> tuple[Form, bytes]:
    values: dict[str, Any] = {}
    file: bytes | None = None
    for name, data in parse_form(request.headers.get("content-type", ""), await request.body()):
        if name not in LISTS and (name in values or (name == FILE and file is not None)):
            raise invalid(f"'{name}' is given twice: send it once", name)
        if name == FILE:
            file = data
            continue
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise invalid(f"'{name}' is not UTF-8 text", name) from error
        if name in LISTS:
            values.setdefault(name, []).append(text)
        else:
            values[name] = text
    if file is None:
        raise invalid("the field 'file' is missing: it is required", FILE, code="missing_required_parameter")
    return validated(kind, values), file


NAMES = {"audio": "file", "timestamps": "response_format"}
FORM: dict[str, Any] = {
    "requestBody": {"required": True, "content": {"multipart/form-data": {"schema": {"type": "object"}}}}
}
router = APIRouter(prefix="/v1/audio", tags=["audio"], responses=ERRORS)


@router.post("/transcriptions", summary="Transcribe speech", openapi_extra=FORM)
async def transcriptions(request: Request) -> Response:
    """Transcribe a sound file."""
    form, file = await _read_form(TranscriptionForm, request)
    if form.timestamp_granularities is not None:
        if form.response_format != "verbose_json":
            message = "'timestamp_granularities[]' needs response_format=verbose_json"
            raise invalid(message, "timestamp_granularities[]")
        if "word" in form.timestamp_granularities:
            message = "'timestamp_granularities[]' may be segment: words have no timestamps"
            raise invalid(message, "timestamp_granularities[]", code="unsupported_parameter")
    speech = Speech(form.language, "transcribe", form.has_timestamps, form.prompt)
    return await respond(request, _answer(form, file, speech, request))


@router.post("/translations", summary="Translate speech into English", openapi_extra=FORM)
async def translations(request: Request) -> Response:
    """Translate the speech of a sound file into English text."""
    form, file = await _read_form(TranslationForm, request)
    speech = Speech(None, "translate", form.has_timestamps, form.prompt)
    return await respond(request, _answer(form, file, speech, request))


@dataclass(slots=True)
class _Sound:
    """Facts about a file that was read: its length in seconds, and the language that the model detected."""

    seconds: float = 0.0
    detected: Detection | None = None
    start: WholeStart | None = None
    windows: LongSpeech | None = None  # its windows, if it is longer than what the model reads at once


async def _answer(form: AudioForm, file: bytes, speech: Speech, request: Request) -> Response:
    model = model_of(request, form.model)
    if not model.llm.llm.transcriber.reads_sound:
        raise invalid(f"the model '{model.name}' reads text: use /v1/completions", "model")
    values: dict[str, Any] = {"temperature": form.temperature, "seed": form.seed, "max_tokens": form.max_tokens}
    values |= {"draft": model.named_draft(form.draft), "request_id": f"audio-{uuid.uuid4().hex}"}
    options = checked_options({**values, "logprobs": 0 if form.response_format == "verbose_json" else None}, NAMES)
    sound = _Sound()

    async def encode(data: bytes, *, most: int | None = None) -> FeatureSource:
        # after the request was admitted: both the features and the language take the machine
        work = model.llm.llm.transcriber
        try:
            samples: np.ndarray = await asyncio.to_thread(
                read_sound, data, work.sampling_rate, max_seconds=server_of(request).settings.max_audio_seconds
            )
            sound.seconds = len(samples) / work.sampling_rate
            if work.is_long(samples):
                windows = sound.windows = await model.llm.long_speech(samples, speech)
                sound.detected = windows.detected
                source, sound.start = await model.llm.prompts.with_tokenizer(lambda _: windows.window())
                return source
            always = form.response_format == "verbose_json"
            source, sound.detected = await model.llm.detect_speech(samples, speech, always=always)
            sound.start = await model.llm.prompts.with_tokenizer(lambda _: work.start(speech, sound.detected))
        except ConfigurationError as error:
            raise invalid(f"the model '{model.name}' cannot read sound files: {error}", "model") from error
        return source

    async with running_job(
        request, model, prompts=[file], options=options, names=NAMES, encode=encode, start=lambda: sound.start
    ) as job:
        (first,) = await job.finish()
        done: Completion | Transcript = first
        if sound.windows is not None:
            done = await _all_windows(model, job, first, sound.windows)
    return await _rendered(form, model, done, speech=speech, sound=sound)


async def _all_windows(model: ServedModel, job: Job, done: Completion, windows: LongSpeech) -> Transcript:
    """Transcribe all windows after the first one, one after the other, and return the whole text."""
    run = model.llm.prompts.with_tokenizer
    await run(lambda _: windows.take(done))
    while not windows.is_done:
        source, start = await run(lambda _: windows.window())
        done = await job.further(source, replace(windows.params(job.options, start), decoder_prompt=start))
        await run(lambda _: windows.take(done))  # noqa: B023
    return windows.transcript()


async def _rendered(
    form: AudioForm, model: ServedModel, done: Completion | Transcript, *, speech: Speech, sound: _Sound
) -> Response:
    work = model.llm.llm.transcriber
    text = done.text
    if not isinstance(done, Transcript):
        text = await model.llm.prompts.with_tokenizer(lambda _: work.text(done.token_ids))
    usage = {"type": "duration", "seconds": round(sound.seconds, 3)}
    if form.response_format == "json":
        return JsonResponse({"text": text, "usage": usage})
    if form.response_format == "text":
        return PlainTextResponse(text + "\n")
    if isinstance(done, Transcript):
        segments: Sequence[Segment] = done.segments
    else:
        cut = partial(work.segments, done.token_ids, seconds=sound.seconds)
        segments = await model.llm.prompts.with_tokenizer(lambda _: cut())
    if form.response_format == "srt":
        return PlainTextResponse(srt(segments))
    if form.response_format == "vtt":
        return PlainTextResponse(vtt(segments), media_type="text/vtt")
    no_speech = None if sound.detected is None else sound.detected.no_speech
    detected = None if sound.detected is None else sound.detected.language
    spoken = "en" if speech.task == "translate" else speech.language or detected or "en"
    return JsonResponse(
        {
            "task": speech.task,
            "language": language_name(language_code(spoken)),
            "duration": round(sound.seconds, 3),
            "text": text,
            "segments": segments_json(segments, done, temperature=form.temperature, no_speech=no_speech),
            "usage": usage,
        }
    )
