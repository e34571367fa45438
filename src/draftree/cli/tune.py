"""`draftree tune`: search by measurement for what makes a model fast on this machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from draftree.cli.layout import argument, group_of, option, refuse
from draftree.cli.options import EXECUTION_OPTIONS, Setup, complete_draft, complete_model, takes, takes_setup, values_of
from draftree.cli.render import (
    CLEAR_LINE,
    INTERRUPTED,
    aligned,
    is_terminal,
    note,
    resolve_with_bar,
    say,
    transient_bar,
    write,
)
from draftree.core.errors import ConfigurationError

if TYPE_CHECKING:
    from draftree.lab.tune.contest import Standing
    from draftree.lab.tune.drafts import DraftSearch
    from draftree.lab.tune.layers import LayerSearch
    from draftree.loading.layer_sets import LayerSet

NOTHING = "–"
HEADINGS = ("drafter", "texts", "tokens/s", "median", "quartiles", "mean", "accepted", "predicted", "replayed", "")
REPLAYED = slice(7, 9)  # columns of what replays predict


def table(standings: Sequence[Standing], predicted: Sequence[Standing] = ()) -> str:
    replayed = {standing.candidate.name: standing for standing in predicted}
    measured = {standing.candidate.name for standing in standings}
    rows = [list(HEADINGS)]
    rows += [
        [*measured_cells(each), *predicted_cells(replayed.get(each.candidate.name)), each.out] for each in standings
    ]
    rows += [
        [shown_name(each), *[NOTHING] * 6, *predicted_cells(each), each.out]
        for name, each in replayed.items()
        if name not in measured
    ]
    if not replayed:
        for row in rows:
            del row[REPLAYED]
    return aligned(rows)


def shown_name(standing: Standing) -> str:
    return "plain" if standing.candidate.is_plain else standing.candidate.name


def measured_cells(standing: Standing) -> tuple[str, ...]:
    return (
        shown_name(standing),
        str(standing.texts),
        f"{standing.tokens_per_second:.1f}",
        f"{standing.median:.2f}",
        f"{standing.low:.2f}–{standing.high:.2f}",
        f"{standing.mean:.2f}",
        f"{standing.acceptance_length:.2f}",
    )


def predicted_cells(standing: Standing | None) -> tuple[str, str]:
    """Return the predicted median of speed-ups, and the tokens per round in replays."""
    return (NOTHING, NOTHING) if standing is None else (f"{standing.median:.2f}", f"{standing.acceptance_length:.2f}")


SEARCH = "Search"
KEPT = "Kept results"
NOT_KEPT = 1
FEWEST_TEXTS = 4  # texts of the winner without which it is not kept


class DraftTuneOptions:
    prompts: Path | None = option(
        None, "JSON lines as for 'draftree bench'; the prompts of the package if not given.", "FILE", SEARCH
    )
    drafts: list[str] = option(
        [],
        "Measure this drafter too, alone and with suffix: head:FOLDER, model:NAME, or DRAFT@PLAN; repeatable.",
        "SPEC",
        SEARCH,
        names="--draft",
        complete=complete_draft,
    )
    minutes: float = option(10.0, "Begin no new text after so long.", "X", SEARCH)
    temperatures: list[float] = option(
        [0.0, 0.8], "Temperatures of the texts, in turn; repeatable.", "X", SEARCH, names="--temperature"
    )
    max_tokens: int = option(96, "Number of tokens per text.", "N", SEARCH)
    limit: int | None = option(None, "Maximum number of prompts per category.", "N", SEARCH)
    seed: int = option(0, "Seed of sampled texts.", "N", SEARCH)
    replay: bool = option(
        True,
        "First replay all drafters on recorded texts of the model, and measure the best three for real; or "
        "measure all for real.",
        panel=SEARCH,
        names="--replay/--no-replay",
    )


@takes_setup(
    *EXECUTION_OPTIONS,
    model=argument(
        None, "A name of 'draftree models', a folder, a GGUF file or a hub id.", "MODEL", complete=complete_model
    ),
)
@takes("work", values_of(DraftTuneOptions))
def drafts(
    *,
    work: dict[str, Any],
    save: bool = option(
        True, "Keep the fastest drafter for '--draft auto', or only show it.", panel=KEPT, names="--save/--dry-run"
    ),
    show: bool = option(False, "Show the kept results, of MODEL or of all models.", panel=KEPT, names="--show"),
    forget: bool = option(False, "Remove the kept results of MODEL.", panel=KEPT, names="--forget"),
    setup: Setup,
) -> None:
    """Measure which drafter, shape and planner is fastest for a model on this machine, and keep it for --draft auto.

    Drafters are first replayed on recorded texts of the model, which predicts their speed. Then the best ones are
    measured: every text is written plainly and with all that are left, in turn; slower ones are dropped early. All
    texts are compared with those of plain decoding. Ctrl-C keeps the measurements, and the same command continues.
    """
    refuse(show and forget, "--forget", "show or forget: leave one of them out")
    if show or forget:
        show_kept(setup.model) if show else forget_kept(setup.model)
        return
    refuse(setup.model is None, "MODEL", "name a model")
    from draftree.lab.tune.drafts import DraftSearch, DraftTuneSettings

    search = DraftSearch(DraftTuneSettings(setup, **work), fetch=resolve_with_bar)
    announce(search, work["minutes"])
    complete = measure(search)
    for name, reason in {} if search.prediction is None else search.prediction.unreplayed.items():
        note(f"not replayed, measured for real: {name} ({reason})")
    say(table(search.contest.standings(), search.predicted))
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
    note(f"{how} {len(search.first)} drafters for up to {minutes:g} minutes")


def measure(search: DraftSearch) -> bool:
    """Run the search with one line of progress; False if the user interrupted it."""
    replaces = is_terminal(sys.stderr)
    try:
        for cell in search.run():
            if replaces:
                contest = search.current
                best = contest.best()
                shown = "" if best is None else f", {best.candidate.name} {best.median:.2f}x"
                kind = "text" if contest is search.contest else "replay of text"
                write(f"{CLEAR_LINE}{kind} {cell.number + 1}, {len(contest.alive)} drafters left{shown}")
    except KeyboardInterrupt:
        return False
    finally:
        if replaces and sys.stderr is not None:
            write(CLEAR_LINE)
    return True


def say_differences(search: DraftSearch) -> None:
    """Print whether all texts were equal to those of plain decoding."""
    differing = [standing for standing in search.contest.standings() if standing.differing]
    if not differing:
        say("all texts are equal to those of plain decoding\n")
        return
    names = ", ".join(f"{standing.candidate.name} ({standing.differing} of {standing.texts})" for standing in differing)
    why = "" if search.contest.is_exact else "; passes through torch may round differently in trees"
    say(f"TEXTS DIFFER from those of plain decoding: {names}{why}\n")


def conclude(search: DraftSearch, *, save: bool) -> bool:
    """Print the fastest drafter, and keep it if wanted; returns whether there is one to keep."""
    from draftree.loading.auto_draft import keep_tuned

    result = search.result()
    if result is None or result.texts < FEWEST_TEXTS:
        note(
            f"not kept: the time ended after {0 if result is None else result.texts} texts, and {FEWEST_TEXTS} are "
            "needed: the measurements stay, and the same command adds to them"
        )
        return False
    plan = f" with plan {result.plan}" if result.plan else ""
    name = "plain decoding" if result.draft == "none" else f"{result.draft}{plan}"
    say(f"fastest: {name}, {result.gain}\n")
    if not save:
        say("not kept (--dry-run); the same command without it keeps this result\n")
        return True
    say(f"kept in {keep_tuned(result)}: --draft auto uses it for this model under the same conditions\n")
    search.forget()
    return True


def show_kept(model: str | None) -> None:
    from draftree.loading.auto_draft import all_tuned

    results = [result for result in all_tuned() if model in (None, result.model, result.fingerprint)]
    if not results:
        say(f"nothing is kept{'' if model is None else f' for {model}'}: run 'draftree tune {model or 'MODEL'}'\n")
    for result in results:
        plan = "" if result.plan is None else f" with plan {result.plan}"
        conditions = ", ".join(f"{key} {value}" for key, value in result.conditions.items() if value is not None)
        say(f"{result.model}: {result.draft}{plan}, {result.gain}, {result.date}\n  {conditions}\n")


def forget_kept(model: str | None) -> None:
    from draftree.lab.tune.contest import forget_journals
    from draftree.loading.auto_draft import all_tuned, forget_tuned

    refuse(model is None, "MODEL", "name the model whose results are removed")
    kept = all_tuned()
    fingerprints = {result.fingerprint for result in kept if model in (result.model, result.fingerprint)}
    if not fingerprints:
        names = ", ".join(sorted({result.model for result in kept})) or "nothing"
        raise ConfigurationError(f"nothing is kept for '{model}'; kept: {names}")
    count = sum(forget_tuned(fingerprint) for fingerprint in fingerprints)
    for fingerprint in fingerprints:
        forget_journals(fingerprint)
    say(f"removed {count} result{'' if count == 1 else 's'} of {model}\n")


class LayerTuneOptions:
    prompts: Path = option(
        ..., "JSON lines as for 'draftree bench'; every fourth prompt is kept for the report.", "FILE", SEARCH
    )
    limit: int | None = option(None, "Maximum number of prompts per category.", "N", SEARCH)
    trials: int = option(60, "Number of sets to measure, including earlier runs.", "N", SEARCH)
    max_tokens: int = option(48, "Number of tokens per text.", "N", SEARCH)
    k: int | None = option(None, "Tokens drafted ahead.", "N", SEARCH, names="--k")
    seed: int = option(0, "Seed of the search.", "N", SEARCH)


@takes_setup(*EXECUTION_OPTIONS)
@takes("work", values_of(LayerTuneOptions))
def layers(
    *,
    work: dict[str, Any],
    keep_anyway: bool = option(
        False, "Store the best set even if plain decoding is faster.", panel=SEARCH, names="--keep-anyway"
    ),
    setup: Setup,
) -> None:
    """Search the sublayers that --draft layer-skip omits; Ctrl-C keeps the results, and a new run continues.

    A set that is slower than plain decoding is not stored, and the exit status is 1.
    """
    from draftree.lab.tune.layers import LayerSearch, LayerTuneSettings

    search = LayerSearch(LayerTuneSettings(setup, **work), fetch=resolve_with_bar)
    if search.kernels_note is not None:
        note(search.kernels_note)
    complete = search_with_bar(search, work["trials"])
    is_kept = keep(search, complete=complete, keep_anyway=keep_anyway)
    if not complete:
        raise typer.Exit(INTERRUPTED)
    if not is_kept:
        raise typer.Exit(NOT_KEPT)


def search_with_bar(search: LayerSearch, trials: int) -> bool:
    """Run the remaining trials; False if the user interrupted them."""
    with transient_bar("sets", trials, done=min(search.num_done, trials)) as show:
        try:
            for _ in search.run():
                best = search.best
                speed = best and search.plain_seconds / (best.seconds_per_token or 1)
                show(advance=1, description=f"best {speed:.2f}x" if speed else "sets")
        except KeyboardInterrupt:
            sys.stderr.write("interrupted: the measurements are kept\n")
            return False
    return True


def keep(search: LayerSearch, *, complete: bool, keep_anyway: bool = False) -> bool:
    """Report the best set, and store it if it is faster than plain decoding; returns whether it was stored."""
    from draftree.loading.layer_sets import store

    layer_set = search.conclude(measures_unseen=complete)
    if layer_set is None:
        sys.stderr.write(f"no set was measured completely, so none is stored; measurements: {search.journal}\n")
        return False
    for line in report(layer_set, len(search.seen), len(search.unseen)):
        typer.echo(line)
    if layer_set.speedup <= 1 and not keep_anyway:
        sys.stderr.write(
            f"not stored: the best set is {layer_set.speedup:.2f} times as fast as plain decoding. "
            "Decode plainly, measure more sets with --trials, or store it with --keep-anyway\n"
        )
        return False
    typer.echo(f"stored in {store(layer_set)}: --draft layer-skip uses it")
    return True


def report(layer_set: LayerSet, num_seen: int, num_unseen: int) -> list[str]:
    lines = [f"{layer_set}", f"found in {layer_set.num_trials} sets, {layer_set.computed_with}"]
    lines.append(speed("searched", num_seen, layer_set.seconds_per_token, layer_set.plain_seconds_per_token))
    if layer_set.unseen_seconds_per_token is None or layer_set.unseen_plain_seconds_per_token is None:
        lines.append("not measured on unseen prompts")
        return lines
    lines.append(
        speed("unseen", num_unseen, layer_set.unseen_seconds_per_token, layer_set.unseen_plain_seconds_per_token)
    )
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
