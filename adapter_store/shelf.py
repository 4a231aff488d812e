"""Packed files together with their entries: in the index on the disk, and in the ledger in memory.

The index can be lost: it is made again from the files. Several stores, and the command line, may share one folder on a
local disk; each follows what the others add and remove. All methods block; any thread.
"""

import sqlite3
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

import structlog

from adapter_store import metrics
from adapter_store.entries import Entry
from adapter_store.index import Index
from adapter_store.ledger import Ledger
from adapter_store.packed_files import SUFFIX, PackedFiles
from adapter_store.rebuild import entry_of_file

log = structlog.stdlib.get_logger("loraplex.store")
T = TypeVar("T")

_ENTRY, _NOTE = "entry:", "note:"
_NOTES_LAST_S = 30 * 86400


class Shelf:
    """What is in the cache's `folder`. `pins` counts the streams of this process on each digest.

    What reads or writes the index is to be called within `run`, what changes several things with `lock` held.
    """

    def __init__(self, folder: Path, lock_timeout_s: float) -> None:
        self.files, self.ledger, self._ledger_of = PackedFiles(folder), Ledger(), 0
        self.lock, self.pins = threading.RLock(), Counter[str]()
        self._index = Index(folder / "index", _is_row_sound, self.adopt_unknown_files, self.lock, lock_timeout_s)
        self.run(self.adopt_unknown_files)

    def __repr__(self) -> str:
        return f"<Shelf {self.ledger}, {len(self.pins)} pinned>"

    def close(self) -> None:
        """Close the index; the files stay."""
        self._index.close()

    def run(self, action: Callable[[], T]) -> T:
        """Run an action on the index, also after folders were removed or the index was found corrupt."""
        if self.files.make_folders():
            self._index.run(self._forget_lost)
        return self._index.run(action)

    def transact(self) -> AbstractContextManager[None]:
        """All or nothing, and alone, also among other stores."""
        return self._index.transact()

    def read(self, key: str) -> Entry | None:
        """The entry of a key."""
        text = self._index.get(_ENTRY + key)
        return None if text is None else _entry(text)

    def write(self, entry: Entry) -> None:
        """Keep an entry in the index."""
        self._index.set(_ENTRY + entry.key, entry.to_json())

    def note(self, name: str, text: str) -> None:
        """Keep a text under a name, for some weeks."""
        self._index.set(_NOTE + name, text, _NOTES_LAST_S)

    def read_note(self, name: str) -> str | None:
        """The text under a name."""
        return self._index.get(_NOTE + name)

    def take(self, entry: Entry, temp: Path) -> None:
        """Move a file that was just written to its place, with its entry. Within a transaction."""
        self.files.take(temp, entry.digest)
        self.write(entry)
        self.ledger.put(entry)
        self._ledger_of = self.files.changed_ns

    def remove(self, digest: str) -> None:
        """Remove a packed file and its entries."""
        with self.lock:
            with self.transact():
                for entry in self.ledger.of_digest(digest):
                    self._index.delete(_ENTRY + entry.key)
                self.files.remove(digest)
            self.ledger.drop(digest)
            self._ledger_of = self.files.changed_ns
            self.measure()
        log.info("packed adapter removed", digest=digest)

    def adopt_unknown_files(self) -> None:
        """Make entries for files that the index does not know: it is new, or was lost."""
        self.files.make_folders()
        self.read_ledger()
        for path in self.files:
            self.adopt(path)
        self.measure()

    def adopt(self, path: Path) -> str:
        """Make an entry for a file without one; what it was: "sound", "adopted" or "unknown"."""
        if path.suffix == SUFFIX and self.ledger.of_digest(path.stem):
            return "sound"
        with self.transact():  # another store may just be adding it
            entry = entry_of_file(path) if path.suffix == SUFFIX else None
            if entry is None:
                self.files.set_aside(path)
                return "unknown"
            stored = self.read(entry.key)
            if stored is not None and stored.digest == entry.digest:
                self.ledger.put(stored)
                return "sound"
            self.write(entry)
            self.ledger.put(entry)
        log.info("packed adapter adopted", digest=entry.digest)
        return "adopted"

    def follow_other_stores(self) -> None:
        """Read the entries again when somebody else added or removed files."""
        if self._ledger_of != self.files.changed_ns:
            self.read_ledger()

    def read_ledger(self) -> None:
        """Read the entries again; a use that is not written yet is kept."""
        with self.lock:
            self._ledger_of = self.files.changed_ns
            known = {entry.key: entry for entry in self.ledger}
            stored = [_entry(text) for _, text in self._index.rows(_ENTRY)]
            self.ledger.reset(max(one, known.get(one.key, one), key=lambda e: e.last_used_s) for one in stored)

    def measure(self) -> None:
        """Bring the metrics up to date."""
        metrics.cache_entries.set(len(self.ledger))
        metrics.cache_bytes.set(self.ledger.size_bytes)

    def _forget_lost(self) -> None:
        """Drop the entries of files that are gone."""
        self.read_ledger()
        for digest in {entry.digest for entry in self.ledger}:
            if not self.files.path(digest).exists():
                self.remove(digest)


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
