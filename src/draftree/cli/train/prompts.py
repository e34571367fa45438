"""`draftree train prompts`: a chat model writes messages of users, as prompts for `draftree train data`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from draftree.cli.made import takes
from draftree.cli.options import RUNNING, Model
from draftree.cli.render import note, say
from draftree.cli.running import Execution, execution_of
from draftree.core.errors import ConfigurationError
from draftree.loading.resolve import require_sound

__all__ = ["prompts"]

PROGRESS = 1000
"""Messages between two lines of progress."""


@takes("execution", execution_of)
def prompts(
    model: Model,
    *,
    output: Annotated[Path, typer.Option(help="New file of JSON lines.", metavar="FILE")],
    number: Annotated[int, typer.Option(help="Number of messages.", metavar="N")] = 2000,
    temperature: Annotated[float, typer.Option(help="Temperature of sampling.", metavar="X")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Probability mass that is sampled from.", metavar="X")] = 0.95,
    max_tokens: Annotated[int, typer.Option(help="Longer messages are dropped.", metavar="N")] = 200,
    seed: Annotated[int, typer.Option(help="Seed of the first message.", metavar="N")] = 0,
    batch: Annotated[
        int, typer.Option(help="Messages that are drawn at a time.", metavar="N", rich_help_panel=RUNNING)
    ] = 64,
    execution: Execution,
) -> None:
    """Let a chat model write messages of users, as prompts for 'draftree train data' (Magpie).

    The model continues its chat template where the message of the user would begin.
    """
    require_sound(model)
    if output.exists():
        raise ConfigurationError(f"'{output}' exists: name a new file")
    if not output.parent.is_dir():
        raise ConfigurationError(f"the folder '{output.parent}' does not exist")
    from draftree.cli.writing import fetch_and_load
    from draftree.train.data.magpie import MessageSettings, magpie_prompts
    from draftree.train.data.manifest import write_atomically

    settings = MessageSettings(
        number=number, temperature=temperature, top_p=top_p, max_tokens=max_tokens, seed=seed, batch=batch
    )
    setup = execution.setup(model)
    llm = setup.over(fetch_and_load(setup))
    reported = [0]

    def show(done: int) -> None:
        if done - reported[0] >= PROGRESS:
            reported[0] = done
            note(f"{done:,} of {number:,} messages")

    found = magpie_prompts(llm, settings, on_progress=show)
    lines = [
        json.dumps({"id": f"magpie-{place}", "category": "magpie", "prompt": text}, ensure_ascii=False)
        for place, text in enumerate(found, 1)
    ]
    write_atomically(output, lambda path: path.write_text("".join(f"{line}\n" for line in lines), "utf-8"))
    say(f"{output}: {len(found):,} messages\n")
