"""Rank rows in a file that is written module by module, so that memory holds one module at a time.

Plain writes and no mapping: a disk that is full is an error of the write, and not the end of the process.
"""

import hashlib
import os
from pathlib import Path
from types import TracebackType

import numpy as np

from adapter_store.dtypes import Stored

_READ_BYTES = 8 << 20


class RowsFile:
    """A new file at `path`: `start` bytes for its header, then rows of `row_bytes` each, zero until they are put."""

    def __init__(self, path: Path, start: int, row_bytes: int) -> None:
        self._start, self._row_bytes = start, row_bytes
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)

    def __enter__(self) -> "RowsFile":
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        os.close(self._descriptor)

    def put(self, column: int, block: Stored) -> None:
        """Write `block` [rank, width] to the first rows, from `column` on."""
        block = np.ascontiguousarray(block)
        for row, numbers in enumerate(block.view(np.uint8)):
            self._write(numbers.data, self._start + row * self._row_bytes + column * block.itemsize)

    def finish(self, header: bytes, num_rows: int) -> tuple[str, int]:
        """Write the header and cut the file after `num_rows`; on the disk when this returns. sha256, size in bytes."""
        if len(header) != self._start:
            raise RuntimeError(f"the header has {len(header)} bytes, {self._start} are free for it")
        size_bytes = self._start + num_rows * self._row_bytes
        os.ftruncate(self._descriptor, size_bytes)
        self._write(memoryview(header), 0)
        digest, position = hashlib.sha256(), 0
        while chunk := os.pread(self._descriptor, _READ_BYTES, position):
            digest.update(chunk)
            position += len(chunk)
        os.fsync(self._descriptor)
        return digest.hexdigest(), size_bytes

    def _write(self, data: memoryview, position: int) -> None:
        while data:
            written = os.pwrite(self._descriptor, data, position)
            data, position = data[written:], position + written
