"""Copies into the rank rows, and the row table."""

import math
import random
from collections.abc import Sequence

import pytest
import torch

from executor.arena import TORCH_DTYPES, Arena, RowTable
from loraplex.layout import Layout

from .samples import packed, small_layout

CPU = torch.device("cpu")


@pytest.fixture
def layout() -> Layout:
    return small_layout()


@pytest.fixture
def arena(layout: Layout) -> Arena:
    return Arena(layout, 12, CPU)


def expected_rows(layout: Layout, rows: torch.Tensor, modules: Sequence[int]) -> torch.Tensor:
    """What the arena's rows must be, column by column."""
    full = torch.zeros(len(rows), layout.width, dtype=rows.dtype)
    position = 0
    for index in modules:
        width = layout.modules[index].width
        full[:, layout.offsets[index] : layout.offsets[index] + width] = rows[:, position : position + width]
        position += width
    return full


def test_an_arena_starts_as_zeros(arena: Arena) -> None:
    assert not arena.rows.any()


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("modules", [(0, 1, 2, 3), (0,), (3,), (1, 2), (0, 2), (0, 3), (1, 3)])
def test_a_load_writes_every_column_of_its_rows_and_no_other_row(dtype: str, modules: tuple[int, ...]) -> None:
    layout = small_layout(dtype)
    arena = Arena(layout, 12, CPU)
    arena.rows.fill_(math.nan)  # whatever is not written stays visible
    adapter = packed(layout, 4, modules)
    rows = (7, 3, 4, 10)
    arena.load(rows, adapter.rows, modules)
    assert torch.equal(arena.rows[list(rows)], expected_rows(layout, adapter.rows, modules))
    others = [row for row in range(12) if row not in rows]
    assert arena.rows[others].isnan().all()


def test_views_are_the_columns_of_their_module(arena: Arena, layout: Layout) -> None:
    adapter = packed(layout, 2)
    arena.load((5, 6), adapter.rows, range(4))
    for index, module in enumerate(layout.modules):
        A, B = arena.views(index)
        start = layout.offsets[index]
        assert A.shape == (12, module.a_width)
        assert B.shape == (12, module.b_width)
        assert torch.equal(A[5:7], adapter.rows[:, start : start + module.a_width])
        assert torch.equal(B[5:7], adapter.rows[:, start + module.a_width : start + module.width])


@pytest.mark.parametrize(
    ("rows", "shape", "dtype", "modules"),
    [
        ((1, 2), (2, 20), torch.float32, (0, 1, 2)),  # too narrow
        ((1, 2), (2, 54), torch.float32, (0, 1, 2, 3)),  # too wide
        ((1, 2), (3, 20), torch.float32, (0, 1)),  # more ranks than rows
        ((1, 2, 3), (2, 20), torch.float32, (0, 1)),  # fewer
        ((1, 2), (40,), torch.float32, (0, 1)),
        ((1, 2), (2, 20), torch.bfloat16, (0, 1)),
        ((0, 1), (2, 20), torch.float32, (0, 1)),  # the zero row
        ((1, 1), (2, 20), torch.float32, (0, 1)),
        ((1, 12), (2, 20), torch.float32, (0, 1)),
        ((-1, 2), (2, 20), torch.float32, (0, 1)),
        ((1, 2), (2, 20), torch.float32, (1, 0)),
        ((1, 2), (2, 20), torch.float32, (0, 0)),
        ((1, 2), (2, 20), torch.float32, (0, 4)),
        ((1, 2), (2, 20), torch.float32, (-1, 1)),
    ],
)
def test_a_refused_load_changes_not_one_byte(
    arena: Arena, rows: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype, modules: tuple[int, ...]
) -> None:
    arena.rows.normal_()
    before = arena.rows.clone()
    with pytest.raises(ValueError, match=r"packed rows|rows must|module index"):
        arena.load(rows, torch.ones(shape, dtype=dtype), modules)
    assert torch.equal(arena.rows, before)


def test_clearing_zeroes_these_rows_and_no_others(arena: Arena) -> None:
    arena.rows.fill_(1.0)
    arena.clear((2, 3, 7))
    assert arena.rows.any(dim=1).tolist() == [row not in (2, 3, 7) for row in range(12)]


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_no_address_changes_in_a_thousand_loads_and_selections(dtype: str) -> None:
    layout = small_layout(dtype)
    arena, table = Arena(layout, 20, CPU), RowTable(2, 8, CPU)
    views = [arena.views(index) for index in range(4)]
    tensors = [arena.rows, table.row_index, table.row_strength, *(tensor for pair in views for tensor in pair)]
    before = [tensor.data_ptr() for tensor in tensors]
    chance = random.Random(7)
    for _ in range(1000):
        modules = sorted(chance.sample(range(4), chance.randint(1, 4)))
        rank = chance.randint(1, 8)
        rows = chance.sample(range(1, 20), rank)
        values = torch.randn(rank, layout.packed_width(modules)).to(TORCH_DTYPES[dtype])
        arena.load(rows, values, modules)
        table.select([tuple((row, chance.uniform(-2, 2)) for row in rows)] * chance.randint(1, 2))
    assert [tensor.data_ptr() for tensor in tensors] == before
    assert not arena.rows[0].any()


def test_a_selection_names_rows_and_strengths_and_pads_with_the_zero_row() -> None:
    table = RowTable(2, 4, CPU)
    table.select([((3, 1.0), (9, -0.5)), ()])
    assert table.row_index.tolist() == [[3, 9, 0, 0], [0, 0, 0, 0]]
    assert table.row_strength.tolist() == [[1.0, -0.5, 0.0, 0.0], [0.0] * 4]


def test_nothing_of_the_last_selection_stays() -> None:
    table = RowTable(1, 4, CPU)
    table.select([tuple((row, 1.0) for row in (1, 2, 3, 4))])
    table.select([((5, 2.0),)])
    assert table.row_index.tolist() == [[5, 0, 0, 0]]
    assert table.row_strength.tolist() == [[2.0, 0.0, 0.0, 0.0]]


def test_another_strength_alone_is_written() -> None:
    table = RowTable(1, 2, CPU)
    for strength in (1.0, 0.5, 0.0, -1.0, 1.0):  # known failures 59 to 61, 84
        table.select([((1, strength),)])
        assert table.row_strength.tolist() == [[strength, 0.0]]


@pytest.mark.parametrize(
    ("samples", "error"),
    [
        ([((7, 1.0),)] * 3, ValueError),  # more samples than the batch
        ([((7, 1.0),), tuple((row, 1.0) for row in range(1, 6))], ValueError),  # more rows than R
        ([((7, None),)], (TypeError, RuntimeError)),
    ],
)
def test_a_refused_selection_changes_nothing(
    samples: list[tuple[tuple[int, float], ...]], error: type[Exception]
) -> None:
    table = RowTable(2, 4, CPU)
    first: list[tuple[tuple[int, float], ...]] = [((3, 1.0),), ((4, 0.5),)]
    table.select(first)
    before = table.row_index.clone(), table.row_strength.clone()
    with pytest.raises(error):
        table.select(samples)
    table.select(first)
    assert torch.equal(table.row_index, before[0])
    assert torch.equal(table.row_strength, before[1])
