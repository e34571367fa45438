"""`draftree demo`: a real model answers two prompts, plain and with speculation, and the texts are compared."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

import typer

from draftree.cli.layout import option, refuse
from draftree.cli.options import COLOUR, complete_draft, complete_model, takes_setup
from draftree.cli.render import Colour, Style, say, waiting
from draftree.core.errors import ConfigurationError
from draftree.options import AUTO_DRAFT

if TYPE_CHECKING:
    from draftree.cli.runs import Run, Setup
    from draftree.llm import LLM
    from draftree.loading.loaded import LoadedModel
    from draftree.sampling.params import SamplingParams


MODEL = "smollm2-135m-instruct"
MAX_WIDTH = 80
WARM_UP_PROMPT = "Name some colours."
WARM_UP_TOKENS = 24  # enough rounds for the first passes of a drafter's model, which are slow


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    title: str
    file: str
    max_tokens: int
    stop: str | None = None  # stop string, included in the answer

    @property
    def prompt(self) -> str:
        return (resources.files("draftree.cli") / "data" / self.file).read_text(encoding="utf-8").strip()

    def params(self, max_tokens: int | None = None) -> SamplingParams:
        """Return greedy parameters, so that every run gives the same answer."""
        from draftree.sampling.params import SamplingParams

        return SamplingParams(
            max_tokens=max_tokens or self.max_tokens,
            temperature=0,
            stop=self.stop,
            include_stop_str_in_output=True,
        )


DEMO_PROMPTS = (
    DemoPrompt("Code to rewrite: much can be copied", "rewrite_code.md", 200, stop="```\n"),
    DemoPrompt("An open story: little can be copied", "tell_story.md", 160),
)


@takes_setup(
    "dtype",
    "device",
    "trust_remote_code",
    generation_config="none",
    model=option(MODEL, "A model with a chat template.", "NAME", complete=complete_model),
    draft=option(AUTO_DRAFT, "The drafter.", "SPEC", complete=complete_draft),
)
def demo(*, setup: Setup, colour: Colour = COLOUR) -> None:
    """Show a real model generate the same text, plain and with speculation.

    Two prompts, decoded greedily, each plain first and then with speculation. Weights are downloaded once. Exit status
    1 if a text differs.
    """
    from draftree.cli.runs import fetch_and_load

    refuse(setup.is_plain, "--draft", "the demo needs a drafter")
    style = Style.chosen(colour, sys.stdout)
    loaded = fetch_and_load(setup)
    setup = setup.decided(loaded)
    if setup.is_plain:
        raise ConfigurationError(f"the demo needs a drafter, and {setup.auto_note}: name one with --draft")
    fast = setup.llm(loaded)
    plain = setup.plainly().llm(loaded)
    with waiting("warming up"):
        loaded.model.settle()
        for llm in (plain, fast):
            llm.chat([{"role": "user", "content": WARM_UP_PROMPT}], DEMO_PROMPTS[0].params(WARM_UP_TOKENS))
            llm.forget()  # drafters must not copy from this answer
    say(heading(setup, loaded, style))
    same = [
        show(demo_prompt, number, setup, plain=plain, fast=fast, style=style)
        for number, demo_prompt in enumerate(DEMO_PROMPTS, 1)
    ]
    if not all(same):
        raise typer.Exit(1)


def heading(setup: Setup, loaded: LoadedModel, style: Style) -> str:
    import torch

    threads = f"{torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''}"
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    machine = f"torch {torch.__version__} · {loaded.model.device} · {threads} · {dtype} · kernels: {loaded.kernels}"
    lines = [style.bold(f"{setup.model} answers two prompts, each plain and with speculation"), style.dim(machine)]
    if setup.auto_note:
        lines.append(style.dim(setup.auto_note))
    if style.coloured:
        lines.append(f"colours: {style.accepted(f'drafted by {setup.draft}, accepted')}, target token")
    return "\n".join(lines) + "\n"


def show(demo_prompt: DemoPrompt, number: int, setup: Setup, *, plain: LLM, fast: LLM, style: Style) -> bool:
    """Show both answers to one prompt; returns whether they are equal."""
    from draftree.cli.prompt import Task
    from draftree.cli.runs import Screen, are_equal, difference, speedup, write

    task = Task(demo_prompt.prompt, chat=True)
    say(f"\n{rule(f'{number}. {demo_prompt.title}', style)}\n")
    for line in outline(demo_prompt.prompt):
        say(style.dim(f"> {line}") + "\n")
    runs = []
    for llm, wrote in ((plain, setup.plainly()), (fast, setup)):
        say(f"\n{style.bold('plain' if wrote.is_plain else f'with {setup.draft}')}\n")
        screen = Screen(style, live=True, width=width())
        runs.append(write(llm, wrote, task, params=demo_prompt.params(), screen=screen))
        say(style.dim(numbers(runs[-1])) + "\n")
    same = are_equal(*runs)
    ratio = speedup(runs[:1], runs[1])
    say("\n" + style.bold(f"speed-up {ratio:.2f} · the two texts {'are the same' if same else 'DIFFER'}") + "\n")
    say(textwrap.fill(verdict(ratio, runs[1]) if same else f"They differ {difference(*runs)}.", width()) + "\n")
    return same


def numbers(run: Run) -> str:
    stats = run.completions[0].stats
    return " · ".join(
        (
            f"{stats.completion_tokens} tokens",
            f"{run.seconds:.2f} s (prompt {stats.prefill_seconds:.2f} s)",
            f"{stats.tokens_per_second:.1f} tokens/s",
            f"acceptance length {stats.acceptance_length:.2f}",
        )
    )


def verdict(ratio: float, run: Run) -> str:
    """Return one sentence that explains the speed-up of a single run, which other work on the machine changes."""
    stats = run.completions[0].stats
    share = f"{stats.accepted_tokens} of {stats.completion_tokens} tokens were drafted correctly"
    passes = f"{stats.rounds} pass{'es' if stats.rounds != 1 else ''}"
    if ratio >= 1.05:
        return f"{share}, in {passes}."
    cost = "about the time that they saved" if ratio >= 0.95 else "more time than they saved"
    return f"{share}, in {passes}. In this run drafts took {cost}."


def outline(prompt: str) -> Iterator[str]:
    """Yield the lines of a prompt; a code block becomes its number of lines."""
    block: int | None = None
    for line in prompt.splitlines():
        if line.startswith("```"):
            if block is not None:
                yield f"[{block} lines of code]"
            block = 0 if block is None else None
        elif block is not None:
            block += 1
        elif line:
            yield line


def rule(title: str, style: Style) -> str:
    return style.bold(f"── {title} ".ljust(width(), "─"))


def width() -> int:
    """Return the width of the terminal, limited for readability."""
    return min(MAX_WIDTH, shutil.get_terminal_size().columns)
