"""Prompts: one from the command line or standard input, or those of a file, all checked before a model is loaded."""

from __future__ import annotations

import codecs
import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from draftree.cli.render import is_terminal
from draftree.core.errors import InvalidRequestError, suggestion
from draftree.core.files import JsonError, parse_json, read_lines
from draftree.options import RequestOptions, shown_value
from draftree.text.chat.images import PlacedImage, read_images
from draftree.text.chat.messages import check_messages

if TYPE_CHECKING:
    from draftree.llm import LLM
    from draftree.options import DecoderOptions, Prompt
    from draftree.sampling.params import SamplingParams

STANDARD_INPUT = "-"


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt for a model."""

    text: str
    system: str | None = None
    chat: bool | None = None  # whether it is a message; None decides by the model: True if it has a chat template
    decoder: DecoderOptions = field(default_factory=dict)  # type: ignore[assignment]
    images: tuple[str, ...] = ()  # before the text of a message; a plain text has placeholders for them

    def __post_init__(self) -> None:
        if self.chat is False and self.system is not None:
            raise typer.BadParameter("--no-chat has no system message: leave one of them out", param_hint="--system")

    def decided(self, llm: LLM) -> Task:
        has_template = llm.tokenizer is not None and llm.tokenizer.has_chat_template
        chat = has_template if self.chat is None else self.chat
        if self.system is not None and not chat:
            raise InvalidRequestError("--system was given, but this model has no chat template: leave --system out")
        if llm.prompts.allow_control_tokens and not chat:
            raise InvalidRequestError(
                "--allow-control-tokens was given, but this model has no chat template, and in a plain prompt control "
                "tokens are always encoded as such: leave --allow-control-tokens out"
            )
        return dataclasses.replace(self, chat=chat)

    def fitted(self, params: SamplingParams, llm: LLM) -> SamplingParams:
        """Return the parameters with `max_tokens` limited to the context; `chat` must be decided."""
        if llm.tokenizer is None or params.max_tokens is None:
            return params
        return fitted_to_context(params, llm, self.encoded(llm), self.decoder)

    def encoded(self, llm: LLM) -> Sequence[int]:
        """Return the token ids of the prompt for a model with a tokenizer; `chat` must be decided."""
        assert llm.tokenizer is not None, "it encodes the prompt"
        if self.chat:
            return llm.prompts.encode_chat(self.messages)
        return llm.prompts.encode(self.prompt) if self.images else llm.tokenizer.encode(self.text)

    @property
    def messages(self) -> list[dict[str, Any]]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, {"role": "user", "content": content_with(self.images, self.text)}]

    @property
    def prompt(self) -> Prompt:
        return {"text": self.text, "images": list(self.images)} if self.images else self.text


def checked_images(images: Sequence[str]) -> tuple[str, ...]:
    """Return the values of `--image`; one that is no image is refused before a model is loaded."""
    for image in images:
        if not image:
            raise typer.BadParameter("the name is empty: give a file", param_hint="--image")
        try:
            read_images([PlacedImage(image, "--image")])
        except InvalidRequestError as error:
            raise typer.BadParameter(str(error.__cause__ or error), param_hint="--image") from error
    return tuple(images)


def content_with(images: Sequence[str], text: str) -> str | list[dict[str, Any]]:
    """Return the content of a message: a text, or parts with the images first."""
    if not images:
        return text
    return [*({"type": "image", "image": image} for image in images), {"type": "text", "text": text}]


@dataclass(frozen=True, slots=True)
class Request:
    task: Task
    params: SamplingParams
    fits_context: bool  # whether `max_tokens` is reduced to fit the context, because it was not given

    def met(self, llm: LLM) -> Request:
        """Return the same request, decided for a model."""
        task = self.task.decided(llm)
        return Request(task, task.fitted(self.params, llm) if self.fits_context else self.params, fits_context=False)


def fitted_to_context(
    params: SamplingParams, llm: LLM, ids: Sequence[int], decoder: DecoderOptions | None = None
) -> SamplingParams:
    """Return the parameters with `max_tokens` limited to the context after the prompt, or the decoder's prompt."""
    from draftree.engine.sequence import decoder_tokens
    from draftree.models.source import EncoderDecoder

    most = params.truncate_prompt_tokens or -1
    if isinstance(llm.model, EncoderDecoder):
        count = len(decoder_tokens(llm.model, llm.prompts.encode_start(RequestOptions(**(decoder or {})))))
    else:
        count = len(ids) if most == -1 else min(most, len(ids))
    room = llm.model.max_length - count
    # without any room the request itself is refused with a message
    if params.max_tokens is None or room < 1:
        return params
    return dataclasses.replace(params, max_tokens=min(params.max_tokens, room))


def read_prompt(text: str | None) -> str:
    """Return the prompt from the command line, or standard input without its final line break."""
    if text is not None and text != STANDARD_INPUT:
        if not text:
            raise InvalidRequestError("the prompt is empty: give at least one character")
        return text
    if sys.stdin is None or (text is None and is_terminal(sys.stdin)):
        raise typer.BadParameter("give a text, or pipe one to standard input", param_hint="PROMPT")
    text = utf8(sys.stdin.buffer.read(), "standard input is")
    text = text.removesuffix("\n").removesuffix("\r")
    if not text:
        raise InvalidRequestError("the prompt is empty: standard input is empty")
    return text


def utf8(raw: bytes, subject: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"{subject} not UTF-8 text (byte {error.start} is invalid): convert it, for example with iconv"
        ) from error


KINDS = ("prompt", "messages")
LABELS = ("id", "category")


@dataclass(frozen=True, slots=True)
class FilePrompt:
    place: str
    line: int
    prompt: str | None = None
    messages: Sequence[Mapping[str, str]] | None = None
    # `id` and `category`, if given; repeated in the output
    labels: dict[str, str | int] = dataclasses.field(default_factory=dict)


def read_prompts(file: str) -> list[FilePrompt]:
    """Read the prompts of a file, or of standard input for "-".

    If the first line that is not blank begins with "{", every line is a JSON object with `prompt` or `messages`, and
    optionally `id` and `category`. Otherwise every line is a prompt. Blank lines are skipped.
    """
    name = "standard input" if file == STANDARD_INPUT else file
    lines = [
        (number, utf8(line, f"{name}:{number}:").removesuffix("\r")) for number, line in enumerate(raw_lines(file), 1)
    ]
    lines = [(number, line) for number, line in lines if line.strip()]
    if not lines:
        raise InvalidRequestError(f"'{name}' holds no prompt: write one per line, or JSON lines with 'prompt'")
    first, text = lines[0]
    read = json_prompt if text.lstrip().startswith("{") else plain_prompt
    prompts = [read(line, number, f"{name}:{number}", first) for number, line in lines]
    seen: dict[str | int, int] = {}
    for prompt in prompts:
        label = prompt.labels.get("id")
        if label is not None and (line := seen.setdefault(label, prompt.line)) != prompt.line:
            raise InvalidRequestError(f"{prompt.place}: 'id' is {label!r}, as in line {line}: ids are unique")
    return prompts


def raw_lines(file: str) -> Iterator[bytes]:
    """Yield the lines of a file, or of standard input, without a byte order mark and line feeds."""
    if file == STANDARD_INPUT and sys.stdin is None:
        raise InvalidRequestError("standard input is closed: name a file with --prompts, or pipe one in")
    try:
        with nullcontext(sys.stdin.buffer) if file == STANDARD_INPUT else Path(file).open("rb") as stream:
            for number, line in enumerate(read_lines(stream)):
                yield (line if number else line.removeprefix(codecs.BOM_UTF8)).removesuffix(b"\n")
    except (OSError, JsonError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidRequestError(f"prompts file '{file}' cannot be read: {reason}") from error


def plain_prompt(line: str, number: int, place: str, first: int) -> FilePrompt:
    """Return a line of text as a prompt; a JSON object with prompt keys is refused."""
    fields = json_value(line) if line.lstrip().startswith("{") else None
    if isinstance(fields, dict) and not fields.keys().isdisjoint(KINDS):
        raise InvalidRequestError(f"{place}: a JSON object, but line {first} is text: use one form in the whole file")
    return FilePrompt(place, number, prompt=line)


def json_prompt(line: str, number: int, place: str, first: int) -> FilePrompt:
    fields = json_value(line)
    if not isinstance(fields, dict):
        raise InvalidRequestError(
            f"{place}: not a valid JSON object: every line must be one, since line {first} is; "
            'a text that begins with a brace is written {"prompt": "{…"}'
        )
    unknown = next((key for key in fields if key not in (*KINDS, *LABELS)), None)
    if unknown is not None:
        raise InvalidRequestError(f"{place}: unknown key '{unknown}': {suggestion(unknown, (*KINDS, *LABELS))}")
    kinds = [kind for kind in KINDS if kind in fields]
    if len(kinds) != 1:
        case = "both 'prompt' and 'messages': keep one" if kinds else "neither 'prompt' nor 'messages': give one"
        raise InvalidRequestError(f"{place}: {case}")
    labels = {label: fields[label] for label in LABELS if label in fields}
    for label, value in labels.items():
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise InvalidRequestError(
                f"{place}: '{label}' is {shown_value(value)}: it must be a text or a whole number"
            )
    if kinds == ["prompt"]:
        return FilePrompt(place, number, prompt=checked_text(fields["prompt"], place), labels=labels)
    try:
        check_messages(fields["messages"])
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{place}: {error}") from error
    return FilePrompt(place, number, messages=fields["messages"], labels=labels)


def json_value(line: str) -> Any:
    """Parse a line; None if it is not JSON."""
    try:
        return parse_json(line)
    except JsonError:
        return None


def checked_text(value: object, place: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequestError(f"{place}: 'prompt' is {shown_value(value)}: it must be a non-empty text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{place}: 'prompt' is not valid Unicode text (character {error.start} is half of a surrogate pair): "
            "write the whole character"
        ) from error
    return value
