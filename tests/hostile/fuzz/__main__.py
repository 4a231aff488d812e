"""`python -m tests.hostile.fuzz --cases 100000 --seed 1`: fuzz the store, print what became of the files."""

import sys
import tempfile
import warnings
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from tests.hostile.fuzz.drive import MAX_CPU_SECONDS, MAX_GROWTH_BYTES, Tally, run


def main(
    cases: Annotated[int, typer.Option(help="How many files.", min=1)] = 100_000,
    seed: Annotated[int, typer.Option(help="Another number is other files.")] = 1,
    first: Annotated[int, typer.Option(help="The number of the first case, to repeat one.")] = 0,
) -> None:
    """Exit with 1 when a file crashed the store, took too long or too much, or was packed to wrong bytes."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    with tempfile.TemporaryDirectory() as folder:
        tally = run(cases, seed, Path(folder), first)
    _show(tally)
    too_much = tally.slowest_cpu_s > MAX_CPU_SECONDS or tally.growth_bytes > MAX_GROWTH_BYTES
    sys.exit(1 if tally.failures or too_much else 0)


def _show(tally: Tally) -> None:
    console = Console(width=120)
    table = Table("outcome", "cases", "share", title="What became of the mutated files")
    for outcome, count in tally.outcomes.most_common():
        table.add_row(outcome, str(count), f"{count / tally.cases:.2%}")
    console.print(table)
    mutations = Table("last mutation", "packed", "refused")
    for mutation in sorted({mutation for mutation, _ in tally.by_mutation}):
        mutations.add_row(mutation, *(str(tally.by_mutation[mutation, kind]) for kind in ("packed", "refused")))
    console.print(mutations)
    console.print(
        f"{tally.cases} cases, {tally.cases / tally.seconds:.0f} a second with the oracle; the slowest took "
        f"{tally.slowest_cpu_s * 1e3:.0f} ms of CPU; the peak grew by {tally.growth_bytes / 1e6:.0f} MB; "
        f"{len(tally.failures)} failures"
    )
    for failure in tally.failures[:50]:
        console.print(failure, markup=False, highlight=False)


if __name__ == "__main__":
    typer.run(main)
