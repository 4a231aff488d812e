"""References to a hub: pinned to a commit, told apart when they fail, served without the hub where that is right."""

import asyncio
import logging
import os
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from huggingface_hub import hf_hub_download
from prometheus_client import generate_latest

from adapter_store.cache import PackedCache
from adapter_store.download import Downloader, Limits, SourceFile, download
from adapter_store.downloads import Downloads
from adapter_store.hub import Hub
from adapter_store.refs import AdapterRef
from adapter_store.resolve import Resolver
from adapter_store.source import Source
from adapter_store.store import Store
from loraplex.errors import (
    AdapterAccessDenied,
    AdapterNotFound,
    AdapterRejected,
    AmbiguousAdapter,
    ServiceError,
    SourceUnavailable,
)
from tests.adapter_store.fake_hub import BAD_TOKEN, BROKEN, FORBIDDEN, GATED, HIDDEN, FakeHub, Repo, fake_hub
from tests.adapter_store.samples import WIDTH, flux_layout, peft, write_adapter

TOKEN = "hf_thisIsTheSecretToken"
LIMITS = Limits(max_file_bytes=1 << 30, timeout_s=60)
LAYOUT = flux_layout()


@dataclass
class Clock:
    """A clock that stands still until it is moved."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Setup:
    """A hub, the store's parts that speak with it, and the clock of its resolver."""

    fake: FakeHub
    hub: Hub
    cache: PackedCache
    resolver: Resolver
    clock: Clock
    files: Downloader

    def store(self) -> Store:
        return Store(self.resolver, self.files, self.cache, LIMITS, max_rank=128)

    def download(self, source: Source, limits: Limits = LIMITS) -> SourceFile:
        return download(source, self.files, limits, lambda *_: None)

    def forget(self) -> None:
        """A resolver without memory, on the same notes."""
        self.resolver = Resolver(self.hub, self.cache, (), 60.0, self.clock)


@pytest.fixture(scope="module")
def served() -> Iterator[FakeHub]:
    with fake_hub() as hub:
        yield hub


@pytest.fixture
def setup(served: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Setup]:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    served.repos.clear()
    served.requests.clear()
    hub, clock = Hub(served.endpoint, tmp_path / "hf", timeout_s=5), Clock()
    cache = PackedCache(tmp_path / "cache", 1 << 30)
    files = Downloader(Downloads(tmp_path / "downloads", 1 << 30), {"hub": hub})
    yield Setup(served, hub, cache, Resolver(hub, cache, (), 60.0, clock), clock, files)
    cache.close()


def adapter(folder: Path, seed: int = 0) -> bytes:
    tensors = peft("transformer.transformer_blocks.0.attn.to_q", WIDTH, WIDTH, 4, seed=seed)
    return write_adapter(folder / "source.safetensors", tensors).read_bytes()


def refusal(action: Callable[[], object]) -> ServiceError:
    with pytest.raises(ServiceError) as refused:
        action()
    assert TOKEN not in f"{refused.value!r} {refused.value} {refused.value.metadata}"
    assert refused.value.remedy
    return refused.value


def test_a_reference_is_pinned_to_a_commit_and_downloaded_row_137(setup: Setup, tmp_path: Path):
    repo = setup.fake.repos["org/name"] = Repo()
    commit = repo.commit(README__md=b"x", a__safetensors=adapter(tmp_path))
    source = setup.resolver.resolve(AdapterRef.parse("org/name"))
    assert (source.commit, source.weight_name, source.path) == (commit, "a.safetensors", None)
    heard: list[tuple[int, int]] = []
    file = download(source, setup.files, LIMITS, lambda done, total: heard.append((done, total)))
    assert file.path.read_bytes() == adapter(tmp_path)
    assert file.digest == source.sha256
    assert heard[-1] == (source.size_bytes, source.size_bytes)
    assert {token for _, _, token in setup.fake.requests} == {f"Bearer {TOKEN}"}


async def test_a_branch_is_looked_up_again_when_its_time_is_over_row_137(setup: Setup, tmp_path: Path):
    repo = setup.fake.repos["org/name"] = Repo()
    store = setup.store()
    first = repo.commit(a__safetensors=adapter(tmp_path))
    one = await store.prepare("org/name", LAYOUT)
    second = repo.commit(a__safetensors=adapter(tmp_path, seed=7))
    assert (await store.prepare("org/name", LAYOUT)).entry.digest == one.entry.digest
    setup.clock.now_s += 61
    two = await store.prepare("org/name", LAYOUT)
    assert (one.commit, two.commit) == (first, second)
    assert one.entry.digest != two.entry.digest
    assert (one.came_from, two.came_from) == ("hub", "hub")
    pinned = await store.prepare(f"org/name@{first}", LAYOUT)
    assert (pinned.commit, pinned.entry.digest, pinned.came_from) == (first, one.entry.digest, "cache")


async def test_the_same_bytes_under_another_commit_are_not_downloaded_again(setup: Setup, tmp_path: Path):
    repo = setup.fake.repos["org/name"] = Repo()
    store = setup.store()
    repo.commit(a__safetensors=adapter(tmp_path))
    first = await store.prepare("org/name", LAYOUT)
    commit = repo.commit(README__md=b"more words", a__safetensors=adapter(tmp_path))
    setup.clock.now_s += 61
    second = await store.prepare("org/name", LAYOUT)
    assert (second.came_from, second.commit) == ("cache", commit)
    assert second.entry.digest == first.entry.digest
    assert len(setup.fake.paths("GET", "/resolve/")) == 1


async def test_a_commit_that_is_known_needs_no_hub(setup: Setup, tmp_path: Path):
    repo = setup.fake.repos["org/name"] = Repo()
    commit = repo.commit(a__safetensors=adapter(tmp_path))
    await setup.store().prepare(f"org/name@{commit}", LAYOUT)
    setup.fake.requests.clear()
    setup.forget()
    assert (await setup.store().prepare(f"org/name@{commit}", LAYOUT)).came_from == "cache"
    assert setup.fake.requests == []


async def test_an_unreachable_hub_leaves_the_commit_that_was_resolved_before(setup: Setup, tmp_path: Path):
    repo = setup.fake.repos["org/name"] = Repo(lfs=False)
    commit = repo.commit(a__safetensors=adapter(tmp_path))
    await setup.store().prepare("org/name", LAYOUT)
    repo.access = BROKEN
    setup.forget()
    prepared = await setup.store().prepare("org/name", LAYOUT)
    assert (prepared.came_from, prepared.commit) == ("cache", commit)


async def test_access_that_was_taken_away_is_not_served_from_the_cache(setup: Setup, tmp_path: Path):
    repo = setup.fake.repos["org/name"] = Repo()
    repo.commit(a__safetensors=adapter(tmp_path))
    await setup.store().prepare("org/name", LAYOUT)
    repo.access = GATED
    setup.clock.now_s += 61
    with pytest.raises(AdapterAccessDenied):
        await setup.store().prepare("org/name", LAYOUT)


@pytest.mark.parametrize(
    ("access", "error", "word"),
    [
        (GATED, AdapterAccessDenied, "gated"),
        (FORBIDDEN, AdapterAccessDenied, "may not be read"),
        (BAD_TOKEN, AdapterAccessDenied, "valid token"),
        (HIDDEN, AdapterNotFound, "hides it"),
        (BROKEN, SourceUnavailable, "500"),
    ],
)
def test_the_reasons_of_a_hub_are_told_apart_row_130(setup: Setup, access: str, error: type[ServiceError], word: str):
    setup.fake.repos["org/name"] = Repo(access=access)
    refused = refusal(lambda: setup.resolver.resolve(AdapterRef.parse("org/name")))
    assert isinstance(refused, error)
    assert word in refused.message


@pytest.mark.parametrize(
    ("ref", "missing"),
    [
        ("org/other", "repository"),
        ("org/name@v9", "revision"),
        ("org/name:b.safetensors", "file"),
        ("org/empty", "file"),
    ],
)
def test_what_a_hub_does_not_have_is_named(setup: Setup, tmp_path: Path, ref: str, missing: str):
    setup.fake.repos["org/name"] = Repo()
    setup.fake.repos["org/name"].commit(a__safetensors=adapter(tmp_path))
    setup.fake.repos["org/empty"] = Repo()
    setup.fake.repos["org/empty"].commit(weights__bin=b"x")
    refused = refusal(lambda: setup.resolver.resolve(AdapterRef.parse(ref)))
    assert isinstance(refused, AdapterNotFound)
    assert refused.metadata["missing"] == missing


def test_a_repository_of_several_files_lists_them_row_128(setup: Setup):
    setup.fake.repos["org/name"] = Repo()
    setup.fake.repos["org/name"].commit(a__safetensors=b"x", b__safetensors=b"y")
    refused = refusal(lambda: setup.resolver.resolve(AdapterRef.parse("org/name")))
    assert isinstance(refused, AmbiguousAdapter)
    assert "a.safetensors, b.safetensors" in refused.message
    assert setup.resolver.resolve(AdapterRef.parse("org/name:b.safetensors")).weight_name == "b.safetensors"


def test_a_hub_that_is_not_there_is_unavailable(setup: Setup, tmp_path: Path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{free.getsockname()[1]}"
    resolver = Resolver(Hub(endpoint, tmp_path / "none", timeout_s=2), setup.cache, (), 60.0)
    refused = refusal(lambda: resolver.resolve(AdapterRef.parse("org/name")))
    assert isinstance(refused, SourceUnavailable)
    assert refused.retry_after_s


def test_bytes_that_are_not_what_the_hub_promised_are_fetched_once_more_row_134(setup: Setup, tmp_path: Path):
    repo = setup.fake.repos["org/name"] = Repo(corrupt_downloads=1)
    repo.commit(a__safetensors=adapter(tmp_path))
    source = setup.resolver.resolve(AdapterRef.parse("org/name"))
    assert setup.download(source).digest == source.sha256
    repo.corrupt_downloads = 2
    repo.commit(a__safetensors=adapter(tmp_path, seed=3))
    setup.forget()
    source = setup.resolver.resolve(AdapterRef.parse("org/name"))
    assert isinstance(refusal(lambda: setup.download(source)), SourceUnavailable)


async def test_no_line_of_the_log_names_a_repository_or_the_token(
    setup: Setup, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    setup.fake.repos["org/name"] = Repo()
    setup.fake.repos["org/name"].commit(a__safetensors=adapter(tmp_path))
    with caplog.at_level(logging.INFO):
        await setup.store().prepare("org/name", LAYOUT)
        with pytest.raises(AdapterNotFound):
            await setup.store().prepare("org/other", LAYOUT)
    lines = [line for line in caplog.messages if TOKEN in line or "org/" in line]
    assert lines == []


def test_a_file_over_the_limit_is_not_downloaded(setup: Setup, tmp_path: Path):
    repo = setup.fake.repos["org/name"] = Repo()
    repo.commit(a__safetensors=adapter(tmp_path))
    source = setup.resolver.resolve(AdapterRef.parse("org/name"))
    refused = refusal(lambda: setup.download(source, Limits(100, 60)))
    assert isinstance(refused, AdapterRejected)
    assert refused.cause == "FILE_TOO_LARGE"
    assert setup.fake.paths("GET", "/resolve/") == []


async def test_an_adapter_config_in_the_repository_decides_the_scaling(setup: Setup, tmp_path: Path):
    repo = setup.fake.repos["org/peft"] = Repo()
    repo.commit(adapter_model__safetensors=adapter(tmp_path), adapter_config__json=b'{"r": 4, "lora_alpha": 8}')
    setup.fake.repos["org/bare"] = Repo()
    setup.fake.repos["org/bare"].commit(adapter_model__safetensors=adapter(tmp_path))
    store = setup.store()
    with_config, bare = await store.prepare("org/peft", LAYOUT), await store.prepare("org/bare", LAYOUT)
    assert with_config.entry.digest != bare.entry.digest
    setup.forget()
    assert (await setup.store().prepare("org/peft", LAYOUT)).came_from == "cache"


OFFLINE = """
import sys
from pathlib import Path
from adapter_store.hub import Hub
from adapter_store.refs import AdapterRef
from adapter_store.resolve import Resolver
from adapter_store.download import Downloader, Limits, download
from adapter_store.downloads import Downloads
class NoNotes:
    def note(self, name, text): pass
    def read_note(self, name): return None
hub = Hub(cache_dir=Path(sys.argv[1]))
resolver = Resolver(hub, NoNotes(), (), 60.0)
files = Downloader(Downloads(Path(sys.argv[1]) / "downloads", 1 << 30), {"hub": hub})
for ref in sys.argv[2:]:
    try:
        source = resolver.resolve(AdapterRef.parse(ref))
        print(source.commit, download(source, files, Limits(1 << 30, 60), lambda *_: None).digest)
    except Exception as error:
        print(type(error).__name__, error)
"""


def test_offline_what_the_librarys_cache_holds_is_served_and_the_rest_says_offline(setup: Setup, tmp_path: Path):
    repo = setup.fake.repos["org/name"] = Repo()
    commit = repo.commit(a__safetensors=adapter(tmp_path))
    source = setup.resolver.resolve(AdapterRef.parse("org/name"))
    hf_hub_download("org/name", source.weight_name, endpoint=setup.fake.endpoint, cache_dir=tmp_path / "hf")
    digest = source.sha256
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE, str(tmp_path / "hf"), f"org/name@{commit}", "org/missing"],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_ENDPOINT": setup.fake.endpoint},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    served, missing = [line for line in done.stdout.splitlines() if "hub unavailable" not in line]
    assert served == f"{commit} {digest}"
    assert missing.startswith("SourceUnavailable The store is offline")


def test_a_download_that_is_cut_off_goes_on_where_it_was(setup: Setup, tmp_path: Path):
    repo = setup.fake.repos["org/name"] = Repo(cut_downloads=2)
    repo.commit(a__safetensors=adapter(tmp_path))
    source = setup.resolver.resolve(AdapterRef.parse("org/name"))
    assert setup.download(source).digest == source.sha256
    assert len(setup.fake.paths("GET", "/resolve/")) == 3


def test_a_hub_that_sends_a_byte_at_a_time_meets_the_deadline_and_a_later_call_goes_on(setup: Setup, tmp_path: Path):
    repo = setup.fake.repos["org/name"] = Repo(trickles=True)
    repo.commit(a__safetensors=adapter(tmp_path))
    source = setup.resolver.resolve(AdapterRef.parse("org/name"))
    began_s = time.monotonic()
    refused = refusal(lambda: setup.download(source, Limits(1 << 30, 0.5)))
    assert isinstance(refused, SourceUnavailable)
    assert time.monotonic() - began_s < 3
    assert [path.suffix for path in (tmp_path / "downloads").iterdir()] == [".part"]
    repo.trickles = False
    assert setup.download(source).digest == source.sha256


def test_the_token_goes_to_the_hub_and_not_to_where_it_keeps_its_files_row_130(setup: Setup, tmp_path: Path):
    repo = setup.fake.repos["org/name"] = Repo()
    repo.commit(a__safetensors=adapter(tmp_path))
    with fake_hub() as elsewhere:
        elsewhere.repos["org/name"] = Repo(commits=repo.commits, branches=repo.branches)
        repo.stored_at = elsewhere.endpoint
        source = setup.resolver.resolve(AdapterRef.parse("org/name"))
        assert setup.download(source).digest == source.sha256
        assert {token for _, _, token in elsewhere.requests} == {""}
    assert {token for _, _, token in setup.fake.requests} == {f"Bearer {TOKEN}"}


async def test_fifty_callers_on_a_cold_cache_make_one_download_row_132(setup: Setup, tmp_path: Path):
    repo = setup.fake.repos["org/name"] = Repo()
    repo.commit(a__safetensors=adapter(tmp_path))
    store = setup.store()
    layouts = [LAYOUT, flux_layout("BF16")]
    prepared = await asyncio.gather(*(store.prepare("org/name", layouts[n % 2]) for n in range(50)))
    assert len({one.entry.digest for one in prepared}) == 2
    assert len(setup.fake.paths("GET", "/resolve/")) == 1
    await store.close()


async def test_the_token_is_in_no_file_of_the_store_and_no_metric_row_130(setup: Setup, tmp_path: Path):
    setup.fake.repos["org/name"] = Repo()
    setup.fake.repos["org/name"].commit(a__safetensors=adapter(tmp_path))
    await setup.store().prepare("org/name", LAYOUT)
    setup.cache.close()
    stored = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert TOKEN.encode() not in stored
    shown = generate_latest().decode()
    assert TOKEN not in shown
    assert "org/name" not in shown


def tar_of_two(folder: Path) -> bytes:
    with tarfile.open(folder / "two.tar", "w") as archive:
        for name in ("a.safetensors", "b.safetensors"):
            archive.addfile(tarfile.TarInfo(name))
    return (folder / "two.tar").read_bytes()


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (lambda _: b"<!DOCTYPE html><p>log in", "HTML_PAGE"),
        (lambda _: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "LFS_POINTER"),
        (lambda _: b"", "EMPTY_FILE"),
        (lambda _: b"\x10\0\0\0\0\0\0", "TRUNCATED"),
        (lambda folder: adapter(folder)[:-1], "TRUNCATED"),
        (lambda folder: adapter(folder) + b"x", "TRAILING_BYTES"),
        (tar_of_two, "ARCHIVE"),
    ],
)
async def test_what_a_hub_has_in_place_of_a_file_is_named_rows_125_and_131(
    setup: Setup, tmp_path: Path, make: Callable[[Path], bytes], cause: str
):
    repo = setup.fake.repos["org/name"] = Repo(lfs=False)
    repo.commit(a__safetensors=make(tmp_path))
    with pytest.raises(AdapterRejected) as refused:
        await setup.store().prepare("org/name", LAYOUT)
    assert refused.value.cause == cause
    repo.commit(a__safetensors=adapter(tmp_path))
    setup.clock.now_s += 61
    assert (await setup.store().prepare("org/name", LAYOUT)).came_from == "hub"


async def test_a_broken_file_beside_a_pickle_is_refused_and_the_pickle_not_even_downloaded_row_127(
    setup: Setup, tmp_path: Path
):
    repo = setup.fake.repos["org/name"] = Repo()
    repo.commit(a__safetensors=adapter(tmp_path)[:-1], a__bin=b"\x80\x04.", adapter_model__bin=b"\x80\x04.")
    with pytest.raises(AdapterRejected):
        await setup.store().prepare("org/name", LAYOUT)
    assert not [path for _, path, _ in setup.fake.requests if ".bin" in path]
