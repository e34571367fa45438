"""The session of a chat: reads messages and commands, and writes answers, until the input ends."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass

from draftree.cli.chatting.answering import Answer, write_answer
from draftree.cli.chatting.conversation import INTERRUPTED, Conversation, Exchange, Messages
from draftree.cli.chatting.drafting import Drafting
from draftree.cli.chatting.reading import MessageReader, PipeReader
from draftree.cli.lossy import lossy_line
from draftree.cli.prompt import Task, fitted_to_context
from draftree.cli.render import Style, decoding_line, note, say
from draftree.cli.report import dump, report
from draftree.cli.writing import Run, Screen
from draftree.core.errors import OUT_OF_MEMORY, DraftreeError, harmless, is_out_of_memory
from draftree.sampling.params import SamplingParams

__all__ = ["Session"]

ROOM_FOR_ANSWER = 4
"""A fraction of the context is kept free for an answer whose length the user did not choose."""
COMMAND = "/"


@dataclass(slots=True)
class Totals:
    """Sums over all answers of a chat."""

    answers: int = 0
    tokens: int = 0
    seconds: float = 0.0


class Session:
    """A chat. Mutated by messages and commands.

    Args:
        drafting: the model with its drafters.
        conversation: the conversation so far.
        params: sampling parameters.
        reader: input.
        screen: where answers appear; None prints one JSON object per answer.
        notes: style of everything that is not an answer.
        run_command: runs a line that begins with a slash.
        fits_context: whether `max_tokens` is reduced to fit the context, because it was not given.
    """

    def __init__(
        self,
        drafting: Drafting,
        conversation: Conversation,
        *,
        params: SamplingParams,
        reader: MessageReader,
        screen: Screen | None,
        notes: Style,
        run_command: Callable[[Session, str], None],
        fits_context: bool,
    ) -> None:
        self.drafting = drafting
        self.conversation = conversation
        self.params = params
        self.fits_context = fits_context
        self.last: Answer | None = None
        self.totals = Totals()
        self.is_over = False
        self._reader = reader
        self._screen = screen
        self._notes = notes
        self._run_command = run_command
        self._is_interactive = not isinstance(reader, PipeReader)

    def run(self) -> None:
        """Serve the input until it ends, or until /quit.

        Raises:
            DraftreeError: on a pipe, the first error, with its line.
        """
        while not self.is_over:
            try:
                message = self._reader.message()
                if message is None:
                    return
                self.handle(message)
            except KeyboardInterrupt:
                if not self._is_interactive:
                    raise
                say("\n")
            except Exception as error:
                self._complain(error)

    def handle(self, message: str) -> None:
        """Answer a message or run a command; a blank line does nothing. Two slashes begin a message with one slash."""
        if message.startswith(COMMAND) and not message.startswith(COMMAND * 2):
            self._run_command(self, message)
        elif message.strip():
            self.ask(message.removeprefix(COMMAND))

    def ask(self, message: str) -> None:
        """Answer a message, and add both to the conversation.

        Raises:
            InvalidRequestError: the message does not fit; the conversation is unchanged.
            GenerationError: generation failed; the conversation is unchanged.
        """
        first_sent = self.conversation.first_sent
        try:
            answer = self._answer(message)
        except BaseException:
            self.conversation.first_sent = first_sent
            raise
        self.conversation.add(Exchange(message, answer.text, answer.finish_reason))
        self.last = answer
        self.totals.answers += 1
        self.totals.tokens += answer.stats.completion_tokens
        self.totals.seconds += answer.seconds
        self._report(message, answer)

    def retry(self) -> None:
        """Answer the last message again; the previous answer is dropped, unless this fails."""
        last = self.conversation.undo()
        try:
            self.ask(last.message)
        except BaseException:
            self.conversation.add(last)
            raise

    def tell(self, text: str) -> None:
        """Show a note: on a terminal in place, else on standard error."""
        shown = self._notes.dim(harmless(text))
        if self._is_interactive:
            say(shown + "\n")
        else:
            note(shown)

    def warn_if_lossy(self) -> None:
        """Show the warning of a lossy verifier at the current temperature."""
        setup = self.drafting.setup
        line = None if setup.is_plain else lossy_line(setup.verify, self.params.sampling.temperature)
        if line is not None:
            self.tell(line)

    def _answer(self, message: str) -> Answer:
        llm = self.drafting.llm

        def count(messages: Messages) -> int:
            return len(llm.prompts.encode_chat(messages))

        limit = llm.engine.longest
        dropped = self.conversation.drop_oldest(message, count, limit=limit, room=self._room(limit))
        if dropped:
            self.tell(f"the context of {limit} tokens is full: the model no longer sees the oldest {turns(dropped)}")
        ids = llm.prompts.encode_chat(self.conversation.messages(message))
        params = fitted_to_context(self.params, llm, ids) if self.fits_context else self.params
        show = None if self._screen is None else self._screen.show
        try:
            return write_answer(
                llm, ids, params=params, draft=self.drafting.name, show=show, stoppable=self._is_interactive
            )
        finally:
            if self._screen is not None and sys.stdout is not None:
                self._screen.finish()

    def _room(self, limit: int) -> int:
        wanted = self.params.max_tokens
        if wanted is None or self.fits_context:
            return limit // ROOM_FOR_ANSWER if wanted is None else min(wanted, limit // ROOM_FOR_ANSWER)
        return wanted

    def _report(self, message: str, answer: Answer) -> None:
        if self._screen is None:
            assert answer.completion is not None, "only a terminal interrupts an answer"
            task = Task(message, self.conversation.system, chat=True)
            run = Run(self.drafting.setup, task, [answer.completion], answer.seconds)
            say(dump(report(run, self.drafting.llm.model)) + "\n")
            return
        if self._is_interactive:
            self.tell(summary(answer, drafted=not self.drafting.setup.is_plain))
        elif answer.finish_reason == "length":
            self.tell(f"the answer to '{shortened(message)}' was cut at the limit of {tokens_of(answer)} tokens")

    def _complain(self, error: Exception) -> None:
        """Show an expected error on a terminal; on a pipe, raise it with its line."""
        if is_out_of_memory(error):
            text = OUT_OF_MEMORY
        elif isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
            text = f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"
        elif isinstance(error, DraftreeError):
            text = str(error)
        else:
            raise error
        if isinstance(self._reader, PipeReader):
            raise DraftreeError(f"standard input, line {self._reader.number}: {text}") from error
        say(self._notes.bold(f"error: {harmless(text)}") + "\n")


def summary(answer: Answer, *, drafted: bool) -> str:
    """Return the statistics of an answer in one line, and why it ended early if it did."""
    line = decoding_line([answer.stats], answer.seconds, drafted=drafted and answer.stats.rounds > 0)
    if answer.finish_reason == INTERRUPTED:
        return f"{line}, stopped: this part stays in the conversation (/undo takes it back, /retry answers again)"
    if answer.finish_reason == "length":
        return f"{line}, cut at the limit: /max-tokens changes it"
    return line


def tokens_of(answer: Answer) -> int:
    return answer.stats.completion_tokens


def turns(count: int) -> str:
    """Return a number of turns in words."""
    return "turn" if count == 1 else f"{count} turns"


def shortened(text: str, width: int = 60) -> str:
    """Return the beginning of a text in one line."""
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + "…"


def with_params(session: Session, **changes: object) -> None:
    """Change sampling parameters of later answers; all or none.

    Raises:
        InvalidRequestError: a value is out of range.
    """
    session.params = dataclasses.replace(session.params, **changes)  # type: ignore[arg-type]
