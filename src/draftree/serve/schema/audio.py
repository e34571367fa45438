"""Forms of /v1/audio/transcriptions and /v1/audio/translations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import ConfigDict, Field

from draftree.serve.audio.forms import FormField
from draftree.serve.errors import invalid
from draftree.serve.schema.common import Body, validated
from draftree.serve.schema.elsewhere import Effect, refused

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
        """Whether the answer holds timestamps."""
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


def read_form(kind: type[Form], fields: list[FormField]) -> tuple[Form, bytes]:
    """Return a form and its file.

    Raises:
        ApiError: 400, no file, a field given twice, or a value that cannot be honoured.
        RequestValidationError: a wrong value.
    """
    values: dict[str, Any] = {}
    file: bytes | None = None
    for field in fields:
        if field.name == FILE:
            if file is not None:
                raise invalid("'file' is given twice: send one file", FILE)
            file = field.data
        elif field.name in LISTS:
            values.setdefault(field.name, []).append(_text(field))
        elif field.name in values:
            raise invalid(f"'{field.name}' is given twice: send it once", field.name)
        else:
            values[field.name] = _text(field)
    if file is None:
        raise invalid("the field 'file' is missing: it is required", FILE, code="missing_required_parameter")
    return validated(kind, values), file


def _text(field: FormField) -> str:
    try:
        return field.data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise invalid(f"'{field.name}' is not UTF-8 text", field.name) from error
