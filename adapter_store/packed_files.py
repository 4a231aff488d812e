"""The folder of packed files, `<sha256>.safetensors` each, and which of them are known to be what their names say.

A file is hashed before it is first trusted, and again whenever its size, times or inode changed. All methods block;
any thread.
"""

import contextlib
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import structlog

from adapter_store.disk import require_writable
from adapter_store.hashing import sha256_of
from loraplex.errors import StoreUnavailable

log = structlog.stdlib.get_logger("loraplex.store")

SUFFIX = ".safetensors"
_STALE_TEMP_S = 3600

Stamp: TypeAlias = tuple[int, int, int, int]


class PackedFiles:
    """The files in `folder`/packed, and in `folder`/temp those that are being written."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._files, self._temps = folder, folder / "packed", folder / "temp"
        self._verified: dict[str, Stamp] = {}
        require_writable(folder, self._files, self._temps)
        self._remove_stale_temps()

    def __iter__(self) -> Iterator[Path]:
        return iter(sorted(self._files.iterdir()))

    @property
    def changed_ns(self) -> int:
        """Another number after a file was added or removed, by whomever."""
        return self._files.stat().st_mtime_ns

    def make_folders(self) -> bool:
        """Make the folders again where somebody removed them; whether the packed files went with theirs."""
        self._temps.mkdir(parents=True, exist_ok=True)
        is_lost = not self._files.exists()
        self._files.mkdir(parents=True, exist_ok=True)
        return is_lost

    def path(self, digest: str) -> Path:
        """Where the file of a digest is, if it is there."""
        return self._files / f"{digest}{SUFFIX}"

    def new_temp(self) -> Path:
        """A path for a file to be written, which `take` can take over."""
        return self._temps / uuid.uuid4().hex

    def take(self, temp: Path, digest: str) -> None:
        """Move a file that was just written, with that sha256, to its place. Does nothing when it was moved before."""
        path = self.path(digest)
        with contextlib.suppress(FileNotFoundError):
            temp.replace(path)
        try:
            self._verified[digest] = _stamp(path.stat())
        except FileNotFoundError as error:
            message = "The folder of the store's cache was removed while the adapter was packed."
            raise StoreUnavailable(message, remedy="Ask again.", retry_after_s=1.0) from error

    def remove(self, digest: str) -> None:
        """Remove a file, if it is there."""
        self.set_aside(self.path(digest))
        self._verified.pop(digest, None)

    def set_aside(self, path: Path) -> None:
        """Take away what is no packed file: a file is removed, anything else moved out of the folder."""
        with contextlib.suppress(FileNotFoundError):
            if path.is_file() or path.is_symlink():
                path.unlink()
                return
            aside = path.rename(self._folder / f"odd-{uuid.uuid4().hex[:6]}-{path.name}")
            log.warning("what is no file set aside", folder=aside.name)

    def is_known(self, digest: str, stat: os.stat_result) -> bool:
        """Whether a file was found to be sound, and nobody touched it since; `stat` is how it is now."""
        return self._verified.get(digest) == _stamp(stat)

    def is_sound(self, digest: str, size_bytes: int) -> bool:
        """Whether the file is what its name says. Hashes it unless it is known."""
        path = self.path(digest)
        try:
            stat = path.stat()
            if self.is_known(digest, stat):
                return True
            if stat.st_size != size_bytes or sha256_of(path) != digest:
                log.warning("packed adapter damaged", digest=digest)
                return False
            self._verified[digest] = _stamp(stat)
        except (FileNotFoundError, IsADirectoryError):
            return False
        return True

    def distrust(self) -> None:
        """Hash every file again before it is next served."""
        self._verified.clear()

    def _remove_stale_temps(self) -> None:
        for path in self._temps.iterdir():
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _STALE_TEMP_S:
                    path.unlink()


def _stamp(stat: os.stat_result) -> Stamp:
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino
