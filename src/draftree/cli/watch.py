"""`draftree watch`: the load and the rounds of a running server, live or once."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from draftree.cli.options import OUTPUT
from draftree.cli.render import is_terminal, say
from draftree.cli.watching.address import Address
from draftree.cli.watching.client import ServerClient, UnreachableError
from draftree.cli.watching.facts import RoundFacts, ServerFacts
from draftree.cli.watching.history import History
from draftree.cli.watching.listener import Backoff, RoundListener
from draftree.cli.watching.view import view
from draftree.core.errors import ConfigurationError

__all__ = ["watch"]

KEY_VARIABLE = "DRAFTREE_API_KEY"
SHORTEST_SECONDS, LONGEST_SECONDS = 0.1, 3600.0
ONCE_HEIGHT = 30

Url = Annotated[
    str,
    typer.Argument(
        help="Address of the server, such as http://127.0.0.1:8000.", metavar="URL", rich_help_panel="Arguments"
    ),
]
Key = Annotated[
    str | None,
    typer.Option(
        help=f"API key; other users of this machine can see it, the variable {KEY_VARIABLE} is safer.", metavar="KEY"
    ),
]
Interval = Annotated[float, typer.Option(help="Seconds between two readings of the status.", metavar="SECONDS")]
Once = Annotated[
    bool,
    typer.Option(
        "--once", help="Print one snapshot with the rounds of one interval, and exit.", rich_help_panel=OUTPUT
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the snapshot as one JSON object.", rich_help_panel=OUTPUT)]


def watch(url: Url, *, key: Key = None, interval: Interval = 1.0, once: Once = False, as_json: Json = False) -> None:
    """Show the load and the rounds of a running server. Ctrl-C leaves."""
    if not SHORTEST_SECONDS <= interval <= LONGEST_SECONDS:
        raise ConfigurationError(
            f"--interval is {interval}: it must be from {SHORTEST_SECONDS} to {LONGEST_SECONDS:.0f} seconds"
        )
    if as_json and not once:
        raise typer.BadParameter("the object of --json is one snapshot: add --once", param_hint="--json")
    if not once and not is_terminal(sys.stdout):
        raise typer.BadParameter("standard output is not a terminal: add --once", param_hint="--once")
    client = ServerClient(Address.parse(url), key if key is not None else os.environ.get(KEY_VARIABLE) or None)
    if once:
        print_snapshot(client, interval, as_json=as_json)
    else:
        show_live(client, interval)


def print_snapshot(client: ServerClient, interval: float, *, as_json: bool) -> None:
    """Print the status, and the rounds of one interval.

    Raises:
        UnreachableError: the server does not answer.
        RefusedError: the server refuses, or is another program.
    """
    client.status()  # wrong addresses and keys are reported before the wait
    history = History()
    raw: list[dict[str, object]] = []
    with RoundListener(client, raw.append):
        time.sleep(interval)
    status = client.status()
    if as_json:
        say(json.dumps({"url": str(client.address), "status": status, "rounds": raw}, ensure_ascii=False) + "\n")
        return
    history.add_status(ServerFacts.of(status))
    for values in raw:
        history.add_round(RoundFacts.of(values))
    console = Console(highlight=False)
    console.print(view(str(client.address), history.snapshot(), width=console.width, height=ONCE_HEIGHT))


def show_live(client: ServerClient, interval: float) -> None:
    """Show the server until Ctrl-C; a server that stops answering is tried again.

    Raises:
        UnreachableError: the server does not answer at the start.
        RefusedError: the server refuses, or is another program.
    """
    history, backoff, console = History(), Backoff(), Console(highlight=False)
    history.add_status(ServerFacts.of(client.status()))
    with (
        RoundListener(client, lambda values: history.add_round(RoundFacts.of(values))),
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        pause = interval
        while True:
            shown = view(str(client.address), history.snapshot(), width=console.width, height=console.height)
            live.update(shown, refresh=True)
            time.sleep(pause)
            pause = interval
            try:
                history.add_status(ServerFacts.of(client.status()))
                backoff.reset()
            except UnreachableError as error:
                pause = backoff.next()
                history.set_trouble(f"{error} (next attempt in {pause:.1f} s)")
