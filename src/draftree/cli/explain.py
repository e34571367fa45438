"""`draftree explain`: run with and without the drafter, and print the planner's measurements and decisions."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from draftree.cli.generate import check_material
from draftree.cli.layout import argument, option
from draftree.cli.options import ALL_OPTIONS, CHAT, SYSTEM, Setup, takes_setup
from draftree.cli.prompt import Task
from draftree.cli.render import Colour, Style, note, say
from draftree.core.errors import ConfigurationError
from draftree.sampling.params import SamplingParams

if TYPE_CHECKING:
    from draftree.llm import LLM
    from draftree.outputs import CompletionStats


PROMPT = "Once upon a time"
NOISE = 1.05  # ratio of two decode rates up to which they count as equal


@takes_setup(*(name for name in ALL_OPTIONS if name not in ("learn", "allow_control_tokens", "exact")))
def explain(
    prompt: str = argument(PROMPT, "The prompt.", "PROMPT"),
    *,
    setup: Setup,
    chat: bool | None = CHAT,
    system: str | None = SYSTEM,
    max_tokens: int = option(128, "Maximum number of tokens.", "N"),
    temperature: float = option(0.0, "0 takes the most likely token.", "X"),
) -> None:
    """Generate a text plainly and with the drafter, and explain the planner's decisions."""
    task = Task(prompt, system, chat)
    from draftree.cli.runs import fetch_and_load, lossy_line, warm_up, write

    if setup.is_plain:
        raise ConfigurationError("there is nothing to explain without a drafter: name one with --draft, such as ngram")
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=0)
    check_material(setup, params)
    if line := lossy_line(setup, temperature):
        note(Style.chosen(Colour.AUTO, sys.stderr).bold(line))
    loaded = fetch_and_load(setup)
    setup = setup.decided(loaded)
    if setup.auto_note:
        say(f"{setup.auto_note}\n")
    if setup.is_plain:
        return
    chosen = setup.methods().plan
    plain = setup.plainly().llm(loaded)
    fast = setup.llm(loaded)
    task = task.decided(fast)
    for llm in (plain, fast):
        warm_up(llm)
    slow_stats = write(plain, setup.plainly(), task, params=params, screen=None).completions[0].stats
    stats = write(fast, setup, task, params=params, screen=None).completions[0].stats
    say(f"{verdict(stats, slow_stats)}\n")
    say(f"planner {chosen}: {stats.explain or 'it measures nothing and has no explanation'}\n")
    say_numbers(fast, stats)


def verdict(stats: CompletionStats, plain: CompletionStats) -> str:
    """Say in one sentence whether drafting paid, with the two decode rates."""
    ratio = stats.tokens_per_second / plain.tokens_per_second if plain.tokens_per_second else 1.0
    rates = (
        f"{ratio:.2f} times plain decoding ({stats.tokens_per_second:.1f} against {plain.tokens_per_second:.1f} "
        f"tokens/s) at {stats.acceptance_length:.2f} tokens per round"
    )
    if not stats.accepted_tokens:
        reason = "no drafted token was accepted" if stats.draft_tokens else "the planner drafted nothing"
        return f"Drafting did not pay: {reason}."
    if ratio > NOISE:
        return f"Drafting pays on this text: {rates}."
    if ratio < 1 / NOISE:
        return f"Drafting costs time on this text: {rates}."
    return f"Drafting makes no difference on this text: {rates}."


def say_numbers(fast: LLM, stats: CompletionStats) -> None:
    known = fast.planner.pass_seconds
    if known:
        passes = ", ".join(f"{rows} rows {1000 * seconds:.1f} ms" for rows, seconds in sorted(known.items()))
        say(f"pass times, measured before the first round: {passes}\n")
    tried = [f"{kept / count:.2f}" for kept, count in zip(stats.accepted_by_depth, stats.drafted_by_depth, strict=True)]
    if tried:
        say(f"acceptance rate of scored tokens by depth: {', '.join(tried)}\n")
    for source, count in sorted(stats.drafted_by_source.items()):
        say(f"{source}: {stats.accepted_by_source.get(source, 0)} of {count} scored tokens accepted\n")
