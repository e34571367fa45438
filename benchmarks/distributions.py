"""Compares a drafter's distributions with the target's: how often it guesses right, and what each rule keeps.

python benchmarks/distributions.py MODEL --draft-model NAME [--category NAME] [--limit N] [--output FILE]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import typer
from closeness import DistributionSettings, prepare

from draftree.cli.bench import COMPARED, HOW, RESULTS, PromptOptions, listed, write_and_show
from draftree.cli.layout import option
from draftree.cli.options import Setup, complete_model, require_new, takes, takes_setup, values_of
from draftree.cli.render import resolve_with_bar
from draftree.core.errors import DraftreeError
from draftree.lab.analysis.theory import kept_by_rule


@takes_setup("dtype", "device", "threads", "trust_remote_code")
@takes("chosen", values_of(PromptOptions), max_tokens=48)
def distributions(
    *,
    draft_model: str = option(..., "The drafter's model.", "NAME", COMPARED, complete=complete_model),
    temperatures: str = option("0,0.5,0.8,1,1.25,1.5", "Temperatures of texts and distributions.", "X,X,...", COMPARED),
    chosen: dict[str, Any],
    draws: int = option(8, "Number of noise seeds to average over.", "N", HOW),
    setup: Setup,
    output: Path | None = RESULTS,
) -> None:
    """Compare a drafter's distributions with the target's: acceptance rates, also under each verifier."""
    require_new(output)
    settings = DistributionSettings(
        model=setup.model,
        draft_model=draft_model,
        temperatures=listed(temperatures, "--temperatures", kind=float, example="0,0.8"),
        **chosen,
        draws=draws,
        dtype=setup.dtype,
        device=setup.device,
        threads=setup.threads,
        trust_remote_code=setup.trust_remote_code,
    )
    ready = prepare(settings, fetch=resolve_with_bar)
    distribution_lines = (("distribution", record) for records in ready.run(kept_by_rule) for record in records)
    write_and_show(output, ready.header, distribution_lines)


if __name__ == "__main__":
    try:
        app = typer.Typer(add_completion=False)
        app.command()(distributions)
        app()
    except DraftreeError as error:
        sys.exit(f"error: {error}")
