"""The steps, once per key: single flight, cancellation, files that change under it."""

import asyncio
import os
from pathlib import Path

import pytest

from adapter_store.cache import PackedCache
from adapter_store.download import Limits
from adapter_store.flights import Flights
from adapter_store.refs import AdapterRef
from adapter_store.resolve import Resolver
from adapter_store.source import Source
from adapter_store.store import Progress, Stage, Store
from loraplex.errors import AdapterRejected, SourceUnavailable
from tests.adapter_store.samples import WIDTH, flux_layout, peft, write_adapter

LAYOUT = flux_layout()
TO_Q = "transformer.transformer_blocks.0.attn.to_q"


class NoHub:
    """A hub that must not be asked."""

    def __getattr__(self, name: str) -> object:
        raise AssertionError(f"the hub was asked: {name}")


class CountingResolver(Resolver):
    """A resolver that can also change the file just after it was resolved."""

    replace_with: bytes | None = None

    def resolve(self, ref: AdapterRef) -> Source:
        source = super().resolve(ref)
        if self.replace_with is not None and source.path is not None:
            source.path.write_bytes(self.replace_with)
            os.utime(source.path, ns=(1, 1))
        return source


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_adapter(tmp_path / "root" / "sketch.safetensors", peft(TO_Q, WIDTH, WIDTH, 4))
    return tmp_path / "root"


@pytest.fixture
def resolver(root: Path, tmp_path: Path) -> CountingResolver:
    return CountingResolver(NoHub(), PackedCache(tmp_path / "notes", 1 << 30), (root,), 60.0)  # type: ignore[arg-type]


def make_store(tmp_path: Path, resolver: Resolver) -> Store:
    return Store(resolver, NoHub(), PackedCache(tmp_path / "cache", 1 << 30), Limits(1 << 30, 60), max_rank=128)  # type: ignore[arg-type]


async def test_fifty_callers_share_one_conversion(tmp_path: Path, resolver: CountingResolver):
    store = make_store(tmp_path, resolver)
    reports: list[Progress] = []
    prepared = await asyncio.gather(*(store.prepare("sketch", LAYOUT, reports.append) for _ in range(50)))
    assert len({one.entry.digest for one in prepared}) == 1
    conversions = [one for one in prepared if one.came_from == "local"]
    assert conversions
    assert all(one is conversions[0] for one in conversions)
    assert (await store.prepare("sketch", LAYOUT)).came_from == "cache"


async def test_callers_share_the_error_too(tmp_path: Path, root: Path, resolver: CountingResolver):
    write_adapter(root / "bad.safetensors", peft("transformer.NOPE", WIDTH, WIDTH, 4))
    store = make_store(tmp_path, resolver)
    refused = await asyncio.gather(*(store.prepare("bad", LAYOUT) for _ in range(10)), return_exceptions=True)
    assert {type(one) for one in refused} == {AdapterRejected}
    assert store.cache.entries() == []


async def test_the_steps_are_reported_in_order(tmp_path: Path, resolver: CountingResolver):
    reports: list[Progress] = []
    await make_store(tmp_path, resolver).prepare("sketch", LAYOUT, reports.append)
    assert [report.stage for report in reports] == [Stage.RESOLVING, Stage.DOWNLOADING, Stage.PACKING]


async def test_a_file_that_changes_while_it_is_read_is_not_packed(tmp_path: Path, resolver: CountingResolver):
    store = make_store(tmp_path, resolver)
    resolver.replace_with = b"something else"
    with pytest.raises(SourceUnavailable):
        await store.prepare("sketch", LAYOUT)
    assert store.cache.entries() == []


async def test_a_cached_adapter_is_served_when_only_its_time_stamp_changed(
    tmp_path: Path, root: Path, resolver: CountingResolver
):
    store = make_store(tmp_path, resolver)
    first = await store.prepare("sketch", LAYOUT)
    os.utime(root / "sketch.safetensors", (5, 5))
    again = await store.prepare("sketch", LAYOUT)
    assert (again.came_from, again.entry.digest) == ("cache", first.entry.digest)


async def test_two_layouts_are_two_packed_adapters(tmp_path: Path, resolver: CountingResolver):
    store = make_store(tmp_path, resolver)
    one, two = await asyncio.gather(store.prepare("sketch", LAYOUT), store.prepare("sketch", flux_layout("BF16")))
    assert one.entry.digest != two.entry.digest
    assert len(store.cache.entries()) == 2


async def test_a_caller_that_leaves_does_not_cancel_the_others():
    flights: Flights[str, int] = Flights()
    go, runs = asyncio.Event(), 0

    async def work(report):
        nonlocal runs
        runs += 1
        report("started")
        await go.wait()
        return 7

    heard: list[str] = []
    first, second = (asyncio.create_task(flights.join("key", work, heard.append)) for _ in range(2))
    await asyncio.sleep(0.01)
    first.cancel()
    late = asyncio.create_task(flights.join("key", work, heard.append))
    await asyncio.sleep(0.01)
    go.set()
    assert await asyncio.gather(second, late) == [7, 7]
    assert first.cancelled()
    assert runs == 1
    assert heard == ["started"] * 3
    assert "0 under way" in repr(flights)


async def test_work_whose_callers_all_left_ends_quietly():
    flights: Flights[str, int] = Flights()

    async def work(report):
        await asyncio.sleep(0.01)
        raise ValueError("nobody looks")

    only = asyncio.create_task(flights.join("key", work, lambda _: None))
    await asyncio.sleep(0)
    only.cancel()
    await asyncio.sleep(0.05)
    assert "0 under way" in repr(flights)
