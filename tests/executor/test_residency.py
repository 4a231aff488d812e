"""All of a job's adapters in the rows, or none."""

from collections.abc import Sequence

import pytest
import torch

from executor.arena import Arena
from executor.errors import NoFreeRows
from executor.residency import Residency

from .samples import Watched, choices, fetched, of_rows, packed, small_layout

LAYOUT = small_layout()


@pytest.fixture
def arena() -> Arena:
    return Arena(LAYOUT, 9, torch.device("cpu"))


@pytest.fixture
def residency(arena: Arena) -> Residency:
    return Residency(arena)


def pins(residency: Residency) -> dict[str, int]:
    residency.rows.check()
    return {one.digest: one.pins for one in residency.residents()[0]}


def test_adapters_are_loaded_and_pinned_in_the_order_of_the_request(residency: Residency, arena: Arena) -> None:
    a, b = packed(LAYOUT, 2, seed=1), packed(LAYOUT, 3, (0,), seed=2)
    ready, active = residency.give(Watched(adapters=choices(1.0, -0.5)).job, fetched(a, b))
    assert [(one.ref, one.strength, one.rank, one.modules, one.ready_from) for one in ready] == [
        ("a", 1.0, 2, 4, "store"),
        ("b", -0.5, 3, 1, "store"),
    ]
    assert [strength for _, strength in active] == [1.0] * 2 + [-0.5] * 3
    assert torch.equal(arena.rows[[row for row, _ in active[:2]]], a.rows)
    assert set(pins(residency).values()) == {1}
    residency.take_back(ready)
    assert set(pins(residency).values()) == {0}


def test_a_resident_adapter_is_not_loaded_again(residency: Residency) -> None:
    a = packed(LAYOUT, 2)
    first, rows = residency.give(Watched(adapters=choices(1.0)).job, fetched(a))
    second, same_rows = residency.give(Watched(adapters=choices(0.5)).job, fetched(a))
    assert (second[0].ready_from, second[0].load_seconds) == ("rows", 0.0)
    assert [row for row, _ in rows] == [row for row, _ in same_rows]
    assert pins(residency) == {a.header.digest: 2}
    residency.take_back(first)
    residency.take_back(second)


def test_one_adapter_under_two_references_is_pinned_twice_and_counts_twice(residency: Residency) -> None:
    a = packed(LAYOUT, 2)
    ready, active = residency.give(Watched(adapters=choices(1.0, -0.25)).job, fetched(a, a))
    assert [strength for _, strength in active] == [1.0, 1.0, -0.25, -0.25]
    assert pins(residency) == {a.header.digest: 2}
    residency.take_back(ready)
    assert pins(residency) == {a.header.digest: 0}


def test_when_the_second_adapter_does_not_fit_nothing_stays_pinned(residency: Residency) -> None:
    kept = packed(LAYOUT, 5, seed=1)
    residency.give(Watched(adapters=choices(1.0)).job, fetched(kept))
    small, large = packed(LAYOUT, 2, seed=2), packed(LAYOUT, 2, seed=3)
    with pytest.raises(NoFreeRows):
        residency.give(Watched(adapters=choices(1.0, 1.0)).job, fetched(small, large))
    assert pins(residency) == {kept.header.digest: 1, small.header.digest: 0}


def test_a_load_that_fails_frees_and_zeroes_its_rows_and_leaves_the_residents(
    residency: Residency, arena: Arena
) -> None:
    good = packed(LAYOUT, 2, seed=1)
    ready, active = residency.give(Watched(adapters=choices(1.0)).job, fetched(good))
    residency.take_back(ready)
    too_narrow = of_rows(LAYOUT, torch.ones(3, LAYOUT.width - 1), range(4))
    with pytest.raises(ValueError, match="packed rows"):
        residency.give(Watched(adapters=choices(1.0, 1.0)).job, fetched(good, too_narrow))
    assert pins(residency) == {good.header.digest: 0}
    rows = [row for row, _ in active]
    assert torch.equal(arena.rows[rows], good.rows)
    assert not arena.rows[[row for row in range(9) if row not in rows]].any()


def test_a_load_that_cannot_succeed_evicts_nobody(residency: Residency) -> None:
    resident = packed(LAYOUT, 8, seed=1)
    ready, _ = residency.give(Watched(adapters=choices(1.0)).job, fetched(resident))
    residency.take_back(ready)
    wrong = of_rows(LAYOUT, torch.ones(3, 5), range(4))
    with pytest.raises(ValueError, match="packed rows"):
        residency.give(Watched(adapters=choices(1.0)).job, fetched(wrong))
    assert pins(residency) == {resident.header.digest: 0}


def test_adapters_take_turns_in_room_for_one(residency: Residency, arena: Arena) -> None:
    adapters = [packed(LAYOUT, 8, modules, seed=seed) for seed, modules in enumerate([(0, 1, 2, 3), (0,), (3,)])]
    for adapter in adapters * 3:
        ready, active = residency.give(Watched(adapters=choices(1.0)).job, fetched(adapter))
        assert ready[0].ready_from == "store"
        residency.take_back(ready)
        assert len(pins(residency)) == 1
        indexes = adapter.header.module_indexes
        touched = sum(LAYOUT.modules[index].width for index in indexes)
        assert int((arena.rows[[row for row, _ in active]] != 0).sum()) == 8 * touched


class _BreakingArena(Arena):
    """Fails in the middle of a load, as a device can."""

    def load(self, rows: Sequence[int], packed: torch.Tensor, module_indexes: Sequence[int]) -> None:
        super().load(rows, packed, module_indexes)
        if packed.shape[0] == 3:
            raise RuntimeError("the device failed")


def test_a_load_that_breaks_off_frees_and_zeroes_its_rows() -> None:
    arena = _BreakingArena(LAYOUT, 9, torch.device("cpu"))
    residency = Residency(arena)
    good, bad = packed(LAYOUT, 2, seed=1), packed(LAYOUT, 3, seed=2)
    with pytest.raises(RuntimeError, match="the device failed"):
        residency.give(Watched(adapters=choices(1.0, 1.0)).job, fetched(good, bad))
    assert pins(residency) == {good.header.digest: 0}
    assert int(arena.rows.any(dim=1).sum()) == 2
