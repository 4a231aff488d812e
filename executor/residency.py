"""Adapters into rows: place, pin, load; all of a job's adapters or none. Device thread only."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from executor import metrics
from executor.adapters import Fetched
from executor.arena import Arena
from executor.errors import NoFreeRows
from executor.jobs import AdapterChoice, AdapterReady
from executor.loading import Loader
from executor.rows import RowAllocator
from executor.store_client import PackedAdapter

ActiveRows = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class ResidentAdapter:
    """An adapter in the rows, as operators see it; `last_used` is in seconds since the epoch."""

    digest: str
    rank: int
    modules: int
    pins: int
    last_used: float


@dataclass(frozen=True)
class Held:
    """One adapter of a job, pinned in its rows. `load` is done when they may be selected; None when they could be."""

    choice: AdapterChoice
    fetched: Fetched
    rows: tuple[int, ...]
    load: Future[float] | None

    @property
    def digest(self) -> str:
        """The adapter's identity."""
        return self.fetched.adapter.header.digest

    def ready(self) -> AdapterReady:
        """What the caller is told once `load` is done. Raises what the load raised."""
        header = self.fetched.adapter.header
        return AdapterReady(
            ref=self.choice.ref,
            strength=self.choice.strength,
            digest=header.digest,
            commit=header.commit,
            rank=header.rank,
            modules=len(header.module_indexes),
            ready_from=self.fetched.source if self.load else "rows",
            fetch_seconds=self.fetched.seconds,
            load_seconds=self.load.result() if self.load else 0.0,
        )


class Residency:
    """The arena together with the bookkeeping of who owns which of its rows."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._loader = Loader(arena)
        self.rows = RowAllocator(len(arena.rows))
        self._modules: dict[str, int] = {}  # of every adapter in the rows
        self._loads: dict[str, Future[float]] = {}  # that are under way

    def fits(self, fetched: Sequence[Fetched]) -> bool:
        """Whether `hold` would find rows for all of these now."""
        return self.rows.fits({one.adapter.header.digest: one.adapter.header.rank for one in fetched})

    def hold(self, choices: Sequence[AdapterChoice], fetched: Sequence[Fetched]) -> tuple[Held, ...]:
        """Pin the adapters in rows, and start to load those that are not there; one `Held` per choice.

        Raises ValueError for packed rows of a wrong shape and NoFreeRows unless `fits`, having changed nothing.
        """
        for one in fetched:
            header = one.adapter.header
            self._arena.check(header.rank, one.adapter.rows, header.module_indexes)
        if not self.fits(fetched):
            raise NoFreeRows("the adapters of the job do not fit beside those that are pinned")
        before = dict(self._loads)
        rows: dict[str, tuple[int, ...]] = {}
        # The residents first, so that none of them is evicted for another one of the same job.
        for one in sorted(fetched, key=lambda one: one.adapter.header.digest not in self._modules):
            digest = one.adapter.header.digest
            rows[digest] = self._place(one.adapter)
            self.rows.pin(digest)
        return tuple(
            Held(choice, one, rows[digest], self._load_of(digest, before))
            for choice, one in zip(choices, fetched, strict=True)
            for digest in (one.adapter.header.digest,)
        )

    def release(self, held: Sequence[Held]) -> None:
        """Unpin what `hold` pinned. The adapters stay resident, unless their load has failed."""
        for one in held:
            self.rows.unpin(one.digest)
            self._forget_if_failed(one.digest)

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

    def close(self) -> None:
        """End the loader's thread."""
        self._loader.close()

    def _place(self, adapter: PackedAdapter) -> tuple[int, ...]:
        header = adapter.header
        self._forget_if_failed(header.digest)
        placement = self.rows.place(header.digest, header.rank)
        if placement.must_load:
            for evicted in placement.evicted:
                self._drop(evicted)
            metrics.EVICTIONS.inc(len(placement.evicted))
            self._modules[header.digest] = len(header.module_indexes)
            self._loads[header.digest] = self._loader.load(placement.rows, adapter)
        return placement.rows

    def _load_of(self, digest: str, before: Mapping[str, Future[float]]) -> Future[float] | None:
        """The load that a holder has to wait for; one that it started itself even when it is done."""
        load = self._loads.get(digest)
        if load and load is before.get(digest) and load.done() and not load.exception():
            return None
        return load

    def _forget_if_failed(self, digest: str) -> None:
        load = self._loads.get(digest)
        if load and load.done() and load.exception() and not self.rows.is_pinned(digest):
            self.rows.forget(digest)
            self._drop(digest)

    def _drop(self, digest: str) -> None:
        del self._modules[digest]
        self._loads.pop(digest, None)
