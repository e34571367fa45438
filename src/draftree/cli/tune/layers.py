"""`draftree tune layers`: search for the sublayers that a model skips when it drafts, and store them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from draftree.cli.made import takes
from draftree.cli.options import Model
from draftree.cli.render import note
from draftree.cli.running import Execution, execution_of

if TYPE_CHECKING:
    from draftree.lab.tune.layers import LayerSearch
    from draftree.loading.layer_sets import LayerSet

__all__ = ["layers"]

SEARCH = "The search"
INTERRUPTED = 130
NOT_KEPT = 1


@takes("execution", execution_of)
def layers(
    model: Model,
    *,
    prompts: Annotated[
        Path,
        typer.Option(
            help="JSON lines as for 'draftree bench'; every fourth prompt is kept for the report.",
            metavar="FILE",
            rich_help_panel=SEARCH,
        ),
    ],
    limit: Annotated[
        int | None, typer.Option(help="Maximum number of prompts per category.", metavar="N", rich_help_panel=SEARCH)
    ] = None,
    trials: Annotated[
        int,
        typer.Option(help="Number of sets to measure, including earlier runs.", metavar="N", rich_help_panel=SEARCH),
    ] = 60,
    max_tokens: Annotated[
        int, typer.Option(help="Number of tokens per text.", metavar="N", rich_help_panel=SEARCH)
    ] = 48,
    k: Annotated[
        int | None, typer.Option("--k", help="Tokens drafted ahead.", metavar="N", rich_help_panel=SEARCH)
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the search.", metavar="N", rich_help_panel=SEARCH)] = 0,
    keep_anyway: Annotated[
        bool,
        typer.Option(
            "--keep-anyway", help="Store the best set even if plain decoding is faster.", rich_help_panel=SEARCH
        ),
    ] = False,
    execution: Execution,
) -> None:
    """Search the sublayers that --draft layer-skip omits; Ctrl-C keeps the results, and a new run continues.

    A set that is slower than plain decoding is not stored, and the exit status is 1.
    """
    from draftree.cli.progress import resolve_with_bar
    from draftree.lab.tune.layers import LayerSearch, LayerTuneSettings

    settings = LayerTuneSettings(
        model=model,
        prompts=prompts,
        trials=trials,
        limit=limit,
        max_tokens=max_tokens,
        k=k,
        seed=seed,
        **execution.values,
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
    """Report the best set, and store it if it is faster than plain decoding; returns whether it was stored.

    Args:
        search: the search with its measurements.
        complete: whether all sets were measured; only then unseen prompts are measured.
        keep_anyway: store a slower set as well.
    """
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
    """Return the lines of the report, on the prompts of the search and on unseen ones."""
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
