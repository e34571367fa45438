"""`draftree explain`: a text is written, and the planner says in numbers what it made of the drafter."""

from __future__ import annotations

from typing import Annotated

import typer

from draftree.cli.generate import check_material
from draftree.cli.options import Device, Dtype, Model, TrustRemoteCode
from draftree.cli.render import say
from draftree.core.errors import ConfigurationError
from draftree.sampling.params import SamplingParams

__all__ = ["explain"]

PROMPT = "Once upon a time"


def explain(
    model: Model,
    prompt: Annotated[
        str, typer.Argument(help="What is written on.", metavar="PROMPT", rich_help_panel="Arguments")
    ] = PROMPT,
    *,
    draft: Annotated[str, typer.Option(help="A drafter, as for 'draftree generate'.", metavar="SPEC")],
    plan: Annotated[str | None, typer.Option(help="A planner that can say why.", metavar="POLICY")] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens of the text at most.", metavar="N")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.", metavar="X")] = 0.0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Write a text plainly and with the drafter, and say what the planner made of it."""
    from draftree.cli.writing import Setup, fetch_and_load, warm_up

    setup = Setup(model, draft, plan=plan, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    chosen = setup.methods().plan
    if setup.is_plain:
        raise ConfigurationError("there is nothing to explain without a drafter: name one with --draft, such as ngram")
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=0)
    check_material(setup, params)
    loaded = fetch_and_load(setup)
    plain, fast = setup.plainly().over(loaded), setup.over(loaded)
    for llm in (plain, fast):
        warm_up(llm)
    slow_stats = plain.generate(prompt, params)[0].stats
    stats = fast.generate(prompt, params)[0].stats
    say(f"planner {chosen}: {stats.explain or 'it weighs nothing, and can give no reason'}\n")
    known = fast.planner.pass_seconds
    if known:
        passes = ", ".join(f"{rows} rows {1000 * seconds:.1f} ms" for rows, seconds in sorted(known.items()))
        say(f"passes, timed before the first round: {passes}\n")
    tried = [f"{kept / count:.2f}" for kept, count in zip(stats.accepted_by_depth, stats.drafted_by_depth, strict=True)]
    if tried:
        say(f"scored tokens that were accepted, by depth: {', '.join(tried)}\n")
    for source, count in sorted(stats.drafted_by_source.items()):
        say(f"{source}: {stats.accepted_by_source.get(source, 0)} of {count} scored tokens accepted\n")
    say(
        f"{stats.acceptance_length:.2f} tokens a round, {stats.tokens_per_second:.1f} tokens/s; "
        f"plain {slow_stats.tokens_per_second:.1f} tokens/s\n"
    )
