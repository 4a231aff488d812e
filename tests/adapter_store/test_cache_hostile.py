"""The cache against full and read-only disks, killed and hammering processes, scribbles, copies: never a wrong byte."""

import contextlib
import hashlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from adapter_store.cache import PackedCache
from adapter_store.disk import Disk, FolderNotWritable
from adapter_store.keys import cache_key
from adapter_store.upkeep import evict, usage, verify
from loraplex.errors import StorageExhausted, StoreUnavailable
from tests.adapter_store.test_cache import REF, add, content

MIB = 1 << 20


@contextlib.contextmanager
def mounted(folder: Path, *options: str) -> Iterator[None]:
    """A mount for as long as the block lasts; the test is skipped where mounting is not allowed."""
    folder.mkdir(exist_ok=True)
    done = subprocess.run(["mount", *options, str(folder)], capture_output=True)
    if done.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def file_of(folder: Path, digest: str) -> Path:
    return folder / "packed" / f"{digest}.safetensors"


def test_the_floor_of_the_disk_evicts_and_then_refuses_before_writing(tmp_path: Path):
    free_bytes = [1 << 40]
    cache = PackedCache(tmp_path, 1 << 30, Disk(tmp_path, 1000, lambda _: free_bytes[0]))
    entries = [add(cache, tmp_path, seed) for seed in range(3)]
    free_bytes[0] = 1000 + entries[0].size_bytes
    with cache.temp_file(2 * entries[0].size_bytes):
        pass
    assert [cache.get(entry.key, None) is not None for entry in entries] == [False, True, True]
    free_bytes[0] = 0
    with pytest.raises(StorageExhausted), cache.temp_file(MIB):
        raise AssertionError("nothing may be written")
    assert len(cache.entries()) == 2, "a refusal changes nothing"
    cache.check()


def test_a_disk_that_is_really_full_is_storage_exhausted_row_138(tmp_path: Path):
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=2m", "tmpfs"):
        folder = tmp_path / "small"
        cache = PackedCache(folder, 1 << 30)
        entry = add(cache, tmp_path, 0)
        before = content(cache, entry)
        with pytest.raises(StorageExhausted), cache.temp_file() as temp:
            temp.write_bytes(bytes(4 * MIB))
        with pytest.raises(StorageExhausted), cache.temp_file(4 * MIB):
            pass
        assert list((folder / "temp").iterdir()) == []
        found = cache.get(entry.key, None)
        assert found is not None
        assert content(cache, found) == before
        (folder / "filler").write_bytes(bytes(shutil.disk_usage(folder).free))
        for number in range(2000):
            try:
                cache.note(f"name-{number}", "x" * 1000)
            except StorageExhausted:
                break
        else:
            raise AssertionError("the index never filled the disk")
        assert cache.get(entry.key, None) is not None
        (folder / "filler").unlink()
        add(cache, tmp_path, 1)
        cache.close()


def test_a_read_only_folder_stops_the_start_and_names_the_setting(tmp_path: Path):
    folder = tmp_path / "cache"
    cache = PackedCache(folder, 1 << 30)
    add(cache, tmp_path, 0)
    cache.close()
    with mounted(folder, "--bind", str(folder)):
        subprocess.run(["mount", "-o", "remount,ro,bind", str(folder)], check=True, capture_output=True)
        with pytest.raises(FolderNotWritable, match="cache_dir"):
            PackedCache(folder, 1 << 30)


def test_a_file_in_place_of_the_folder_stops_the_start_and_names_the_setting(tmp_path: Path):
    (tmp_path / "cache").write_bytes(b"")
    with pytest.raises(FolderNotWritable, match="cache_dir"):
        PackedCache(tmp_path / "cache", 1 << 30)


def test_what_is_no_file_is_set_aside_and_the_store_starts(tmp_path: Path):
    cache = PackedCache(tmp_path, 1 << 30)
    entry = add(cache, tmp_path, 0)
    cache.close()
    (tmp_path / "packed" / "x.safetensors").mkdir()
    (tmp_path / "packed" / "x.safetensors" / "kept.txt").write_text("somebody's")
    os.mkfifo(tmp_path / "packed" / "pipe.safetensors")
    (tmp_path / "packed" / "nowhere.safetensors").symlink_to(tmp_path / "nothing")
    (tmp_path / "temp" / "folder").mkdir()
    os.utime(tmp_path / "temp" / "folder", (0, 0))
    again = PackedCache(tmp_path, 1 << 30)
    assert again.get(entry.key, None)
    assert [path.read_text() for path in tmp_path.glob("odd-*-x.safetensors/kept.txt")] == ["somebody's"]
    again.check()
    file_of(tmp_path, entry.digest).unlink()
    file_of(tmp_path, entry.digest).mkdir()
    assert again.get(entry.key, None) is None
    assert verify(again).sound == ()
    assert add(again, tmp_path, 0).digest == entry.digest
    again.check()


@pytest.mark.parametrize("removed", [".", "packed", "temp", "index"])
def test_folders_that_are_removed_are_made_again_and_what_is_lost_is_forgotten(tmp_path: Path, removed: str):
    cache = PackedCache(tmp_path / "cache", 1 << 30)
    entry = add(cache, tmp_path, 0)
    shutil.rmtree(tmp_path / "cache" / removed)
    is_lost = removed in (".", "packed")
    assert usage(cache).entries == (0 if is_lost else 1)
    assert (cache.get(entry.key, None) is None) == is_lost
    cache.check()
    assert add(cache, tmp_path, 0).digest == entry.digest
    assert cache.get(entry.key, None)
    cache.check()


def test_a_cache_that_is_removed_while_an_adapter_is_packed_is_an_error_to_try_again(tmp_path: Path):
    cache = PackedCache(tmp_path / "cache", 1 << 30)
    entry = add(cache, tmp_path, 0)
    with pytest.raises(StoreUnavailable) as refused, cache.temp_file() as temp:
        temp.write_bytes(b"x")
        shutil.rmtree(tmp_path / "cache")
        cache.add(entry, temp)
    assert refused.value.retry_after_s
    cache.check()


def scribble(path: Path, keep_time: bool) -> None:
    """Another byte of the same file, in place; with its old time stamp if asked for."""
    stat = path.stat()
    with path.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        last = stream.read(1)
        stream.seek(-1, os.SEEK_END)
        stream.write(bytes([last[0] ^ 1]))
    if keep_time:
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize("keep_time", [False, True])
def test_a_file_that_is_scribbled_after_it_was_checked_is_not_served(tmp_path: Path, keep_time: bool):
    cache = PackedCache(tmp_path, 1 << 30)
    entry, other = add(cache, tmp_path, 0), add(cache, tmp_path, 1)
    assert cache.get(entry.key, REF)
    scribble(file_of(tmp_path, entry.digest), keep_time)
    assert cache.get(entry.key, REF) is None
    assert cache.get(other.key, REF)
    cache.check()


def test_a_file_that_is_scribbled_between_get_and_open_is_not_opened(tmp_path: Path):
    cache = PackedCache(tmp_path, 1 << 30)
    entry = add(cache, tmp_path, 0)
    assert cache.get(entry.key, REF)
    scribble(file_of(tmp_path, entry.digest), keep_time=False)
    with pytest.raises(FileNotFoundError), cache.open(entry):
        pass
    assert cache.get(entry.key, REF) is None
    assert "0 pinned" in repr(cache)


def test_an_index_that_somebody_holds_is_a_clear_error_row_135(tmp_path: Path):
    cache = PackedCache(tmp_path, 1 << 30, lock_timeout_s=0.3)
    entry = add(cache, tmp_path, 0)
    with contextlib.closing(sqlite3.connect(tmp_path / "index" / "cache.db", isolation_level=None)) as holder:
        holder.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailable, match="held the index") as refused:
            cache.note("a", "b")
        assert refused.value.remedy
        assert cache.get(entry.key, None), "reading goes on"
        holder.execute("ROLLBACK")
    cache.note("a", "b")
    assert list(tmp_path.glob("index.corrupt-*")) == []


def test_a_copy_of_a_running_cache_serves_the_same_bytes_row_158(tmp_path: Path):
    cache = PackedCache(tmp_path / "one", 1 << 30)
    entries = [add(cache, tmp_path, seed) for seed in range(3)]
    for name in ("with", "without"):
        shutil.copytree(tmp_path / "one", tmp_path / name)
    for journal in (tmp_path / "without" / "index").glob("cache.db-*"):
        journal.unlink()
    for name in ("with", "without"):
        copied = PackedCache(tmp_path / name, 1 << 30)
        for entry in entries:
            found = copied.get(entry.key, None)
            assert found is not None
            assert hashlib.sha256(content(copied, found)).hexdigest() == entry.digest
        copied.check()
        copied.close()


def test_an_index_that_one_store_made_again_is_taken_over_by_the_other_row_158(tmp_path: Path):
    one, two = PackedCache(tmp_path, 1 << 30), PackedCache(tmp_path, 1 << 30)
    entry = add(one, tmp_path, 0)
    with sqlite3.connect(tmp_path / "index" / "cache.db") as connection:
        connection.execute("UPDATE Cache SET mode = 4, value = x'80'")
    connection.close()
    assert one.get(entry.key, None), "makes it again"
    later = add(two, tmp_path, 1)
    assert one.get(later.key, None)
    assert len(list(tmp_path.glob("index.corrupt-*"))) == 1
    one.check()
    two.check()


def test_verify_tells_what_every_file_is(tmp_path: Path):
    cache = PackedCache(tmp_path, 1 << 30)
    sound, damaged, missing, orphan = (add(cache, tmp_path, seed) for seed in range(4))
    with contextlib.closing(sqlite3.connect(tmp_path / "index" / "cache.db")) as connection, connection:
        connection.execute("DELETE FROM Cache WHERE key = ?", (f"entry:{orphan.key}",))
    scribble(file_of(tmp_path, damaged.digest), keep_time=True)
    file_of(tmp_path, missing.digest).unlink()
    (tmp_path / "packed" / "notes.txt").write_text("hello")
    other = PackedCache(tmp_path, 1 << 30)  # as the command line does, beside a store that is running
    with contextlib.closing(sqlite3.connect(tmp_path / "index" / "cache.db")) as connection, connection:
        connection.execute("DELETE FROM Cache WHERE key = ?", (f"entry:{orphan.key}",))
    (tmp_path / "packed" / "notes.txt").write_text("hello")
    report = verify(other)
    assert (report.sound, report.adopted) == ((sound.digest,), (orphan.digest,))
    assert (report.damaged, report.missing) == ((damaged.digest,), (missing.digest,))
    assert report.unknown == ("notes.txt",)
    cache.check()
    assert verify(cache).sound == tuple(sorted((sound.digest, orphan.digest)))
    cache.check()


def test_evict_removes_what_is_chosen_but_not_what_is_being_sent(tmp_path: Path):
    cache = PackedCache(tmp_path, 1 << 30)
    entries = [add(cache, tmp_path, seed) for seed in range(3)]
    with cache.open(entries[0]):
        evicted = evict(cache, lambda entry: entry.key != entries[2].key)
        assert usage(cache).pinned == 1
    assert [entry.key for entry in evicted.entries] == [entries[1].key]
    assert [entry.key for entry in evicted.kept] == [entries[0].key]
    assert evicted.freed_bytes == entries[1].size_bytes
    used = usage(cache)
    assert (used.entries, used.size_bytes) == (2, 2 * entries[0].size_bytes)
    cache.check()


def test_what_another_process_evicts_is_gone_here_too(tmp_path: Path):
    store, command_line = PackedCache(tmp_path, 1 << 30), PackedCache(tmp_path, 1 << 30)
    entry = add(store, tmp_path, 0)
    assert evict(command_line, lambda _: True).freed_bytes == entry.size_bytes
    assert store.get(entry.key, REF) is None
    assert usage(store).entries == 0
    store.check()


def test_the_parts_of_a_key_cannot_be_shifted_into_one_another():
    digests = [f"{n:064x}" for n in range(4)]
    keys = {cache_key(a, b, c) for a in digests for b in ("", *digests) for c in digests}
    assert len(keys) == len(digests) * (len(digests) + 1) * len(digests)


WORKER = """
import json, random, sys, time
from pathlib import Path
from adapter_store.cache import PackedCache
from tests.adapter_store.test_cache import content
import tests.adapter_store.test_cache as t
from adapter_store import pack
import hashlib
folder, scratch, seed, seconds = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
scratch.mkdir()
files = {p.stem: p.read_bytes() for p in (scratch.parent / "packed").iterdir()}
entries = [t.Entry.from_json(line) for line in (scratch.parent / "entries").read_text().splitlines()]
cache = PackedCache(folder, 6 * entries[0].size_bytes)
choose, done, wrong = random.Random(seed), 0, 0
print("ready", flush=True)
end = time.monotonic() + seconds
while time.monotonic() < end:
    entry = choose.choice(entries)
    found = cache.get(entry.key, None)
    if found is None:
        with cache.temp_file(entry.size_bytes) as temp:
            temp.write_bytes(files[entry.digest])
            cache.add(entry, temp)
    else:
        try:
            wrong += hashlib.sha256(content(cache, found)).hexdigest() != entry.digest
        except FileNotFoundError:
            pass
    done += 1
print(json.dumps([done, wrong]), flush=True)
"""


def start_workers(tmp_path: Path, number: int, seconds: float) -> list["subprocess.Popen[str]"]:
    source = PackedCache(tmp_path / "source", 1 << 30)
    entries = [add(source, tmp_path, seed) for seed in range(10)]
    source.close()
    shutil.copytree(tmp_path / "source" / "packed", tmp_path / "packed")
    (tmp_path / "entries").write_text("\n".join(entry.to_json() for entry in entries))
    workers = []
    for seed in range(number):
        arguments = [str(tmp_path / "cache"), str(tmp_path / f"scratch-{seed}"), str(seed), str(seconds)]
        command = [sys.executable, "-c", WORKER, *arguments]
        workers.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    for worker in workers:
        assert worker.stdout is not None
        assert any(line == "ready\n" for line in iter(worker.stdout.readline, ""))
    return workers


@pytest.mark.slow
def test_processes_that_hammer_one_folder_never_see_a_wrong_byte_row_158(tmp_path: Path):
    workers = start_workers(tmp_path, number=3, seconds=4.0)
    for worker in workers:
        output, _ = worker.communicate(timeout=60)
        done, wrong = json.loads(output.splitlines()[-1])
        assert worker.returncode == 0
        assert (done > 20, wrong) == (True, 0)
    cache = PackedCache(tmp_path / "cache", 1 << 30)
    report = verify(cache)
    assert (report.damaged, report.unknown, report.missing, report.adopted) == ((), (), (), ())
    assert list((tmp_path / "cache").glob("index.corrupt-*")) == []
    sizes = [path.stat().st_size for path in (tmp_path / "cache" / "packed").iterdir()]
    assert sum(sizes) <= 6 * max(sizes)
    cache.check()
    cache.close()


@pytest.mark.slow
def test_writers_that_are_killed_leave_a_sound_cache_row_158(tmp_path: Path):
    workers = start_workers(tmp_path, number=2, seconds=60.0)
    time.sleep(1.5)
    for worker in workers:
        worker.send_signal(signal.SIGKILL)
        worker.communicate()
    cache = PackedCache(tmp_path / "cache", 1 << 30)
    entries = cache.entries()
    assert entries
    for entry in entries:
        found = cache.get(entry.key, None)
        assert found is not None
        assert hashlib.sha256(content(cache, found)).hexdigest() == entry.digest
    for temp in (tmp_path / "cache" / "temp").iterdir():
        os.utime(temp, (0, 0))
    cache.close()
    cache = PackedCache(tmp_path / "cache", 1 << 30)
    assert list((tmp_path / "cache" / "temp").iterdir()) == []
    cache.check()
    cache.close()
