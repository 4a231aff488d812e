"""Packed adapters in host memory."""

import asyncio

import pytest

from executor.adapters import HostAdapters
from executor.store_client import PackedAdapter
from loraplex.errors import AdapterNotFound
from loraplex.pack_options import PackOptions

from .samples import packed, small_layout

LAYOUT = small_layout()
ONE = packed(LAYOUT, 1).header.size_bytes


class FakeFetch:
    """Holds every fetch until `go` is set; `content` is what a reference means."""

    def __init__(self) -> None:
        self.content = {name: packed(LAYOUT, 1, seed=seed) for seed, name in enumerate("abcdef")}
        self.asked: list[tuple[str, str]] = []
        self.go = asyncio.Event()
        self.go.set()

    async def __call__(self, ref: str, options: PackOptions, known_digest: str) -> PackedAdapter | None:
        self.asked.append((ref, known_digest))
        await self.go.wait()
        if ref not in self.content:
            raise AdapterNotFound(f"There is no {ref}.")
        adapter = self.content[ref]
        return None if adapter.header.digest == known_digest else adapter


async def test_fifty_waiters_share_one_fetch() -> None:
    fetch = FakeFetch()
    fetch.go.clear()
    adapters = HostAdapters(fetch, 100 * ONE)
    waiting = [asyncio.create_task(adapters.get("a")) for _ in range(50)]
    await asyncio.sleep(0)
    fetch.go.set()
    got = await asyncio.gather(*waiting)
    assert len(fetch.asked) == 1
    assert all(one.adapter is fetch.content["a"] for one in got)
    assert adapters.used_bytes == ONE


async def test_cancelling_one_waiter_leaves_the_others() -> None:
    fetch = FakeFetch()
    fetch.go.clear()
    adapters = HostAdapters(fetch, 100 * ONE)
    first, second = (asyncio.create_task(adapters.get("a")) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    fetch.go.set()
    assert (await second).adapter is fetch.content["a"]
    assert len(fetch.asked) == 1


async def test_a_fetch_that_nobody_waits_for_any_more_still_lands() -> None:
    fetch = FakeFetch()
    fetch.go.clear()
    adapters = HostAdapters(fetch, 100 * ONE)
    for ref in ("a", "missing"):
        only = asyncio.create_task(adapters.get(ref))
        await asyncio.sleep(0)
        only.cancel()
    fetch.go.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert (await adapters.get("a")).source == "host_memory"


async def test_a_failure_goes_to_all_waiters_and_is_not_kept() -> None:
    fetch = FakeFetch()
    fetch.go.clear()
    adapters = HostAdapters(fetch, 100 * ONE)
    waiting = [asyncio.create_task(adapters.get("new")) for _ in range(5)]
    await asyncio.sleep(0)
    fetch.go.set()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(one, AdapterNotFound) for one in results)
    assert len(fetch.asked) == 1
    fetch.content["new"] = fetch.content["b"]
    assert (await adapters.get("new")).adapter is fetch.content["b"]


async def test_an_unchanged_adapter_comes_from_host_memory() -> None:
    fetch = FakeFetch()
    adapters = HostAdapters(fetch, 100 * ONE)
    first, second = await adapters.get("a"), await adapters.get("a")
    assert (first.source, second.source) == ("store", "host_memory")
    assert second.adapter is first.adapter
    assert fetch.asked == [("a", ""), ("a", first.adapter.header.digest)]


async def test_a_reference_that_means_something_else_now_is_not_served_from_memory() -> None:
    fetch = FakeFetch()
    adapters = HostAdapters(fetch, 100 * ONE)
    await adapters.get("a")
    fetch.content["a"] = fetch.content["b"]
    got = await adapters.get("a")
    assert (got.source, got.adapter) == ("store", fetch.content["b"])


async def test_the_least_recently_used_adapter_leaves_when_the_bytes_are_used_up() -> None:
    fetch = FakeFetch()
    adapters = HostAdapters(fetch, 3 * ONE)
    for ref in "abcad":
        await adapters.get(ref)
        assert adapters.used_bytes <= 3 * ONE
    assert [(await adapters.get(ref)).source for ref in "acd"] == ["host_memory"] * 3
    assert (await adapters.get("b")).source == "store"


async def test_an_adapter_that_is_evicted_while_the_store_calls_it_unchanged_is_served() -> None:
    fetch = FakeFetch()
    adapters = HostAdapters(fetch, ONE)
    await adapters.get("a")
    fetch.go.clear()
    again = asyncio.create_task(adapters.get("a"))
    other = asyncio.create_task(adapters.get("b"))
    await asyncio.sleep(0)
    fetch.go.set()
    assert (await again).adapter is fetch.content["a"]
    assert (await other).adapter is fetch.content["b"]
    assert adapters.used_bytes == ONE


async def test_two_references_to_one_adapter_count_its_bytes_once() -> None:
    fetch = FakeFetch()
    fetch.content["b"] = fetch.content["a"]
    adapters = HostAdapters(fetch, 100 * ONE)
    await asyncio.gather(adapters.get("a"), adapters.get("b"))
    assert adapters.used_bytes == ONE


async def test_without_host_memory_every_adapter_is_fetched_and_served() -> None:
    adapters = HostAdapters(FakeFetch(), 0)
    assert [(await adapters.get("a")).source for _ in range(2)] == ["store", "store"]
    assert adapters.used_bytes == 0
