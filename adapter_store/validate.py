"""Step 3: a file on disk -> raw tensors, or a refusal that says what the file really is.

The header is checked by `header` before anything in it is trusted; what is no safetensors file at all is named by
`signatures`. Nothing is ever unpickled, and nothing is mapped: a file that somebody cuts short or writes to meanwhile
is an error and not the end of the process.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np

from adapter_store.dtypes import STORAGE_TYPES, Float32, Stored, are_finite, decode
from adapter_store.errors import Cause, quoted, rejected
from adapter_store.header import MAX_HEADER_BYTES, Header, RawTensor, parse_header
from adapter_store.signatures import HEAD_BYTES, recognise
from loraplex.errors import SourceUnavailable

_PIECE_BYTES = 16 << 20


class RawFile:
    """A checked safetensors file, open: `tensors` in the header's order, `metadata`, and `load` for the numbers."""

    def __init__(self, stream: BinaryIO, header: Header) -> None:
        self._stream = stream
        self.tensors = header.tensors
        self.metadata = header.metadata

    def load(self, name: str) -> Float32:
        """One tensor as float32, in its own shape. Finite, or NOT_FINITE names the key. One thread at a time."""
        tensor = self.tensors[name]
        return self._read(tensor, 0, tensor.size_bytes).reshape(tensor.shape)

    def load_stored(self, name: str) -> Stored:
        """One tensor of a dtype that a layout can have, as it is stored; finite, as in `load`."""
        tensor = self.tensors[name]
        values = np.frombuffer(self._bytes(tensor, 0, tensor.size_bytes), STORAGE_TYPES[tensor.dtype])
        self._check_finite(tensor, are_finite(values, tensor.dtype))
        return values.reshape(tensor.shape)

    def is_zero(self, name: str) -> bool:
        """Whether every number of a tensor is zero; reads in pieces. NOT_FINITE as in `load`."""
        tensor = self.tensors[name]
        starts = range(0, tensor.size_bytes, _PIECE_BYTES)
        return not any(self._read(tensor, at, min(_PIECE_BYTES, tensor.size_bytes - at)).any() for at in starts)

    def _read(self, tensor: RawTensor, start: int, size_bytes: int) -> Float32:
        values = decode(self._bytes(tensor, start, size_bytes), tensor.dtype)
        self._check_finite(tensor, bool(np.isfinite(values).all()))
        return values

    def _bytes(self, tensor: RawTensor, start: int, size_bytes: int) -> bytes:
        self._stream.seek(tensor.offset + start)
        raw = self._stream.read(size_bytes)
        if len(raw) != size_bytes:
            message = f"The file was cut short inside of {quoted(tensor.name)} while it was read."
            raise rejected(Cause.TRUNCATED, message, tensor.name)
        return raw

    def _check_finite(self, tensor: RawTensor, is_finite: bool) -> None:
        if not is_finite:
            message = f"{quoted(tensor.name)} holds NaN or Inf: the training failed."
            raise rejected(Cause.NOT_FINITE, message, tensor.name)


@contextmanager
def open_file(path: Path, max_bytes: int) -> Iterator[RawFile]:
    """Check `path` and hold it open. Raises AdapterRejected; OSError passes through.

    SourceUnavailable when the file was written to between opening and closing. A file that was replaced, by renaming
    another one over it, is read to its end as it was.
    """
    with _opened(path) as stream:
        before = os.fstat(stream.fileno())
        if before.st_size > max_bytes:
            raise rejected(Cause.FILE_TOO_LARGE, f"The file has {before.st_size} bytes; at most {max_bytes} are read.")
        yield RawFile(stream, _read_header(stream, before.st_size))
        after = os.fstat(stream.fileno())
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            message = "The file was changed while it was read."
            raise SourceUnavailable(message, remedy="Try again; replace files by renaming.", retry_after_s=1.0)


def _opened(path: Path) -> BinaryIO:
    """A regular file. A pipe or a device is not even opened: that may wait for ever, or do something."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise _no_file()
    stream = os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb")
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        stream.close()
        raise _no_file()
    return stream


def _no_file() -> Exception:
    return rejected(Cause.NOT_SAFETENSORS, "This is a folder, a pipe or a device, and no file.")


def _read_header(stream: BinaryIO, size_bytes: int) -> Header:
    head = stream.read(HEAD_BYTES)
    if not head:
        raise rejected(Cause.EMPTY_FILE, "The file is empty.")
    length = int.from_bytes(head[:8], "little")
    # First: a header of 640 bytes begins like a pickle, 80 02 00 00.
    is_brace = head[8:9] == b"{"
    if not (is_brace and length <= MAX_HEADER_BYTES) and (refusal := recognise(head)):
        raise refusal
    if size_bytes < 8:
        raise rejected(Cause.TRUNCATED, f"The file has {size_bytes} bytes, fewer than the shortest safetensors header.")
    if length > MAX_HEADER_BYTES:
        cause = Cause.HEADER_TOO_LARGE if is_brace else Cause.NOT_SAFETENSORS
        raise rejected(cause, f"The file claims a header of {length} bytes; at most {MAX_HEADER_BYTES} are read.")
    if 8 + length > size_bytes:
        cause = Cause.TRUNCATED if is_brace or len(head) == 8 else Cause.NOT_SAFETENSORS
        raise rejected(cause, f"The file has {size_bytes} bytes, its header alone should have {length}.")
    if not is_brace:
        raise rejected(Cause.NOT_SAFETENSORS, "The file is no safetensors file: no JSON header.")
    stream.seek(8)
    text = stream.read(length)
    if len(text) != length:
        raise rejected(Cause.TRUNCATED, "The file was cut short inside of its header while it was read.")
    return parse_header(text, 8 + length, size_bytes)
