"""Packed adapters in host memory: one fetch each however many jobs wait, least recently used out by bytes."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from executor.store_client import PackedAdapter
from loraplex.pack_options import EXACTLY, PackOptions

Fetch = Callable[[str, PackOptions, str], Awaitable[PackedAdapter | None]]
_Wanted = tuple[str, PackOptions]


@dataclass(frozen=True)
class Fetched:
    """A packed adapter, where it came from, and how long that took."""

    adapter: PackedAdapter
    source: Literal["host_memory", "store"]
    seconds: float


class HostAdapters:
    """Packed adapters by digest, and which digest each reference had last with which options. Event loop only."""

    def __init__(self, fetch: Fetch, capacity_bytes: int) -> None:
        """`fetch(ref, options, known_digest)` asks the store; it returns None when `known_digest` is still right."""
        self._fetch = fetch
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._by_digest: OrderedDict[str, PackedAdapter] = OrderedDict()  # least recently used first
        self._digest_of: dict[_Wanted, str] = {}
        self._under_way: dict[_Wanted, asyncio.Task[tuple[PackedAdapter, Literal["host_memory", "store"]]]] = {}

    def __repr__(self) -> str:
        return f"HostAdapters({len(self._by_digest)} adapters, {self.used_bytes}/{self.capacity_bytes} bytes)"

    async def get(self, ref: str, options: PackOptions = EXACTLY) -> Fetched:
        """The adapter that `ref` means now, packed with `options`. Raises what the store raises.

        Cancelling one caller does not cancel the fetch that others wait for.
        """
        started = time.monotonic()
        wanted = ref, options
        if wanted not in self._under_way:
            task = asyncio.ensure_future(self._bring(wanted))
            self._under_way[wanted] = task
            task.add_done_callback(lambda done: self._landed(wanted, done))
        adapter, source = await asyncio.shield(self._under_way[wanted])
        return Fetched(adapter, source, time.monotonic() - started)

    async def _bring(self, wanted: _Wanted) -> tuple[PackedAdapter, Literal["host_memory", "store"]]:
        known = self._by_digest.get(self._digest_of.get(wanted, ""))
        fetched = await self._fetch(*wanted, known.header.digest if known else "")
        if fetched is None:
            assert known is not None
            self._keep(wanted, known)
            return known, "host_memory"
        self._keep(wanted, fetched)
        return fetched, "store"

    def _landed(self, wanted: _Wanted, done: asyncio.Task[object]) -> None:
        del self._under_way[wanted]
        if not done.cancelled():
            done.exception()  # seen, even when every waiter has left

    def _keep(self, wanted: _Wanted, adapter: PackedAdapter) -> None:
        digest = adapter.header.digest
        self._digest_of[wanted] = digest
        if digest not in self._by_digest:
            self._by_digest[digest] = adapter
            self.used_bytes += adapter.header.size_bytes
        self._by_digest.move_to_end(digest)
        while self.used_bytes > self.capacity_bytes and self._by_digest:
            old, evicted = self._by_digest.popitem(last=False)
            self.used_bytes -= evicted.header.size_bytes
            self._digest_of = {key: kept for key, kept in self._digest_of.items() if kept != old}
