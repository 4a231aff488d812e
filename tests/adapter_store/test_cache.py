"""The cache of packed files: LRU by bytes, pins, damage of every kind, and two stores on one folder."""

import errno
import os
import pickle
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from adapter_store import pack
from adapter_store.cache import PackedCache
from adapter_store.entries import Entry, KnownRef
from adapter_store.keys import cache_key
from loraplex.errors import StorageExhausted
from tests.adapter_store.samples import WIDTH, flux_layout, pack_file, peft, write_adapter

LAYOUT = flux_layout()
REF = KnownRef("org/name", "a.safetensors", local=False)


class Boom:
    """What a hostile pickle would do."""

    touched = False

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _explode, ()


def _explode() -> None:
    Boom.touched = True


@pytest.fixture(scope="module")
def packed_size(tmp_path_factory: pytest.TempPathFactory) -> int:
    folder = tmp_path_factory.mktemp("size")
    cache = PackedCache(folder, 1 << 30)
    size_bytes = add(cache, folder, 0).size_bytes
    cache.close()
    return size_bytes


def add(cache: PackedCache, folder: Path, seed: int) -> Entry:
    """Pack an adapter of its own content and put it into the cache."""
    tensors = peft("transformer.transformer_blocks.0.attn.to_q", WIDTH, WIDTH, 4, seed=seed)
    packed = pack_file(write_adapter(folder / "source.safetensors", tensors), LAYOUT)
    source_digest = f"{seed:064d}"
    with cache.temp_file() as temp:
        digest, size_bytes = packed.write(pack.Origin(source_digest), temp)
        key = cache_key(source_digest, "", LAYOUT.digest)
        entry = Entry(key, digest, size_bytes, packed.rank, packed.module_indexes, LAYOUT.digest, time.time(), (REF,))
        cache.add(entry, temp)
    cache.check()
    return entry


def content(cache: PackedCache, entry: Entry) -> bytes:
    with cache.open(entry) as stream:
        return stream.read()


def test_what_is_added_is_found_again_also_after_a_restart(tmp_path: Path):
    cache = PackedCache(tmp_path, 1 << 30)
    entry = add(cache, tmp_path, 0)
    before = content(cache, entry)
    cache.close()
    again = PackedCache(tmp_path, 1 << 30)
    found = again.get(entry.key, None)
    assert found is not None
    assert (found.digest, found.refs) == (entry.digest, (REF,))
    assert content(again, found) == before
    assert again.get("another key", None) is None
    assert "\n" not in repr(again)


def test_the_least_recently_used_is_evicted_one_at_a_time(tmp_path: Path, packed_size: int):
    cache = PackedCache(tmp_path, 3 * packed_size)
    entries = [add(cache, tmp_path, seed) for seed in range(3)]
    assert cache.get(entries[0].key, REF)
    fourth = add(cache, tmp_path, 3)
    assert {entry.digest for entry in cache.entries()} == {entries[0].digest, entries[2].digest, fourth.digest}
    assert cache.get(entries[1].key, None) is None


def test_a_pinned_adapter_is_never_evicted(tmp_path: Path, packed_size: int):
    cache = PackedCache(tmp_path, 2 * packed_size)
    pinned, other = add(cache, tmp_path, 0), add(cache, tmp_path, 1)
    with cache.open(pinned) as stream:
        add(cache, tmp_path, 2)
        assert cache.get(other.key, None) is None
        assert cache.get(pinned.key, None)
        with cache.open(add(cache, tmp_path, 3)), pytest.raises(StorageExhausted):
            add(cache, tmp_path, 4)
        assert len(stream.read()) == pinned.size_bytes
    add(cache, tmp_path, 5)
    add(cache, tmp_path, 6)
    assert cache.get(pinned.key, None) is None


def test_an_adapter_larger_than_the_cache_is_refused_and_evicts_nothing(tmp_path: Path, packed_size: int):
    cache = PackedCache(tmp_path, packed_size - 1)
    with pytest.raises(StorageExhausted):
        add(cache, tmp_path, 0)
    assert list((tmp_path / "temp").iterdir()) == []
    cache.check()


def test_a_full_disk_is_storage_exhausted_and_leaves_nothing_behind_row_138(tmp_path: Path):
    cache = PackedCache(tmp_path, 1 << 30)
    with pytest.raises(StorageExhausted), cache.temp_file() as temp:
        temp.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert list((tmp_path / "temp").iterdir()) == []
    cache.check()


@pytest.mark.parametrize("damage", ["flip a bit", "cut", "remove"])
def test_a_damaged_file_is_not_served_after_a_start(tmp_path: Path, damage: str):
    cache = PackedCache(tmp_path, 1 << 30)
    entry, other = add(cache, tmp_path, 0), add(cache, tmp_path, 1)
    cache.close()
    path = tmp_path / "packed" / f"{entry.digest}.safetensors"
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(whole if damage == "flip a bit" else whole[:-4])
    again = PackedCache(tmp_path, 1 << 30)
    assert again.get(entry.key, None) is None
    assert again.get(other.key, None)
    again.check()


def scribble(folder: Path) -> None:
    (folder / "index" / "cache.db").write_bytes(b"this is no database at all " * 500)


def truncate(folder: Path) -> None:
    database = folder / "index" / "cache.db"
    database.write_bytes(database.read_bytes()[: database.stat().st_size // 2])


def zero_pages(folder: Path) -> None:
    database = folder / "index" / "cache.db"
    whole = bytearray(database.read_bytes())
    whole[4096:] = bytes(len(whole) - 4096)
    database.write_bytes(whole)


def plant(sql: str, *values: object) -> Callable[[Path], None]:
    def planted(folder: Path) -> None:
        with sqlite3.connect(folder / "index" / "cache.db") as connection:
            connection.execute(sql, values)
        connection.close()

    return planted


def remove_index(folder: Path) -> None:
    for path in (folder / "index").iterdir():
        path.unlink()


PICKLE = pickle.dumps(Boom())
DAMAGES = {
    "scribbled": scribble,
    "cut": truncate,
    "zeros": zero_pages,
    "removed": remove_index,
    "no table": plant("DROP TABLE Cache"),
    "a pickled value": plant("UPDATE Cache SET mode = 4, value = ?", PICKLE),
    "a pickled key": plant("UPDATE Cache SET raw = 0, key = ?", PICKLE),
    "a pickle in a file": plant("UPDATE Cache SET mode = 4, filename = '../evil.pickle', value = NULL"),
    "no JSON": plant("UPDATE Cache SET value = '{'"),
    "an odd policy": plant("UPDATE Settings SET value = 'nonsense' WHERE key = 'eviction_policy'"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_index_is_set_aside_and_made_again_from_the_files_row_158(tmp_path: Path, name: str):
    cache = PackedCache(tmp_path, 1 << 30)
    entry = add(cache, tmp_path, 0)
    cache.close()
    (tmp_path / "evil.pickle").write_bytes(PICKLE)
    for extra in (tmp_path / "index").glob("cache.db-*"):
        extra.unlink()
    DAMAGES[name](tmp_path)
    again = PackedCache(tmp_path, 1 << 30)
    found = again.get(entry.key, REF)
    assert found is not None
    assert (found.digest, found.rank, found.module_indexes) == (entry.digest, entry.rank, entry.module_indexes)
    again.check()
    assert not Boom.touched


def test_an_index_that_is_damaged_while_the_store_runs_is_made_again_row_158(tmp_path: Path):
    cache = PackedCache(tmp_path, 1 << 30)
    entry = add(cache, tmp_path, 0)
    with sqlite3.connect(tmp_path / "index" / "cache.db") as connection:
        connection.execute("UPDATE Cache SET mode = 4, value = ?", (PICKLE,))
    connection.close()
    assert cache.get(entry.key, None)
    assert not Boom.touched
    add(cache, tmp_path, 1)


def test_two_stores_on_one_folder_do_not_break_one_another(tmp_path: Path, packed_size: int):
    one, two = PackedCache(tmp_path, 2 * packed_size), PackedCache(tmp_path, 2 * packed_size)
    first = add(one, tmp_path, 0)
    assert two.get(first.key, None)
    add(two, tmp_path, 1)
    add(two, tmp_path, 2)
    assert one.get(first.key, None) is None
    with pytest.raises(FileNotFoundError), one.open(first):
        pass
    assert add(one, tmp_path, 0).digest == first.digest
    assert two.get(first.key, None)
    one.check()
    two.check()


def test_a_foreign_file_in_the_folder_is_removed_and_temps_of_a_crash_too(tmp_path: Path):
    for name in ("packed", "temp"):
        (tmp_path / name).mkdir()
    (tmp_path / "packed" / "x.safetensors").write_bytes(PICKLE)
    stale = tmp_path / "temp" / "stale"
    stale.write_bytes(b"half")
    os.utime(stale, (0, 0))
    PackedCache(tmp_path, 1 << 30).check()
    assert not stale.exists()
    assert not Boom.touched


def test_notes_are_kept(tmp_path: Path):
    cache = PackedCache(tmp_path, 1 << 30)
    cache.note("a", "text")
    cache.close()
    again = PackedCache(tmp_path, 1 << 30)
    assert again.read_note("a") == "text"
    assert again.read_note("b") is None
