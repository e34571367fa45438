"""`draftree tune MODEL`: measure which drafter is fastest for given prompts on this machine, and keep it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftree.cli.completion import complete_draft, complete_model
from draftree.cli.made import takes
from draftree.cli.render import is_terminal, note, say
from draftree.cli.running import Execution, execution_of
from draftree.cli.tune.table import table
from draftree.core.errors import ConfigurationError

if TYPE_CHECKING:
    from draftree.lab.tune.contest import Cell
    from draftree.lab.tune.drafts import DraftSearch

__all__ = ["drafts"]

SEARCH, KEPT = "Search", "Kept results"
INTERRUPTED, NOT_KEPT = 130, 1
FEWEST_TEXTS = 4
"""Texts of the winner without which it is not kept."""
CLEAR = "\r\x1b[K"

Model = Annotated[
    str | None,
    typer.Argument(
        help="A name of 'draftree models', a folder, a GGUF file or a hub id.",
        metavar="MODEL",
        autocompletion=complete_model,
        rich_help_panel="Arguments",
    ),
]


Prompts = Annotated[
    Path | None,
    typer.Option(
        help="JSON lines as for 'draftree bench'; the prompts of the package if not given.",
        metavar="FILE",
        rich_help_panel=SEARCH,
    ),
]
Drafts = Annotated[
    list[str],
    typer.Option(
        "--draft",
        help="Measure this drafter too, alone and merged with suffix: head:FOLDER, model:NAME, or DRAFT@PLAN; "
        "repeatable.",
        metavar="SPEC",
        autocompletion=complete_draft,
        rich_help_panel=SEARCH,
    ),
]
Minutes = Annotated[float, typer.Option(help="Begin no new text after so long.", metavar="X", rich_help_panel=SEARCH)]
Temperatures = Annotated[
    list[float],
    typer.Option(
        help="Temperatures of the texts, in turn; repeatable; 0 and 0.8 if not given.",
        metavar="X",
        rich_help_panel=SEARCH,
    ),
]
MaxTokens = Annotated[int, typer.Option(help="Number of tokens per text.", metavar="N", rich_help_panel=SEARCH)]
Limit = Annotated[
    int | None, typer.Option(help="Maximum number of prompts per category.", metavar="N", rich_help_panel=SEARCH)
]
Seed = Annotated[int, typer.Option(help="Seed of sampled texts.", metavar="N", rich_help_panel=SEARCH)]
Replay = Annotated[
    bool,
    typer.Option(
        "--replay/--no-replay",
        help="First replay all drafters on recorded texts of the model, and measure the best three for real; or "
        "measure all for real.",
        rich_help_panel=SEARCH,
    ),
]
Save = Annotated[
    bool,
    typer.Option(
        "--save/--dry-run",
        help="Keep the fastest drafter for '--draft auto', or only show it.",
        rich_help_panel=KEPT,
    ),
]
Show = Annotated[
    bool, typer.Option("--show", help="Show the kept results, of MODEL or of all models.", rich_help_panel=KEPT)
]
Forget = Annotated[bool, typer.Option("--forget", help="Remove the kept results of MODEL.", rich_help_panel=KEPT)]


@takes("execution", execution_of)
def drafts(
    model: Model = None,
    *,
    prompts: Prompts = None,
    draft: Drafts = [],  # noqa: B006, read only
    minutes: Minutes = 10.0,
    temperature: Temperatures = [],  # noqa: B006, read only
    max_tokens: MaxTokens = 96,
    limit: Limit = None,
    seed: Seed = 0,
    replay: Replay = True,
    save: Save = True,
    show: Show = False,
    forget: Forget = False,
    execution: Execution,
) -> None:
    """Measure which drafter, shape and planner is fastest for a model on this machine, and keep it for --draft auto.

    Drafters are first replayed on recorded texts of the model, which predicts their speed. Then the best ones are
    measured: every text is written plainly and with all that are left, in turn; slower ones are dropped early. All
    texts are compared with those of plain decoding. Ctrl-C keeps the measurements, and the same command continues.
    """
    if show and forget:
        raise typer.BadParameter("show or forget: leave one of them out", param_hint="--forget")
    if show or forget:
        show_kept(model) if show else forget_kept(model)
        return
    if model is None:
        raise typer.BadParameter("name a model", param_hint="MODEL")
    from draftree.cli.progress import resolve_with_bar
    from draftree.lab.tune.drafts import DraftSearch, DraftTuneSettings

    settings = DraftTuneSettings(
        model=model,
        prompts=prompts,
        drafts=tuple(draft),
        temperatures=tuple(temperature) or (0.0, 0.8),
        limit=limit,
        max_tokens=max_tokens,
        minutes=minutes,
        seed=seed,
        replay=replay,
        **execution.values,
    )
    search = DraftSearch(settings, fetch=resolve_with_bar)
    announce(search, minutes)
    complete = measure(search)
    say_unreplayed(search)
    say("".join(f"{line}\n" for line in table(search.contest.standings(), search.predicted)))
    say_differences(search)
    if not complete:
        note(
            f"interrupted: {search.num_samples} measurements are kept in {search.journal.path.parent}, and the same "
            "command continues; no drafter was kept"
        )
        raise typer.Exit(INTERRUPTED)
    if not conclude(search, save=save):
        raise typer.Exit(NOT_KEPT)


def announce(search: DraftSearch, minutes: float) -> None:
    """Print what is measured, and what cannot be."""
    for text in search.notes:
        note(text)
    for name, reason in search.refused.items():
        note(f"not measured: {name} ({reason})")
    if search.num_known:
        note(f"{search.num_known} measurements of an earlier run are used")
    how = "measuring" if search.prediction is None else "replaying, then measuring"
    note(f"{how} {search.num_candidates} drafters for up to {minutes:g} minutes")


def measure(search: DraftSearch) -> bool:
    """Run the search with one line of progress; False if the user interrupted it."""
    replaces = is_terminal(sys.stderr)
    try:
        for cell in search.run():
            if replaces:
                sys.stderr.write(CLEAR + progress_line(search, cell))
                sys.stderr.flush()
    except KeyboardInterrupt:
        return False
    finally:
        if replaces and sys.stderr is not None:
            sys.stderr.write(CLEAR)
    return True


def progress_line(search: DraftSearch, cell: Cell) -> str:
    contest = search.current
    best = contest.best()
    shown = "" if best is None else f", {best.candidate.name} {best.speedup:.2f}x"
    kind = "text" if contest is search.contest else "replay of text"
    return f"{kind} {cell.number + 1}, {len(contest.alive)} drafters left{shown}"


def say_unreplayed(search: DraftSearch) -> None:
    """Print which drafters were measured for real without a replay."""
    for name, reason in {} if search.prediction is None else search.prediction.unreplayed.items():
        note(f"not replayed, measured for real: {name} ({reason})")


def say_differences(search: DraftSearch) -> None:
    """Print whether all texts were equal to those of plain decoding."""
    found = [one for one in search.contest.standings() if one.differing]
    if not found:
        say("all texts are equal to those of plain decoding\n")
        return
    names = ", ".join(f"{one.candidate.name} ({one.differing} of {one.texts})" for one in found)
    why = "" if search.is_exact else "; passes through torch may round differently in trees"
    say(f"TEXTS DIFFER from those of plain decoding: {names}{why}\n")


def conclude(search: DraftSearch, *, save: bool) -> bool:
    """Print the fastest drafter, and keep it if wanted; returns whether there is one to keep."""
    from draftree.loading.tuned import keep_tuned

    found = search.result()
    if found is None or found.texts < FEWEST_TEXTS:
        note(
            f"not kept: the time ended after {0 if found is None else found.texts} texts, and {FEWEST_TEXTS} are "
            "needed: give more --minutes; the measurements stay"
        )
        return False
    name = (
        "plain decoding" if found.draft == "none" else found.draft + (f" with plan {found.plan}" if found.plan else "")
    )
    say(
        f"fastest: {name}, {found.speedup:.2f} times plain decoding "
        f"(quartiles {found.spread[0]:.2f}–{found.spread[1]:.2f}, {found.texts} texts)\n"
    )
    if not save:
        say("not kept (--dry-run); the same command without it keeps this result\n")
        return True
    say(f"kept in {keep_tuned(found)}: --draft auto uses it for this model under the same conditions\n")
    search.forget()
    return True


def show_kept(model: str | None) -> None:
    """Print the kept results.

    Raises:
        ConfigurationError: a file is damaged.
    """
    from draftree.loading.tuned import all_tuned

    found = [one for one in all_tuned() if model in (None, one.model, one.fingerprint)]
    if not found:
        say(f"nothing is kept{'' if model is None else f' for {model}'}: run 'draftree tune {model or 'MODEL'}'\n")
    for one in found:
        plan = "" if one.plan is None else f" with plan {one.plan}"
        conditions = ", ".join(f"{key} {value}" for key, value in one.conditions.items() if value is not None)
        say(
            f"{one.model}: {one.draft}{plan}, {one.speedup:.2f} times plain decoding "
            f"(quartiles {one.spread[0]:.2f}–{one.spread[1]:.2f}, {one.texts} texts, {one.date})\n  {conditions}\n"
        )


def forget_kept(model: str | None) -> None:
    """Remove the results and the measurements of a model.

    Raises:
        ConfigurationError: no model was named, or nothing is kept for it.
    """
    from draftree.lab.tune.contest import forget_journals
    from draftree.loading.tuned import all_tuned, forget_tuned

    if model is None:
        raise typer.BadParameter("name the model whose results are removed", param_hint="MODEL")
    kept = all_tuned()
    fingerprints = {one.fingerprint for one in kept if model in (one.model, one.fingerprint)}
    if not fingerprints:
        names = ", ".join(sorted({one.model for one in kept})) or "nothing"
        raise ConfigurationError(f"nothing is kept for '{model}'; kept: {names}")
    count = sum(forget_tuned(one) for one in fingerprints)
    for one in fingerprints:
        forget_journals(one)
    say(f"removed {count} result{'' if count == 1 else 's'} of {model}\n")
