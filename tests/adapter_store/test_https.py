"""Files under https: allowed hosts and addresses only, pinned to what they held, resumed, and no lie believed."""

import asyncio
import hashlib
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from adapter_store.addresses import is_allowed
from adapter_store.cache import PackedCache
from adapter_store.config import StoreSettings
from adapter_store.download import Downloader, Limits, SourceFile, download
from adapter_store.downloads import Downloads
from adapter_store.https import HttpsHosts
from adapter_store.refs import AdapterRef
from adapter_store.resolve import Resolver
from adapter_store.service import make_store
from adapter_store.source import Source
from adapter_store.store import Progress, Store
from adapter_store.versions import Versions
from adapter_store.wire import header
from loraplex.errors import (
    AdapterAccessDenied,
    AdapterNotFound,
    AdapterRejected,
    InvalidAdapterRef,
    ServiceError,
    SourceUnavailable,
)
from loraplex.v1 import adapter_store_pb2 as pb
from tests.adapter_store.file_server import FileServer, file_server, make_certificate
from tests.adapter_store.samples import flux_layout, peft, write_adapter

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")

SECRET = "X-Amz-Signature=thisIsTheSecret"
LAYOUT = flux_layout(width=64)
LIMITS = Limits(max_file_bytes=1 << 30, timeout_s=30)


class NoHub:
    """A hub that must not be asked."""

    def __getattr__(self, name: str) -> object:
        raise AssertionError(f"the hub was asked: {name}")


@dataclass
class Setup:
    """A server, and a store that may read from it as files.test."""

    served: FileServer
    folder: Path
    hosts: HttpsHosts
    cache: PackedCache
    now_s: float = 0.0
    looked_up: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """The same folder, without the memory."""
        self.urls = Versions(self.hosts, self.cache, 60.0, lambda: self.now_s)
        self.downloads = Downloads(self.folder / "downloads", 1 << 30)
        self.files = Downloader(self.downloads, {"https": self.urls})
        self.resolver = Resolver(NoHub(), self.cache, (), 60.0, urls={"https": self.urls})  # type: ignore[arg-type]

    def resolve(self, query: str = "") -> Source:
        return self.resolver.resolve(AdapterRef.parse(self.served.url() + query))

    def download(self, limits: Limits = LIMITS) -> SourceFile:
        return download(self.resolve(), self.files, limits, lambda *_: None)

    def store(self) -> Store:
        return Store(self.resolver, self.files, self.cache, LIMITS, max_rank=128)

    def kept(self) -> list[str]:
        """The kinds of files in the folder of downloads."""
        return sorted(path.suffix or "whole" for path in (self.folder / "downloads").iterdir())


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_certificate(tmp_path_factory.mktemp("ca"), "files.test", "other.test", "rebind.test", "localhost")


@pytest.fixture(scope="module")
def served_once(certificate: tuple[Path, Path]) -> Iterator[FileServer]:
    with file_server(certificate) as served:
        yield served


@pytest.fixture
def setup(served_once: FileServer, certificate: tuple[Path, Path], tmp_path: Path) -> Iterator[Setup]:
    fresh = FileServer(port=served_once.port, content=adapter(tmp_path))
    for name, value in vars(fresh).items():
        setattr(served_once, name, value)
    host = f"files.test:{served_once.port}"
    hosts = HttpsHosts((), (host,), certificate[0], timeout_s=2.0, look_up=lambda *_: ["127.0.0.1"])
    cache = PackedCache(tmp_path / "cache", 1 << 30)
    yield Setup(served_once, tmp_path, hosts, cache)
    hosts.close()
    cache.close()


def adapter(folder: Path, seed: int = 0) -> bytes:
    """About 300 kB."""
    names = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj")
    tensors = {}
    for name in names:
        tensors |= peft(f"transformer.transformer_blocks.0.attn.{name}", 64, 64, 64, seed=seed)
    tensors |= peft("transformer.transformer_blocks.0.ff.net.0.proj", 256, 64, 64, seed=seed)
    return write_adapter(folder / "source.safetensors", tensors).read_bytes()


def refusal(action: Callable[[], object]) -> ServiceError:
    with pytest.raises(ServiceError) as refused:
        action()
    assert "Secret" not in f"{refused.value!r} {refused.value} {refused.value.metadata}"
    assert refused.value.remedy
    return refused.value


async def test_a_file_is_served_and_known_again_without_a_download(setup: Setup):
    first = await setup.store().prepare(setup.served.url(), LAYOUT)
    assert first.came_from == "https"
    setup.now_s += 61
    again = await setup.store().prepare(setup.served.url(), LAYOUT)
    assert (again.came_from, again.entry.digest) == ("cache", first.entry.digest)
    assert setup.served.requests[-1][3] == setup.served.tag(), "the second look is conditional"
    assert setup.served.bodies() == [""]


async def test_a_store_made_from_its_settings_reads_what_they_allow(
    setup: Setup, certificate: tuple[Path, Path], tmp_path: Path
):
    settings = StoreSettings(
        cache_dir=tmp_path / "by-settings",
        https_private_hosts=(f"localhost:{setup.served.port}",),
        https_ca_file=certificate[0],
        download_cache_bytes=0,
        min_free_bytes=0,
    )
    store = make_store(settings)
    prepared = await store.prepare(setup.served.url("localhost"), LAYOUT)
    assert prepared.came_from == "https"
    assert header(prepared, 0.0).source == pb.ADAPTER_SOURCE_URL
    assert header(prepared, 0.0).commit == hashlib.sha256(setup.served.content).hexdigest()
    for _ in range(100):  # the thread that packed it may still hold it for a moment
        if not list((tmp_path / "by-settings" / "downloads").iterdir()):
            break
        await asyncio.sleep(0.05)
    else:
        raise AssertionError("the download is not removed once it was packed")
    with pytest.raises(InvalidAdapterRef):
        await store.prepare("s3://bucket/a.safetensors", LAYOUT)
    await store.close()


async def test_another_content_under_the_same_url_is_another_adapter_row_136(setup: Setup):
    first = await setup.store().prepare(setup.served.url(), LAYOUT)
    setup.served.content = adapter(setup.folder, seed=9)
    assert (await setup.store().prepare(setup.served.url(), LAYOUT)).entry.digest == first.entry.digest
    setup.now_s += 61
    second = await setup.store().prepare(setup.served.url(), LAYOUT)
    assert (second.came_from, second.entry.digest != first.entry.digest) == ("https", True)


@pytest.mark.parametrize("modified_s", [1_700_000_000.0, None])
async def test_without_an_etag_the_time_counts_and_without_a_time_the_bytes(setup: Setup, modified_s: float | None):
    setup.served.etag, setup.served.modified_s = "", modified_s
    first = await setup.store().prepare(setup.served.url(), LAYOUT)
    setup.served.content = adapter(setup.folder, seed=9)
    setup.served.modified_s = modified_s and modified_s + 1
    setup.now_s += 61
    second = await setup.store().prepare(setup.served.url(), LAYOUT)
    assert second.entry.digest != first.entry.digest
    setup.now_s += 61
    assert (await setup.store().prepare(setup.served.url(), LAYOUT)).entry.digest == second.entry.digest


async def test_a_file_that_changes_between_look_and_download_is_looked_at_again(setup: Setup):
    setup.resolve()
    setup.served.content = adapter(setup.folder, seed=9)
    assert isinstance(refusal(setup.download), SourceUnavailable)
    assert setup.download().path.read_bytes() == setup.served.content


def test_a_server_that_is_down_leaves_what_was_seen_before(setup: Setup):
    before = setup.resolve()
    setup.served.status = 503
    setup.now_s += 61
    assert setup.resolve().identity == before.identity
    setup.restart()
    assert setup.resolve().identity == before.identity


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (401, AdapterAccessDenied),
        (403, AdapterAccessDenied),
        (404, AdapterNotFound),
        (410, AdapterNotFound),
        (400, SourceUnavailable),
        (429, SourceUnavailable),
        (500, SourceUnavailable),
    ],
)
def test_what_a_server_says_is_told_apart(setup: Setup, status: int, error: type[ServiceError]):
    setup.served.status = status
    assert isinstance(refusal(lambda: setup.resolve(f"?{SECRET}")), error)


async def test_a_signature_is_in_no_key_log_note_or_listing(setup: Setup, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.DEBUG):
        prepared = await setup.store().prepare(f"{setup.served.url()}?{SECRET}", LAYOUT)
    assert setup.served.requests[0][0].endswith(SECRET), "the server must get it"
    assert prepared.entry.refs[0].ref == setup.served.url()
    setup.cache.close()
    stored = b"".join(path.read_bytes() for path in setup.folder.rglob("*") if path.is_file())
    shown = f"{AdapterRef.parse(f'{setup.served.url()}?{SECRET}')!r} {setup.resolve(f'?{SECRET}').canonical}"
    assert "Secret" not in caplog.text + shown
    assert b"Secret" not in stored


def test_only_hosts_on_the_list_are_read_also_after_a_redirect(setup: Setup):
    refused = refusal(lambda: setup.resolver.resolve(AdapterRef.parse(setup.served.url("other.test"))))
    assert isinstance(refused, InvalidAdapterRef)
    assert "other.test" in refused.message
    for target in (setup.served.url("other.test"), f"http://files.test:{setup.served.port}/a", "file:///etc/passwd"):
        setup.served.redirect_to = target
        assert isinstance(refusal(setup.resolve), InvalidAdapterRef)
    setup.served.redirect_to = setup.served.url()
    assert isinstance(refusal(setup.resolve), SourceUnavailable)


ADDRESSES = ("127.0.0.1", "10.1.2.3", "192.168.0.1", "172.16.5.5", "::1", "fd00::1", "::ffff:127.0.0.1")
NEVER = (
    *("169.254.169.254", "169.254.1.1", "fe80::1", "fd00:ec2::254", "100.100.100.200", "0.0.0.0", "224.0.0.1"),
    *("255.255.255.255", "::", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "2002:a9fe:a9fe::1", "nonsense"),
)


@pytest.mark.parametrize("address", ADDRESSES)
def test_private_addresses_are_for_private_hosts(address: str):
    assert not is_allowed(address, may_be_private=False)
    assert is_allowed(address, may_be_private=True) or address.startswith("::ffff")


@pytest.mark.parametrize("address", NEVER)
def test_metadata_and_link_local_addresses_are_for_nobody(address: str):
    assert not is_allowed(address, may_be_private=False)
    assert not is_allowed(address, may_be_private=True)


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_public_addresses_are_for_all(address: str):
    assert is_allowed(address, may_be_private=False)


@pytest.mark.parametrize("answers", [["127.0.0.1"], ["8.8.8.8", "127.0.0.1"], ["169.254.169.254"]])
def test_a_public_host_with_any_private_address_is_not_asked(
    setup: Setup, certificate: tuple[Path, Path], answers: list[str]
):
    host = f"rebind.test:{setup.served.port}"
    hosts = HttpsHosts((host,), (), certificate[0], 1.0, lambda *_: answers)
    refused = refusal(lambda: hosts.look(AdapterRef.parse(setup.served.url("rebind.test")), None))
    assert isinstance(refused, InvalidAdapterRef)
    assert setup.served.requests == []
    hosts.close()


def test_a_name_that_answers_otherwise_the_second_time_gains_nothing(setup: Setup, certificate: tuple[Path, Path]):
    asked: list[str] = []

    def rebinding(name: str, _: int) -> list[str]:
        asked.append(name)
        return ["192.0.2.1"] if len(asked) == 1 else ["127.0.0.1"]

    host = f"rebind.test:{setup.served.port}"
    hosts = HttpsHosts((), (host,), certificate[0], 0.3, rebinding)
    assert isinstance(
        refusal(lambda: hosts.look(AdapterRef.parse(setup.served.url("rebind.test")), None)), SourceUnavailable
    )
    assert asked == ["rebind.test"], "one look-up per connection, and that address is the one connected to"
    assert setup.served.requests == []
    hosts.close()


def test_a_certificate_that_is_not_known_is_refused(setup: Setup):
    host = f"files.test:{setup.served.port}"
    hosts = HttpsHosts((), (host,), None, 1.0, lambda *_: ["127.0.0.1"])
    refused = refusal(lambda: hosts.look(AdapterRef.parse(setup.served.url()), None))
    assert isinstance(refused, SourceUnavailable)
    assert "https_ca_file" in refused.remedy
    hosts.close()


@pytest.mark.parametrize("how", ["cut", "busy", "stall"])
def test_a_transfer_that_breaks_off_goes_on_where_it_was(setup: Setup, how: str):
    setup.served.misbehave = [how]
    assert setup.download().path.read_bytes() == setup.served.content
    first, second = setup.served.bodies()
    assert first == ""
    if how != "busy":
        assert second.startswith("bytes=") and second != "bytes=0-"
        assert setup.served.requests[-1][2] == setup.served.tag()


def test_a_server_without_ranges_starts_again(setup: Setup):
    setup.served.has_ranges, setup.served.misbehave = False, ["cut", "cut"]
    assert setup.download().path.read_bytes() == setup.served.content


def test_a_later_call_goes_on_where_an_earlier_one_gave_up(setup: Setup):
    setup.served.always = "trickle"
    assert "longer than" in refusal(lambda: setup.download(Limits(1 << 30, 0.4))).message
    assert setup.kept() == [".part"]
    setup.served.always = ""
    setup.restart()
    assert setup.download().path.read_bytes() == setup.served.content
    assert setup.served.bodies()[-1].startswith("bytes=")


def test_a_partial_file_of_another_content_is_not_continued_row_134(setup: Setup):
    setup.served.always = "trickle"
    refusal(lambda: setup.download(Limits(1 << 30, 0.4)))
    setup.served.always, setup.served.content = "", adapter(setup.folder, seed=9)
    setup.now_s += 61
    assert setup.download().path.read_bytes() == setup.served.content
    assert setup.served.bodies()[-1] == ""


@pytest.mark.parametrize("how", ["wrong range", "compressed", "endless"])
def test_an_answer_that_is_no_file_is_not_believed(setup: Setup, how: str):
    if how == "wrong range":
        setup.served.misbehave = ["cut"]
    setup.served.always = how
    assert isinstance(refusal(setup.download), SourceUnavailable)
    assert setup.kept() == []


@pytest.mark.parametrize("how", ["states more", "states less"])
def test_a_length_other_than_before_is_not_believed(setup: Setup, how: str):
    setup.served.always = how
    assert isinstance(refusal(setup.download), SourceUnavailable)
    assert setup.kept() == []


def test_an_endless_stream_ends_at_the_size_limit(setup: Setup):
    setup.served.has_ranges = setup.served.has_length = False
    setup.served.always = "endless"
    began_s = time.monotonic()
    refused = refusal(lambda: setup.download(Limits(5_000_000, 30)))
    assert isinstance(refused, AdapterRejected)
    assert refused.cause == "FILE_TOO_LARGE"
    assert time.monotonic() - began_s < 10
    assert setup.kept() == []


def test_a_server_that_sends_a_byte_at_a_time_meets_the_deadline(setup: Setup):
    setup.served.always = "trickle"
    began_s = time.monotonic()
    refused = refusal(lambda: setup.download(Limits(1 << 30, 0.5)))
    assert "download_timeout_s" in refused.remedy
    assert time.monotonic() - began_s < 3


def test_a_file_over_the_limit_is_not_begun(setup: Setup):
    refused = refusal(lambda: setup.download(Limits(1000, 30)))
    assert isinstance(refused, AdapterRejected)
    assert setup.served.bodies() == []


@pytest.mark.parametrize(("times", "cause"), [(1, None), (2, "HTML_PAGE")])
async def test_a_web_page_in_place_of_the_file_is_fetched_again_and_then_named_row_125(
    setup: Setup, times: int, cause: str | None
):
    setup.served.has_ranges = setup.served.has_length = False
    setup.served.misbehave = ["html"] * times
    if cause is None:
        assert (await setup.store().prepare(setup.served.url(), LAYOUT)).came_from == "https"
        return
    with pytest.raises(AdapterRejected) as refused:
        await setup.store().prepare(setup.served.url(), LAYOUT)
    assert refused.value.cause == cause
    setup.downloads.trim()
    assert "whole" not in setup.kept(), "nothing of it is used again"
    assert (await setup.store().prepare(setup.served.url(), LAYOUT)).came_from == "https"


async def test_a_file_cut_short_without_a_length_is_truncated_row_134(setup: Setup):
    setup.served.has_ranges = setup.served.has_length = False
    setup.served.always = "cut"
    with pytest.raises(AdapterRejected) as refused:
        await setup.store().prepare(setup.served.url(), LAYOUT)
    assert refused.value.cause == "TRUNCATED"


async def test_progress_is_reported_and_ends_at_the_size(setup: Setup):
    heard: list[Progress] = []
    await setup.store().prepare(setup.served.url(), LAYOUT, heard.append)
    done = [(one.downloaded_bytes, one.total_bytes) for one in heard if one.downloaded_bytes]
    assert done[-1] == (len(setup.served.content), len(setup.served.content))
    assert done == sorted(done)


def test_fifty_threads_on_a_cold_folder_make_one_download_row_132(setup: Setup):
    setup.resolve()
    with ThreadPoolExecutor(50) as pool:
        files = list(pool.map(lambda _: setup.download(), range(50)))
    assert {file.path.read_bytes() for file in files} == {setup.served.content}
    assert setup.served.bodies() == [""]


def test_two_stores_on_one_folder_do_not_share_a_partial_file_row_133(setup: Setup):
    setup.served.always = "trickle"
    refusal(lambda: setup.download(Limits(1 << 30, 0.4)))
    setup.served.always = ""
    source = setup.resolve()
    stores = [Downloader(Downloads(setup.folder / "downloads", 1 << 30), {"https": setup.urls}) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        files = list(pool.map(lambda files: download(source, files, LIMITS, lambda *_: None), stores))
    assert {file.path.read_bytes() for file in files} == {setup.served.content}
    assert setup.kept() == ["whole"]


async def test_a_source_that_hangs_does_not_keep_the_cache_from_answering(setup: Setup):
    store = setup.store()
    await store.prepare(setup.served.url(), LAYOUT)
    setup.served.always = "stall"
    layouts = [flux_layout("BF16", width=64, double=1 + n) for n in range(20)]
    (path,) = (setup.folder / "downloads").iterdir()
    path.unlink()
    hanging = [asyncio.create_task(store.prepare(setup.served.url(), layouts[n])) for n in range(20)]
    await asyncio.sleep(0.2)
    began_s = time.monotonic()
    assert (await store.prepare(setup.served.url(), LAYOUT)).came_from == "cache"
    assert time.monotonic() - began_s < 1
    for task in hanging:
        task.cancel()
    setup.files.stop()
    await asyncio.gather(*hanging, return_exceptions=True)
    await store.close()
