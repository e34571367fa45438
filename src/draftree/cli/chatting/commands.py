"""The commands of a chat: lines that begin with a slash."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from draftree.cli.chatting.session import Session, shortened, with_params
from draftree.cli.options import require_new
from draftree.cli.render import decoding_line
from draftree.core.errors import InvalidRequestError, suggestion

__all__ = ["COMMANDS", "run_command"]

NONE = "none"


@dataclass(frozen=True, slots=True)
class ChatCommand:
    """A command.

    Attributes:
        value: placeholder of its value in the help; empty if it has none. In brackets: may be left out.
        help: one line.
        run: called with the session and the value; an absent value is empty.
    """

    value: str
    help: str
    run: Callable[[Session, str], None]


def run_command(session: Session, line: str) -> None:
    """Run a line that begins with a slash.

    Raises:
        InvalidRequestError: there is no such command, or its value is missing or malformed; nothing has changed then.
    """
    name, _, value = line.strip().partition(" ")
    command = COMMANDS.get(name)
    if command is None:
        raise InvalidRequestError(
            f"there is no command '{name}': {suggestion(name, COMMANDS)}; "
            "for a message that begins with a slash, write two"
        )
    value = value.strip()
    if value and not command.value:
        raise InvalidRequestError(f"{name} takes no value, and got '{shortened(value)}': leave it out")
    if not value and command.value and not command.value.startswith("["):
        raise InvalidRequestError(f"{name} needs a value: write {name} {command.value}")
    command.run(session, value)


def show_help(session: Session, value: str) -> None:
    rows = [(f"{name} {command.value}".rstrip(), command.help) for name, command in COMMANDS.items()]
    width = max(len(usage) for usage, _ in rows)
    lines = [f"{usage:<{width}}  {text}" for usage, text in rows]
    session.tell("\n".join([*lines, *KEYS]))


def set_draft(session: Session, value: str) -> None:
    if value:
        session.drafting.switch(value)
        for text in filter(None, (session.drafting.setup.auto_note, session.drafting.llm.draft_note)):
            session.tell(text)
        session.warn_if_lossy()
    session.tell(f"drafter {session.drafting.name}")


def number_command(
    field: str, kind: type[int] | type[float], *, optional: bool = False
) -> Callable[[Session, str], None]:
    """Return the function of a command that sets or shows a sampling parameter."""
    allowed = f"{'a whole number' if kind is int else 'a number'}{f', or {NONE}' if optional else ''}"

    def run(session: Session, value: str) -> None:
        if value:
            with_params(session, **{field: number_of(value)})
            session.fits_context = session.fits_context and field != "max_tokens"
            session.warn_if_lossy()
        now = getattr(session.params, field)
        session.tell(f"{field} {NONE if now is None else now}")

    def number_of(value: str) -> float | None:
        if optional and value.lower() == NONE:
            return None
        try:
            return kind(value)
        except ValueError:
            raise InvalidRequestError(f"{field} is '{shortened(value)}': it must be {allowed}") from None

    return run


def set_system(session: Session, value: str) -> None:
    if value:
        session.conversation.system = None if value.lower() == NONE else value
    now = session.conversation.system
    session.tell("no system message" if now is None else f"system message: {now}")


def show_stats(session: Session, value: str) -> None:
    last = session.last
    if last is None:
        session.tell("there is no answer yet")
        return
    stats, totals = last.stats, session.totals
    lines = [
        f"last answer: {decoding_line([stats], last.seconds, drafted=False)}",
        f"prompt: {stats.prompt_tokens} tokens, {stats.cached_tokens} from the prefix cache",
    ]
    if stats.draft_tokens:
        share = 100 * stats.accepted_tokens / stats.draft_tokens
        lines.append(
            f"drafts: acceptance length {stats.acceptance_length:.2f} in {stats.rounds} rounds, "
            f"{stats.accepted_tokens} of {stats.draft_tokens} drafted tokens accepted ({share:.0f}%)"
        )
    if stats.explain:
        lines.append(f"planner: {stats.explain}")
    used, limit = stats.prompt_tokens + stats.completion_tokens, session.drafting.llm.engine.longest
    lines += [
        f"context: {used} of {limit} tokens",
        f"this chat: {totals.answers} answers, {totals.tokens} tokens in {totals.seconds:.2f} s",
        f"drafter {session.drafting.name}, kernels {stats.kernels}, promise '{stats.promise}'",
    ]
    session.tell("\n".join(lines))


def undo(session: Session, value: str) -> None:
    session.tell(f"took back: {shortened(session.conversation.undo().message)}")


def retry(session: Session, value: str) -> None:
    is_fixed = session.params.temperature == 0 or session.params.seed is not None
    if is_fixed and session.conversation.exchanges:
        case = "temperature is 0" if session.params.temperature == 0 else "the seed is fixed"
        session.tell(f"{case}: the answer to the same conversation is the same")
    session.retry()


def save(session: Session, value: str) -> None:
    path = Path(value).expanduser()
    require_new(path)
    content = {
        "model": session.drafting.setup.model,
        "draft": session.drafting.name,
        "messages": session.conversation.to_json(),
    }
    with path.open("x", encoding="utf-8") as file:
        json.dump(content, file, ensure_ascii=False, indent=2)
        file.write("\n")
    session.tell(f"saved to {path}")


def clear(session: Session, value: str) -> None:
    session.conversation.clear()
    session.tell("the conversation is empty; system message and settings stay")


def leave(session: Session, value: str) -> None:
    session.is_over = True


COMMANDS = {
    "/help": ChatCommand("", "Show this list.", show_help),
    "/draft": ChatCommand("[SPEC]", "Switch the drafter, such as ngram, model:NAME or none.", set_draft),
    "/temperature": ChatCommand("[X]", "Set the temperature; 0 is greedy.", number_command("temperature", float)),
    "/top-p": ChatCommand("[X]", "Set top_p; 1 keeps all tokens.", number_command("top_p", float)),
    "/seed": ChatCommand("[N|none]", "Fix the seed of answers.", number_command("seed", int, optional=True)),
    "/max-tokens": ChatCommand(
        "[N|none]", "Set the maximum length of an answer.", number_command("max_tokens", int, optional=True)
    ),
    "/system": ChatCommand("[TEXT|none]", "Set the system message.", set_system),
    "/stats": ChatCommand("", "Show speed, acceptance and the planner's reason.", show_stats),
    "/undo": ChatCommand("", "Take back the last message and its answer.", undo),
    "/retry": ChatCommand("", "Answer the last message again.", retry),
    "/save": ChatCommand("FILE", "Save the conversation as JSON in a new file.", save),
    "/clear": ChatCommand("", "Remove all messages.", clear),
    "/quit": ChatCommand("", "Leave, like Ctrl-D.", leave),
}
"""Commands by name."""
KEYS = (
    "Ctrl-C stops an answer, and clears the line at the prompt. Ctrl-D leaves.",
    'A line that ends with a backslash continues; """ begins and ends a block of lines.',
    "A message that begins with a slash is written with two.",
)
