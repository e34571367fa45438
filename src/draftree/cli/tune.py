"""`draftree tune`: search by measurement for what makes a model fast on this machine."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from draftree.cli.layout import argument, group_of, option
from draftree.cli.options import EXECUTION_OPTIONS, Model, Setup, complete_draft, complete_model, takes_setup
from draftree.cli.render import is_terminal, note, say
from draftree.core.errors import ConfigurationError

if TYPE_CHECKING:
    from draftree.lab.tune.contest import Standing
    from draftree.lab.tune.drafts import DraftSearch
    from draftree.lab.tune.layers import LayerSearch
    from draftree.loading.layer_sets import LayerSet

NOTHING = "–"


def table(standings: Sequence[Standing], predicted: Sequence[Standing] = ()) -> list[str]:
    replayed = {one.candidate.name: one for one in predicted}
    only_replayed = [one for one in predicted if one.candidate.name not in {s.candidate.name for s in standings}]
    rows: list[tuple[str, ...]] = [
        (*measured_cells(one), *predicted_cells(replayed.get(one.candidate.name)), one.out) for one in standings
    ]
    rows += [(shown_name(one), *[NOTHING] * 6, *predicted_cells(one), one.out) for one in only_replayed]
    head: tuple[str, ...] = (
        "drafter",
        "texts",
        "tokens/s",
        "speed-up",
        "median",
        "quartiles",
        "accepted",
        "predicted",
        "replayed",
        "",
    )
    if not replayed:
        head, rows = (*head[:7], head[9]), [(*row[:7], row[9]) for row in rows]
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    return [
        "  ".join(f"{value:<{width}}" for value, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]


def shown_name(one: Standing) -> str:
    return "plain" if one.candidate.is_plain else one.candidate.name


def measured_cells(one: Standing) -> tuple[str, ...]:
    return (
        shown_name(one),
        str(one.texts),
        f"{one.tokens_per_second:.1f}",
        f"{one.speedup:.2f}",
        f"{one.median:.2f}",
        f"{one.low:.2f}–{one.high:.2f}",
        f"{one.acceptance_length:.2f}",
    )


def predicted_cells(one: Standing | None) -> tuple[str, str]:
    """Return the predicted speed-up, and the tokens per round in replays."""
    return (NOTHING, NOTHING) if one is None else (f"{one.speedup:.2f}", f"{one.acceptance_length:.2f}")


SEARCH = "Search"
KEPT = "Kept results"
INTERRUPTED, NOT_KEPT = 130, 1
FEWEST_TEXTS = 4
"""Texts of the winner without which it is not kept."""
CLEAR = "\r\x1b[K"


@takes_setup(*EXECUTION_OPTIONS)
def drafts(
    model: Annotated[
        str | None,
        argument("A name of 'draftree models', a folder, a GGUF file or a hub id.", "MODEL", complete=complete_model),
    ] = None,
    *,
    prompts: Annotated[
        Path | None,
        option("JSON lines as for 'draftree bench'; the prompts of the package if not given.", "FILE", SEARCH),
    ] = None,
    draft: Annotated[
        list[str],
        option(
            "Measure this drafter too, alone and with suffix: head:FOLDER, model:NAME, or DRAFT@PLAN; repeatable.",
            "SPEC",
            SEARCH,
            names="--draft",
            complete=complete_draft,
        ),
    ] = [],  # noqa: B006, read only
    minutes: Annotated[float, option("Begin no new text after so long.", "X", SEARCH)] = 10.0,
    temperature: Annotated[
        list[float], option("Temperatures of the texts, in turn; repeatable; 0 and 0.8 if not given.", "X", SEARCH)
    ] = [],  # noqa: B006, read only
    max_tokens: Annotated[int, option("Number of tokens per text.", "N", SEARCH)] = 96,
    limit: Annotated[int | None, option("Maximum number of prompts per category.", "N", SEARCH)] = None,
    seed: Annotated[int, option("Seed of sampled texts.", "N", SEARCH)] = 0,
    replay: Annotated[
        bool,
        option(
            "First replay all drafters on recorded texts of the model, and measure the best three for real; or "
            "measure all for real.",
            panel=SEARCH,
            names="--replay/--no-replay",
        ),
    ] = True,
    save: Annotated[
        bool,
        option("Keep the fastest drafter for '--draft auto', or only show it.", panel=KEPT, names="--save/--dry-run"),
    ] = True,
    show: Annotated[
        bool, option("Show the kept results, of MODEL or of all models.", panel=KEPT, names="--show")
    ] = False,
    forget: Annotated[bool, option("Remove the kept results of MODEL.", panel=KEPT, names="--forget")] = False,
    setup: Setup,
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
    from draftree.cli.render import resolve_with_bar
    from draftree.lab.tune.drafts import DraftSearch, DraftTuneSettings

    settings = DraftTuneSettings(
        dataclasses.replace(setup, model=model),
        prompts=prompts,
        drafts=tuple(draft),
        temperatures=tuple(temperature) or (0.0, 0.8),
        limit=limit,
        max_tokens=max_tokens,
        minutes=minutes,
        seed=seed,
        replay=replay,
    )
    search = DraftSearch(settings, fetch=resolve_with_bar)
    announce(search, minutes)
    complete = measure(search)
    for name, reason in {} if search.prediction is None else search.prediction.unreplayed.items():
        note(f"not replayed, measured for real: {name} ({reason})")
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
                contest = search.current
                best = search.current.best()
                shown = "" if best is None else f", {best.candidate.name} {best.speedup:.2f}x"
                kind = "text" if contest is search.contest else "replay of text"
                sys.stderr.write(f"{CLEAR}{kind} {cell.number + 1}, {len(contest.alive)} drafters left{shown}")
                sys.stderr.flush()
    except KeyboardInterrupt:
        return False
    finally:
        if replaces and sys.stderr is not None:
            sys.stderr.write(CLEAR)
    return True


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
    from draftree.loading.auto_draft import keep_tuned

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
    from draftree.loading.auto_draft import all_tuned

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
    from draftree.lab.tune.contest import forget_journals
    from draftree.loading.auto_draft import all_tuned, forget_tuned

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


@takes_setup(*EXECUTION_OPTIONS)
def layers(
    model: Model,
    *,
    prompts: Annotated[
        Path, option("JSON lines as for 'draftree bench'; every fourth prompt is kept for the report.", "FILE", SEARCH)
    ],
    limit: Annotated[int | None, option("Maximum number of prompts per category.", "N", SEARCH)] = None,
    trials: Annotated[int, option("Number of sets to measure, including earlier runs.", "N", SEARCH)] = 60,
    max_tokens: Annotated[int, option("Number of tokens per text.", "N", SEARCH)] = 48,
    k: Annotated[int | None, option("Tokens drafted ahead.", "N", SEARCH, names="--k")] = None,
    seed: Annotated[int, option("Seed of the search.", "N", SEARCH)] = 0,
    keep_anyway: Annotated[
        bool, option("Store the best set even if plain decoding is faster.", panel=SEARCH, names="--keep-anyway")
    ] = False,
    setup: Setup,
) -> None:
    """Search the sublayers that --draft layer-skip omits; Ctrl-C keeps the results, and a new run continues.

    A set that is slower than plain decoding is not stored, and the exit status is 1.
    """
    from draftree.cli.render import resolve_with_bar
    from draftree.lab.tune.layers import LayerSearch, LayerTuneSettings

    settings = LayerTuneSettings(
        dataclasses.replace(setup, model=model),
        prompts=prompts,
        trials=trials,
        limit=limit,
        max_tokens=max_tokens,
        k=k,
        seed=seed,
    )
    search = LayerSearch(settings, fetch=resolve_with_bar)
    if search.kernels_note is not None:
        note(search.kernels_note)
    complete = search_with_bar(search, trials)
    is_kept = keep(search, complete=complete, keep_anyway=keep_anyway)
    if not complete:
        raise typer.Exit(INTERRUPTED)
    if not is_kept:
        raise typer.Exit(NOT_KEPT)


def search_with_bar(search: LayerSearch, trials: int) -> bool:
    """Run the remaining trials; False if the user interrupted them."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("sets", total=trials, completed=min(search.num_done, trials))
        try:
            for _ in search.run():
                best = search.best
                speed = best and search.plain_seconds / (best.seconds_per_token or 1)
                bar.update(task, advance=1, description=f"best {speed:.2f}x" if speed else "sets")
        except KeyboardInterrupt:
            sys.stderr.write("interrupted: the measurements are kept\n")
            return False
    return True


def keep(search: LayerSearch, *, complete: bool, keep_anyway: bool = False) -> bool:
    """Report the best set, and store it if it is faster than plain decoding; returns whether it was stored."""
    from draftree.loading.layer_sets import store

    found = search.conclude(measures_unseen=complete)
    if found is None:
        sys.stderr.write(f"no set was measured completely, so none is stored; measurements: {search.journal}\n")
        return False
    for line in report(found, len(search.seen), len(search.unseen)):
        typer.echo(line)
    if found.speedup <= 1 and not keep_anyway:
        sys.stderr.write(
            f"not stored: the best set is {found.speedup:.2f} times as fast as plain decoding. "
            "Decode plainly, measure more sets with --trials, or store it with --keep-anyway\n"
        )
        return False
    typer.echo(f"stored in {store(found)}: --draft layer-skip uses it")
    return True


def report(found: LayerSet, num_seen: int, num_unseen: int) -> list[str]:
    lines = [f"{found}", f"found in {found.num_trials} sets, {found.computed_with}"]
    lines.append(speed("searched", num_seen, found.seconds_per_token, found.plain_seconds_per_token))
    if found.unseen_seconds_per_token is None or found.unseen_plain_seconds_per_token is None:
        lines.append("not measured on unseen prompts")
        return lines
    lines.append(speed("unseen", num_unseen, found.unseen_seconds_per_token, found.unseen_plain_seconds_per_token))
    return lines


def speed(kind: str, count: int, seconds: float, plain: float) -> str:
    return (
        f"{count} {kind} prompts: {1000 * seconds:.2f} ms per token, plain {1000 * plain:.2f} ms: "
        f"{plain / seconds:.2f} times as fast"
    )


tune = group_of(
    """Measure on this machine what makes a model fast, and keep the result.

    'draftree tune MODEL' is 'draftree tune drafts MODEL'.
    """,
    {"drafts": drafts, "layers": layers},
    default="drafts",
)
