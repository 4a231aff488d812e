"""The folder of downloaded files: each is fetched once at a time, resumed, verified, and kept only within bounds.

`<key>-<sha256>` is a whole file, `<key>.part` one that can be continued, `<key>.<random>.open` one that is being
written, `<random>.bad` one that is handed out once. A partial file is claimed by renaming it, so that two never write
to one. What is in use carries a lock (flock), which ends with its process. Several stores may share the folder. All
methods block; any thread.
"""

import contextlib
import fcntl
import hashlib
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from adapter_store.disk import Disk, full_disk_is_exhausted
from adapter_store.hashing import sha256_of
from adapter_store.transfer import Limits, RemoteFile, Report, Watch, WrongBytes, transfer
from loraplex.errors import AdapterRejected, SourceUnavailable

_MAX_AGE_S = 7 * 86400
_DEAD_AFTER_S = 60


@dataclass(frozen=True)
class Wanted:
    """One file to fetch. `identity` names its content; `size_bytes` and `sha256` are 0 and "" where nobody states them.

    `looks_right` is asked about a file whose sha256 nobody stated.
    """

    identity: str
    size_bytes: int = 0
    sha256: str = ""
    is_resumable: bool = True
    looks_right: Callable[[Path], bool] = lambda _: True

    @property
    def key(self) -> str:
        """The name of its files."""
        return hashlib.sha256(self.identity.encode()).hexdigest()[:40]


class Fetched:
    """A file on the disk, kept from removal for as long as this object lives."""

    def __init__(self, path: Path, digest: str) -> None:
        self.path, self.digest = path, digest

    def __repr__(self) -> str:
        return f"<Fetched {self.digest[:12]}>"


class Downloads:
    """The files below `folder`, at most `limit_bytes` of them beside those in use."""

    def __init__(self, folder: Path, limit_bytes: int, disk: Disk | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._limit_bytes, self._disk = folder, limit_bytes, disk or Disk(folder)
        self._lock = threading.RLock()
        self._keys: dict[str, tuple[threading.Lock, int]] = {}
        self._is_stopped = False
        self.trim()

    def __repr__(self) -> str:
        files = self._files()
        return f"<Downloads {len(files)} files, {sum(one[1] for one in files)} of {self._limit_bytes} bytes>"

    def stop(self) -> None:
        """Make running transfers end, keeping what they have."""
        self._is_stopped = True

    def fetch(self, wanted: Wanted, remote: RemoteFile, limits: Limits, report: Report) -> Fetched:
        """The file, from the folder or from `remote`. Many at a time cause one transfer.

        What has not the sha256 that was stated is fetched once more, and then refused with SourceUnavailable; what
        only looks wrong is fetched once more, and then handed out once. Raises StorageExhausted, FILE_TOO_LARGE,
        SourceUnavailable, and what `remote` raises.
        """
        watch = Watch(limits, report, lambda: self._is_stopped)
        watch.check_size(wanted.size_bytes)
        self._folder.mkdir(parents=True, exist_ok=True)  # somebody may have removed it
        with self._alone(wanted.key, watch):
            for is_last in (False, True):
                fetched = self._found(wanted) or self._transferred(wanted, remote, watch)
                if fetched.digest == wanted.sha256 if wanted.sha256 else wanted.looks_right(fetched.path):
                    return fetched
                if is_last and not wanted.sha256:
                    fetched.path = fetched.path.replace(self._folder / f"{uuid.uuid4().hex}.bad")
                    return fetched
                fetched.path.unlink(missing_ok=True)
        message = "The source delivered other bytes than it promised, twice."
        raise SourceUnavailable(message, remedy="Try again later.", retry_after_s=10.0)

    def trim(self, wanted_bytes: int = 0) -> None:
        """Remove what is old, and then the least recently used until `wanted_bytes` more fit. Never what is in use."""
        with self._lock:
            files, now_s = self._files(), time.time()
            over_bytes = sum(size_bytes for _, size_bytes, _ in files) + wanted_bytes - self._limit_bytes
            over_bytes = max(over_bytes, self._disk.missing_bytes(wanted_bytes))
            for path, size_bytes, used_s in files:
                if path.suffix in (".open", ".bad"):
                    is_over = now_s - used_s > _DEAD_AFTER_S
                else:
                    is_over = over_bytes > 0 or now_s - used_s > _MAX_AGE_S
                if is_over and _remove_unless_used(path):
                    over_bytes -= size_bytes

    def _found(self, wanted: Wanted) -> Fetched | None:
        """A file that was fetched before; it is hashed again."""
        for path in self._folder.glob(f"{wanted.key}-*"):
            with contextlib.suppress(FileNotFoundError):
                held = os.open(path, os.O_RDONLY)
                fetched = self._held(path, held)
                if path.exists() and path.name.endswith(fetched.digest):
                    os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))  # a reader watches the time of change
                    return fetched
                path.unlink()
        return None

    def _transferred(self, wanted: Wanted, remote: RemoteFile, watch: Watch) -> Fetched:
        open_path, part_path = (self._folder / f"{wanted.key}.{end}" for end in (f"{uuid.uuid4().hex}.open", "part"))
        with contextlib.suppress(FileNotFoundError):
            part_path.rename(open_path)
        try:
            with full_disk_is_exhausted(), open_path.open("ab") as into:
                _hold(into.fileno())
                transfer(remote, into, wanted.size_bytes, watch, self._make_room)
                into.flush()
                fetched = self._held(open_path, os.dup(into.fileno()))
            fetched.path = open_path.rename(self._folder / f"{wanted.key}-{fetched.digest}")
            return fetched
        except (WrongBytes, AdapterRejected):
            raise
        except SourceUnavailable:
            if wanted.is_resumable:
                _park(open_path, part_path)
            raise
        finally:
            open_path.unlink(missing_ok=True)

    def _make_room(self, size_bytes: int) -> None:
        self.trim(max(size_bytes, 0))
        self._disk.require(max(size_bytes, 0))

    def _held(self, path: Path, descriptor: int) -> Fetched:
        """Hash a file and keep it in use; takes over `descriptor`."""
        try:
            _hold(descriptor)
            fetched = Fetched(path, sha256_of(path))
        except BaseException:
            os.close(descriptor)
            raise
        weakref.finalize(fetched, self._release, descriptor)
        return fetched

    def _release(self, descriptor: int) -> None:
        os.close(descriptor)
        self.trim()

    def _files(self) -> list[tuple[Path, int, float]]:
        """(path, bytes, last use), the least recently used first."""
        found = []
        with contextlib.suppress(FileNotFoundError), os.scandir(self._folder) as files:
            for file in files:
                with contextlib.suppress(FileNotFoundError):
                    stat = file.stat()
                    found.append((Path(file.path), stat.st_size, stat.st_atime))
        return sorted(found, key=lambda one: one[2])

    @contextmanager
    def _alone(self, key: str, watch: Watch) -> Iterator[None]:
        """One thread per key. Raises SourceUnavailable when the one before does not end in time."""
        with self._lock:
            lock, users = self._keys.get(key, (threading.Lock(), 0))
            self._keys[key] = lock, users + 1
        try:
            if not lock.acquire(timeout=max(0.0, watch.deadline_s - time.monotonic())):
                message = "Another download of the same file has not ended in time."
                raise SourceUnavailable(message, remedy="Try again later.", retry_after_s=10.0)
            try:
                yield
            finally:
                lock.release()
        finally:
            with self._lock:
                lock, users = self._keys.pop(key)
                if users > 1:
                    self._keys[key] = lock, users - 1


def _hold(descriptor: int) -> None:
    """Mark a file as in use, until its descriptor and all copies of it are closed."""
    with contextlib.suppress(OSError):  # a file system without locks: then the age alone decides
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)


def _remove_unless_used(path: Path) -> bool:
    try:
        with path.open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    except BlockingIOError:
        return False
    except FileNotFoundError:
        pass
    return True


def _park(open_path: Path, part_path: Path) -> None:
    """Keep what has arrived, on the disk for good: after a loss of power it must not be zeros."""
    if not open_path.stat().st_size:
        return
    with open_path.open("rb") as stream:
        os.fsync(stream.fileno())
    open_path.rename(part_path)
