"""Arguments of `LLM` and of its methods: prompts, sampling parameters and counts, checked and brought to one form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from draftree.core.errors import ConfigurationError, InvalidRequestError
from draftree.engine.engine import Limits
from draftree.sampling.params import SamplingParams
from draftree.text.tokenizer import MESSAGE_KEYS

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, str]]
Params = SamplingParams | Sequence[SamplingParams] | None


def prompt_list(prompts: Any) -> list[Prompt]:
    """One prompt or several, as a list of them; arrays and tensors of token ids are read as lists are.

    Raises:
        InvalidRequestError: it is neither.
    """
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping):
        _refuse_messages([prompts])
    if not is_row(prompts):
        hint = "give its input_ids" if isinstance(prompts, Mapping) else "give a text, token ids, or a list of either"
        raise InvalidRequestError(f"prompts is {shown_value(prompts)}: {hint}")
    listed = list(prompts)
    _refuse_messages(listed)
    is_one_of_ids = bool(listed) and all(map(is_id, listed))
    return [listed] if is_one_of_ids else listed


def _refuse_messages(prompts: Sequence[Any]) -> None:
    """Refuse a conversation, or a list of them, in the place of prompts."""
    rows = (row if isinstance(row, list | tuple) else [row] for row in prompts)
    if any(isinstance(item, Mapping) and not item.keys().isdisjoint(MESSAGE_KEYS) for row in rows for item in row):
        raise InvalidRequestError(
            "prompts holds messages with 'role' and 'content', and generate takes texts or token ids: "
            "call chat(messages), which formats them by the model's chat template"
        )


def is_id(value: Any) -> bool:
    """Whether it is one whole number, such as a token id."""
    # arrays and tensors of any size have __index__
    return hasattr(value, "__index__") and not getattr(value, "ndim", 0)


def is_row(value: Any) -> bool:
    """Whether it goes on in an order of its own; a dictionary would give its keys, bytes their numbers."""
    return isinstance(value, Iterable) and not isinstance(value, Mapping | Set | bytes | bytearray)


def shown_value(value: Any) -> str:
    """The value as a message shows it: its type, where it is long."""
    shown = repr(value)
    return shown if len(shown) <= 40 else f"a {type(value).__name__}"


def params_for(params: Params, count: int) -> list[SamplingParams]:
    """Parameters for each of so many prompts.

    Raises:
        InvalidRequestError: there are more or fewer of them, or they are something else.
    """
    if not isinstance(params, Sequence) or isinstance(params, str):
        return [one_params(params)] * count
    if len(params) != count:
        raise InvalidRequestError(
            f"{count} prompts came with {len(params)} sampling parameters: give one for each, or one"
        )
    return [one_params(given) for given in params]


def one_params(params: SamplingParams | None) -> SamplingParams:
    """What was given for one prompt; the defaults where nothing was.

    Raises:
        InvalidRequestError: it is something else.
    """
    if params is None:
        return SamplingParams()
    if isinstance(params, Mapping):
        raise InvalidRequestError("the sampling parameters are a dictionary: give SamplingParams(**parameters)")
    if not isinstance(params, SamplingParams):
        raise InvalidRequestError(
            f"the sampling parameters are {shown_value(params)}: give SamplingParams, "
            "such as SamplingParams(temperature=0)"
        )
    return params


def require_single(params: SamplingParams) -> None:
    """Refuse several texts where one is streamed."""
    if params.n != 1:
        raise InvalidRequestError(f"n={params.n} texts cannot be streamed as one: set n=1, or use generate")


def limits_of(max_batch_size: int | None, *, prefill_chunk_size: int, prefix_cache_size: int) -> Limits:
    """The engine's limits.

    Raises:
        ConfigurationError: one of them is no whole number, or too small.
    """
    if max_batch_size is not None:
        require_count("max_batch_size", max_batch_size, least=1)
    require_count("prefill_chunk_size", prefill_chunk_size, least=1)
    require_count("prefix_cache_size", prefix_cache_size, least=0)
    return Limits(max_batch_size, prefill_chunk_size=prefill_chunk_size, prefix_cache_size=prefix_cache_size)


def require_count(name: str, value: object, *, least: int) -> None:
    """Refuse what is no whole number of at least so many."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(f"{name} is {value!r}: it must be a whole number of at least {least}")
