"""A table as a grid of text."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table

NOTHING = "–"


@dataclass(frozen=True, slots=True)
class Grid:
    """A table: a title, headings, rows of text; the first column is a name, the others are numbers."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        """Return the table as Markdown under its title."""
        rule = ["---", *["---:"] * (len(self.headings) - 1)]
        lines = [self.headings, rule, *self.rows]
        return "\n".join([f"**{self.title}**", "", *(f"| {' | '.join(line)} |" for line in lines)])

    def rich(self) -> Table:
        """Return the table for a terminal, without the title."""
        table = Table(box=None, pad_edge=False)
        for place, heading in enumerate(self.headings):
            table.add_column(heading, justify="right" if place else "left", no_wrap=not place)
        for row in self.rows:
            table.add_row(*row)
        return table
