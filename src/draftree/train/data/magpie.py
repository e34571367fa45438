"""Prompts written by the target itself: a chat model continues its template where the user's message would begin.

Aligned models have learned the messages of users together with the answers, so what they write there resembles the
prompts of their own training. No file of prompts is needed. Source: Xu and others, "Magpie: Alignment Data Synthesis
from Scratch by Prompting Aligned LLMs with Nothing", 2024 (arXiv 2406.08464).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from draftree.core.errors import ConfigurationError
from draftree.llm import LLM
from draftree.sampling.params import SamplingParams

PROBES = ("alpha", "Zero")
"""Two messages that begin and end with other letters: what is equal in both encoded conversations is the template's."""
MIN_TOKENS = 4
"""Shorter messages are dropped."""
MAX_ATTEMPTS = 4
"""Drawn messages per wanted one, after which the model is regarded as unable to write them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageSettings:
    """How messages of users are drawn.

    Attributes:
        number: number of messages.
        temperature: temperature of sampling, above 0.
        top_p: probability mass that is sampled from.
        max_tokens: maximum number of tokens of a message, its end included.
        seed: seed of the first message; each further one has the next seed.
        batch: number of messages that are drawn at a time.

    Raises:
        ConfigurationError: a value out of range.
        InvalidRequestError: a value that sampling does not allow.
    """

    number: int
    temperature: float = 1.0
    top_p: float = 0.95
    max_tokens: int = 200
    seed: int = 0
    batch: int = 64

    def __post_init__(self) -> None:
        for name in ("number", "batch"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.max_tokens <= MIN_TOKENS:
            raise ConfigurationError(
                f"max_tokens is {self.max_tokens}: it must be at least {MIN_TOKENS + 1}, because shorter messages "
                "are dropped"
            )
        if self.temperature <= 0:
            raise ConfigurationError(
                f"temperature is {self.temperature}: it must be above 0, because all messages are equal otherwise"
            )
        self.params(self.seed, end=0)

    def params(self, seed: int, end: int) -> SamplingParams:
        """Return the parameters of the message with a seed; `end` is the token id that ends it."""
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            max_tokens=self.max_tokens,
            seed=seed,
            stop_token_ids=[end],
        )


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
        ConfigurationError: there is no chat template, or it does not write a user's message after other tokens and
            before a special token.
    """
    if llm.tokenizer is None or not llm.tokenizer.has_chat_template:
        raise ConfigurationError("the model has no chat template, so it cannot write messages of users: give prompts")
    first, second = (llm.prompts.encode_chat([{"role": "user", "content": probe}]) for probe in PROBES)
    before, after = _common(first, second), _common(first[::-1], second[::-1])[::-1]
    if not before:
        raise ConfigurationError("the chat template writes nothing before a user's message: give prompts")
    if not after or after[0] not in llm.tokenizer.special_ids:
        raise ConfigurationError("the chat template does not end a user's message with a special token: give prompts")
    return UserTurn(tuple(before), after[0])


def magpie_prompts(
    llm: LLM, settings: MessageSettings, *, on_progress: Callable[[int], None] | None = None
) -> list[str]:
    """Let a chat model write messages of users.

    Messages that do not end within `max_tokens`, are shorter than 4 tokens or are equal to an earlier one are dropped.
    The result is a function of model and settings, and does not depend on `batch` if the passes of the model are exact.

    Args:
        llm: the model.
        settings: number of messages and how they are drawn.
        on_progress: called after each batch with the number of messages so far.

    Raises:
        ConfigurationError: there is no usable chat template, or the model does not write enough different messages.
    """
    turn = user_turn(llm)
    found: dict[str, None] = {}
    drawn = 0
    while len(found) < settings.number:
        if drawn >= MAX_ATTEMPTS * settings.number + settings.batch:
            raise ConfigurationError(
                f"the model wrote {len(found)} different messages in {drawn} attempts: ask for fewer, raise "
                "max_tokens or the temperature, or give prompts"
            )
        seed = settings.seed + drawn
        found.update(dict.fromkeys(_drawn(llm, turn, range(seed, seed + settings.batch), settings)))
        drawn += settings.batch
        if on_progress is not None:
            on_progress(min(settings.number, len(found)))
    return list(found)[: settings.number]


def _drawn(llm: LLM, turn: UserTurn, seeds: range, settings: MessageSettings) -> Iterator[str]:
    params = [settings.params(seed, turn.end) for seed in seeds]
    for result in llm.generate([list(turn.before)] * len(params), params):
        text = result.text.strip()
        # the token that ended the message is counted in token_ids
        if result.finish_reason == "stop" and len(result.token_ids) > MIN_TOKENS and text:
            yield text


def _common(first: list[int], second: list[int]) -> list[int]:
    """Return the longest common beginning."""
    length = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        length += 1
    return first[:length]
