"""Workloads: prompts from a JSON lines file, each with a category, and the later turns of conversations.

A line is one of: ours (`id`, `category`, and `prompt` or `messages`; only the last is required), a Spec-Bench
question (`question_id`, `category`, `turns`, the messages of the user), a HumanEval task (`task_id`, `prompt`).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from draftree.core.errors import ConfigurationError, InvalidRequestError, suggestion
from draftree.core.files import JsonError, parse_json_object, read_lines
from draftree.text.tokenizer import Tokenizer

SHIPPED = Path(__file__).parent / "data" / "prompts.jsonl"
DEFAULT_CATEGORY = "prompts"
CODE_CATEGORY = "code-completion"


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt of a workload: a text to continue, or messages to answer.

    Attributes:
        turns: later messages of the user, each sent after the model's answer to what was before it.
        first_turn: id of the task that began the conversation; None if this is the first turn.
    """

    id: str
    category: str
    prompt: str | None = None
    messages: tuple[dict[str, str], ...] | None = None
    turns: tuple[str, ...] = ()
    first_turn: str | None = None

    @property
    def ids(self) -> tuple[str, ...]:
        return (self.id, *(f"{self.id}/{number}" for number in range(2, len(self.turns) + 2)))

    @property
    def text(self) -> str:
        """The prompt, or the contents of the messages, for models without a chat template."""
        if self.prompt is not None:
            return self.prompt
        return "\n\n".join(message["content"] for message in self.messages or ())


@dataclass(frozen=True, slots=True)
class Workload:
    """The prompts of a file, with the hash of the file."""

    name: str
    sha256: str
    tasks: tuple[Task, ...]

    def choose(self, categories: Sequence[str] = (), limit: int | None = None) -> Workload:
        """Return the tasks of these categories (none: all), the first `limit` of each."""
        groups: dict[str, list[Task]] = {}
        for task in self.tasks:
            groups.setdefault(task.category, []).append(task)
        for category in categories:
            if category not in groups:
                raise ConfigurationError(
                    f"category '{category}' does not occur in {self.name}: {suggestion(category, groups)}"
                )
        chosen = {task.id for category in categories or groups for task in groups[category][:limit]}
        return replace(self, tasks=tuple(task for task in self.tasks if task.id in chosen))


def read_workload(path: Path = SHIPPED) -> Workload:
    tasks, sha256 = [], hashlib.sha256()
    try:
        with path.open("rb") as stream:
            for number, line in enumerate(read_lines(stream), start=1):
                sha256.update(line)
                if text := line.decode("utf-8-sig" if number == 1 else "utf-8").strip():
                    tasks.append(_task(text, number, path.name))
    except FileNotFoundError as error:
        raise ConfigurationError(f"prompts file '{path}' does not exist: check the path") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"prompts file '{path}' is not UTF-8 text: it must hold JSON lines") from error
    except JsonError as error:
        raise ConfigurationError(f"prompts file '{path}', {error}") from error
    except OSError as error:
        raise ConfigurationError(f"prompts file '{path}' cannot be read: {error.strerror}") from error
    if not tasks:
        raise ConfigurationError(f"prompts file '{path}' holds no prompts: write one JSON object per line")
    for task_id, count in Counter(prompt_id for task in tasks for prompt_id in task.ids).items():
        if count > 1:
            raise ConfigurationError(
                f"prompts file '{path}' has {count} prompts with the id '{task_id}': ids are unique"
            )
    return Workload(path.name, sha256.hexdigest(), tuple(tasks))


def encode(task: Task, tokenizer: Tokenizer) -> tuple[list[int], str]:
    """Return token ids of a task, and the form of its prompt: "chat" or "plain"."""
    if task.messages is not None and tokenizer.has_chat_template:
        return tokenizer.apply_chat_template(task.messages), "chat"
    return tokenizer.encode(task.text), "plain"


def _task(line: str, number: int, file: str) -> Task:
    where = f"prompts file {file}, line {number}"
    try:
        fields = parse_json_object(line)
    except JsonError as error:
        raise ConfigurationError(f"{where}: {error}; every line must be one object") from error
    kinds = [key for key in ("prompt", "messages", "turns") if key in fields]
    if len(kinds) != 1:
        raise ConfigurationError(
            f"{where} has {' and '.join(kinds) or 'no prompt'}: give one of 'prompt', 'messages' or 'turns'"
        )
    try:
        return _task_of(fields, kinds[0], number)
    except (InvalidRequestError, ValueError) as error:
        raise ConfigurationError(f"{where}: {error}") from error


def _task_of(fields: dict[str, Any], kind: str, number: int) -> Task:
    task_id = str(next((fields[key] for key in ("id", "question_id", "task_id") if key in fields), number))
    category = fields.get("category", CODE_CATEGORY if "task_id" in fields else DEFAULT_CATEGORY)
    if not isinstance(category, str) or not category.strip():
        raise ValueError("'category' must be a name")
    match kind, fields[kind]:
        case "prompt", prompt:
            return Task(task_id, category, prompt=_text(prompt, "'prompt'"))
        case "turns", [*turns] if turns:
            first, *later = [_text(turn, f"turn {place}") for place, turn in enumerate(turns, start=1)]
            return Task(task_id, category, messages=({"role": "user", "content": first},), turns=tuple(later))
        case "messages", [*messages] if messages:
            return Task(task_id, category, messages=tuple(map(_message, messages)))
        case "turns", _:
            raise ValueError("'turns' must be a list of texts")
        case _:
            raise ValueError("'messages' must be a list of objects with 'role' and 'content'")


def _message(message: Any) -> dict[str, str]:
    if not isinstance(message, dict) or set(message) != {"role", "content"}:
        raise ValueError("a message has only 'role' and 'content'")
    return {"role": _text(message["role"], "'role'"), "content": _text(message["content"], "'content'")}


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{what} must be a non-empty text")
    return value


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
    """Return the turn of a conversation after `prompt` and its answer; None after the last one."""
    task = prompt.task
    if not task.turns or task.messages is None:
        return None
    first = task.first_turn or task.id
    users = sum(message["role"] == "user" for message in task.messages)
    added = ({"role": "assistant", "content": answer}, {"role": "user", "content": task.turns[0]})
    messages = (*task.messages, *added)
    after = Task(f"{first}/{users + 1}", task.category, messages=messages, turns=task.turns[1:], first_turn=first)
    ids, form = encode(after, tokenizer)
    return Prompt(after, tuple(ids), form)


def with_room(
    prompts: Sequence[Prompt], tokenizer: Tokenizer, *, room: int, answer: int
) -> tuple[list[Prompt], tuple[str, ...]]:
    """Return the prompts without the turns for which the context is too short, and a note on them.

    `room` is the tokens that a prompt may have, `answer` those that an answer may have.
    """
    shortened: list[Prompt] = []
    left_out: list[str] = []
    for prompt in prompts:
        fits = 0
        turn = following(tokenizer, prompt, STAND_IN)
        while turn is not None and len(turn.ids) + (fits + 1) * (answer + MARGIN) <= room:
            fits += 1
            turn = following(tokenizer, turn, STAND_IN)
        left_out += prompt.task.ids[fits + 1 :]
        shortened.append(replace(prompt, task=replace(prompt.task, turns=prompt.task.turns[:fits])))
    if not left_out:
        return shortened, ()
    return shortened, (f"{len(left_out)} later turns left out, longer than the context: {', '.join(left_out)}",)
