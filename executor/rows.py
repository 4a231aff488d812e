"""Which rank rows are free, owned and pinned. Pure bookkeeping: no tensors, no I/O, no locks; one thread calls it.

Row 0 is never handed out: it stays zero, and unused entries of a row table point at it.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from executor.errors import NoFreeRows

ZERO_ROW = 0


@dataclass(frozen=True)
class Placement:
    """Where an adapter stands; when `must_load`, the caller copies it there before anyone may select it."""

    rows: tuple[int, ...]
    must_load: bool
    evicted: tuple[str, ...] = ()


@dataclass
class Resident:
    """An adapter that owns rows."""

    digest: str
    rows: tuple[int, ...]
    pins: int = 0
    last_used: float = field(default=0.0, compare=False)


class RowAllocator:
    """Hands out rank rows to adapters by digest; evicts the least recently used unpinned one when it must."""

    def __init__(self, num_rows: int, clock: Callable[[], float] = time.time) -> None:
        """`num_rows` counts the zero row; at least one row must be left for adapters."""
        if num_rows < 2:
            raise ValueError(f"num_rows must be at least 2, got {num_rows}")
        self.num_rows = num_rows
        self._clock = clock
        self._free = list(range(ZERO_ROW + 1, num_rows))
        self._residents: OrderedDict[str, Resident] = OrderedDict()  # least recently used first

    def __repr__(self) -> str:
        pinned = sum(resident.pins > 0 for resident in self._residents.values())
        return (
            f"RowAllocator(rows={self.num_rows}, free={self.free_rows}, residents={len(self._residents)}, "
            f"pinned={pinned})"
        )

    @property
    def free_rows(self) -> int:
        """Rows that no adapter owns."""
        return len(self._free)

    def residents(self) -> list[Resident]:
        """The adapters that own rows, most recently used first."""
        return list(reversed(self._residents.values()))

    def fits(self, ranks: Mapping[str, int]) -> bool:
        """Whether all of these adapters, by their ranks, could own rows together, beside those that are pinned."""
        others = (one for digest, one in self._residents.items() if digest not in ranks and not one.pins)
        available = self.free_rows + sum(len(one.rows) for one in others)
        return available >= sum(rank for digest, rank in ranks.items() if digest not in self._residents)

    def place(self, digest: str, rank: int) -> Placement:
        """Give `rank` rows to `digest`, or find those that it owns.

        The caller loads them when `must_load`, or calls `forget` if that fails. Raises NoFreeRows, having changed
        nothing, when the free and the unpinned rows together are too few.
        """
        if resident := self._residents.get(digest):
            self._touch(resident)
            return Placement(resident.rows, must_load=False)
        victims = self._victims(rank)
        for victim in victims:
            self.forget(victim)
        rows, self._free = tuple(self._free[:rank]), self._free[rank:]
        self._residents[digest] = resident = Resident(digest, rows)
        self._touch(resident)
        return Placement(rows, must_load=True, evicted=tuple(victims))

    def pin(self, digest: str) -> None:
        """Keep `digest` until as many `unpin` calls."""
        self._residents[digest].pins += 1

    def unpin(self, digest: str) -> None:
        """Take one pin back."""
        resident = self._residents[digest]
        if resident.pins == 0:
            raise ValueError(f"{digest[:12]} is not pinned")
        resident.pins -= 1

    def is_pinned(self, digest: str) -> bool:
        """Whether the resident `digest` is pinned."""
        return self._residents[digest].pins > 0

    def forget(self, digest: str) -> None:
        """Free the rows of `digest`. Raises ValueError while it is pinned."""
        resident = self._residents[digest]
        if resident.pins:
            raise ValueError(f"{digest[:12]} is pinned")
        del self._residents[digest]
        self._free = sorted([*self._free, *resident.rows])

    def check(self) -> None:
        """Assert that every row but the zero row is either free or owned by exactly one adapter."""
        owned = [row for resident in self._residents.values() for row in resident.rows]
        assert sorted([*self._free, *owned]) == list(range(ZERO_ROW + 1, self.num_rows)), "rows lost or doubled"
        assert all(resident.pins >= 0 for resident in self._residents.values()), "negative pins"
        assert self._free == sorted(self._free), "free rows out of order"

    def _touch(self, resident: Resident) -> None:
        resident.last_used = self._clock()
        self._residents.move_to_end(resident.digest)

    def _victims(self, rank: int) -> list[str]:
        if rank < 1:
            raise ValueError(f"rank must be at least 1, got {rank}")
        free, victims = len(self._free), []
        for resident in self._residents.values():
            if free >= rank:
                break
            if resident.pins == 0:
                victims.append(resident.digest)
                free += len(resident.rows)
        if free < rank:
            raise NoFreeRows(f"{rank} rows needed, {free} are free or unpinned of {self.num_rows - 1}")
        return victims
