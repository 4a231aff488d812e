"""Tables of results: on a terminal, as markdown for the README, and as numbers for a program."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Column:
    """A column's heading, and how its numbers are written (a format specification; texts ignore it)."""

    heading: str
    spec: str = ""

    def write(self, value: object) -> str:
        """One cell."""
        if value is None:
            return "-"
        return value if isinstance(value, str) else format(value, self.spec)


@dataclass
class Report:
    """One table: a row per case, and what a reader must know to read it."""

    name: str
    title: str
    columns: Sequence[Column]
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def cells(self) -> list[list[str]]:
        """The rows as they are written."""
        return [[column.write(value) for column, value in zip(self.columns, row, strict=True)] for row in self.rows]

    def to_json(self) -> dict[str, Any]:
        """The numbers as they were measured."""
        headings = [column.heading for column in self.columns]
        return {
            "name": self.name,
            "title": self.title,
            "rows": [dict(zip(headings, row, strict=True)) for row in self.rows],
            "notes": self.notes,
        }


def show(console: Console, report: Report) -> None:
    """A table on the terminal."""
    table = Table(title=report.title, title_justify="left")
    for position, column in enumerate(report.columns):
        table.add_column(column.heading, justify="right" if position else "left")
    for row in report.cells():
        table.add_row(*row)
    console.print(table)
    for note in report.notes:
        console.print(f"  {note}", style="dim", markup=False, highlight=False)


def markdown(report: Report) -> str:
    """A table for the README."""
    lines = [f"**{report.title}**", "", _line([column.heading for column in report.columns])]
    lines.append(_line([":--", *["--:"] * (len(report.columns) - 1)]))
    lines += [_line(row) for row in report.cells()]
    if report.notes:
        lines += ["", *(f"- {note}" for note in report.notes)]
    return "\n".join(lines) + "\n"


def heading(machine: Mapping[str, str]) -> str:
    """The machine in one line."""
    return ", ".join(f"{name} {value}" for name, value in machine.items())


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
