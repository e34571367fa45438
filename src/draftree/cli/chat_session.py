"""The session of `draftree chat`: the conversation, its input, its commands and the answers."""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftree.build import Methods
from draftree.cli.main import sentence_of
from draftree.cli.options import require_new
from draftree.cli.prompt import Task, content_with, fitted_to_context, utf8
from draftree.cli.render import Style, aligned, decoding_line, note, resolve_with_bar, say, waiting
from draftree.cli.runs import Run, Screen, Setup, dump, fetch_and_load, lossy_line, report
from draftree.core.errors import ConfigurationError, DraftreeError, InvalidRequestError, harmless, suggestion
from draftree.drafters import drafts
from draftree.engine.sequence import Update
from draftree.llm import LLM
from draftree.loading.loaded import LoadedModel, load_tokenizer
from draftree.options import NO_DRAFT
from draftree.outputs import Completion, CompletionStats, completion_of, stats_of
from draftree.remote.address import is_remote
from draftree.sampling.params import SamplingParams
from draftree.text.tokenizer import Tokenizer

INTERRUPTED = "interrupted"  # finish reason of an answer that Ctrl-C ended
HEADROOM = 4
"""After turns are dropped, this fraction of the context is free: the next turns can use the prefix cache again."""

Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Answer:
    """A message of the user and its answer, complete or interrupted."""

    message: str
    text: str  # text of the model, up to the interruption if there was one
    finish_reason: str  # "stop", "length" or "interrupted"
    stats: CompletionStats
    seconds: float  # wall-clock time, prompt included
    completion: Completion | None  # the result as the library returns it; None for an interrupted answer


class Conversation:
    """All answers of a chat, and the index of the first one that is sent. Mutated by its methods."""

    def __init__(self, system: str | None = None, images: tuple[str, ...] = ()) -> None:
        self.system = system
        self.images = images  # those of the first message
        self.answers: list[Answer] = []
        self.first_sent = 0

    def messages(self, message: str) -> Messages:
        said = [*self._said(self.answers[self.first_sent :]), {"role": "user", "content": message}]
        if self.images and not self.first_sent:
            first = next(each for each in said if each["role"] == "user")
            first["content"] = content_with(self.images, first["content"])
        return said

    def _said(self, answers: Sequence[Answer], *, marks: bool = False) -> Iterator[dict[str, Any]]:
        if self.system is not None:
            yield {"role": "system", "content": self.system}
        for answer in answers:
            yield {"role": "user", "content": answer.message}
            said = {"role": "assistant", "content": answer.text}
            yield said | {"interrupted": True} if marks and answer.finish_reason == INTERRUPTED else said

    def undo(self) -> Answer:
        if not self.answers:
            raise InvalidRequestError("the conversation is empty: there is no message to take back")
        last = self.answers.pop()
        self.first_sent = min(self.first_sent, len(self.answers))
        return last

    def clear(self) -> None:
        """Remove all answers; the system message stays."""
        self.answers.clear()
        self.first_sent = 0

    def drop_oldest(self, message: str, count: Callable[[Messages], int], *, limit: int, reserved: int) -> int:
        """Leave the oldest exchanges out of what is sent until a message and its answer fit."""
        if count(self.messages(message)) + reserved <= limit:
            return 0
        most = limit - max(reserved, limit // HEADROOM)
        before = self.first_sent
        while self.first_sent < len(self.answers) and count(self.messages(message)) > most:
            self.first_sent += 1
        return self.first_sent - before

    def to_json(self) -> list[dict[str, Any]]:
        """Return all messages as plain values, those that are no longer sent included; interrupted ones are marked."""
        return list(self._said(self.answers, marks=True))


BLOCK = '"""'
CONTINUES = "\\"
SIGNAL_SECONDS = 0.2
PROMPT, MORE = ">>> ", "... "


class MessageReader(ABC):
    """Reads messages: a line that ends with a backslash continues, and a block between triple quotes keeps its lines.

    A text that was pasted with its line breaks is one message, unchanged.
    """

    @abstractmethod
    def line(self, *, is_first: bool) -> str | None:
        """Return the next line without its line break; None at the end of the input."""

    def message(self) -> str | None:
        """Return the next message; None at the end of the input."""
        line = self.line(is_first=True)
        if line is None:
            return None
        if line.lstrip().startswith(BLOCK) and "\n" not in line:
            return self._block(line.lstrip().removeprefix(BLOCK))
        lines = []
        while line.endswith(CONTINUES):
            lines.append(line.removesuffix(CONTINUES))
            line = self._next("a line ended with a backslash")
        return "\n".join([*lines, line]).rstrip("\n")

    def _block(self, line: str) -> str:
        lines = []
        while not line.rstrip().endswith(BLOCK):
            lines.append(line)
            line = self._next(f"a block began with {BLOCK}")
        text = "\n".join([*lines, line.rstrip().removesuffix(BLOCK)])
        return text.removeprefix("\n").removesuffix("\n")

    def _next(self, case: str) -> str:
        line = self.line(is_first=False)
        if line is None:
            raise InvalidRequestError(f"the input has no more lines, but {case}: complete the message")
        return line


class PipeReader(MessageReader):
    """Reads lines from standard input, which is not a terminal."""

    def __init__(self) -> None:
        self.number = 0

    def line(self, *, is_first: bool) -> str | None:
        raw = b"" if sys.stdin is None else sys.stdin.buffer.readline()
        if not raw:
            return None
        self.number += 1
        return utf8(raw, "it is").removesuffix("\n").removesuffix("\r")


class TerminalReader(MessageReader):
    """Reads lines from the terminal, with editing and a history of messages where readline is available."""

    def __init__(self, style: Style) -> None:
        self._style = style
        self._readline = _readline()

    def line(self, *, is_first: bool) -> str | None:
        try:
            with noticing_signals():
                return input(self._shown(PROMPT if is_first else MORE))
        except EOFError:
            say("\n")
            return None

    def message(self) -> str | None:
        """Return the next message, which joins the history as a whole."""
        message = super().message()
        if message and self._readline is not None:
            self._readline.add_history(message)
        return message

    def _shown(self, prompt: str) -> str:
        if not self._style.coloured or self._readline is None:
            return self._style.bold(prompt)
        # readline counts columns: escapes are marked as having no width
        before, after = self._style.bold("\0").split("\0")
        return f"\1{before}\2{prompt}\1{after}\2"


@contextmanager
def noticing_signals() -> Iterator[None]:
    """Handle signals within a fraction of a second while `input` waits.

    Python's readline module handles signals only when one interrupts its wait. One that arrives while it processes a
    key would stay unhandled until the next; a timer brings the next one.
    """
    if not hasattr(signal, "setitimer"):
        yield
        return
    previous = signal.signal(signal.SIGALRM, lambda number, frame: None)
    signal.setitimer(signal.ITIMER_REAL, SIGNAL_SECONDS, SIGNAL_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def _readline() -> Any:
    """Return the readline module, set up for messages; None where Python has none."""
    try:
        import readline
    except ImportError:
        return None
    readline.set_auto_history(False)  # lines of one message join the history together
    readline.parse_and_bind("set enable-bracketed-paste on")
    return readline


class Drafting:
    """A loaded model and the drafter of the next answer. Mutated by `switch`."""

    def __init__(self, setup: Setup, *, has_grammar: bool) -> None:
        require_material(setup.methods(), has_grammar=has_grammar)
        self._loaded, self._tokenizer = load_for_chat(setup)
        self._has_grammar = has_grammar
        self._start = setup
        self.setup = setup.decided(self._loaded)
        self.llm = self.setup.llm(self._loaded, tokenizer=self._tokenizer)

    @property
    def name(self) -> str:
        return NO_DRAFT if self.setup.is_plain else str(self.setup.draft)

    def switch(self, draft: str) -> None:
        """Use another drafter, or none, from the next answer on. The model and earlier drafters stay loaded."""
        plan = self._start.plan if drafts(draft) else None
        setup = dataclasses.replace(self.setup, draft=draft, plan=plan, auto_note="").decided(self._loaded)
        draft, methods = str(setup.draft), setup.methods()
        require_material(methods, has_grammar=self._has_grammar)
        if drafts(draft) and draft not in self.llm.drafts:
            for name in methods.draft_models:
                resolve_with_bar(name)
            with waiting(f"loading drafter {draft}"):
                each = (draft, *self.llm.drafts)
                llm = self._start.llm(self._loaded, draft=each, tokenizer=self._tokenizer)
            self.llm.forget()  # its cached prefixes would keep their memory
            self.llm = llm
        self.setup = setup


def load_for_chat(setup: Setup) -> tuple[LoadedModel, Tokenizer]:
    """Load model and tokenizer; a model without a chat template is refused before its weights are read."""
    if is_remote(setup.model):  # the session brings the server's tokenizer
        loaded = fetch_and_load(setup)
        return loaded, chat_tokenizer(setup, loaded.folder)
    tokenizer = chat_tokenizer(setup, resolve_with_bar(setup.model))
    return fetch_and_load(setup), tokenizer


def chat_tokenizer(setup: Setup, folder: Path | None) -> Tokenizer:
    tokenizer = None if folder is None else load_tokenizer(folder, trust_remote_code=setup.trust_remote_code)
    if tokenizer is None or not tokenizer.has_chat_template:
        raise ConfigurationError(
            f"'{setup.model}' has no chat template, so it cannot chat: continue texts with "
            f"draftree generate {setup.model} 'TEXT', or use a model that is trained for conversations"
        )
    return tokenizer


def require_material(methods: Methods, *, has_grammar: bool) -> None:
    if methods.traits.reads_predictions:
        raise ConfigurationError(
            "drafter 'prediction' drafts from an expected text, which a chat does not have: use ngram or suffix, "
            "or 'draftree generate' with --prediction"
        )
    if methods.traits.reads_grammars and not has_grammar:
        raise ConfigurationError(
            "drafter 'grammar' has nothing to draft from: start the chat with --json-schema, --regex or --grammar, "
            "or use another drafter"
        )


class StopRequest:
    """Whether Ctrl-C was pressed. The first press is noted, the second raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.is_set = False

    def __call__(self, number: int, frame: Any) -> None:
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True


@contextmanager
def stopped_by_ctrl_c() -> Iterator[StopRequest]:
    """Note Ctrl-C instead of raising; for the main thread."""
    request = StopRequest()
    before = signal.signal(signal.SIGINT, request)
    try:
        yield request
    finally:
        signal.signal(signal.SIGINT, before)


def write_answer(
    llm: LLM,
    message: str,
    ids: Sequence[int],
    *,
    params: SamplingParams,
    draft: str,
    show: Callable[[Update], None] | None,
    stoppable: bool,
) -> Answer:
    """Generate one answer. If stoppable, Ctrl-C ends it after the current pass, and a second Ctrl-C ends the pass."""
    (sequence,) = llm.requests.sequences(ids, params, draft=draft)
    start = time.perf_counter()
    with stopped_by_ctrl_c() if stoppable else nullcontext(StopRequest()) as stop:
        try:
            llm.engine.add(sequence)
            while not sequence.is_finished and not stop.is_set:
                llm.engine.step()
                update = sequence.take_update()
                if update is not None and show is not None:
                    show(update)
        except KeyboardInterrupt:
            if not stoppable:
                raise
        finally:
            llm.engine.abort([sequence])
    seconds = time.perf_counter() - start
    if not stop.is_set and sequence.error is not None:
        raise sequence.error
    text = "".join(sequence.texts)
    if stop.is_set and str(sequence.finish_reason) not in ("stop", "length"):
        return Answer(message, text, INTERRUPTED, stats_of(sequence), seconds, None)
    done = completion_of(sequence, prompt_index=0)
    return Answer(message, done.text, done.finish_reason, done.stats, seconds, done)


ROOM_FOR_ANSWER = 4  # a fraction of the context is kept free for an answer whose length the user did not choose
COMMAND = "/"


@dataclass(slots=True, kw_only=True, eq=False)
class Session:
    """A chat. Mutated by messages and commands.

    `fits_context`: `max_tokens` is reduced to fit the context, because it was not given. Without a screen, answers are
    printed as one JSON object each.
    """

    drafting: Drafting
    conversation: Conversation
    params: SamplingParams
    reader: MessageReader
    screen: Screen | None
    notes: Style
    fits_context: bool
    answers: list[Answer] = field(default_factory=list)  # all of them, also those that were taken back
    is_over: bool = False

    @property
    def is_interactive(self) -> bool:
        return not isinstance(self.reader, PipeReader)

    def run(self) -> None:
        while not self.is_over:
            try:
                message = self.reader.message()
                if message is None:
                    return
                self.handle(message)
            except KeyboardInterrupt:
                if not self.is_interactive:
                    raise
                say("\n")
            except Exception as error:
                self._complain(error)

    def handle(self, message: str) -> None:
        """Answer a message or run a command; a blank line does nothing. Two slashes begin a message with one slash."""
        if message.startswith(COMMAND) and not message.startswith(COMMAND * 2):
            run_command(self, message)
        elif message.strip():
            self.ask(message.removeprefix(COMMAND))

    def ask(self, message: str) -> None:
        first_sent = self.conversation.first_sent
        try:
            answer = self._answer(message)
        except BaseException:
            self.conversation.first_sent = first_sent
            raise
        self.conversation.answers.append(answer)
        self.answers.append(answer)
        self._report(answer)

    def retry(self) -> None:
        """Answer the last message again; the previous answer is dropped, unless this fails."""
        last = self.conversation.undo()
        try:
            self.ask(last.message)
        except BaseException:
            self.conversation.answers.append(last)
            raise

    def tell(self, text: str) -> None:
        """Show a note: on a terminal in place, else on standard error."""
        shown = self.notes.dim(harmless(text))
        if self.is_interactive:
            say(shown + "\n")
        else:
            note(shown)

    def warn_if_lossy(self) -> None:
        """Show the warning of a lossy verifier at the current temperature."""
        if line := lossy_line(self.drafting.setup, self.params.sampling.temperature):
            self.tell(line)

    def _answer(self, message: str) -> Answer:
        llm = self.drafting.llm
        conversation = self.conversation
        limit = llm.engine.longest

        def count(messages: Messages) -> int:
            return len(llm.prompts.encode_chat(messages))

        if dropped := conversation.drop_oldest(message, count, limit=limit, reserved=self._reserved(limit)):
            turns = "turn" if dropped == 1 else f"{dropped} turns"
            self.tell(f"the context of {limit} tokens is full: the model no longer sees the oldest {turns}")
        ids = llm.prompts.encode_chat(conversation.messages(message))
        params = fitted_to_context(self.params, llm, ids) if self.fits_context else self.params
        show = None if self.screen is None else self.screen.show
        try:
            return write_answer(
                llm, message, ids, params=params, draft=self.drafting.name, show=show, stoppable=self.is_interactive
            )
        finally:
            if self.screen is not None and sys.stdout is not None:
                self.screen.finish()

    def _reserved(self, limit: int) -> int:
        """Return the tokens of a context that are kept for the answer."""
        most = self.params.max_tokens
        share = limit // ROOM_FOR_ANSWER
        if most is None:
            return share
        return min(most, share) if self.fits_context else most

    def _report(self, answer: Answer) -> None:
        if self.screen is None:
            assert answer.completion is not None, "only a terminal interrupts an answer"
            task = Task(answer.message, self.conversation.system, chat=True)
            run = Run(self.drafting.setup, task, [answer.completion], answer.seconds)
            say(dump(report(run, self.drafting.llm.model)) + "\n")
            return
        if self.is_interactive:
            self.tell(summary(answer, drafted=not self.drafting.setup.is_plain))
        elif answer.finish_reason == "length":
            count = answer.stats.completion_tokens
            self.tell(f"the answer to '{shortened(answer.message)}' was cut at the limit of {count} tokens")

    def _complain(self, error: Exception) -> None:
        """Show an expected error on a terminal; on a pipe, raise it with its line."""
        text = sentence_of(error)
        if isinstance(self.reader, PipeReader):
            raise DraftreeError(f"standard input, line {self.reader.number}: {text}") from error
        say(self.notes.bold(f"error: {harmless(text)}") + "\n")


def summary(answer: Answer, *, drafted: bool) -> str:
    line = decoding_line([answer.stats], answer.seconds, drafted=drafted and answer.stats.rounds > 0)
    if answer.finish_reason == INTERRUPTED:
        return f"{line}, stopped: this part stays in the conversation (/undo takes it back, /retry answers again)"
    if answer.finish_reason == "length":
        return f"{line}, cut at the limit: /max-tokens changes it"
    return line


def shortened(text: str, width: int = 60) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + "…"


NONE = "none"


@dataclass(frozen=True, slots=True)
class ChatCommand:
    value: str  # placeholder of its value in the help; empty if it has none. In brackets: may be left out
    help: str
    run: Callable[[Session, str], None]


def run_command(session: Session, line: str) -> None:
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
    session.tell(aligned(rows) + "\n".join(KEYS))


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
            change: dict[str, Any] = {field: number_of(value)}
            session.params = dataclasses.replace(session.params, **change)
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
    if not session.answers:
        session.tell("there is no answer yet")
        return
    last = session.answers[-1]
    stats = last.stats
    tokens = sum(answer.stats.completion_tokens for answer in session.answers)
    seconds = sum(answer.seconds for answer in session.answers)
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
        f"this chat: {len(session.answers)} answers, {tokens} tokens in {seconds:.2f} s",
        f"drafter {session.drafting.name}, kernels {stats.kernels}, promise '{stats.promise}'",
    ]
    session.tell("\n".join(lines))


def undo(session: Session, value: str) -> None:
    session.tell(f"took back: {shortened(session.conversation.undo().message)}")


def retry(session: Session, value: str) -> None:
    is_fixed = session.params.temperature == 0 or session.params.seed is not None
    if is_fixed and session.conversation.answers:
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
