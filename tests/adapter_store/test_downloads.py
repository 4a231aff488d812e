"""The folder of downloads: bounded in bytes and age, never what is in use, and nothing of a crash in the way."""

import errno
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from adapter_store.disk import Disk
from adapter_store.downloads import Downloads, Fetched, Wanted
from adapter_store.transfer import Body, Limits
from loraplex.errors import SourceUnavailable, StorageExhausted

LIMITS = Limits(1 << 30, 10.0)


@dataclass
class Remote:
    """A file in memory."""

    content: bytes
    opened: int = 0
    error: Exception | None = None
    wait: threading.Event | None = None

    @contextmanager
    def open(self, start: int) -> Iterator[Body]:
        self.opened += 1
        yield Body(start, len(self.content), self._chunks(start))

    def _chunks(self, start: int) -> Iterator[bytes]:
        for at in range(start, len(self.content), 100):
            yield self.content[at : at + 100]
            if self.wait is not None:
                self.wait.wait(10)
            if self.error is not None:
                raise self.error


def wanted(name: str, content: bytes) -> Wanted:
    return Wanted(name, len(content), hashlib.sha256(content).hexdigest())


def fetch(downloads: Downloads, name: str, content: bytes | None = None) -> tuple[Fetched, Remote]:
    content = name.encode() * 500 if content is None else content
    remote = Remote(content)
    return downloads.fetch(wanted(name, content), remote, LIMITS, lambda *_: None), remote


def test_a_file_is_fetched_once_and_hashed_again(tmp_path: Path):
    downloads = Downloads(tmp_path, 10_000)
    first, _ = fetch(downloads, "a")
    again, remote = fetch(downloads, "a")
    assert (again.digest, remote.opened) == (first.digest, 0)
    first.path.write_bytes(b"scribbled")
    repaired, remote = fetch(downloads, "a")
    assert remote.opened == 1
    assert repaired.path.read_bytes() == b"a" * 500
    assert "\n" not in repr(downloads) + repr(first)


def test_the_least_recently_used_goes_first_and_what_is_in_use_stays(tmp_path: Path):
    downloads = Downloads(tmp_path, 1200)
    held, _ = fetch(downloads, "a")
    path_b = fetch(downloads, "b")[0].path
    os.utime(held.path, (1e9 + 5, time.time() - 100))
    path_c = fetch(downloads, "c")[0].path
    assert (held.path.exists(), path_b.exists(), path_c.exists()) == (True, False, True)
    other_store = Downloads(tmp_path, 0)
    assert held.path.exists()
    assert not path_c.exists()
    path = held.path
    del held
    other_store.trim()
    assert not path.exists()


def test_a_folder_of_no_bytes_keeps_a_file_for_as_long_as_it_is_used(tmp_path: Path):
    downloads = Downloads(tmp_path, 0)
    held, _ = fetch(downloads, "a")
    assert held.path.read_bytes() == b"a" * 500
    del held
    assert list(tmp_path.iterdir()) == []


def test_what_is_old_goes_even_where_there_is_room(tmp_path: Path):
    path = fetch(Downloads(tmp_path, 10_000), "a")[0].path
    partial, dead = tmp_path / "x.part", tmp_path / "x.y.open"
    partial.write_bytes(b"x")
    dead.write_bytes(b"x")
    for file, days in ((path, 8), (partial, 8), (dead, 0.01)):
        os.utime(file, (time.time() - days * 86400,) * 2)
    Downloads(tmp_path, 10_000)
    assert list(tmp_path.iterdir()) == []


def test_a_stale_partial_file_of_a_crash_does_not_break_a_download_row_134(tmp_path: Path):
    content = b"a" * 500
    key = wanted("a", content).key
    (tmp_path / f"{key}.dead.open").write_bytes(b"b" * 300)
    (tmp_path / f"{key}.part").write_bytes(b"b" * 300)
    fetched, remote = fetch(Downloads(tmp_path, 10_000), "a")
    assert fetched.path.read_bytes() == content
    assert remote.opened == 2, "continued, found to be other bytes, and fetched again from the start"


def test_bytes_that_were_not_promised_are_fetched_twice_and_then_refused(tmp_path: Path):
    remote = Remote(b"b" * 500)
    with pytest.raises(SourceUnavailable, match="twice"):
        Downloads(tmp_path, 10_000).fetch(wanted("a", b"a" * 500), remote, LIMITS, lambda *_: None)
    assert remote.opened == 2
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_is_storage_exhausted_and_leaves_nothing_row_138(tmp_path: Path):
    remote = Remote(b"a" * 500, error=OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(StorageExhausted):
        Downloads(tmp_path, 10_000).fetch(wanted("a", remote.content), remote, LIMITS, lambda *_: None)
    assert list(tmp_path.iterdir()) == []


def test_the_floor_of_the_disk_is_kept_by_removing_and_then_by_refusing(tmp_path: Path):
    def free(folder: Path) -> int:
        return 1700 - sum(path.stat().st_size for path in folder.iterdir())

    downloads = Downloads(tmp_path, 1 << 30, Disk(tmp_path, 1000, free))
    first = fetch(downloads, "a")[0].path
    second = fetch(downloads, "b")[0].path
    assert (first.exists(), second.exists()) == (False, True)
    with pytest.raises(StorageExhausted):
        fetch(downloads, "c", b"c" * 800)


def test_a_held_download_times_out_with_a_clear_error_row_135(tmp_path: Path):
    downloads, remote = Downloads(tmp_path, 10_000), Remote(b"a" * 500, wait=threading.Event())
    ask = wanted("a", remote.content)
    holder = threading.Thread(target=downloads.fetch, args=(ask, remote, LIMITS, lambda *_: None))
    holder.start()
    while not remote.opened:
        time.sleep(0.01)
    with pytest.raises(SourceUnavailable, match="Another download"):
        downloads.fetch(ask, remote, Limits(1 << 30, 0.2), lambda *_: None)
    assert remote.wait is not None
    remote.wait.set()
    holder.join()


def test_a_store_that_stops_ends_its_transfers_and_keeps_what_they_have(tmp_path: Path):
    downloads, remote = Downloads(tmp_path, 10_000), Remote(b"a" * 500)
    downloads.stop()
    with pytest.raises(SourceUnavailable, match="shutting down"):
        downloads.fetch(Wanted("a", 500), remote, LIMITS, lambda *_: None)


KILLED = """
import sys, time
from contextlib import contextmanager
from pathlib import Path
from adapter_store.downloads import Downloads, Wanted
from adapter_store.transfer import Body, Limits
class Slow:
    @contextmanager
    def open(self, start):
        yield Body(start, 10_000_000, self.chunks())
    def chunks(self):
        yield bytes(5_000_000)
        print("half", flush=True)
        time.sleep(60)
Downloads(Path(sys.argv[1]), 1 << 30).fetch(Wanted("a", 10_000_000), Slow(), Limits(1 << 30, 60), lambda *_: None)
"""


def test_a_killed_writer_leaves_nothing_that_is_taken_for_a_file_row_133(tmp_path: Path):
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"half\n"
        Downloads(tmp_path, 0)
        assert [path.suffix for path in tmp_path.iterdir()] == [".open"], "a living writer keeps its file"
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    fetched, remote = fetch(Downloads(tmp_path, 1 << 30), "a")
    assert remote.opened == 1
    assert fetched.path.read_bytes() == remote.content
    (dead,) = tmp_path.glob("*.open")
    os.utime(dead, (0, 0))
    Downloads(tmp_path, 1 << 30)
    assert list(tmp_path.glob("*.open")) == []
