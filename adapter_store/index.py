"""The index of the cache: texts by key in a diskcache, which can be lost: it is set aside and made again when corrupt.

Nothing in its folder is ever unpickled. Several stores may share it, on a local disk; when one of them had to make it
again, the others notice and follow.
"""

import contextlib
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import diskcache
import structlog

from adapter_store.disk import exhausted
from loraplex.errors import StoreUnavailable

log = structlog.stdlib.get_logger("loraplex.store")
T = TypeVar("T")

_FETCH_ROWS = 1000


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


class Index:
    """Texts by key below `folder`. `is_sound` checks the (key, text) rows of an index before it is used.

    `made_again` is called after a corrupt index was replaced by an empty one, and is to fill it. `lock` is
    held during every action.
    """

    def __init__(
        self,
        folder: Path,
        is_sound: Callable[[str, str], bool],
        made_again: Callable[[], None],
        lock: "threading.RLock",
        timeout_s: float,
    ) -> None:
        self._folder, self._is_row_sound, self._made_again = folder, is_sound, made_again
        self._lock, self._timeout_s = lock, timeout_s
        with self._busy_is_unavailable():
            self._cache, self._inode = self._open()

    def close(self) -> None:
        """Close the database."""
        self._cache.close()

    def run(self, action: Callable[[], T]) -> T:
        """Run an action on the index; once again after a corrupt index was replaced.

        Raises StorageExhausted for a full disk, StoreUnavailable when another process holds the index too long.
        """
        with self._lock, self._busy_is_unavailable():
            self._follow()
            try:
                return action()
            except sqlite3.DatabaseError as error:
                if "full" in str(error):
                    raise exhausted("The store's disk is full.") from error
                if _is_busy(error):
                    raise
                log.warning("cache index corrupt", error=str(error))
                self._cache.close()
                self._cache, self._inode = self._open()
                self._made_again()
                return action()

    def get(self, key: str) -> str | None:
        """The text under a key."""
        text: str | None = self._cache.get(key)
        return text

    def set(self, key: str, text: str, lasts_s: float | None = None) -> None:
        """Keep a text."""
        self._cache.set(key, text, expire=lasts_s)

    def delete(self, key: str) -> None:
        """Forget a text."""
        self._cache.delete(key)

    def transact(self) -> AbstractContextManager[None]:
        """All or nothing, and alone."""
        changes: AbstractContextManager[None] = self._cache.transact()
        return changes

    def rows(self, prefix: str) -> Iterator[tuple[str, str]]:
        """All (key, text) whose key starts with `prefix`; several times faster than to get each."""
        with contextlib.closing(sqlite3.connect(self._folder / "cache.db", timeout=self._timeout_s)) as connection:
            found = connection.execute(
                "SELECT key, value FROM Cache WHERE key >= ? AND key < ?", (prefix, prefix + "~")
            )
            while rows := found.fetchmany(_FETCH_ROWS):
                yield from ((_text(key), _text(value)) for key, value in rows)

    def _follow(self) -> None:
        """Leave an index that another store has set aside."""
        if self._inode != self._inode_now():
            log.warning("cache index was replaced by another store")
            self._cache.close()
            self._cache, self._inode = self._open()
            self._made_again()

    def _inode_now(self) -> int:
        try:
            return (self._folder / "cache.db").stat().st_ino
        except FileNotFoundError:
            return 0

    def _open(self) -> tuple[Any, int]:
        """Open the index; what is damaged is moved aside and a new one started."""
        if not self._is_sound():
            self._quarantine()
        try:
            cache = self._new()
        except sqlite3.DatabaseError as error:
            if _is_busy(error):
                raise
            self._quarantine()
            cache = self._new()
        return cache, self._inode_now()

    def _new(self) -> Any:
        # All settings are passed: those in the folder would win over the defaults.
        return diskcache.Cache(
            str(self._folder),
            disk=PlainDisk,
            disk_min_file_size=1 << 30,
            disk_pickle_protocol=0,
            eviction_policy="none",
            size_limit=1 << 40,
            cull_limit=1,
            statistics=0,
            tag_index=0,
            timeout=self._timeout_s,
        )

    def _quarantine(self) -> None:
        aside = self._folder.with_name(f"index.corrupt-{int(time.time())}-{uuid.uuid4().hex[:6]}")
        with contextlib.suppress(FileNotFoundError):
            self._folder.rename(aside)
            log.warning("cache index set aside", folder=aside.name)

    def _is_sound(self) -> bool:
        """Whether SQLite finds nothing wrong, and every row is a plain text as `PlainDisk` writes it."""
        database = self._folder / "cache.db"
        if not database.exists():
            return True
        odd = "SELECT 1 FROM Cache WHERE typeof(key) != 'text' OR typeof(value) != 'text' OR NOT raw OR mode != 1"
        try:
            with contextlib.closing(sqlite3.connect(database, timeout=self._timeout_s)) as connection:
                if connection.execute("PRAGMA quick_check").fetchone() != ("ok",):
                    return False
                if connection.execute(odd).fetchone() is not None:
                    return False
                rows = connection.execute("SELECT key, value FROM Cache")
                return all(self._is_row_sound(key, text) for key, text in rows)
        except sqlite3.DatabaseError as error:
            return _is_busy(error)

    @contextlib.contextmanager
    def _busy_is_unavailable(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.OperationalError, diskcache.Timeout) as error:
            if not (isinstance(error, diskcache.Timeout) or _is_busy(error)):
                raise
            message = f"Another process has held the index of the store's cache for {self._timeout_s:g} s."
            remedy = "Look for a store or a backup on the same cache_dir that hangs, and end it."
            raise StoreUnavailable(message, remedy=remedy, retry_after_s=10.0) from error


def _is_busy(error: Exception) -> bool:
    """Whether another store only holds the index longer than the timeout."""
    return "locked" in str(error) or "busy" in str(error)
