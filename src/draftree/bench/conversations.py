"""Prompts with their tokens, and the later turns of conversations with the model's own answers before them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from draftree.bench.workload import Task, encode
from draftree.text.tokenizer import Tokenizer

__all__ = ["Prompt", "following", "with_room"]

MARGIN = 16
"""Tokens by which the encoding of an answer may be longer than the tokens that were generated."""
STAND_IN = "."
"""Answer in the estimate of a conversation's length."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A task with its tokens."""

    task: Task
    ids: tuple[int, ...]
    form: str


def following(tokenizer: Tokenizer, prompt: Prompt, answer: str) -> Prompt | None:
    """Return the next turn of a conversation.

    Args:
        tokenizer: of the model.
        prompt: the turn that was answered.
        answer: its answer, which becomes part of the conversation.

    Returns:
        The next turn; None after the last one.
    """
    task = prompt.task
    if not task.turns or task.messages is None:
        return None
    first = task.first_turn or task.id
    users = sum(message["role"] == "user" for message in task.messages)
    added = ({"role": "assistant", "content": answer}, {"role": "user", "content": task.turns[0]})
    after = Task(
        f"{first}/{users + 1}",
        task.category,
        messages=(*task.messages, *added),
        turns=task.turns[1:],
        first_turn=first,
    )
    ids, form = encode(after, tokenizer)
    return Prompt(after, tuple(ids), form)


def with_room(
    prompts: Sequence[Prompt], tokenizer: Tokenizer, *, room: int, answer: int
) -> tuple[list[Prompt], tuple[str, ...]]:
    """Return the prompts without the turns for which the context is too short, and a note on them.

    Args:
        prompts: first turns.
        tokenizer: of the model.
        room: tokens that a prompt may have.
        answer: tokens that an answer may have.
    """
    found: list[Prompt] = []
    left_out: list[str] = []
    for prompt in prompts:
        fits, turn = 0, following(tokenizer, prompt, STAND_IN)
        while turn is not None and len(turn.ids) + (fits + 1) * (answer + MARGIN) <= room:
            fits, turn = fits + 1, following(tokenizer, turn, STAND_IN)
        left_out += prompt.task.ids[fits + 1 :]
        kept = replace(prompt.task, turns=prompt.task.turns[:fits])
        found.append(replace(prompt, task=kept))
    if not left_out:
        return found, ()
    return found, (f"{len(left_out)} later turns left out, longer than the context: {', '.join(left_out)}",)
