"""Step 7: packed files by key on the disk, least recently used ones evicted by bytes.

`packed/<digest>.safetensors` are the files, named by their sha256; `index/` is a diskcache of JSON texts about them,
and can be lost: it is rebuilt from the files. Nothing in the folder is ever unpickled. All methods block; any thread.
Two stores may share one folder on a local disk.
"""

import contextlib
import errno
import hashlib
import sqlite3
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import diskcache
import structlog

from adapter_store import metrics
from adapter_store.entries import Entry, KnownRef, choose_victims
from adapter_store.rebuild import entry_of_file
from loraplex.errors import StorageExhausted

log = structlog.stdlib.get_logger("loraplex.store")
T = TypeVar("T")

_ENTRY, _NOTE = "entry:", "note:"
_STALE_TEMP_S = 3600
_NOTES_LAST_S = 30 * 86400
_READ_BYTES = 8 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT)


class PlainDisk(diskcache.Disk):
    """Texts under text keys, inside the index. Anything else, above all a pickle, is a corrupt index."""

    def put(self, key: Any) -> Any:
        """The database form of a key."""
        return super().put(_text(key))

    def get(self, key: Any, raw: Any) -> Any:
        """The key of a row."""
        return _text(key if raw else None)

    def store(self, value: Any, read: bool, key: Any = None) -> Any:
        """The database form of a value."""
        return 0, diskcache.core.MODE_RAW, None, _text(None if read else value)

    def fetch(self, mode: Any, filename: Any, value: Any, read: Any) -> Any:
        """The value of a row."""
        return _text(value if mode == diskcache.core.MODE_RAW else None)


def _text(value: Any) -> str:
    if type(value) is not str:
        raise sqlite3.DatabaseError("the cache's index holds something that is no text")
    return value


class PackedCache:
    """The packed files below `folder`, at most `limit_bytes` of them."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._files, self._temps, self._index_folder = folder / "packed", folder / "temp", folder / "index"
        self._limit_bytes = limit_bytes
        self._lock = threading.RLock()
        self._pins: Counter[str] = Counter()
        self._verified: set[str] = set()
        for path in (self._files, self._temps):
            path.mkdir(parents=True, exist_ok=True)
        self._remove_stale_temps()
        self._index = self._open_index()
        self._with_index(self._adopt_unknown_files)

    def __repr__(self) -> str:
        entries = self.entries()
        size_bytes = sum(entry.size_bytes for entry in entries)
        return (
            f"<PackedCache {len(entries)} entries, {size_bytes} of {self._limit_bytes} bytes, {len(self._pins)} pinned>"
        )

    def close(self) -> None:
        """Close the index; the files stay."""
        self._index.close()

    def get(self, key: str, ref: KnownRef | None) -> Entry | None:
        """The entry under `key`, noted as used through `ref`; None when it is not there or its file is damaged."""
        entry = self._with_index(lambda: self._read_entry(key))
        if entry is None:
            return None
        if not self._is_sound(entry):
            self._with_index(lambda: self._remove(entry))
            return None
        used = entry.used(time.time(), ref)
        self._with_index(lambda: self._index.set(_ENTRY + key, used.to_json()))
        return used

    def add(self, entry: Entry, temp: Path) -> None:
        """Take over the packed file `temp` as `entry`, evicting as needed.

        Raises StorageExhausted when it does not fit beside what is pinned; then `temp` is left to the caller.
        """

        def adopt() -> None:
            with self._index.transact():
                self._make_room(entry)
                if temp.exists():  # else it was moved just before the index was found corrupt
                    temp.replace(self._path(entry.digest))
                self._index.set(_ENTRY + entry.key, entry.to_json())

        self._with_index(adopt)
        self._verified.add(entry.digest)
        self._measure()

    @contextmanager
    def temp_file(self) -> Iterator[Path]:
        """A path to write a packed file to; gone afterwards unless `add` took it. A full disk is StorageExhausted."""
        path = self._temps / uuid.uuid4().hex
        try:
            yield path
        except OSError as error:
            if error.errno not in _FULL:
                raise
            raise _exhausted("The store's disk is full.") from error
        finally:
            path.unlink(missing_ok=True)

    @contextmanager
    def open(self, entry: Entry) -> Iterator[BinaryIO]:
        """The packed file, pinned while it is open. FileNotFoundError when another store evicted it meanwhile."""
        with self._lock:
            self._pins[entry.digest] += 1
        try:
            with self._path(entry.digest).open("rb") as stream:
                yield stream
        finally:
            with self._lock:
                self._pins[entry.digest] -= 1
                self._pins += Counter()  # drops the zeros

    def entries(self) -> list[Entry]:
        """All entries, in no order."""
        return self._with_index(lambda: [e for key in self._index if (e := self._read_entry_at(key))])

    def note(self, name: str, text: str) -> None:
        """Keep a text under a name, for some weeks. Notes are a convenience: they may be lost."""
        self._with_index(lambda: self._index.set(_NOTE + name, text, expire=_NOTES_LAST_S))

    def read_note(self, name: str) -> str | None:
        """The text under a name, if there is one."""
        return self._with_index(lambda: self._index.get(_NOTE + name))

    def check(self) -> None:
        """For tests: every entry has its file, every file its entry, and the limit holds."""
        entries = self.entries()
        names = {entry.digest for entry in entries}
        assert names == {path.stem for path in self._files.iterdir()}, "entries and files differ"
        unpinned = sum(entry.size_bytes for entry in entries if entry.digest not in self._pins)
        assert unpinned <= self._limit_bytes, "over the limit"

    def _make_room(self, entry: Entry) -> None:
        others = {e.digest: e for e in self.entries() if e.digest != entry.digest}
        over_bytes = sum(e.size_bytes for e in others.values()) + entry.size_bytes - self._limit_bytes
        victims = choose_victims(others.values(), over_bytes, self._pins)
        if sum(victim.size_bytes for victim in victims) < over_bytes:
            raise _exhausted(f"A packed adapter of {entry.size_bytes} bytes does not fit in the store's cache.")
        for victim in victims:
            self._remove(victim)

    def _remove(self, entry: Entry) -> None:
        with self._index.transact():
            for key in list(self._index):
                known = self._read_entry_at(key)
                if known is not None and known.digest == entry.digest:
                    self._index.delete(key)
            self._path(entry.digest).unlink(missing_ok=True)
        self._verified.discard(entry.digest)
        log.info("packed adapter removed", digest=entry.digest)

    def _is_sound(self, entry: Entry) -> bool:
        path = self._path(entry.digest)
        try:
            if path.stat().st_size != entry.size_bytes:
                return False
            if entry.digest not in self._verified:
                if _sha256(path) != entry.digest:
                    log.warning("packed adapter damaged", digest=entry.digest)
                    return False
                self._verified.add(entry.digest)
        except FileNotFoundError:
            return False
        return True

    def _read_entry(self, key: str) -> Entry | None:
        return self._read_entry_at(_ENTRY + key)

    def _read_entry_at(self, index_key: str) -> Entry | None:
        if not index_key.startswith(_ENTRY) or (text := self._index.get(index_key)) is None:
            return None
        try:
            return Entry.from_json(text)
        except ValueError as error:
            raise sqlite3.DatabaseError("an entry of the cache's index cannot be read") from error

    def _path(self, digest: str) -> Path:
        return self._files / f"{digest}.safetensors"

    def _adopt_unknown_files(self) -> None:
        """Make entries for files that the index does not know: it is new, or was lost."""
        known = {entry.digest for entry in (self._read_entry_at(key) for key in self._index) if entry}
        for path in self._files.glob("*.safetensors"):
            if path.stem in known:
                continue
            entry = entry_of_file(path)
            if entry is None:
                path.unlink(missing_ok=True)
            else:
                self._index.set(_ENTRY + entry.key, entry.to_json())
                log.info("packed adapter adopted", digest=entry.digest)
        self._measure()

    def _measure(self) -> None:
        entries = self.entries()
        metrics.cache_entries.set(len(entries))
        metrics.cache_bytes.set(sum(entry.size_bytes for entry in entries))

    def _remove_stale_temps(self) -> None:
        for path in self._temps.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > _STALE_TEMP_S:
                    path.unlink()

    def _with_index(self, action: Callable[[], T]) -> T:
        """Run `action` under the lock; a corrupt index is replaced by one made from the files, once."""
        with self._lock:
            try:
                return action()
            except sqlite3.DatabaseError as error:
                if "full" in str(error):
                    raise _exhausted("The store's disk is full.") from error
                if _is_busy(error):
                    raise
                log.warning("cache index corrupt", error=str(error))
                self._index.close()
                self._index = self._open_index()
                self._adopt_unknown_files()
                return action()

    def _open_index(self) -> Any:
        """Open the index; what is damaged is moved aside and a new one started."""
        if not _is_sound_index(self._index_folder):
            self._quarantine()
        try:
            return self._new_index()
        except sqlite3.DatabaseError:
            self._quarantine()
            return self._new_index()

    def _new_index(self) -> Any:
        # All settings are passed: those in the folder would win over the defaults.
        return diskcache.Cache(
            str(self._index_folder),
            disk=PlainDisk,
            disk_min_file_size=1 << 30,
            disk_pickle_protocol=0,
            eviction_policy="none",
            size_limit=1 << 40,
            cull_limit=1,
            statistics=0,
            tag_index=0,
            timeout=60,
        )

    def _quarantine(self) -> None:
        aside = self._index_folder.with_name(f"index.corrupt-{int(time.time())}-{uuid.uuid4().hex[:6]}")
        with contextlib.suppress(FileNotFoundError):
            self._index_folder.rename(aside)
            log.warning("cache index set aside", folder=aside.name)


def _is_sound_index(folder: Path) -> bool:
    """Whether SQLite finds nothing wrong, and every row is a plain text as `PlainDisk` writes it."""
    database = folder / "cache.db"
    if not database.exists():
        return True
    try:
        with contextlib.closing(sqlite3.connect(database, timeout=60)) as connection:
            if connection.execute("PRAGMA quick_check").fetchone() != ("ok",):
                return False
            odd = "SELECT 1 FROM Cache WHERE typeof(key) != 'text' OR typeof(value) != 'text' OR NOT raw OR mode != 1"
            texts = connection.execute("SELECT key, value FROM Cache WHERE key LIKE 'entry:%'").fetchall()
            if connection.execute(odd).fetchone() is not None:
                return False
        for _, text in texts:
            Entry.from_json(text)
    except (sqlite3.DatabaseError, ValueError) as error:
        return _is_busy(error)
    return True


def _is_busy(error: Exception) -> bool:
    """Whether another store only holds the index longer than the timeout."""
    return "locked" in str(error) or "busy" in str(error)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _exhausted(message: str) -> StorageExhausted:
    return StorageExhausted(message, remedy="Free space on the store's disk, or raise cache_bytes.")
