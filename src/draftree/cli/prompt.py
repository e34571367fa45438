"""The prompt of a run: its source, and whether it is a message or plain text."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import typer

from draftree.cli.render import is_terminal
from draftree.core.errors import InvalidRequestError

if TYPE_CHECKING:
    from draftree.engine.prompts import DecoderOptions
    from draftree.llm import LLM
    from draftree.sampling.params import SamplingParams

__all__ = ["Request", "Task", "fitted_to_context", "read_prompt"]

STANDARD_INPUT = "-"


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt for a model.

    Attributes:
        text: the prompt.
        system: system message of the conversation.
        chat: whether it is a message; None decides by the model: True if it has a chat template.
        decoder: options of encoder-decoder models.
    """

    text: str
    system: str | None = None
    chat: bool | None = None
    decoder: DecoderOptions = field(default_factory=dict)  # type: ignore[assignment]

    def decided(self, llm: LLM) -> Task:
        """Return the same task with `chat` decided."""
        chat = self.chat
        if chat is None:
            chat = llm.tokenizer is not None and llm.tokenizer.has_chat_template
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
        ids = llm.prompts.encode_chat(self.messages) if self.chat else llm.tokenizer.encode(self.text)
        return fitted_to_context(params, llm, ids, self.decoder)

    @property
    def messages(self) -> list[dict[str, str]]:
        """The task as a conversation."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, {"role": "user", "content": self.text}]


@dataclass(frozen=True, slots=True)
class Request:
    """A task with its sampling parameters.

    Attributes:
        task: the prompt.
        params: sampling parameters.
        fits_context: whether `max_tokens` is reduced to fit the context, because it was not given.
    """

    task: Task
    params: SamplingParams
    fits_context: bool

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
        count = len(decoder_tokens(llm.model, llm.prompts.encode_start(decoder or {})))
    else:
        count = len(ids) if most == -1 else min(most, len(ids))
    room = llm.model.max_length - count
    # without any room the request itself is refused with a message
    if params.max_tokens is None or room < 1:
        return params
    return dataclasses.replace(params, max_tokens=min(params.max_tokens, room))


def read_prompt(given: str | None) -> str:
    """Return the prompt from the command line, or standard input without its final line break."""
    if given is not None and given != STANDARD_INPUT:
        if not given:
            raise InvalidRequestError("the prompt is empty: give at least one character")
        return given
    if sys.stdin is None or (given is None and is_terminal(sys.stdin)):
        raise typer.BadParameter("give a text, or pipe one to standard input", param_hint="PROMPT")
    raw = sys.stdin.buffer.read()
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"standard input is not UTF-8 text (byte {error.start} is invalid): convert it, for example with iconv"
        ) from error
    text = text.removesuffix("\n").removesuffix("\r")
    if not text:
        raise InvalidRequestError("the prompt is empty: standard input is empty")
    return text
