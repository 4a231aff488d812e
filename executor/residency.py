"""Adapters into rows: place, load, pin; all of a job's adapters or none. Device thread only."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from executor import metrics
from executor.adapters import Fetched
from executor.arena import Arena
from executor.jobs import AdapterReady, Job
from executor.rows import RowAllocator

ActiveRows = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class ResidentAdapter:
    """An adapter in the rows, as operators see it; `last_used` is in seconds since the epoch."""

    digest: str
    rank: int
    modules: int
    pins: int
    last_used: float


class Residency:
    """The arena together with the bookkeeping of who owns which of its rows."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self.rows = RowAllocator(len(arena.rows))
        self._modules: dict[str, int] = {}  # of every adapter in the rows

    def give(self, job: Job, fetched: Sequence[Fetched]) -> tuple[tuple[AdapterReady, ...], ActiveRows]:
        """Make the job's adapters resident and pin them; the rows that its samples use, with their strengths.

        Raises NoFreeRows when they do not fit now. Whatever it raises, nothing stays pinned.
        """
        ready: list[AdapterReady] = []
        active: list[tuple[int, float]] = []
        try:
            for choice, one in zip(job.parameters.adapters, fetched, strict=True):
                rows, load_seconds = self._make_resident(one)
                header = one.adapter.header
                self.rows.pin(header.digest)
                ready.append(
                    AdapterReady(
                        ref=choice.ref,
                        strength=choice.strength,
                        digest=header.digest,
                        commit=header.commit,
                        rank=header.rank,
                        modules=len(header.module_indexes),
                        ready_from="rows" if load_seconds is None else one.source,
                        fetch_seconds=one.seconds,
                        load_seconds=load_seconds or 0.0,
                    )
                )
                active += [(row, choice.strength) for row in rows]
        except BaseException:
            self.take_back(ready)
            raise
        return tuple(ready), tuple(active)

    def take_back(self, ready: Sequence[AdapterReady]) -> None:
        """Unpin what `give` pinned. The adapters stay resident."""
        for adapter in ready:
            self.rows.unpin(adapter.digest)

    def residents(self) -> tuple[list[ResidentAdapter], int]:
        """The adapters in the rows, most recently used first, and the number of free rows."""
        residents = [
            ResidentAdapter(one.digest, len(one.rows), self._modules[one.digest], one.pins, one.last_used)
            for one in self.rows.residents()
        ]
        return residents, self.rows.free_rows

    def observe(self) -> None:
        """Set the metrics of the rows."""
        metrics.RESIDENTS.set(len(self.rows.residents()))
        metrics.FREE_ROWS.set(self.rows.free_rows)

    def _make_resident(self, fetched: Fetched) -> tuple[tuple[int, ...], float | None]:
        header = fetched.adapter.header
        self._arena.check(header.rank, fetched.adapter.rows, header.module_indexes)  # before anyone is evicted
        placement = self.rows.place(header.digest, header.rank)
        if not placement.must_load:
            return placement.rows, None
        for evicted in placement.evicted:
            del self._modules[evicted]
        began = time.monotonic()
        try:
            self._arena.load(placement.rows, fetched.adapter.rows, header.module_indexes)
        except BaseException:
            self._arena.clear(placement.rows)
            self.rows.forget(header.digest)
            raise
        self._modules[header.digest] = len(header.module_indexes)
        seconds = time.monotonic() - began
        metrics.LOADS.inc()
        metrics.EVICTIONS.inc(len(placement.evicted))
        metrics.LOAD_SECONDS.observe(seconds)
        return placement.rows, seconds
