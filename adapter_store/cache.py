"""Step 7: packed files by key on the disk, least recently used ones evicted by bytes.

`packed/<digest>.safetensors` are the files, named by their sha256; `index/` holds texts about them, and can be lost: it
is made again from the files. A file is hashed before it is first served, and again whenever its size, times or inode
changed. All methods block; any thread. Several stores, and the command line, may share one folder on a local disk.
"""

import contextlib
import os
import sqlite3
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeAlias

import structlog

from adapter_store import metrics
from adapter_store.disk import Disk, exhausted, full_disk_is_exhausted, require_writable
from adapter_store.entries import Entry, KnownRef
from adapter_store.hashing import sha256_of
from adapter_store.index import Index
from adapter_store.ledger import Ledger
from adapter_store.rebuild import entry_of_file

log = structlog.stdlib.get_logger("loraplex.store")

_ENTRY, _NOTE = "entry:", "note:"
_SUFFIX = ".safetensors"
_STALE_TEMP_S = 3600
_NOTES_LAST_S = 30 * 86400
# A use is written to the disk when the last one that was written is older.
_USES_WRITTEN_EVERY_S = 30.0

Stamp: TypeAlias = tuple[int, int, int, int]


@dataclass(frozen=True)
class Usage:
    """What the cache holds."""

    entries: int
    size_bytes: int
    limit_bytes: int
    pinned: int
    free_disk_bytes: int


@dataclass(frozen=True)
class Verified:
    """What `verify` found, by digest or file name. Sound files without an entry (`adopted`) have one now; damaged and
    unknown files, and entries without a file (`missing`), are removed."""

    sound: tuple[str, ...]
    adopted: tuple[str, ...]
    damaged: tuple[str, ...]
    unknown: tuple[str, ...]
    missing: tuple[str, ...]


@dataclass(frozen=True)
class Evicted:
    """What `evict` removed; `kept` were chosen too, but are being sent."""

    entries: tuple[Entry, ...]
    freed_bytes: int
    kept: tuple[Entry, ...]


class PackedCache:
    """The packed files below `folder`, at most `limit_bytes` of them."""

    def __init__(self, folder: Path, limit_bytes: int, disk: Disk | None = None, lock_timeout_s: float = 60.0) -> None:
        self._files, self._temps = folder / "packed", folder / "temp"
        self._limit_bytes, self._disk = limit_bytes, disk or Disk(folder)
        self._lock = threading.RLock()
        self._pins: Counter[str] = Counter()
        self._verified: dict[str, Stamp] = {}
        self._ledger, self._ledger_of = Ledger(), 0
        require_writable(folder, self._files, self._temps)
        self._remove_stale_temps()
        self._index = Index(folder / "index", _is_row_sound, self._adopt_unknown_files, self._lock, lock_timeout_s)
        self._index.run(self._adopt_unknown_files)

    def __repr__(self) -> str:
        held = f"{len(self._ledger)} entries, {self._ledger.size_bytes} of {self._limit_bytes} bytes"
        return f"<PackedCache {held}, {len(self._pins)} pinned>"

    def close(self) -> None:
        """Close the index; the files stay."""
        self._index.close()

    def get(self, key: str, ref: KnownRef | None) -> Entry | None:
        """The entry under `key`, noted as used through `ref`; None when it is not there or its file is damaged."""
        entry = self._index.run(lambda: self._read_entry(_ENTRY + key))
        if entry is None:
            return None
        if not self._is_sound(entry.digest, entry.size_bytes):
            self._index.run(lambda: self._remove(entry.digest))
            return None
        used = entry.used(time.time(), ref)
        with self._lock:
            self._ledger.put(used)
        if used.refs != entry.refs or used.last_used_s - entry.last_used_s > _USES_WRITTEN_EVERY_S:
            self._index.run(lambda: self._index.set(_ENTRY + key, used.to_json()))
        return used

    def add(self, entry: Entry, temp: Path) -> None:
        """Take over the packed file `temp` as `entry`, evicting as needed.

        Raises StorageExhausted when it does not fit beside what is pinned; then `temp` is left to the caller.
        """
        path = self._path(entry.digest)

        def adopt() -> None:
            with self._index.transact():
                self._follow_other_stores()
                self._make_room(entry.size_bytes, entry.digest, is_written=True)
                if temp.exists():  # else it was moved just before the index was found corrupt
                    temp.replace(path)
                self._index.set(_ENTRY + entry.key, entry.to_json())
                self._ledger.put(entry)
                self._verified[entry.digest] = _stamp(path.stat())
                self._ledger_of = self._files.stat().st_mtime_ns

        with self._lock:
            self._index.run(adopt)
            self._measure()

    @contextmanager
    def temp_file(self, size_bytes: int = 0) -> Iterator[Path]:
        """A path to write a packed file of `size_bytes` to; gone afterwards unless `add` took it.

        What was used least makes room on the disk beforehand. Raises StorageExhausted when that does not suffice, and
        for a full disk.
        """
        with self._lock:
            self._index.run(lambda: self._make_room(size_bytes, "", is_written=False))
        path = self._temps / uuid.uuid4().hex
        try:
            with full_disk_is_exhausted():
                yield path
        finally:
            path.unlink(missing_ok=True)

    @contextmanager
    def open(self, entry: Entry) -> Iterator[BinaryIO]:
        """The packed file, pinned while it is open.

        FileNotFoundError when it was evicted by another store, or damaged, since `get`: get it again.
        """
        with self._lock:
            self._pins[entry.digest] += 1
        try:
            with self._path(entry.digest).open("rb") as stream:
                if self._verified.get(entry.digest) != _stamp(os.fstat(stream.fileno())):
                    self._check_again(entry)
                yield stream
        finally:
            with self._lock:
                self._pins[entry.digest] -= 1
                self._pins += Counter()  # drops the zeros

    def entries(self) -> list[Entry]:
        """All entries, in no order, as of now also in other stores."""
        with self._lock:
            self._index.run(self._read_ledger)
            return list(self._ledger)

    def usage(self) -> Usage:
        """What the cache holds now."""
        self._index.run(self._follow_other_stores)
        free = self._disk.free(self._disk.folder)
        return Usage(len(self._ledger), self._ledger.size_bytes, self._limit_bytes, len(self._pins), free)

    def evict(self, is_chosen: Callable[[Entry], bool]) -> Evicted:
        """Remove the packed files of the entries that are chosen, except those that this process is sending."""
        chosen = [entry for entry in self.entries() if is_chosen(entry)]
        with self._lock:
            kept = tuple(entry for entry in chosen if entry.digest in self._pins)
            digests = {entry.digest for entry in chosen} - {entry.digest for entry in kept}
            removed = [one for digest in sorted(digests) for one in self._ledger.of_digest(digest)]
            freed_bytes = sum(self._ledger.size_of(digest) for digest in digests)
            for digest in digests:
                self._index.run(lambda digest=digest: self._remove(digest))  # type: ignore[misc]
            self._measure()
        return Evicted(tuple(removed), freed_bytes, kept)

    def verify(self) -> Verified:
        """Hash every file, whatever is known of it; remove what is wrong. Other calls go on meanwhile."""
        found: dict[str, list[str]] = {kind: [] for kind in Verified.__dataclass_fields__}
        self._verified.clear()
        self.entries()
        for path in sorted(self._files.iterdir()):
            kind = self._verify_file(path)
            if kind:
                found[kind].append(path.stem if path.suffix == _SUFFIX else path.name)
        for digest in {entry.digest for entry in self.entries()}:
            if self._index.run(lambda digest=digest: self._remove_without_file(digest)):  # type: ignore[misc]
                found["missing"].append(digest)
        return Verified(**{kind: tuple(sorted(names)) for kind, names in found.items()})

    def note(self, name: str, text: str) -> None:
        """Keep a text under a name, for some weeks. Notes are a convenience: they may be lost."""
        self._index.run(lambda: self._index.set(_NOTE + name, text, _NOTES_LAST_S))

    def read_note(self, name: str) -> str | None:
        """The text under a name, if there is one."""
        return self._index.run(lambda: self._index.get(_NOTE + name))

    def check(self) -> None:
        """For tests: every entry has its file, every file its entry, and the limit holds."""
        entries = self.entries()
        self._ledger.check()
        names = {entry.digest for entry in entries}
        assert names == {path.stem for path in self._files.iterdir()}, "entries and files differ"
        unpinned = sum(self._ledger.size_of(digest) for digest in names - set(self._pins))
        assert unpinned <= self._limit_bytes, "over the limit"

    def _make_room(self, size_bytes: int, digest: str, is_written: bool) -> None:
        """Evict until a file of that size fits in the limit, and on the disk unless it lies there already."""
        held_bytes = self._ledger.size_bytes - self._ledger.size_of(digest)
        over_bytes = held_bytes + size_bytes - self._limit_bytes
        over_bytes = max(over_bytes, self._disk.missing_bytes(0 if is_written else size_bytes))
        victims = self._ledger.victims(over_bytes, {*self._pins, digest}, self._was_used_elsewhere)
        if sum(map(self._ledger.size_of, victims)) < over_bytes:
            raise exhausted(f"A packed adapter of {size_bytes} bytes does not fit in the store's cache or on its disk.")
        for victim in victims:
            self._remove(victim)

    def _was_used_elsewhere(self, digest: str) -> bool:
        """Whether another store used a packed adapter later than this one knows; learns of it."""
        is_later = False
        for entry in self._ledger.of_digest(digest):
            stored = self._read_entry(_ENTRY + entry.key)
            if stored is not None and stored.last_used_s > entry.last_used_s + _USES_WRITTEN_EVERY_S:
                self._ledger.put(stored)
                is_later = True
        return is_later

    def _remove(self, digest: str) -> None:
        with self._lock:
            with self._index.transact():
                for entry in self._ledger.of_digest(digest):
                    self._index.delete(_ENTRY + entry.key)
                self._path(digest).unlink(missing_ok=True)
            self._ledger.drop(digest)
            self._verified.pop(digest, None)
            self._ledger_of = self._files.stat().st_mtime_ns
            self._measure()
        log.info("packed adapter removed", digest=digest)

    def _remove_without_file(self, digest: str) -> bool:
        with self._index.transact():
            is_missing = not self._path(digest).exists()
            if is_missing:
                self._remove(digest)
        return is_missing

    def _is_sound(self, digest: str, size_bytes: int) -> bool:
        """Whether the file is as its name says. Hashes it unless that was done and nothing touched it since."""
        path = self._path(digest)
        try:
            stamp = _stamp(path.stat())
            if self._verified.get(digest) == stamp:
                return True
            if stamp[0] != size_bytes or sha256_of(path) != digest:
                log.warning("packed adapter damaged", digest=digest)
                return False
            self._verified[digest] = stamp
        except FileNotFoundError:
            return False
        return True

    def _check_again(self, entry: Entry) -> None:
        if not self._is_sound(entry.digest, entry.size_bytes):
            self._index.run(lambda: self._remove(entry.digest))
            raise FileNotFoundError(f"{entry.digest} was damaged")

    def _verify_file(self, path: Path) -> str:
        """What a file of the folder is; "" when it went away meanwhile."""
        digest = path.stem
        try:
            size_bytes = path.stat().st_size
            if path.suffix != _SUFFIX or (entry_of_file(path) is None and sha256_of(path) == digest):
                path.unlink()
                return "unknown"
        except FileNotFoundError:
            return ""
        if not self._is_sound(digest, size_bytes):
            self._index.run(lambda: self._remove(digest))
            return "damaged"
        return self._index.run(lambda: self._adopt(path))

    def _read_entry(self, index_key: str) -> Entry | None:
        text = self._index.get(index_key)
        return None if text is None else _entry(text)

    def _path(self, digest: str) -> Path:
        return self._files / f"{digest}{_SUFFIX}"

    def _adopt_unknown_files(self) -> None:
        """Make entries for files that the index does not know: it is new, or was lost."""
        self._read_ledger()
        for path in self._files.iterdir():
            self._adopt(path)
        self._measure()

    def _adopt(self, path: Path) -> str:
        """Make an entry for a file without one. Within a transaction: another store may just be adding it."""
        if path.suffix == _SUFFIX and self._ledger.of_digest(path.stem):
            return "sound"
        with self._index.transact():
            entry = entry_of_file(path) if path.suffix == _SUFFIX else None
            if entry is None:
                path.unlink(missing_ok=True)
                return "unknown"
            stored = self._read_entry(_ENTRY + entry.key)
            if stored is not None and stored.digest == entry.digest:
                self._ledger.put(stored)
                return "sound"
            self._index.set(_ENTRY + entry.key, entry.to_json())
            self._ledger.put(entry)
        log.info("packed adapter adopted", digest=entry.digest)
        return "adopted"

    def _follow_other_stores(self) -> None:
        """Read the entries again when somebody else added or removed files."""
        if self._ledger_of != self._files.stat().st_mtime_ns:
            self._read_ledger()

    def _read_ledger(self) -> None:
        with self._lock:
            self._ledger_of = self._files.stat().st_mtime_ns
            known = {entry.key: entry for entry in self._ledger}
            stored = [_entry(text) for _, text in self._index.rows(_ENTRY)]
            self._ledger.reset(max(one, known.get(one.key, one), key=lambda e: e.last_used_s) for one in stored)

    def _measure(self) -> None:
        metrics.cache_entries.set(len(self._ledger))
        metrics.cache_bytes.set(self._ledger.size_bytes)

    def _remove_stale_temps(self) -> None:
        for path in self._temps.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > _STALE_TEMP_S:
                    path.unlink()


def _entry(text: str) -> Entry:
    try:
        return Entry.from_json(text)
    except ValueError as error:
        raise sqlite3.DatabaseError("an entry of the cache's index cannot be read") from error


def _is_row_sound(key: str, text: str) -> bool:
    try:
        return not key.startswith(_ENTRY) or bool(Entry.from_json(text))
    except ValueError:
        return False


def _stamp(stat: os.stat_result) -> Stamp:
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino
