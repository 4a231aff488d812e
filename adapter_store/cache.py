"""Step 7: packed files by key on the disk, least recently used ones evicted by bytes.

What the store does with them when it serves; `upkeep` is for its operators. All methods block; any thread.
"""

import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from adapter_store.disk import Disk, exhausted, full_disk_is_exhausted
from adapter_store.entries import Entry, KnownRef
from adapter_store.shelf import Shelf

# A use is written to the disk when the last one that was written is older.
_USES_WRITTEN_EVERY_S = 30.0


class PackedCache:
    """The packed files below `folder`, at most `limit_bytes` of them."""

    def __init__(self, folder: Path, limit_bytes: int, disk: Disk | None = None, lock_timeout_s: float = 60.0) -> None:
        self.limit_bytes, self.disk = limit_bytes, disk or Disk(folder)
        self.shelf = Shelf(folder, lock_timeout_s)

    def __repr__(self) -> str:
        ledger = self.shelf.ledger
        held = f"{len(ledger)} entries, {ledger.size_bytes} of {self.limit_bytes} bytes"
        return f"<PackedCache {held}, {len(self.shelf.pins)} pinned>"

    def close(self) -> None:
        """Close the index; the files stay."""
        self.shelf.close()

    def get(self, key: str, ref: KnownRef | None) -> Entry | None:
        """The entry under `key`, noted as used through `ref`; None when it is not there or its file is damaged."""
        shelf = self.shelf
        entry = shelf.run(lambda: shelf.read(key))
        if entry is None:
            return None
        if not shelf.files.is_sound(entry.digest, entry.size_bytes):
            shelf.run(lambda: shelf.remove(entry.digest))
            return None
        used = entry.used(time.time(), ref)
        with shelf.lock:
            shelf.ledger.put(used)
        if used.refs != entry.refs or used.last_used_s - entry.last_used_s > _USES_WRITTEN_EVERY_S:
            shelf.run(lambda: shelf.write(used))
        return used

    def add(self, entry: Entry, temp: Path) -> None:
        """Take over the packed file `temp` as `entry`, evicting as needed.

        Raises StorageExhausted when it does not fit beside what is pinned; then `temp` is left to the caller.
        """
        shelf = self.shelf

        def adopt() -> None:
            with shelf.transact():
                shelf.follow_other_stores()
                self._make_room(entry.size_bytes, entry.digest, is_written=True)
                shelf.take(entry, temp)

        with shelf.lock:
            shelf.run(adopt)
            shelf.measure()

    @contextmanager
    def temp_file(self, size_bytes: int = 0) -> Iterator[Path]:
        """A path to write a packed file of `size_bytes` to; gone afterwards unless `add` took it.

        What was used least makes room on the disk beforehand. Raises StorageExhausted when that does not suffice, and
        for a full disk.
        """
        with self.shelf.lock:
            self.shelf.run(lambda: self._make_room(size_bytes, "", is_written=False))
        path = self.shelf.files.new_temp()
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
        shelf = self.shelf
        with shelf.lock:
            shelf.pins[entry.digest] += 1
        try:
            with shelf.files.path(entry.digest).open("rb") as stream:
                if not shelf.files.is_known(entry.digest, os.fstat(stream.fileno())):
                    self._check_again(entry)
                yield stream
        finally:
            with shelf.lock:
                shelf.pins[entry.digest] -= 1
                shelf.pins += Counter()  # drops the zeros

    def entries(self) -> list[Entry]:
        """All entries, in no order, as of now also in other stores."""
        with self.shelf.lock:
            self.shelf.run(self.shelf.read_ledger)
            return list(self.shelf.ledger)

    def note(self, name: str, text: str) -> None:
        """Keep a text under a name, for some weeks. Notes are a convenience: they may be lost."""
        self.shelf.run(lambda: self.shelf.note(name, text))

    def read_note(self, name: str) -> str | None:
        """The text under a name, if there is one."""
        return self.shelf.run(lambda: self.shelf.read_note(name))

    def check(self) -> None:
        """For tests: every entry has its file, every file its entry, and the limit holds."""
        entries, ledger = self.entries(), self.shelf.ledger
        ledger.check()
        names = {entry.digest for entry in entries}
        assert names == {path.stem for path in self.shelf.files}, "entries and files differ"
        unpinned = sum(ledger.size_of(digest) for digest in names - set(self.shelf.pins))
        assert unpinned <= self.limit_bytes, "over the limit"

    def _make_room(self, size_bytes: int, digest: str, is_written: bool) -> None:
        """Evict until a file of that size fits in the limit, and on the disk unless it lies there already."""
        ledger = self.shelf.ledger
        over_bytes = ledger.size_bytes - ledger.size_of(digest) + size_bytes - self.limit_bytes
        over_bytes = max(over_bytes, self.disk.missing_bytes(0 if is_written else size_bytes))
        victims = ledger.victims(over_bytes, {*self.shelf.pins, digest}, self._was_used_elsewhere)
        if sum(map(ledger.size_of, victims)) < over_bytes:
            raise exhausted(f"A packed adapter of {size_bytes} bytes does not fit in the store's cache or on its disk.")
        for victim in victims:
            self.shelf.remove(victim)

    def _was_used_elsewhere(self, digest: str) -> bool:
        """Whether another store used a packed adapter later than this one knows; learns of it."""
        is_later = False
        for entry in self.shelf.ledger.of_digest(digest):
            stored = self.shelf.read(entry.key)
            if stored is not None and stored.last_used_s > entry.last_used_s + _USES_WRITTEN_EVERY_S:
                self.shelf.ledger.put(stored)
                is_later = True
        return is_later

    def _check_again(self, entry: Entry) -> None:
        if not self.shelf.files.is_sound(entry.digest, entry.size_bytes):
            self.shelf.run(lambda: self.shelf.remove(entry.digest))
            raise FileNotFoundError(f"{entry.digest} was damaged")
