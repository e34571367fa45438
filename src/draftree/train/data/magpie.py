"""Prompts written by the target itself: a chat model continues its template where the user's message would begin.

Aligned models have learned the messages of users together with the answers, so what they write there resembles the
prompts of their own training. No file of prompts is needed. Source: Xu and others, "Magpie: Alignment Data Synthesis
from Scratch by Prompting Aligned LLMs with Nothing", 2024 (arXiv 2406.08464).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

from draftree.core.errors import ConfigurationError
from draftree.llm import LLM
from draftree.sampling.params import SamplingParams

PROBES = ("alpha", "Zebra")
"""Two messages; what the template writes before and after both of them is the template's own."""
MIN_TOKENS = 4
"""Shorter messages are dropped."""
MAX_ATTEMPTS = 4
"""Drawn messages per wanted one, after which the model is regarded as unable to write them."""


@dataclass(frozen=True, slots=True)
class UserTurn:
    """Where a chat template has the user's message.

    Attributes:
        before: token ids up to the message.
        end: the token id that ends the message.
    """

    before: tuple[int, ...]
    end: int


def user_turn(llm: LLM) -> UserTurn:
    """Return where the chat template of a model has the user's message.

    Raises:
        ConfigurationError: there is no chat template, or it has no token that ends a user's message.
    """
    if llm.tokenizer is None or not llm.tokenizer.has_chat_template:
        raise ConfigurationError("the model has no chat template, so it cannot write messages of users: give prompts")
    first, second = (llm.prompts.encode_chat([{"role": "user", "content": probe}]) for probe in PROBES)
    before, after = _common(first, second), _common(first[::-1], second[::-1])[::-1]
    if not before or not after or after[0] not in llm.tokenizer.special_ids:
        raise ConfigurationError("the chat template does not mark the end of a user's message with a special token")
    return UserTurn(tuple(before), after[0])


def magpie_prompts(
    llm: LLM,
    number: int,
    *,
    temperature: float = 1.0,
    top_p: float = 0.95,
    max_tokens: int = 200,
    seed: int = 0,
    batch: int = 64,
    on_progress: Callable[[int], None] | None = None,
) -> list[str]:
    """Let a chat model write messages of users.

    Messages that do not end within `max_tokens`, are shorter than 4 tokens or are equal to an earlier one are dropped.
    The result is a function of model and arguments, without `batch` if passes are exact.

    Args:
        llm: the model.
        number: number of messages.
        temperature: temperature of sampling, above 0.
        top_p: probability mass that is sampled from.
        max_tokens: maximum number of tokens of a message.
        seed: seed of the first message; others follow.
        batch: messages that are drawn at a time.
        on_progress: called with the number of messages so far.

    Raises:
        ConfigurationError: there is no usable chat template, a number is out of range, or the model does not write
            enough different messages.
        InvalidRequestError: invalid parameters of sampling.
    """
    for name, value in (("number", number), ("batch", batch), ("max_tokens", max_tokens)):
        if value < 1:
            raise ConfigurationError(f"{name} is {value}: it must be at least 1")
    if temperature <= 0:
        raise ConfigurationError(f"temperature is {temperature}: it must be above 0, or all messages are equal")
    turn = user_turn(llm)
    found: dict[str, None] = {}
    for first in count(seed, batch):
        if len(found) >= number:
            return list(found)[:number]
        if first - seed >= MAX_ATTEMPTS * number + batch:
            raise ConfigurationError(
                f"the model wrote only {len(found)} different messages in {first - seed} attempts: ask for fewer, "
                "or give prompts"
            )
        found.update(dict.fromkeys(_drawn(llm, turn, range(first, first + batch), temperature, top_p, max_tokens)))
        if on_progress is not None:
            on_progress(min(number, len(found)))
    raise AssertionError("the loop ends by itself")


def _drawn(llm: LLM, turn: UserTurn, seeds: range, temperature: float, top_p: float, max_tokens: int) -> Iterator[str]:
    params = [
        SamplingParams(
            temperature=temperature, top_p=top_p, max_tokens=max_tokens, seed=seed, stop_token_ids=[turn.end]
        )
        for seed in seeds
    ]
    for result in llm.generate([list(turn.before)] * len(params), params):
        text = result.text.strip()
        if result.finish_reason == "stop" and len(result.token_ids) > MIN_TOKENS and text:
            yield text


def _common(first: list[int], second: list[int]) -> list[int]:
    """The longest common beginning."""
    length = next((place for place, (one, other) in enumerate(zip(first, second, strict=False)) if one != other), None)
    return first[: min(len(first), len(second)) if length is None else length]
