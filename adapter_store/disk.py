"""The space on the store's disk: what must stay free, and the error for when it does not."""

import errno
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from loraplex.errors import StorageExhausted

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def free_bytes(folder: Path) -> int:
    """What can still be written to the disk of `folder`."""
    return shutil.disk_usage(folder).free


@dataclass(frozen=True)
class Disk:
    """The disk of one folder. `min_free_bytes` stay free; `free` tells what is left."""

    folder: Path
    min_free_bytes: int = 0
    free: Callable[[Path], int] = free_bytes

    def missing_bytes(self, size_bytes: int) -> int:
        """What has to be freed before `size_bytes` can be written; 0 or less when they fit."""
        return size_bytes + self.min_free_bytes - self.free(self.folder)

    def require(self, size_bytes: int) -> None:
        """Raise StorageExhausted unless `size_bytes` can be written."""
        if self.missing_bytes(size_bytes) > 0:
            raise exhausted(
                f"The store's disk has no room for {size_bytes} bytes beside the {self.min_free_bytes} to keep."
            )


@contextmanager
def full_disk_is_exhausted() -> Iterator[None]:
    """Turn the error of a full disk, quota or file size limit into StorageExhausted."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise exhausted("The store's disk is full.") from error


def exhausted(message: str) -> StorageExhausted:
    """The error for too little space."""
    remedy = "Free space on the store's disk, or change cache_bytes, download_cache_bytes or min_free_bytes."
    return StorageExhausted(message, remedy=remedy)


class FolderNotWritable(OSError):
    """The store cannot write to its folder; the message names the setting."""


def require_writable(*folders: Path) -> None:
    """Make the folders where they are missing. Raises FolderNotWritable unless files can be made in each."""
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe = folder / f".probe-{uuid.uuid4().hex}"
            probe.touch()
            probe.unlink(missing_ok=True)
        except OSError as error:
            message = f"cache_dir: the folder {folder} cannot be written to: {error.strerror}. "
            raise FolderNotWritable(f"{message}Name one on a local disk that the store may write to.") from error
