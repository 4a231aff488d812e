"""From nothing to serving and what it takes in memory: both services as real processes, on tiny-flux."""

import os
import statistics
import tempfile
from pathlib import Path

import torch

from benchmarks.generate import measure_requests
from benchmarks.machine import compiler_cache
from benchmarks.processes import both_services, resident_bytes
from benchmarks.tables import Column, Report
from deploy.local import Running
from loraplex import Client

_WARM_STARTS = 3

_COLUMNS = (
    Column("start"),
    Column("store serving s", ".1f"),
    Column("executor serving s", ".1f"),
    Column("store RSS MB", ".0f"),
    Column("executor RSS MB", ".0f"),
)


def run(device: torch.device) -> list[Report]:
    """Cold and warm starts, then requests to the services that were started last."""
    starts = Report("start", "Start of both services, tiny-flux, until health says SERVING", _COLUMNS)
    os.environ["LORAPLEX_EXECUTOR_DEVICE"] = str(device)  # the services inherit it
    with compiler_cache(), tempfile.TemporaryDirectory(prefix="loraplex-bench-") as scratch:
        adapters, cache = Path(scratch) / "adapters", Path(scratch) / "cache"
        adapters.mkdir()
        with both_services(adapters, cache) as (running, *seconds):
            starts.rows.append(("cold compiler cache", *seconds, *_memory(running)))
        warm = []
        for number in range(_WARM_STARTS):
            with both_services(adapters, cache) as (running, *seconds):
                warm.append((*seconds, *_memory(running)))
                if number == _WARM_STARTS - 1:
                    starts.rows.append(("warm compiler cache", *map(statistics.median, zip(*warm, strict=True))))
                    requests = measure_requests(running, adapters)
                    starts.rows.append(("after the requests below", None, None, *_memory(running)))
                    starts.notes += _notes(running)
    return [starts, requests]


def _memory(running: Running) -> tuple[float, ...]:
    """MB of the store and of the executor."""
    return tuple(resident_bytes(process.pid) / 1e6 for process in running.processes)


def _notes(running: Running) -> list[str]:
    with Client(executor=running.executor, store=running.store) as client:
        model = client.model()
    row_bytes = model.layout.row_bytes
    return [
        f"arena: {model.arena_rows} rows of {row_bytes / 1e3:.1f} kB, {model.arena_rows * row_bytes / 1e6:.1f} MB, "
        f"{len(model.layout.modules)} modules, {model.layout.dtype}, {model.device}",
        f"compiled graphs: {model.compiled_graphs}, for batch sizes {', '.join(map(str, model.batch_sizes))}",
        f"cold: one start; warm: the median of {_WARM_STARTS}; in both the files are in the page cache",
    ]
