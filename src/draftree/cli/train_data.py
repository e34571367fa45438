"""`draftree train data` and `draftree train prompts`: training data from a model's own answers."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from draftree.cli.layout import option
from draftree.cli.options import EXECUTION_OPTIONS, Setup, takes, takes_setup, values_of
from draftree.cli.prompt import FilePrompt, read_prompts
from draftree.cli.render import INTERRUPTED, is_terminal, note, say, transient_bar
from draftree.core.errors import ConfigurationError
from draftree.loading.resolve import require_sound
from draftree.options import EXECUTION, NO_DRAFT, SPECULATION

if TYPE_CHECKING:
    from draftree.train.data.capture import Capture, CaptureSettings, Progress
    from draftree.train.data.prompts import PromptSet

PROGRESS = 1000  # messages between two lines of progress


class MessageOptions:
    number: int = option(2000, "Number of messages.", "N")
    temperature: float = option(1.0, "Temperature of sampling.", "X")
    top_p: float = option(0.95, "Probability mass that is sampled from.", "X")
    max_tokens: int = option(200, "Longer messages are dropped.", "N")
    seed: int = option(0, "Seed of the first message.", "N")
    batch: int = option(64, "Messages that are drawn at a time.", "N", EXECUTION)


@takes_setup(*EXECUTION_OPTIONS, draft=None, generation_config="none")
@takes("drawing", values_of(MessageOptions))
def prompts(
    *,
    output: Path = option(..., "New file of JSON lines.", "FILE"),
    drawing: dict[str, Any],
    setup: Setup,
) -> None:
    """Let a chat model write messages of users, as prompts for 'draftree train data' (Magpie).

    The model continues its chat template where the message of the user would begin.
    """
    require_sound(setup.model)
    if output.exists():
        raise ConfigurationError(f"'{output}' exists: name a new file")
    if not output.parent.is_dir():
        raise ConfigurationError(f"the folder '{output.parent}' does not exist")
    from draftree.cli.runs import fetch_and_load
    from draftree.train.data.prompts import MessageSettings, magpie_prompts
    from draftree.train.data.shards import write_atomically

    settings = MessageSettings(**drawing)
    reported = 0

    def show(done: int) -> None:
        nonlocal reported
        if done - reported >= PROGRESS:
            reported = done
            note(f"{done:,} of {settings.number:,} messages")

    messages = magpie_prompts(setup.llm(fetch_and_load(setup)), settings, on_progress=show)
    lines = [
        json.dumps({"id": f"magpie-{place}", "category": "magpie", "prompt": text}, ensure_ascii=False)
        for place, text in enumerate(messages, 1)
    ]
    write_atomically(output, lambda path: path.write_text("".join(f"{line}\n" for line in lines), "utf-8"))
    say(f"{output}: {len(messages):,} messages\n")


PROMPTS, TEXTS, STORED = "Prompts", "Texts", "Stored data"
DEFAULT_PROMPTS = ("shipped", "expanded")
LINE_SECONDS = 60.0  # seconds between lines of progress without a terminal


class CaptureOptions:
    chat: bool | None = option(
        None,
        "Prompts as messages or as plain text; default: messages if the model has a chat template.",
        panel=PROMPTS,
        names="--chat/--raw",
    )
    max_prompt_tokens: int = option(800, "Longer prompts are skipped.", "N", PROMPTS)
    temperatures: list[float] = option(
        [0.0, 0.8],
        "Temperature of the texts; repeatable, each for an equal share.",
        "X",
        TEXTS,
        names="--temperature",
    )
    max_tokens: int = option(200, "Maximum number of new tokens of a text.", "N", TEXTS)
    limit_tokens: int | None = option(
        None, "End when so many tokens are stored, prompts included; all prompts if not given.", "N", TEXTS
    )
    seed: int = option(0, "Seed of the order of prompts and of all texts.", "N", TEXTS)
    features: str = option(
        "auto",
        "Captured layers, such as 2,15,27: the input of a layer, or the output of the last one (-1); auto is "
        "2, n/2 and n-3 of n layers; none is enough for 'draftree train distill'.",
        "LAYERS",
        STORED,
    )
    teacher: str = option(
        "hidden",
        "hidden stores the last hidden state, from which all logits follow; top-k:64 the 64 most likely tokens.",
        "KIND",
        STORED,
    )
    batch: int = option(64, "Texts that are generated at a time.", "N", EXECUTION)


@takes_setup(*EXECUTION_OPTIONS, generation_config="none")
@takes("capturing", values_of(CaptureOptions))
def data(
    *,
    output: Path = option(..., "Folder of the data; one of an interrupted run is continued.", "FOLDER", STORED),
    prompts: list[str] | None = option(
        None,
        "shipped, expanded:N (from templates), packages:N (from installed packages), or a file as for "
        "'draftree generate'; repeatable, used in turn; shipped and expanded if not given.",
        "NAME|FILE",
        PROMPTS,
    ),
    capturing: dict[str, Any],
    dry_run: bool = option(False, "Print the estimated size and end.", panel=STORED, names="--dry-run"),
    draft: str = option(
        NO_DRAFT,
        "A drafter, which changes the speed and never the data; useful for small batches.",
        "SPEC",
        SPECULATION,
    ),
    setup: Setup,
) -> None:
    """Let a model answer prompts and store its hidden states, for 'draftree train'.

    Ctrl-C keeps all complete texts, and the same command continues.
    """
    require_sound(setup.model)
    sets = prompt_sets(prompts)
    from draftree.cli.runs import fetch_and_load
    from draftree.train.data.capture import Capture, CaptureSettings

    settings = CaptureSettings(**capturing)
    setup = dataclasses.replace(setup, draft=draft)
    loaded = fetch_and_load(setup)
    capture = Capture(setup.llm(loaded), loaded, sets, settings)
    prepare(capture, settings, output)
    if not dry_run:
        run(capture, settings, output)


def prompt_sets(names: Sequence[str] | None) -> list[PromptSet]:
    """Return the sets of these names or files; the default ones for None."""
    named = [(name, None if is_own(name) else read_prompts(name)) for name in names or DEFAULT_PROMPTS]
    from draftree.train.data.prompts import DataPrompt, PromptSet, prompt_set

    def of_file(name: str, prompts: Sequence[FilePrompt]) -> PromptSet:
        made = [
            DataPrompt.of_text(str(prompt.prompt)) if prompt.messages is None else DataPrompt(tuple(prompt.messages))
            for prompt in prompts
        ]
        return PromptSet(os.path.basename(name), made, "as the file's owner says")

    return [prompt_set(name) if prompts is None else of_file(name, prompts) for name, prompts in named]


def is_own(name: str) -> bool:
    """Return whether a name is not a file; a file of the same name is given as ./NAME."""
    return name.partition(":")[0] in ("shipped", "expanded", "packages")


def prepare(capture: Capture, settings: CaptureSettings, output: Path) -> None:
    """Print what is there and what is still to be done, and check that the disk has room."""
    from draftree.train.data.capture import estimate, require_disk

    stored = capture.found(output)
    if stored is not None:
        note(f"'{output}' holds {stored.num_texts:,} texts with {stored.num_tokens:,} tokens: continued")
    sources = ", ".join(f"{source.name} ({source.count:,})" for source in capture.recipe.prompts)
    layers = ", ".join(map(str, capture.recipe.features)) or "none"
    note(f"prompts: {sources}; layers {layers}; teacher {settings.teacher}; {capture.row_bytes:,} bytes per token")
    if not capture.recipe.exact:
        note("passes of this model depend on the batch in their last digits: another batch size may give other texts")
    done = (0, 0) if stored is None else (stored.next_prompt, stored.num_tokens)
    sized = estimate(capture, settings, done_prompts=done[0], done_tokens=done[1])
    note(str(sized))
    require_disk(output, sized.num_bytes)


def run(capture: Capture, settings: CaptureSettings, output: Path) -> None:
    """Capture with a progress bar, or with lines if standard error is no terminal."""
    try:
        with progress(settings.limit_tokens, len(capture.jobs)) as show:
            manifest = capture.run(output, on_progress=show)
    except KeyboardInterrupt:
        from draftree.train.data.shards import Manifest

        stored = Manifest.read(output)
        note(f"interrupted: {stored.num_texts:,} texts are stored; the same command continues")
        raise typer.Exit(INTERRUPTED) from None
    skipped = "".join(f", {count:,} skipped ({reason})" for reason, count in manifest.skipped.items())
    say(f"{output}: {manifest.num_texts:,} texts, {manifest.num_tokens:,} tokens{skipped}\n")


@contextmanager
def progress(limit_tokens: int | None, num_prompts: int) -> Iterator[Callable[[Progress], None]]:
    if not is_terminal(sys.stderr):
        last = time.monotonic()

        def show(at: Progress) -> None:
            nonlocal last
            if time.monotonic() - last >= LINE_SECONDS:
                last = time.monotonic()
                note(f"{at.texts:,} texts, {at.tokens:,} tokens")

        yield show
        return
    with transient_bar("", limit_tokens or num_prompts) as update:

        def move(at: Progress) -> None:
            done = at.prompts if limit_tokens is None else min(limit_tokens, at.tokens + at.running_tokens)
            update(completed=done, description=f"{at.texts:,} texts, {at.tokens:,} tokens")

        yield move
