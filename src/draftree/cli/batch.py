"""Generation for a file of prompts as one batch, with output in the order of the file."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from draftree.cli.prompt import FilePrompt, Request, Task, fitted_to_context
from draftree.cli.render import Style, decoding_line, is_terminal, note, say
from draftree.cli.runs import (
    PICTURES,
    Run,
    Screen,
    Setup,
    announce_methods,
    dump,
    fetch_and_load,
    recorded,
    report,
    save_learned,
)
from draftree.core.errors import GenerationError, InvalidRequestError
from draftree.engine.sequence import FinishReason, WritingSequence
from draftree.llm import LLM, ProgressBar
from draftree.options import RequestOptions
from draftree.outputs import Completion, completion_of


@dataclass(frozen=True, slots=True)
class Written:
    """A prompt with its finished or failed sequences."""

    prompt: FilePrompt
    chat: bool
    sequences: Sequence[WritingSequence]
    seconds: float

    @property
    def error(self) -> Exception | None:
        return next((sequence.error for sequence in self.sequences if sequence.error is not None), None)

    @property
    def completions(self) -> list[Completion]:
        whole = (each for each in self.sequences if each.finish_reason is not FinishReason.ERROR)
        return [completion_of(sequence, prompt_index=0) for sequence in whole]


def write_prompts(
    setup: Setup,
    prompts: Sequence[FilePrompt],
    request: Request,
    *,
    screen: Screen | None,
    notes: Style,
    record: Path | None = None,
) -> None:
    require_fitting_options(prompts, request.task)
    loaded = fetch_and_load(setup)
    setup = setup.decided(loaded)
    start, done = time.perf_counter(), []
    with recorded(record, setup, loaded, request.params) as llm:
        announce_methods(setup, llm, request.params, notes)
        for written in write_in_order(llm, prompts, request):
            done.append(written)
            if screen is None:
                say(dump(as_json(written, setup, llm)) + "\n")
            else:
                show(written, screen)
        save_learned(llm)
    if screen is not None:
        stats = [completion.stats for written in done for completion in written.completions]
        if stats:
            if setup.auto_note:
                note(notes.dim(setup.auto_note))
            line = decoding_line(stats, time.perf_counter() - start, drafted=not setup.is_plain)
            note(notes.dim(f"{len(done)} prompts, {line}"))
    failed = [written for written in done if written.error is not None]
    if failed:
        first = failed[0]
        raise GenerationError(
            f"{len(failed)} of {len(done)} prompts failed; the first, {first.prompt.place}: {first.error}"
        ) from first.error


def require_fitting_options(prompts: Sequence[FilePrompt], task: Task) -> None:
    """Refuse prompt options for lines that are whole conversations."""
    chosen = {
        "--no-chat": task.chat is False,
        "--system": task.system is not None,
        "--source-lang": task.decoder.get("source_lang") is not None,
    }
    option = next((name for name, is_chosen in chosen.items() if is_chosen), None)
    conversation = next((prompt for prompt in prompts if prompt.messages is not None), None)
    if conversation is not None and option is not None:
        raise InvalidRequestError(
            f"{conversation.place}: holds messages, and {option} applies to prompts only: leave {option} out, "
            "or add its content to the line"
        )


def write_in_order(llm: LLM, prompts: Sequence[FilePrompt], request: Request) -> Iterator[Written]:
    """Run all prompts as one batch; yield each once it and all before it are finished."""
    made = [sequences_of(llm, prompt, request) for prompt in prompts]
    everything = [sequence for _, sequences in made for sequence in sequences]
    for sequence in everything:
        sequence.is_collected = True
    start = time.perf_counter()
    # no progress bar between texts on a terminal
    with ProgressBar(len(everything), shown=False if is_terminal(sys.stdout) else None) as bar:
        llm.engine.add(*everything)
        try:
            for prompt, (chat, sequences) in zip(prompts, made, strict=True):
                while not all(sequence.is_finished for sequence in sequences):
                    llm.engine.step()
                    bar.show(everything)
                yield Written(prompt, chat, sequences, time.perf_counter() - start)
        finally:
            llm.engine.abort(everything)


def sequences_of(llm: LLM, prompt: FilePrompt, request: Request) -> tuple[bool, list[WritingSequence]]:
    """Create the n sequences of a prompt; also returns whether they answer a conversation."""
    try:
        if prompt.messages is not None:
            chat, ids = True, llm.prompts.encode_chat(prompt.messages)
        else:
            task = dataclasses.replace(request.task, text=str(prompt.prompt)).decided(llm)
            chat = bool(task.chat)
            ids = llm.prompts.encode(task.messages if chat else task.text, source_lang=task.decoder.get("source_lang"))
        decoder = request.task.decoder
        params = fitted_to_context(request.params, llm, ids, decoder) if request.fits_context else request.params
        return chat, llm.requests.sequences(ids, llm.prompts.with_start(RequestOptions.of(params, **decoder)))
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{prompt.place}: {error}") from error


def as_json(written: Written, setup: Setup, llm: LLM) -> dict[str, object]:
    """Return the output object of a prompt: its labels, and the fields of `--json` or the error."""
    head = {**written.prompt.labels, "line": written.prompt.line}
    if written.error is not None:
        return {**head, "error": str(written.error)}
    task = Task(written.prompt.prompt or "", chat=written.chat)
    return {**head, **report(Run(setup, task, written.completions, written.seconds), llm.model)}


def show(written: Written, screen: Screen) -> None:
    name = str(written.prompt.labels.get("id", written.prompt.place))
    say(f"{screen.style.bold(f'=== {name.translate(PICTURES)} ===')}\n")
    if written.error is None:
        for sequence in written.sequences:
            update = sequence.take_update()
            assert update is not None, "a finished sequence has a last update"
            screen.show(update)
    screen.finish()
