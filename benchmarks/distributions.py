"""Compares a drafter's distributions with the target's: how often it guesses right, and what each rule keeps.

python benchmarks/distributions.py MODEL --draft-model NAME [--category NAME] [--limit N] [--output FILE]
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from closeness import DistributionSettings, prepare

from draftree.cli.bench import COMPARED, HOW, Category, Limit, MaxTokens, Output, Prompts, Seed, listed, write_and_show
from draftree.cli.layout import option
from draftree.cli.options import Model, Setup, complete_model, require_new, takes_setup
from draftree.cli.render import resolve_with_bar
from draftree.core.errors import DraftreeError
from draftree.lab.analysis.theory import kept_by_rule


@takes_setup("dtype", "device", "threads", "trust_remote_code")
def distributions(
    model: Model,
    *,
    draft_model: Annotated[
        str,
        option("The drafter's model.", "NAME", COMPARED, complete=complete_model),
    ],
    temperatures: Annotated[
        str, option("Temperatures of texts and distributions.", "X,X,...", COMPARED)
    ] = "0,0.5,0.8,1,1.25,1.5",
    prompts: Prompts = None,
    category: Category = None,
    limit: Limit = None,
    max_tokens: MaxTokens = 48,
    seed: Seed = 0,
    draws: Annotated[int, option("Number of noise seeds to average over.", "N", HOW)] = 8,
    setup: Setup,
    output: Output = None,
) -> None:
    """Compare a drafter's distributions with the target's: acceptance rates, also under each verifier."""
    require_new(output)
    settings = DistributionSettings(
        model=model,
        draft_model=draft_model,
        temperatures=listed(temperatures, "--temperatures", kind=float, example="0,0.8"),
        prompts=prompts,
        categories=tuple(category or ()),
        limit=limit,
        max_tokens=max_tokens,
        seed=seed,
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
