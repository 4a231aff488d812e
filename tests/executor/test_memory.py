"""How many rank rows there is room for, and that loading forever needs no more."""

import gc

import psutil
import pytest
import torch
from torch import nn

from executor.arena import Arena
from executor.config import ExecutorSettings
from executor.errors import UnsupportedOption
from executor.memory import account, choose_rows

from .samples import packed, small_layout

CPU = torch.device("cpu")
LAYOUT = small_layout()


def changed(settings: ExecutorSettings, **fields: object) -> ExecutorSettings:
    return settings.model_copy(update={"rows_per_sample": 4, **fields})


def test_rows_come_by_number_or_by_bytes(settings: ExecutorSettings) -> None:
    assert choose_rows(changed(settings, arena_rows=33), LAYOUT, CPU) == 33
    assert choose_rows(changed(settings, arena_rows=33, arena_bytes=10 * LAYOUT.row_bytes + 1), LAYOUT, CPU) == 10


def test_too_few_rows_for_one_image_are_refused_by_the_settings_name(settings: ExecutorSettings) -> None:
    with pytest.raises(UnsupportedOption, match="arena_bytes: there is room for 4 rows"):
        choose_rows(changed(settings, arena_bytes=4 * LAYOUT.row_bytes), LAYOUT, CPU)
    with pytest.raises(UnsupportedOption, match="arena_rows: there is room for 4 rows"):
        choose_rows(changed(settings, arena_rows=4), LAYOUT, CPU)


def test_a_share_of_free_memory_needs_a_gpu(settings: ExecutorSettings) -> None:
    with pytest.raises(UnsupportedOption, match="arena_share"):
        choose_rows(changed(settings, arena_share=0.5), LAYOUT, CPU)


def test_the_account_has_every_component_and_the_arena() -> None:
    shared = nn.Linear(1000, 500, bias=False)
    arena = Arena(LAYOUT, 1000, CPU)
    told = account({"transformer": nn.Sequential(shared, shared), "vae": nn.Linear(10, 10)}, arena.rows, CPU)
    assert told == {"transformer_mb": 2.0, "vae_mb": 0.0, "arena_mb": round(arena.rows.nbytes / 1e6, 1)}


def test_a_thousand_loads_need_no_more_memory() -> None:
    """Known failure 147."""
    arena = Arena(LAYOUT, 33, CPU)
    adapters = [
        packed(LAYOUT, rank, modules, seed=rank) for rank, modules in ((2, (0,)), (8, (0, 1, 2, 3)), (16, (2,)))
    ]
    process = psutil.Process()

    def load(times: int) -> None:
        for number in range(times):
            adapter = adapters[number % 3]
            first = 1 + number % 16
            arena.load(range(first, first + len(adapter.rows)), adapter.rows, adapter.header.module_indexes)

    load(100)
    gc.collect()
    before, pointer = process.memory_info().rss, arena.rows.data_ptr()
    load(1000)
    gc.collect()
    assert process.memory_info().rss - before < 2 << 20
    assert arena.rows.data_ptr() == pointer
