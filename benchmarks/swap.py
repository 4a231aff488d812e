"""Changing the adapter: diffusers' hot swap against rank rows from host memory, from the store, and resident."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

from benchmarks.adapter_files import block_modules, write_adapter
from benchmarks.machine import median_seconds
from benchmarks.models import full_flux, layout_of, tiny_flux
from benchmarks.processes import adapter_store
from benchmarks.tables import Column, Report
from executor.arena import Arena, RowTable
from executor.store_client import PackedAdapter, StoreClient
from loraplex.layout import Layout

RANKS = (4, 16, 64)
TARGET_RANK = 64
_ARENA_ROWS = 192
_DTYPE, _DTYPE_NAME = torch.bfloat16, "BF16"
_SLOT = "bench"
_MODELS: dict[str, Callable[[torch.device, torch.dtype], Any]] = {"tiny-flux": tiny_flux, "FLUX.1-dev": full_flux}

_COLUMNS = (
    Column("base model"),
    Column("modules", "d"),
    Column("rank", "d"),
    Column("MB", ".3g"),
    Column("diffusers ms", ".1f"),
    Column("plain copy ms", ".2f"),
    Column("host memory ms", ".2f"),
    Column("ratio", ".1f"),
    Column("store ms", ".2f"),
    Column("ratio to store", ".1f"),
    Column("store GB/s", ".2f"),
    Column("resident ms", ".3f"),
)


def run(device: torch.device) -> list[Report]:
    """The table of swaps, both models."""
    report = Report("swap", "Changing the adapter, bf16, all linear layers of the blocks", _COLUMNS)
    for name, make in _MODELS.items():
        report.rows += _of_model(name, make(device, _DTYPE), device)
    report.notes += [
        f"diffusers: load_lora_weights(file, hotswap=True) after enable_lora_hotswap(target_rank={TARGET_RANK}), "
        "file in the page cache",
        "plain copy: the packed adapter's bytes to another place in memory, once; no load can be faster",
        "host memory: Arena.load of the packed adapter and its rows selected in the row table; ratio: diffusers to it",
        "store: the same after StoreClient.fetch, sha256 verified, from the cache of a store process on loopback",
        "resident: the row table alone",
    ]
    return [report]


@dataclass
class Bench:
    """One model with an adapter slot of diffusers, beside an arena of the same layout."""

    pipeline: Any
    layout: Layout
    arena: Arena
    table: RowTable
    store: StoreClient
    folder: Path

    def hot_swap(self, file: Path) -> None:
        """What diffusers offers."""
        self.pipeline.load_lora_weights(file, adapter_name=_SLOT, hotswap=True)

    def load(self, rows: range, adapter: PackedAdapter) -> None:
        """What the device thread does for an adapter in host memory."""
        self.arena.load(rows, adapter.rows, adapter.header.module_indexes)
        self.select(rows)

    def fetch(self, ref: str) -> PackedAdapter:
        """The packed adapter, from the store."""
        adapter = self.store.fetch(ref, known_digest="")
        assert adapter is not None
        return adapter

    def select(self, rows: range) -> None:
        """What the device thread does for a resident adapter."""
        self.table.select([tuple((row, 1.0) for row in rows)])


def _of_model(name: str, pipeline: Any, device: torch.device) -> Iterator[tuple[object, ...]]:
    with _bench(name, pipeline, device) as bench:
        modules = len(block_modules(bench.layout))
        write_adapter(bench.folder / "first.safetensors", bench.layout, TARGET_RANK, _DTYPE)
        pipeline.enable_lora_hotswap(target_rank=TARGET_RANK)
        pipeline.load_lora_weights(bench.folder / "first.safetensors", adapter_name=_SLOT)
        for rank in RANKS:
            yield (name, modules, rank, *_of_rank(bench, rank, device))


@contextmanager
def _bench(name: str, pipeline: Any, device: torch.device) -> Iterator[Bench]:
    layout = layout_of(pipeline, name, _DTYPE_NAME)
    arena, table = Arena(layout, _ARENA_ROWS, device), RowTable(1, TARGET_RANK, device)
    arena.clear(range(_ARENA_ROWS))  # so that no pass pays for pages that were never touched
    with tempfile.TemporaryDirectory(prefix="loraplex-bench-") as scratch:
        folder = Path(scratch) / "adapters"
        folder.mkdir()
        with adapter_store(folder, Path(scratch) / "cache") as address:
            store = StoreClient(address, layout, fetch_timeout_s=120.0, pin_memory=device.type == "cuda")
            store.register_layout(timeout_s=60.0)
            yield Bench(pipeline, layout, arena, table, store, folder)
            store.close()


def _of_rank(bench: Bench, rank: int, device: torch.device) -> tuple[float | None, ...]:
    file = bench.folder / f"rank-{rank}.safetensors"
    first_module = write_adapter(file, bench.layout, rank, _DTYPE, seed=rank)
    adapter = bench.fetch(file.stem)
    elsewhere = torch.empty_like(adapter.rows, device=device)
    places = cycle((range(1, rank + 1), range(rank + 1, 2 * rank + 1)))
    seconds = median_seconds(
        {
            "diffusers": lambda: bench.hot_swap(file),
            "copy": lambda: elsewhere.copy_(adapter.rows),
            "host": lambda: bench.load(next(places), adapter),
            "store": lambda: bench.load(next(places), bench.fetch(file.stem)),
            "resident": lambda: bench.select(next(places)),
        },
        device,
    )
    bench.load(range(1, rank + 1), adapter)
    _check(bench, range(1, rank + 1), first_module)
    size, diffusers = adapter.header.size_bytes, seconds["diffusers"]
    copy, host, store = seconds["copy"], seconds["host"], seconds["store"]
    times = (1e3 * diffusers, 1e3 * copy, 1e3 * host, diffusers / host, 1e3 * store, diffusers / store)
    return (size / 1e6, *times, size / 1e9 / store, 1e3 * seconds["resident"])


def _check(bench: Bench, rows: range, first_module: dict[str, torch.Tensor]) -> None:
    """Both ways put the file's numbers where the model reads them."""
    module = block_modules(bench.layout)[0]
    A, B = bench.arena.views(bench.layout.modules.index(module))
    layer = bench.pipeline.transformer.get_submodule(module.name)
    rank = len(rows)
    for ours, theirs, written in (
        (A[rows.start : rows.stop], layer.lora_A[_SLOT].weight[:rank], first_module["A"]),
        (B[rows.start : rows.stop].T, layer.lora_B[_SLOT].weight[:, :rank], first_module["B"]),
    ):
        assert torch.equal(ours.cpu(), written), f"the arena does not hold {module.path}"
        assert torch.equal(theirs.cpu(), written), f"diffusers does not hold {module.path}"
