"""All of a job's adapters in the rows, or none."""

import threading
from collections.abc import Iterator, Sequence

import pytest
import torch

from executor.arena import Arena
from executor.errors import NoFreeRows
from executor.residency import Held, Residency
from executor.store_client import PackedAdapter

from .samples import choices, fetched, of_rows, packed, small_layout

LAYOUT = small_layout()


class _SlowOrBrokenArena(Arena):
    """Loads when `go` is set; fails in the middle of a load of 3 rows, as a device can."""

    def __init__(self) -> None:
        super().__init__(LAYOUT, 9, torch.device("cpu"))
        self.go = threading.Event()
        self.go.set()

    def load(self, rows: Sequence[int], packed: torch.Tensor, module_indexes: Sequence[int]) -> None:
        assert self.go.wait(20)
        super().load(rows, packed, module_indexes)
        if packed.shape[0] == 3:
            raise RuntimeError("the device failed")


@pytest.fixture
def arena() -> _SlowOrBrokenArena:
    return _SlowOrBrokenArena()


@pytest.fixture
def residency(arena: _SlowOrBrokenArena) -> Iterator[Residency]:
    residency = Residency(arena)
    yield residency
    arena.go.set()
    residency.close()


def hold(residency: Residency, *adapters: PackedAdapter) -> tuple[Held, ...]:
    """Hold the adapters and wait for their loads to end."""
    held = residency.hold(choices(*[1.0] * len(adapters)), fetched(*adapters))
    for load in filter(None, (one.load for one in held)):
        load.exception(timeout=20)
    return held


def pins(residency: Residency) -> dict[str, int]:
    residency.rows.check()
    return {one.digest: one.pins for one in residency.residents()[0]}


def test_adapters_are_loaded_and_pinned_in_the_order_of_the_request(residency: Residency, arena: Arena) -> None:
    a, b = packed(LAYOUT, 2, seed=1), packed(LAYOUT, 3, (0,), seed=2)
    held = residency.hold(choices(1.0, -0.5), fetched(b, a))
    assert [(one.digest, one.choice.strength, len(one.rows)) for one in held] == [
        (b.header.digest, 1.0, 3),
        (a.header.digest, -0.5, 2),
    ]
    ready = held[1].ready()
    assert (ready.ref, ready.strength, ready.rank, ready.modules, ready.ready_from) == ("b", -0.5, 2, 4, "store")
    assert torch.equal(arena.rows[list(held[1].rows)], a.rows)
    assert set(pins(residency).values()) == {1}
    residency.release(held)


def test_a_resident_adapter_is_not_loaded_again(residency: Residency) -> None:
    a = packed(LAYOUT, 2)
    first, second = hold(residency, a), hold(residency, a)
    assert first[0].ready().ready_from == "store"
    assert (second[0].ready().ready_from, second[0].ready().load_seconds) == ("rows", 0.0)
    assert first[0].rows == second[0].rows
    assert pins(residency) == {a.header.digest: 2}
    residency.release(first)
    residency.release(second)
    assert pins(residency) == {a.header.digest: 0}


def test_a_job_waits_for_a_load_that_another_one_started(residency: Residency, arena: _SlowOrBrokenArena) -> None:
    a = packed(LAYOUT, 2)
    arena.go.clear()
    held = [residency.hold(choices(1.0), fetched(a))[0] for _ in range(2)]
    assert held[0].load is held[1].load is not None
    assert not held[1].load.done()
    arena.go.set()
    assert held[1].ready().load_seconds > 0
    residency.release(held)


def test_holding_does_not_wait_for_the_load(residency: Residency, arena: _SlowOrBrokenArena) -> None:
    arena.go.clear()
    held = residency.hold(choices(1.0), fetched(packed(LAYOUT, 2)))
    assert not arena.rows.any()
    arena.go.set()
    held[0].ready()
    assert arena.rows.any()
    residency.release(held)


def test_rows_that_change_hands_during_a_load_end_with_the_last_owners_numbers(
    residency: Residency, arena: _SlowOrBrokenArena
) -> None:
    a, b = packed(LAYOUT, 8, seed=1), packed(LAYOUT, 8, (1,), seed=2)
    arena.go.clear()
    residency.release(residency.hold(choices(1.0), fetched(a)))  # its job was cancelled
    held = residency.hold(choices(1.0), fetched(b))
    arena.go.set()
    held[0].ready()
    assert list(pins(residency)) == [b.header.digest]
    start, width = LAYOUT.offsets[1], LAYOUT.modules[1].width
    assert torch.equal(arena.rows[1:, start : start + width], b.rows)
    assert not arena.rows[:, :start].any()
    residency.release(held)


def test_one_adapter_under_two_references_is_pinned_twice_and_counts_twice(residency: Residency) -> None:
    a = packed(LAYOUT, 2)
    held = hold(residency, a, a)
    assert held[0].rows == held[1].rows
    assert {one.ready().ready_from for one in held} == {"store"}
    assert pins(residency) == {a.header.digest: 2}
    residency.release(held)
    assert pins(residency) == {a.header.digest: 0}


def test_when_the_second_adapter_does_not_fit_nothing_is_held_or_evicted(residency: Residency) -> None:
    kept, resident = packed(LAYOUT, 4, seed=1), packed(LAYOUT, 1, seed=4)
    residency.release(hold(residency, resident))
    hold(residency, kept)
    small, large = packed(LAYOUT, 2, seed=2), packed(LAYOUT, 3, seed=3)
    assert not residency.fits(fetched(small, large))
    with pytest.raises(NoFreeRows):
        hold(residency, small, large)
    assert pins(residency) == {kept.header.digest: 1, resident.header.digest: 0}


def test_an_adapter_of_the_same_job_is_not_evicted_for_another_one(residency: Residency) -> None:
    resident = packed(LAYOUT, 6, seed=1)
    residency.release(hold(residency, resident))
    assert residency.fits(fetched(packed(LAYOUT, 2, seed=2), resident))
    held = hold(residency, packed(LAYOUT, 2, seed=2), resident)
    assert [one.ready().ready_from for one in held] == ["store", "rows"]
    residency.release(held)


def test_a_load_that_cannot_succeed_evicts_nobody(residency: Residency) -> None:
    resident = packed(LAYOUT, 8, seed=1)
    residency.release(hold(residency, resident))
    wrong = of_rows(LAYOUT, torch.ones(3, 5), range(4))
    with pytest.raises(ValueError, match="packed rows"):
        hold(residency, wrong)
    assert pins(residency) == {resident.header.digest: 0}


def test_adapters_take_turns_in_room_for_one(residency: Residency, arena: Arena) -> None:
    adapters = [packed(LAYOUT, 8, modules, seed=seed) for seed, modules in enumerate([(0, 1, 2, 3), (0,), (3,)])]
    for adapter in adapters * 3:
        held = hold(residency, adapter)
        assert held[0].ready().ready_from == "store"
        residency.release(held)
        assert len(pins(residency)) == 1
        touched = sum(LAYOUT.modules[index].width for index in adapter.header.module_indexes)
        assert int((arena.rows[list(held[0].rows)] != 0).sum()) == 8 * touched


def test_a_load_that_breaks_off_zeroes_its_rows_and_is_forgotten_when_released(
    residency: Residency, arena: Arena
) -> None:
    good, bad = packed(LAYOUT, 2, seed=1), packed(LAYOUT, 3, seed=2)
    held = hold(residency, good, bad)
    with pytest.raises(RuntimeError, match="the device failed"):
        held[1].ready()
    second = hold(residency, bad)  # another job that came meanwhile learns of it as well
    with pytest.raises(RuntimeError, match="the device failed"):
        second[0].ready()
    residency.release(held)
    residency.release(second)
    assert pins(residency) == {good.header.digest: 0}
    assert int(arena.rows.any(dim=1).sum()) == 2


def test_a_load_that_failed_after_its_jobs_had_left_is_done_again(
    residency: Residency, arena: _SlowOrBrokenArena
) -> None:
    bad = packed(LAYOUT, 3, seed=2)
    arena.go.clear()
    held = residency.hold(choices(1.0), fetched(bad))
    residency.release(held)
    arena.go.set()
    assert held[0].load is not None
    assert held[0].load.exception(timeout=20)
    again = residency.hold(choices(1.0), fetched(bad))
    assert again[0].load is not held[0].load
    again[0].load.exception(timeout=20)  # type: ignore[union-attr]
    residency.release(again)
