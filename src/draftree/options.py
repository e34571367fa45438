"""Checks and normalization of what a user passes to `LLM` and `AsyncLLM`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from draftree.core.errors import InvalidRequestError, blaming
from draftree.sampling.params import SamplingParams
from draftree.text.chat.messages import MESSAGE_KEYS, check_messages

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]
Params = SamplingParams | Sequence[SamplingParams] | None


def prompt_list(prompts: Any) -> list[Prompt]:
    """Return one prompt or several as a list; arrays and tensors of token ids are treated as lists.

    Raises:
        InvalidRequestError: the value is neither.
    """
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping):
        _refuse_messages([prompts])
    if not is_row(prompts):
        hint = "give its input_ids" if isinstance(prompts, Mapping) else "give a text, token ids, or a list of either"
        raise InvalidRequestError(f"prompts is {shown_value(prompts)}: {hint}", param="prompts")
    listed = list(prompts)
    _refuse_messages(listed)
    is_one_of_ids = bool(listed) and all(map(is_id, listed))
    return [listed] if is_one_of_ids else listed


def _refuse_messages(prompts: Sequence[Any]) -> None:
    """Raise for a conversation, or a list of them, in place of prompts."""
    rows = (row if isinstance(row, list | tuple) else [row] for row in prompts)
    if any(isinstance(item, Mapping) and not item.keys().isdisjoint(MESSAGE_KEYS) for row in rows for item in row):
        raise InvalidRequestError(
            "prompts holds messages with 'role' and 'content', and generate takes texts or token ids: "
            "call chat(messages), which formats them by the model's chat template",
            param="prompts",
        )


def is_id(value: Any) -> bool:
    """Return whether the value is one whole number, such as a token id."""
    # arrays and tensors of any size have __index__
    return hasattr(value, "__index__") and not getattr(value, "ndim", 0)


def is_row(value: Any) -> bool:
    """Return whether the value is an ordered iterable; mappings would give their keys, bytes their numbers."""
    return isinstance(value, Iterable) and not isinstance(value, Mapping | Set | bytes | bytearray)


def shown_value(value: Any) -> str:
    """Return the value for a message: its type if its text is long."""
    shown = repr(value)
    return shown if len(shown) <= 40 else f"a {type(value).__name__}"


def params_for(params: Params, count: int) -> list[SamplingParams]:
    """Return sampling parameters for each of `count` prompts.

    Raises:
        InvalidRequestError: their number differs, or they have another type.
    """
    if not isinstance(params, Sequence) or isinstance(params, str):
        return [one_params(params)] * count
    if len(params) != count:
        raise InvalidRequestError(
            f"{count} prompts came with {len(params)} sampling parameters: give one for each, or one",
            param="params",
        )
    return [one_params(given) for given in params]


def one_params(params: SamplingParams | None) -> SamplingParams:
    """Return the parameters of one prompt; the defaults for None.

    Raises:
        InvalidRequestError: the value has another type.
    """
    if params is None:
        return SamplingParams()
    if isinstance(params, Mapping):
        raise InvalidRequestError(
            "the sampling parameters are a dictionary: give SamplingParams(**parameters)", param="params"
        )
    if not isinstance(params, SamplingParams):
        raise InvalidRequestError(
            f"the sampling parameters are {shown_value(params)}: give SamplingParams, "
            "such as SamplingParams(temperature=0)",
            param="params",
        )
    return params


def require_single(params: SamplingParams) -> None:
    """Raise for several texts in a stream of one."""
    if params.n != 1:
        raise InvalidRequestError(f"n={params.n} texts cannot be streamed as one: set n=1, or use generate", param="n")


def require_text(params: SamplingParams) -> None:
    """Raise for a stream of text from a request without text."""
    if not params.detokenize:
        raise InvalidRequestError(
            "detokenize=False gives no text to stream: use stream_updates or AsyncLLM.submit, whose updates have "
            "token_ids, or generate",
            param="detokenize",
        )


def require_one_prompt(prompt: Any) -> None:
    """Raise for a list of prompts or of conversations in place of one."""
    first = prompt[0] if isinstance(prompt, list | tuple) and prompt else None
    if isinstance(first, list | tuple) and first and isinstance(first[0], Mapping):
        raise InvalidRequestError(
            f"the prompt is a list of {len(prompt)} conversations, and a call takes one: call chat(messages), or this "
            "method, once for each, for example with asyncio.gather",
            param="prompt",
        )
    if isinstance(first, str | list | tuple):
        raise InvalidRequestError(
            f"the prompt is a list of {len(prompt)} prompts, and a call takes one: call it once for each, for example "
            "with asyncio.gather",
            param="prompt",
        )


def require_one_conversation(messages: object) -> None:
    """Raise unless the value is one conversation; `generate` would treat a text or token ids as a prompt."""
    if isinstance(messages, list | tuple) and messages and isinstance(messages[0], list | tuple):
        raise InvalidRequestError(
            f"chat takes one conversation per call, and this is a list of {len(messages)}: "
            "call it once for each, for example with asyncio.gather",
            param="messages",
        )
    with blaming("messages"):
        check_messages(messages)
