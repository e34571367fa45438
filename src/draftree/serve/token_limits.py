"""Limits of tokens and texts that the server sets beyond those of a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Protocol

from draftree.models.source import FeatureSource
from draftree.sampling.params import SamplingParams
from draftree.serve.errors import ApiError, invalid
from draftree.serve.notes import note
from draftree.serve.pool import ServedModel
from draftree.serve.settings import ServerSettings


class Encode(Protocol):
    """Encodes a prompt; beyond `most` tokens it may be refused without encoding it all."""

    def __call__(self, prompt: Any, /, *, most: int | None = None) -> Awaitable[Any]:
        """Return token ids, or features."""


def longest_prompt(settings: ServerSettings, model: ServedModel, params: SamplingParams) -> int | None:
    """Return the most tokens that a prompt may have; None if it is truncated."""
    most = model.llm.llm.requests.longest_prompt(params)
    if most is None or settings.max_prompt_tokens is None:
        return most
    return min(most, settings.max_prompt_tokens)


def require_choices(settings: ServerSettings, params: SamplingParams, names: Mapping[str, str]) -> None:
    """Refuse more texts, or longer ones, than the server allows.

    Args:
        settings: of the server.
        params: sampling parameters.
        names: body field of a library parameter, where it differs.

    Raises:
        ApiError: 400.
    """
    if params.n > settings.max_choices:
        raise invalid(f"n={params.n}: this server allows at most {settings.max_choices} texts per request", "n")
    limit = settings.max_completion_tokens
    if limit is not None and params.max_tokens is not None and params.max_tokens > limit:
        name = names.get("max_tokens", "max_tokens")
        raise invalid(f"{name}={params.max_tokens}: this server allows at most {limit}", name)


def clipped(params: SamplingParams, most: int, field: str) -> SamplingParams:
    """Return parameters without a maximum number of tokens if it is above what is possible, and note its field."""
    if params.max_tokens is None or params.max_tokens <= most:
        return params
    note(field, f"is reduced to {most}: more tokens do not fit")
    return dataclasses.replace(params, max_tokens=None)


async def within_limits(
    settings: ServerSettings, model: ServedModel, *, prompts: Sequence[Any], params: SamplingParams
) -> tuple[SamplingParams, Sequence[Any]]:
    """Apply the server's limits of prompts, and of texts without a limit of their own.

    Args:
        settings: of the server.
        model: the model.
        prompts: texts, token ids or messages.
        params: sampling parameters.

    Returns:
        The parameters, and the prompts, encoded if that was needed.

    Raises:
        ApiError: 400, a prompt is too long.
    """
    needs_limit = settings.max_completion_tokens is not None and params.max_tokens is None
    if settings.max_prompt_tokens is None and not needs_limit:
        return params, prompts
    # the features of sound have no tokens, and a fixed length
    most = longest_prompt(settings, model, params)
    encode = model.llm.prompts.encode
    ids = [one if isinstance(one, FeatureSource) else await encode(one, most=most) for one in prompts]
    kept, lengths = params.truncate_prompt_tokens, [0 if isinstance(one, FeatureSource) else len(one) for one in ids]
    longest = max((one if kept is None or kept < 0 else min(kept, one) for one in lengths), default=0)
    if settings.max_prompt_tokens is not None and longest > settings.max_prompt_tokens:
        raise _too_long(longest, settings.max_prompt_tokens)
    if settings.max_completion_tokens is not None and params.max_tokens is None:
        room = max(1, model.max_context - longest)
        params = dataclasses.replace(params, max_tokens=min(settings.max_completion_tokens, room))
    return params, ids


def _too_long(count: int, limit: int) -> ApiError:
    text = f"the prompt has {count} tokens: this server allows at most {limit}; shorten it"
    return invalid(text, None, code="context_length_exceeded")
