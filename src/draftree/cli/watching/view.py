"""The view of a server: models, phases of rounds, and the last rounds as bars."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from draftree.cli.watching.facts import PHASES, ModelFacts, RoundFacts, RowFacts, ServerFacts
from draftree.cli.watching.history import Snapshot

__all__ = ["sparkline", "view"]

LEVELS = "▁▂▃▄▅▆▇█"
PHASE_WIDTH, MAX_BAR = 14, 16
PHASE_STYLES = {"plan": "blue", "draft": "green", "score": "magenta", "verify": "cyan", "commit": "yellow"}
NOTHING = "–"
FIXED_LINES = 10
"""Lines of the view besides those of models and rounds."""
LEAST_ROUNDS = 3


def view(url: str, snapshot: Snapshot, *, width: int, height: int) -> RenderableType:
    """Return the picture of a snapshot.

    Args:
        url: address of the server.
        snapshot: what is known.
        width: columns of the terminal.
        height: its lines; fewer rounds are shown on a low terminal.
    """
    parts: list[RenderableType] = [heading(url, snapshot)]
    server = snapshot.server
    if server is None:
        return Group(*parts)
    parts += [Text(), models_table(server), Text()]
    details = [line for model in server.models for line in model_lines(model, snapshot, width)]
    used = FIXED_LINES + len(server.models) + sum(1 + line.cell_len // width for line in details)
    shown = max(LEAST_ROUNDS, height - used)
    parts += [*details, phases_line(snapshot), Text(), *rounds_lines(snapshot.rounds, shown)]
    return Group(*parts)


def heading(url: str, snapshot: Snapshot) -> Text:
    line = Text(url, style="bold")
    server = snapshot.server
    if server is not None:
        line.append(
            f"  draftree {server.version}, up {duration(server.uptime_seconds)}{queue(server)}", style="not bold"
        )
    if snapshot.trouble:
        line.append(f"\n{snapshot.trouble}", style="bold red")
    return line


def queue(server: ServerFacts) -> str:
    words = []
    for name in ("running", "waiting", "places"):
        if name in server.queue:
            limit = server.queue.get(f"max_{name}")
            words.append(f"{name} {figure(server.queue[name])}" + (f" of {figure(limit)}" if limit is not None else ""))
    return f"\nrequests: {', '.join(words)}" if words else ""


def models_table(server: ServerFacts) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("model")
    table.add_column("drafters")
    for title in ("tokens/s", "running", "waiting", "length", "accepted"):
        table.add_column(title, justify="right", no_wrap=True)
    for model in server.models:
        rate = model.acceptance_rate
        table.add_row(
            cut(model.name, style="bold"),
            cut(", ".join(model.drafts) or NOTHING),
            figure(model.tokens_per_second, digits=1),
            str(model.running),
            str(model.waiting),
            figure(model.acceptance_length, digits=2),
            NOTHING if rate is None else f"{rate:.0%}",
        )
    return table


def model_lines(model: ModelFacts, snapshot: Snapshot, width: int) -> list[Text]:
    """Return the rates of a model over time, and the planner's reason."""
    line = cut(f"{model.name}  tokens/s  ", style="dim")
    room = max(1, width - line.cell_len)
    line.append(sparkline(snapshot.rates.get(model.name, ()), room), style="not dim green")
    return [line, Text("  planner: ", style="dim").append(model.explain, style="not dim")] if model.explain else [line]


def cut(text: str, style: str = "") -> Text:
    """Return a text in one line, cut where the room ends."""
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def phases_line(snapshot: Snapshot) -> Text:
    """Return the shares of the phases as one bar with its legend."""
    line = cut("phases  ", style="dim")
    shares = snapshot.phase_shares
    if not snapshot.rounds:
        return line.append("no rounds yet")
    reached = 0.0
    for phase in PHASES:
        begin, reached = round(reached * PHASE_WIDTH), reached + shares[phase]
        line.append("█" * (round(reached * PHASE_WIDTH) - begin), style=f"not dim {PHASE_STYLES[phase]}")
    for phase in PHASES:
        line.append(f"  {phase} {shares[phase]:.0%}", style=f"not dim {PHASE_STYLES[phase]}")
    return line


def rounds_lines(rounds: Sequence[RoundFacts], count: int) -> list[Text]:
    """Return one line for each of the last rounds, the newest first."""
    legend = cut("rounds  ", style="dim")
    legend.append("█ accepted", style="not dim green").append(" ░ drafted", style="not dim red")
    legend.append(" · none drafted; newest first")
    return [legend, *(round_line(one) for one in reversed(rounds[-count:]))]


def round_line(done: RoundFacts) -> Text:
    line = cut("")
    line.append(f"{1000 * done.total_seconds:7.1f} ms  ", style="dim")
    line.append(f"{sum(row.num_written for row in done.rows):4d} tokens  ")
    for row in done.rows:
        line.append_text(bar(row)).append(" ")
    return line.append(f" {done.model}", style="dim")


def bar(row: RowFacts) -> Text:
    """Return accepted and other drafted tokens of a sequence as blocks; long drafts are shown to scale."""
    drafted = max(row.num_drafted, row.num_accepted)
    if not drafted:
        return Text("·", style="dim")
    scale = min(1.0, MAX_BAR / drafted)
    accepted, width = round(row.num_accepted * scale), max(1, round(drafted * scale))
    return Text("█" * accepted, style="green").append("░" * (width - accepted), style="red")


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the last values as one line of blocks between zero and the largest of them."""
    last = list(values)[-width:]
    most = max(last, default=0.0)
    if most <= 0:
        return LEVELS[0] * len(last)
    return "".join(LEVELS[min(len(LEVELS) - 1, int(value / most * len(LEVELS)))] for value in last)


def figure(value: float | None, *, digits: int = 0) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"


def duration(seconds: float | None) -> str:
    """Return a duration in hours, minutes and seconds."""
    if seconds is None:
        return NOTHING
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
