"""Files in a real S3 protocol: s3fs against moto's server on loopback."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
from loraplex.errors import AdapterNotFound, InvalidAdapterRef, SourceUnavailable
from tests.adapter_store.samples import WIDTH, flux_layout, numbers, peft, write_adapter

s3fs = pytest.importorskip("s3fs", reason="needs the extra `s3`")
moto_server = pytest.importorskip("moto.server", reason="needs moto, flask and flask-cors")

LAYOUT = flux_layout()
URL = "s3://loras/styles/a b.safetensors"
ROOTS = ("s3://loras/styles/",)


class Clock:
    """A clock that stands still until it is moved."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A file system with one empty bucket, found as in production: by the environment."""
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in (
        ("AWS_ENDPOINT_URL", f"http://{host}:{port}"),
        ("AWS_ACCESS_KEY_ID", "id"),
        ("AWS_SECRET_ACCESS_KEY", "key"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    store = s3fs.S3FileSystem(skip_instance_cache=True)
    store.mkdir("loras")
    yield store
    store.rm("loras", recursive=True)  # what moto holds outlives its server
    s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


def put(bucket: Any, folder: Path, seed: int = 0) -> bytes:
    tensors = peft("transformer.transformer_blocks.0.attn.to_q", WIDTH, WIDTH, 4, seed=seed)
    content = write_adapter(folder / "source.safetensors", tensors).read_bytes()
    bucket.pipe_file(URL, content)
    return content


def make_store(folder: Path, clock: Clock) -> Store:
    cache = PackedCache(folder / "cache", 1 << 30)
    urls = {"fsspec": Versions(ObjectStores(ROOTS), cache, 60.0, clock)}
    resolver = Resolver(None, cache, (), 60.0, urls=urls)  # type: ignore[arg-type]
    downloads = Downloads(folder / "downloads", 1 << 30)
    return Store(resolver, Downloader(downloads, urls), cache, Limits(1 << 30, 30.0), max_rank=128)


async def test_a_file_is_served_known_again_and_noticed_when_it_changes(bucket: Any, tmp_path: Path):
    put(bucket, tmp_path)
    clock = Clock()
    store = make_store(tmp_path, clock)
    first = await store.prepare(URL, LAYOUT)
    clock.now_s += 61
    again = await store.prepare(URL, LAYOUT)
    put(bucket, tmp_path, seed=5)
    clock.now_s += 61
    changed = await store.prepare(URL, LAYOUT)
    assert [one.came_from for one in (first, again, changed)] == ["fsspec", "cache", "fsspec"]
    assert first.entry.digest == again.entry.digest != changed.entry.digest
    await store.close()


def test_a_file_of_several_requests_is_read_from_the_byte_that_was_asked_for(bucket: Any, tmp_path: Path):
    content = write_adapter(tmp_path / "large.safetensors", {"a": numbers(1 << 20)}).read_bytes()
    bucket.pipe_file(URL, content)
    urls, ref = ObjectStores(ROOTS), AdapterRef.parse(URL)
    version = urls.look(ref, None)
    assert (version.size_bytes, urls.look(ref, version) is version) == (len(content), True)
    with urls.open(ref, version, 1000) as body:
        assert b"".join(body.chunks) == content[1000:]


def test_a_change_during_the_download_is_no_file_of_either(bucket: Any, tmp_path: Path):
    content = put(bucket, tmp_path)
    urls, ref = ObjectStores(ROOTS), AdapterRef.parse(URL)
    version = urls.look(ref, None)
    with urls.open(ref, version, 0) as body:
        next(body.chunks)
        bucket.pipe_file(URL, content[::-1])  # as many bytes
        with pytest.raises(SourceUnavailable):
            list(body.chunks)


def test_what_is_not_there_or_not_allowed_is_told_apart(bucket: Any):
    bucket.pipe_file("s3://loras/secret.safetensors", b"x")
    urls = ObjectStores(ROOTS)
    with pytest.raises(AdapterNotFound):
        urls.look(AdapterRef.parse("s3://loras/styles/none.safetensors"), None)
    with pytest.raises(InvalidAdapterRef):
        urls.look(AdapterRef.parse("s3://loras/secret.safetensors"), None)


def test_a_server_that_cannot_be_reached_is_unavailable(bucket: Any, monkeypatch: pytest.MonkeyPatch):
    s3fs.S3FileSystem.clear_instance_cache()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(SourceUnavailable) as refused:
        ObjectStores(ROOTS).look(AdapterRef.parse(URL), None)
    assert "127.0.0.1" not in str(refused.value)


def test_settings_with_a_bucket_need_nothing_but_its_name():
    assert StoreSettings(fsspec_roots=("s3://loras/styles",)).fsspec_roots == ROOTS
