"""`draftree train data` and `draftree train prompts`: training data from a model's own answers."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftree.cli.layout import option
from draftree.cli.options import EXECUTION_OPTIONS, Model, Setup, takes_setup
from draftree.cli.prompt import FilePrompt, read_prompts
from draftree.cli.render import note, say
from draftree.core.errors import ConfigurationError
from draftree.loading.resolve import require_sound
from draftree.options import EXECUTION, NO_DRAFT, SPECULATION

if TYPE_CHECKING:
    from draftree.train.data.capture import Capture, CaptureSettings, Progress
    from draftree.train.data.prompts import PromptSet

PROGRESS = 1000
"""Messages between two lines of progress."""


@takes_setup(*EXECUTION_OPTIONS, draft=None, generation_config="none")
def prompts(
    model: Model,
    *,
    output: Annotated[Path, option("New file of JSON lines.", "FILE")],
    number: Annotated[int, option("Number of messages.", "N")] = 2000,
    temperature: Annotated[float, option("Temperature of sampling.", "X")] = 1.0,
    top_p: Annotated[float, option("Probability mass that is sampled from.", "X")] = 0.95,
    max_tokens: Annotated[int, option("Longer messages are dropped.", "N")] = 200,
    seed: Annotated[int, option("Seed of the first message.", "N")] = 0,
    batch: Annotated[int, option("Messages that are drawn at a time.", "N", EXECUTION)] = 64,
    setup: Setup,
) -> None:
    """Let a chat model write messages of users, as prompts for 'draftree train data' (Magpie).

    The model continues its chat template where the message of the user would begin.
    """
    require_sound(model)
    if output.exists():
        raise ConfigurationError(f"'{output}' exists: name a new file")
    if not output.parent.is_dir():
        raise ConfigurationError(f"the folder '{output.parent}' does not exist")
    from draftree.cli.runs import fetch_and_load
    from draftree.train.data.prompts import MessageSettings, magpie_prompts
    from draftree.train.data.shards import write_atomically

    settings = MessageSettings(
        number=number, temperature=temperature, top_p=top_p, max_tokens=max_tokens, seed=seed, batch=batch
    )
    setup = dataclasses.replace(setup, model=model)
    llm = setup.llm(fetch_and_load(setup))
    reported = [0]

    def show(done: int) -> None:
        if done - reported[0] >= PROGRESS:
            reported[0] = done
            note(f"{done:,} of {number:,} messages")

    found = magpie_prompts(llm, settings, on_progress=show)
    lines = [
        json.dumps({"id": f"magpie-{place}", "category": "magpie", "prompt": text}, ensure_ascii=False)
        for place, text in enumerate(found, 1)
    ]
    write_atomically(output, lambda path: path.write_text("".join(f"{line}\n" for line in lines), "utf-8"))
    say(f"{output}: {len(found):,} messages\n")


PROMPTS, TEXTS, STORED = "Prompts", "Texts", "Stored data"
DEFAULT_PROMPTS = ("shipped", "expanded")
INTERRUPTED = 130
LINE_SECONDS = 60.0
"""Seconds between lines of progress without a terminal."""


@takes_setup(*EXECUTION_OPTIONS, generation_config="none")
def data(
    model: Model,
    *,
    output: Annotated[Path, option("Folder of the data; one of an interrupted run is continued.", "FOLDER", STORED)],
    prompts: Annotated[
        list[str] | None,
        option(
            "shipped, expanded:N (from templates), packages:N (from installed packages), or a file as for "
            "'draftree generate'; repeatable, used in turn; shipped and expanded if not given.",
            "NAME|FILE",
            PROMPTS,
        ),
    ] = None,
    chat: Annotated[
        bool | None,
        option(
            "Prompts as messages or as plain text; default: messages if the model has a chat template.",
            panel=PROMPTS,
            names="--chat/--raw",
        ),
    ] = None,
    max_prompt_tokens: Annotated[int, option("Longer prompts are skipped.", "N", PROMPTS)] = 800,
    temperature: Annotated[
        list[float] | None,
        option("Temperature of the texts; repeatable, each for an equal share; 0 and 0.8 if not given.", "X", TEXTS),
    ] = None,
    max_tokens: Annotated[int, option("Maximum number of new tokens of a text.", "N", TEXTS)] = 200,
    limit_tokens: Annotated[
        int | None,
        option("End when so many tokens are stored, prompts included; all prompts if not given.", "N", TEXTS),
    ] = None,
    seed: Annotated[int, option("Seed of the order of prompts and of all texts.", "N", TEXTS)] = 0,
    features: Annotated[
        str,
        option(
            "Captured layers, such as 2,15,27: the input of a layer, or the output of the last one (-1); auto is "
            "2, n/2 and n-3 of n layers; none is enough for 'draftree train distill'.",
            "LAYERS",
            STORED,
        ),
    ] = "auto",
    teacher: Annotated[
        str,
        option(
            "hidden stores the last hidden state, from which all logits follow; top-k:64 the 64 most likely tokens.",
            "KIND",
            STORED,
        ),
    ] = "hidden",
    dry_run: Annotated[bool, option("Print the estimated size and end.", panel=STORED, names="--dry-run")] = False,
    batch: Annotated[int, option("Texts that are generated at a time.", "N", EXECUTION)] = 64,
    draft: Annotated[
        str,
        option("A drafter, which changes the speed and never the data; useful for small batches.", "SPEC", SPECULATION),
    ] = NO_DRAFT,
    setup: Setup,
) -> None:
    """Let a model answer prompts and store its hidden states, for 'draftree train'.

    Ctrl-C keeps all complete texts, and the same command continues.
    """
    require_sound(model)
    named = [(name, None if is_own(name) else read_prompts(name)) for name in prompts or DEFAULT_PROMPTS]
    from draftree.cli.runs import fetch_and_load
    from draftree.train.data.capture import Capture, CaptureSettings

    settings = CaptureSettings(
        features=features,
        teacher=teacher,
        chat=chat,
        temperatures=tuple(temperature or (0.0, 0.8)),
        max_tokens=max_tokens,
        max_prompt_tokens=max_prompt_tokens,
        limit_tokens=limit_tokens,
        seed=seed,
        batch=batch,
    )
    sets = [set_of(name, own) for name, own in named]
    setup = dataclasses.replace(setup, model=model, draft=draft)
    loaded = fetch_and_load(setup)
    capture = Capture(setup.llm(loaded), loaded, sets, settings)
    prepare(capture, settings, output)
    if not dry_run:
        run(capture, settings, output)


def is_own(name: str) -> bool:
    """Return whether a name is not a file; a file of the same name is given as ./NAME."""
    return name.partition(":")[0] in ("shipped", "expanded", "packages")


def set_of(name: str, own: Sequence[FilePrompt] | None) -> PromptSet:
    from draftree.train.data.prompts import DataPrompt, PromptSet, prompt_set

    if own is None:
        return prompt_set(name)
    made = [
        DataPrompt.of_text(str(prompt.prompt)) if prompt.messages is None else DataPrompt(tuple(prompt.messages))
        for prompt in own
    ]
    return PromptSet(os.path.basename(name), made, "as the file's owner says")


def prepare(capture: Capture, settings: CaptureSettings, output: Path) -> None:
    """Print what is there and what is still to be done, and check that the disk has room."""
    from draftree.train.data.capture import estimate, require_disk

    found = capture.found(output)
    if found is not None:
        note(f"'{output}' holds {found.num_texts:,} texts with {found.num_tokens:,} tokens: continued")
    sources = ", ".join(f"{source.name} ({source.count:,})" for source in capture.recipe.prompts)
    layers = ", ".join(map(str, capture.recipe.features)) or "none"
    note(f"prompts: {sources}; layers {layers}; teacher {settings.teacher}; {capture.row_bytes:,} bytes per token")
    if not capture.recipe.exact:
        note("passes of this model depend on the batch in their last digits: another batch size may give other texts")
    done = (0, 0) if found is None else (found.next_prompt, found.num_tokens)
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

        found = Manifest.read(output)
        note(f"interrupted: {found.num_texts:,} texts are stored; the same command continues")
        raise typer.Exit(INTERRUPTED) from None
    skipped = "".join(f", {count:,} skipped ({reason})" for reason, count in manifest.skipped.items())
    say(f"{output}: {manifest.num_texts:,} texts, {manifest.num_tokens:,} tokens{skipped}\n")


@contextmanager
def progress(limit_tokens: int | None, num_prompts: int) -> Iterator[Any]:
    import sys

    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    if not sys.stderr.isatty():
        yield Lines().show
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=limit_tokens or num_prompts)

        def show(found: Any) -> None:
            done = found.prompts if limit_tokens is None else min(limit_tokens, found.tokens + found.running_tokens)
            bar.update(task, completed=done, description=f"{found.texts:,} texts, {found.tokens:,} tokens")

        yield show


class Lines:
    def __init__(self) -> None:
        self._last = time.monotonic()

    def show(self, found: Progress) -> None:
        now = time.monotonic()
        if now - self._last >= LINE_SECONDS:
            self._last = now
            note(f"{found.texts:,} texts, {found.tokens:,} tokens")
