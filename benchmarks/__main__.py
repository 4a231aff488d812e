"""`python -m benchmarks [NAME ...]`: run them, all of them by default, and print their tables."""

import importlib
import json
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks import environment, tables
from deploy.local import exit_on_signals

BENCHMARKS = ("swap", "step", "start", "throughput", "prefetch", "pack")


def main(
    names: Annotated[list[str] | None, typer.Argument(help=f"Which of {', '.join(BENCHMARKS)}; default all.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers to this file too.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print markdown.")] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
) -> None:
    """Measure, on one thread, and print a table per comparison."""
    if unknown := set(names or ()) - set(BENCHMARKS):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: known are {', '.join(BENCHMARKS)}")
    environment.settle()
    exit_on_signals()  # so that no service is left behind
    console = Console() if Console().is_terminal else Console(width=160)
    machine = importlib.import_module("benchmarks.machine")
    place = machine.prepare(device)
    where = machine.describe(place)
    console.print(tables.heading(where), markup=False, highlight=False, soft_wrap=True)
    reports: list[tables.Report] = []
    for name in names or BENCHMARKS:
        began = time.perf_counter()
        measured: list[tables.Report] = importlib.import_module(f"benchmarks.{name}").run(place)
        _show(console, measured, markdown)
        console.print(f"{name} took {time.perf_counter() - began:.0f} s\n", style="dim", highlight=False)
        reports += measured
    if json_file:
        numbers = {"machine": where, "tables": [report.to_json() for report in reports]}
        json_file.write_text(json.dumps(numbers, indent=1) + "\n")


def _show(console: Console, reports: list[tables.Report], markdown: bool) -> None:
    for report in reports:
        if markdown:
            console.print(tables.markdown(report), markup=False, highlight=False, soft_wrap=True)
        else:
            tables.show(console, report)


if __name__ == "__main__":
    typer.run(main)
