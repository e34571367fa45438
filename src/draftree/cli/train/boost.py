"""`draftree train boost`: the next head, trained on what earlier heads miss."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftree.cli.made import takes
from draftree.cli.render import note, say
from draftree.cli.train.shared import Run, head_of, run_of, say_trained, say_use, train
from draftree.cli.train.showing import Lines

if TYPE_CHECKING:
    from draftree.train.head import HeadOptions

__all__ = ["boost"]

BOOSTING = "Boosting"


@takes("run", run_of)
@takes("chosen", head_of)
def boost(
    *,
    run: Run,
    earlier: Annotated[
        list[Path],
        typer.Option(
            help="Folder of an earlier head; repeatable, the best one first.",
            metavar="FOLDER",
            rich_help_panel=BOOSTING,
        ),
    ],
    strength: Annotated[
        float,
        typer.Option(
            help="Exponent of the probability that earlier heads miss.", metavar="X", rich_help_panel=BOOSTING
        ),
    ] = 1.0,
    floor: Annotated[
        float, typer.Option(help="Least weight of a prediction.", metavar="X", rich_help_panel=BOOSTING)
    ] = 0.05,
    chosen: HeadOptions,
) -> None:
    """Train a second head on what the first misses, and compare both with the best two tokens of the first.

    'draftree generate MODEL --draft head:FIRST+head:SECOND' merges their drafts. Ctrl-C keeps the last checkpoint.
    """
    from draftree.train.boost import Boosting, train_boosted

    boosting = Boosting(tuple(earlier), strength, floor)
    result, union = train(
        run, lambda: train_boosted(run.job, run.settings, chosen, boosting, report=Lines(), note=note)
    )
    say_trained(result)
    for kind, rows in union.items():
        lengths = ", ".join(f"{name} {row['acceptance_length']:.3f}" for name, row in rows.items())
        say(f"temperature {kind}, tokens per round: {lengths}\n")
    say_use(run, result.folder, "+".join(f"head:{folder}" for folder in (*earlier, result.folder)))
