"""Files in object stores, by fsspec's store in memory: allowed roots only, and no content under another's identity."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from adapter_store.cache import PackedCache
from adapter_store.config import StoreSettings
from adapter_store.download import Downloader, Limits
from adapter_store.downloads import Downloads
from adapter_store.object_stores import ObjectStores
from adapter_store.refs import AdapterRef
from adapter_store.resolve import Resolver
from adapter_store.store import Store
from adapter_store.versions import Versions
from loraplex.errors import AdapterAccessDenied, AdapterNotFound, InvalidAdapterRef, ServiceError, SourceUnavailable
from tests.adapter_store.samples import WIDTH, flux_layout, peft, write_adapter

LAYOUT = flux_layout()
URL = "memory://loras/styles/a.safetensors"


class Clock:
    """A clock that stands still until it is moved."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def memory() -> Iterator[Any]:
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    yield memory
    memory.store.clear()


def put(memory: Any, folder: Path, seed: int = 0) -> bytes:
    tensors = peft("transformer.transformer_blocks.0.attn.to_q", WIDTH, WIDTH, 4, seed=seed)
    content = write_adapter(folder / "source.safetensors", tensors).read_bytes()
    memory.pipe_file("/loras/styles/a.safetensors", content)
    return content


def make_store(folder: Path, clock: Clock) -> Store:
    cache = PackedCache(folder / "cache", 1 << 30)
    urls = {"fsspec": Versions(ObjectStores(("memory://loras/",)), cache, 60.0, clock)}
    resolver = Resolver(None, cache, (), 60.0, urls=urls)  # type: ignore[arg-type]
    downloads = Downloads(folder / "downloads", 1 << 30)
    return Store(resolver, Downloader(downloads, urls), cache, Limits(1 << 30, 30.0), max_rank=128)


async def test_a_file_is_served_known_again_and_noticed_when_it_changes_row_136(memory: Any, tmp_path: Path):
    put(memory, tmp_path)
    clock = Clock()
    store = make_store(tmp_path, clock)
    first = await store.prepare(URL, LAYOUT)
    clock.now_s += 61
    again = await store.prepare(URL, LAYOUT)
    assert (first.came_from, again.came_from) == ("fsspec", "cache")
    put(memory, tmp_path, seed=5)
    clock.now_s += 61
    second = await store.prepare(URL, LAYOUT)
    assert (second.came_from, second.entry.digest != first.entry.digest) == ("fsspec", True)
    assert second.entry.refs[0].ref == URL
    await store.close()


async def test_a_change_during_the_download_is_no_file_of_either(memory: Any, tmp_path: Path):
    put(memory, tmp_path)
    store = make_store(tmp_path, Clock())
    urls = ObjectStores(("memory://loras/",))
    ref = AdapterRef.parse(URL)
    version = urls.look(ref, None)
    with urls.open(ref, version, 0) as body:
        next(body.chunks)
        put(memory, tmp_path, seed=5)
        with pytest.raises(SourceUnavailable):
            list(body.chunks)
    assert (await store.prepare(URL, LAYOUT)).came_from == "fsspec"
    await store.close()


def test_a_file_is_read_from_the_byte_that_was_asked_for(memory: Any, tmp_path: Path):
    content = put(memory, tmp_path)
    urls, ref = ObjectStores(("memory://loras/",)), AdapterRef.parse(URL)
    version = urls.look(ref, None)
    with urls.open(ref, version, 1000) as body:
        assert (body.start, body.size_bytes) == (1000, len(content))
        assert b"".join(body.chunks) == content[1000:]


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("memory://loras/none.safetensors", AdapterNotFound),
        ("memory://loras-secret/a.safetensors", InvalidAdapterRef),
        ("memory://other/a.safetensors", InvalidAdapterRef),
        ("s3://loras/a.safetensors", InvalidAdapterRef),
    ],
)
def test_only_what_is_below_a_root_is_looked_at(memory: Any, url: str, error: type[ServiceError]):
    memory.pipe_file("/loras-secret/a.safetensors", b"x")
    with pytest.raises(error) as refused:
        ObjectStores(("memory://loras/",)).look(AdapterRef.parse(url), None)
    assert refused.value.remedy


@pytest.mark.parametrize(
    ("raised", "error"),
    [
        (PermissionError("bucket-of-somebody"), AdapterAccessDenied),
        (ValueError("key-of-somebody"), SourceUnavailable),
        (OSError("host-of-somebody"), SourceUnavailable),
    ],
)
def test_no_error_of_a_backend_reaches_a_caller(
    memory: Any, raised: Exception, error: type[ServiceError], monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.setattr(type(memory), "info", fail)
    with pytest.raises(error) as refused:
        ObjectStores(("memory://loras/",)).look(AdapterRef.parse(URL), None)
    assert "somebody" not in str(refused.value)


def test_a_root_whose_backend_is_missing_stops_the_start():
    with pytest.raises(ValueError, match="Protocol not known"):
        StoreSettings(fsspec_roots=("nosuchstore://x",))  # type: ignore[arg-type]
