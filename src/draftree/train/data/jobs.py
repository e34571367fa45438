"""Prompts in the order in which they are answered, each with its temperature and its seed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, zip_longest

from draftree.train.data.manifest import PromptSource


@dataclass(frozen=True, slots=True)
class DataPrompt:
    """A prompt for training data.

    Attributes:
        messages: a conversation that ends with a message of the user, or one message.
        is_text: whether it was given as plain text rather than as messages.
    """

    messages: tuple[Mapping[str, str], ...]
    is_text: bool = False

    @classmethod
    def of_text(cls, text: str) -> DataPrompt:
        """Return a plain text as a prompt: one message in a chat."""
        return cls(({"role": "user", "content": text},), is_text=True)

    @property
    def text(self) -> str:
        """The prompt for a model without chat: the contents of all messages, with blank lines between them."""
        return "\n\n".join(message["content"] for message in self.messages)


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts of one source.

    Attributes:
        name: "shipped", "packages" or the name of a file.
        prompts: the prompts.
        licence: licence of the prompts, as far as it is known.
    """

    name: str
    prompts: Sequence[DataPrompt]
    licence: str

    @property
    def source(self) -> PromptSource:
        """Name, size and checksum for the manifest."""
        found = hashlib.sha256()
        for prompt in self.prompts:
            found.update(json.dumps([dict(message) for message in prompt.messages], sort_keys=True).encode() + b"\n")
        return PromptSource(name=self.name, count=len(self.prompts), sha256=found.hexdigest(), licence=self.licence)


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt and how it is answered.

    Attributes:
        prompt_id: index of the prompt among all prompts.
        prompt: the prompt.
        temperature: temperature of the answer.
        seed: seed of the answer.
    """

    prompt_id: int
    prompt: DataPrompt
    temperature: float
    seed: int


def jobs_of(sets: Sequence[PromptSet], *, temperatures: Sequence[float], seed: int) -> list[Job]:
    """Return all prompts: those of each set in random order, one of every set in turn.

    The first prompts are an even sample of the sets, of which small ones are used completely. Order, temperatures and
    seeds are functions of the arguments only.
    """
    prompts = [prompt for one in sets for prompt in one.prompts]
    starts = [0, *accumulate(len(one.prompts) for one in sets)]
    shuffled = [
        sorted(range(first, end), key=lambda prompt_id: _hash(f"order {seed}/{prompt_id}"))
        for first, end in pairwise(starts)
    ]
    order = [prompt_id for turn in zip_longest(*shuffled) for prompt_id in turn if prompt_id is not None]
    return [
        Job(
            prompt_id,
            prompts[prompt_id],
            temperatures[_hash(f"temperature {seed}/{prompt_id}") % len(temperatures)],
            _hash(f"text {seed}/{prompt_id}") >> 32,
        )
        for prompt_id in order
    ]


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
