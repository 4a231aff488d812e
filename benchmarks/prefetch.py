"""Adapters into the store's cache from a hub, by how many are under way at a time, and back out of the cache."""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import torch

from adapter_store.cache import PackedCache
from adapter_store.entries import KnownRef
from benchmarks.adapter_files import write_adapter
from benchmarks.models import FAMILY, layout_of, tiny_flux
from benchmarks.processes import adapter_store
from benchmarks.tables import Column, Report
from loraplex.layout import Layout
from loraplex.v1 import adapter_store_pb2 as pb
from loraplex.v1.adapter_store_pb2_grpc import AdapterStoreStub
from tests.adapter_store.fake_hub import FakeHub, Repo, fake_hub

_ADAPTERS = 200
_RANK = 4
_IN_FLIGHT = (1, 2, 4, 8, 16)
_HITS = 2000

_PREFETCH = (
    Column("in flight"),
    Column("all of them s", ".2f"),
    Column("adapters / s", ".0f"),
    Column("ratio to 1", ".2f"),
)
_CACHE = (Column("cache hits"), Column("in flight", "d"), Column("hits / s", ".0f"))


def run(device: torch.device) -> list[Report]:
    """Prefetch of many small adapters into an empty cache, once per number in flight; then hits on the last cache."""
    layout = layout_of(tiny_flux(device, torch.float32), FAMILY, "F32")
    title = f"Prefetch of {_ADAPTERS} adapters of rank {_RANK} from a hub on loopback, tiny-flux, into an empty cache"
    prefetches = Report("prefetch", title, _PREFETCH)
    hits = Report("hits", f"The same {_ADAPTERS} from the cache: a fetch with its bytes, and a look-up alone", _CACHE)
    with tempfile.TemporaryDirectory(prefix="loraplex-bench-") as scratch, fake_hub() as hub, _reading_from(hub):
        refs = _publish(hub, layout, Path(scratch))
        first_s = 0.0
        for in_flight in _IN_FLIGHT:
            cache = Path(scratch) / f"cache-{in_flight}"
            with _client(Path(scratch), cache, layout) as (fetch, prefetch):
                seconds = _all(prefetch, refs, in_flight)
                first_s = first_s or seconds
                prefetches.rows.append((str(in_flight), seconds, len(refs) / seconds, first_s / seconds))
                if in_flight == _IN_FLIGHT[-1]:
                    for threads in (1, 8):
                        rate = _HITS / _all(fetch, refs * (_HITS // len(refs)), threads)
                        hits.rows.append(("FetchAdapter over gRPC", threads, rate))
        hits.rows.append(("PackedCache.get in process", 1, _hits_in_process(cache)))
    prefetches.notes.append("the hub is a Python server in this process, the store a process of its own; one pass each")
    return [prefetches, hits]


def _publish(hub: FakeHub, layout: Layout, folder: Path) -> list[str]:
    """Repositories of one random adapter each; returns references to them."""
    path = folder / "adapter.safetensors"
    for number in range(_ADAPTERS):
        write_adapter(path, layout, _RANK, torch.float32, seed=number)
        repo = hub.repos[f"bench/adapter-{number}"] = Repo()
        repo.commit(adapter__safetensors=path.read_bytes())
    return list(hub.repos)


@contextmanager
def _reading_from(hub: FakeHub) -> Iterator[None]:
    """The services that are started inside read from `hub`."""
    wanted = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0"}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def _client(
    adapters: Path, cache: Path, layout: Layout
) -> Iterator[tuple[Callable[[str], None], Callable[[str], None]]]:
    """Functions that fetch and prefetch one reference at a store on an empty cache."""
    with adapter_store(adapters, cache) as address, grpc.insecure_channel(address) as channel:
        grpc.channel_ready_future(channel).result(timeout=60)
        stub = AdapterStoreStub(channel)
        digest = stub.RegisterLayout(pb.RegisterLayoutRequest(layout=layout.to_proto())).layout_digest

        def fetch(ref: str) -> None:
            for _ in stub.FetchAdapter(pb.FetchAdapterRequest(ref=ref, layout_digest=digest)):
                pass

        def prefetch(ref: str) -> None:
            for _ in stub.Prefetch(pb.PrefetchRequest(ref=ref, layout_digest=digest)):
                pass

        yield fetch, prefetch


def _all(call: Callable[[str], None], refs: list[str], in_flight: int) -> float:
    """Seconds to call with every reference."""
    with ThreadPoolExecutor(in_flight) as pool:
        began = time.perf_counter()
        list(pool.map(call, refs))
        return time.perf_counter() - began


def _hits_in_process(folder: Path) -> float:
    """Look-ups per second, the files hashed before."""
    cache, ref = PackedCache(folder, 1 << 40), KnownRef("bench/adapter", "adapter.safetensors", local=False)
    keys = [entry.key for entry in cache.entries()]
    for key in keys:
        cache.get(key, ref)
    began = time.perf_counter()
    for number in range(_HITS):
        if cache.get(keys[number % len(keys)], ref) is None:
            raise RuntimeError("an adapter is missing from the cache")
    seconds = time.perf_counter() - began
    cache.close()
    return _HITS / seconds
