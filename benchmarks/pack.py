"""From an adapter's file to what a model can use: the store's packing against diffusers' load of the same file."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from benchmarks import models
from benchmarks.adapter_files import write_adapter, write_kohya
from benchmarks.pack_sides import ADAPTER, LAYOUT, PACKED
from benchmarks.tables import Column, Report
from deploy.local import ROOT

_PASSES = 5
_DTYPE, _DTYPE_NAME = torch.bfloat16, "BF16"
# The disk is not what is compared: diffusers writes nothing.
_IN_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
# So that memory which is given back shows; the services keep it.
_ENVIRONMENT = {"MALLOC_TRIM_THRESHOLD_": "134217728", "MALLOC_TOP_PAD_": "131072", "OPENBLAS_NUM_THREADS": "1"}

_COLUMNS = (
    Column("base model"),
    Column("file"),
    Column("modules", "d"),
    Column("rank", "d"),
    Column("MB", ".3g"),
    Column("diffusers ms", ".0f"),
    Column("store ms", ".0f"),
    Column("ratio", ".1f"),
    Column("store MB/s", ".0f"),
    Column("diffusers peak MB", ".0f"),
    Column("store peak MB", ".0f"),
    Column("peak / file", ".2f"),
)


@dataclass(frozen=True)
class Case:
    """One file for one model; `write` returns the tensors of the file's first module."""

    model: str
    naming: str
    rank: int
    write: Callable[..., dict[str, torch.Tensor]]


_CASES = (
    Case("tiny-flux", "peft", 8, write_adapter),
    *(Case("FLUX.1-dev", "peft", rank, write_adapter) for rank in (4, 16, 64)),
    Case("SDXL's UNet", "kohya, convolutions", 32, write_kohya),
)


def run(device: torch.device) -> list[Report]:
    """The table; on the CPU, whatever the device."""
    report = Report("pack", "From an adapter's file to weights that are ready, bf16, files in memory", _COLUMNS)
    report.rows += [_of_case(case) for case in _CASES]
    report.notes += [
        "diffusers: load_lora_weights of a pipeline with this denoiser and no adapter yet, weights without memory; "
        "what it loads stays mapped, so most of the numbers are first read by the first step",
        "store: validate, convert, pack, and the packed file written",
        f"a process for each, one thread, median of {_PASSES}; peak: what the first pass adds to the process",
    ]
    return [report]


def _of_case(case: Case) -> tuple[object, ...]:
    layout = models.layout_of(models.MODELS[case.model](torch.device("cpu"), _DTYPE), case.model, _DTYPE_NAME)
    with tempfile.TemporaryDirectory(prefix="loraplex-bench-", dir=_IN_MEMORY) as scratch:
        folder = Path(scratch)
        first = case.write(folder / ADAPTER, layout, case.rank, _DTYPE)
        (folder / LAYOUT).write_bytes(layout.to_proto().SerializeToString())
        size = (folder / ADAPTER).stat().st_size
        theirs, their_peak = _measured("diffusers", case, folder)
        ours, our_peak = _measured("store", case, folder)
        modules = _check(folder, case.rank, first)
    times = (1e3 * theirs, 1e3 * ours, theirs / ours, size / 1e6 / ours)
    return (
        case.model,
        case.naming,
        modules,
        case.rank,
        size / 1e6,
        *times,
        their_peak / 1e6,
        our_peak / 1e6,
        our_peak / size,
    )


def _check(folder: Path, rank: int, first: dict[str, torch.Tensor]) -> int:
    """The rows hold the first module's numbers as the file does. Returns how many modules they touch."""
    with safe_open(folder / PACKED, framework="pt") as file:
        names, rows = json.loads(file.metadata()["modules"]), file.get_slice("rows")
        A, B = first["A"].flatten(1), first["B"].flatten(1)
        width = A.shape[1]
        assert torch.equal(rows[:rank, :width], A), f"the rows do not hold A of {names[0][1]}"
        assert torch.equal(rows[:rank, width : width + len(B)].T, B), f"the rows do not hold B of {names[0][1]}"
    return len(names)


def _measured(side: str, case: Case, folder: Path) -> tuple[float, float]:
    """Median seconds, and bytes that the peak grew by."""
    command = [sys.executable, "-m", "benchmarks.pack_sides", side, case.model, str(folder), str(_PASSES)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **_ENVIRONMENT},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=600,
    )
    measured = json.loads(done.stdout.splitlines()[-1])
    return statistics.median(measured["seconds"]), measured["grown_bytes"]
