"""Step 3: a file on disk -> raw tensors, or a refusal that says what the file really is.

The header is checked here before anything in it is trusted, and then once more by safetensors. Nothing is ever
unpickled. The format: 8 bytes little-endian length n, n bytes JSON {name: {dtype, shape, data_offsets}}, then the data.
"""

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import safetensors

from adapter_store.dtypes import FLOAT_SIZES, SIZES, STORAGE_TYPES, Float32, Stored, are_finite, decode
from adapter_store.errors import Cause, rejected

MAX_HEADER_BYTES = 32 << 20
MAX_TENSORS = 100_000
_PIECE_BYTES = 16 << 20

# First bytes that tell what a file is instead.
_SIGNATURES: tuple[tuple[bytes, Cause, str], ...] = (
    (b"version https://git-lfs", Cause.LFS_POINTER, "a Git LFS pointer, not the file behind it"),
    (b"GGUF", Cause.GGUF, "a GGUF file"),
    (b"PK\x03\x04", Cause.ARCHIVE, "a zip archive, perhaps a PyTorch checkpoint"),
    (b"\x1f\x8b", Cause.ARCHIVE, "a gzip archive"),
    (b"\x80\x02", Cause.PICKLE, "a Python pickle"),
    (b"\x80\x03", Cause.PICKLE, "a Python pickle"),
    (b"\x80\x04", Cause.PICKLE, "a Python pickle"),
    (b"\x80\x05", Cause.PICKLE, "a Python pickle"),
)
_TAR_MAGIC_AT = 257


@dataclass(frozen=True)
class RawTensor:
    """One tensor of a file; `offset` counts from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


class RawFile:
    """A checked safetensors file, open: `tensors` in the header's order, `metadata`, and `load` for the numbers.

    Reads with plain reads and not through a mapping, so that a file which somebody cuts short meanwhile is an error
    and not the end of the process.
    """

    def __init__(self, stream: BinaryIO, tensors: dict[str, RawTensor], metadata: dict[str, str]) -> None:
        self._stream = stream
        self.tensors = tensors
        self.metadata = metadata

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
            message = f"The file was cut short inside of {tensor.name!r} while it was read."
            raise rejected(Cause.TRUNCATED, message, tensor.name)
        return raw

    def _check_finite(self, tensor: RawTensor, is_finite: bool) -> None:
        if not is_finite:
            message = f"{tensor.name!r} holds NaN or Inf: the training failed."
            raise rejected(Cause.NOT_FINITE, message, tensor.name)


@contextmanager
def open_file(path: Path, max_bytes: int) -> Iterator[RawFile]:
    """Check `path` and hold it open. Raises AdapterRejected; OSError passes through."""
    with path.open("rb") as stream:
        size_bytes = os.fstat(stream.fileno()).st_size
        if size_bytes > max_bytes:
            raise rejected(Cause.FILE_TOO_LARGE, f"The file has {size_bytes} bytes; at most {max_bytes} are read.")
        header, data_start = _read_header(stream, size_bytes)
        metadata = _checked_metadata(header.pop("__metadata__", {}))
        tensors = _checked_tensors(header, data_start, size_bytes)
        _check_with_safetensors(path)
        yield RawFile(stream, tensors, metadata)


def _read_header(stream: BinaryIO, size_bytes: int) -> tuple[dict[str, Any], int]:
    head = stream.read(512)
    if not head:
        raise rejected(Cause.EMPTY_FILE, "The file is empty.")
    might_be_length = head[4:9] == b"\0\0\0\0{"  # a header of 640 bytes begins like a pickle: 80 02 00 00 ...
    for signature, cause, what in _SIGNATURES:
        if head.startswith(signature) and not might_be_length:
            raise rejected(cause, f"The file is {what}.")
    if head.lstrip()[:9].lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        raise rejected(Cause.HTML_PAGE, "The file is a web page, probably an error or login page of the site.")
    if head[_TAR_MAGIC_AT : _TAR_MAGIC_AT + 5] == b"ustar":
        raise rejected(Cause.ARCHIVE, "The file is a tar archive.")
    if size_bytes < 8:
        raise rejected(Cause.TRUNCATED, f"The file has {size_bytes} bytes, fewer than the shortest safetensors header.")
    length = int.from_bytes(head[:8], "little")
    looks_right = head[8:9] == b"{"
    if length > MAX_HEADER_BYTES:
        cause = Cause.HEADER_TOO_LARGE if looks_right else Cause.NOT_SAFETENSORS
        raise rejected(cause, f"The file claims a header of {length} bytes; it is no safetensors file.")
    if 8 + length > size_bytes:
        cause = Cause.TRUNCATED if looks_right or length < size_bytes * 1000 else Cause.NOT_SAFETENSORS
        raise rejected(cause, f"The file has {size_bytes} bytes, its header alone should have {length}.")
    if not looks_right:
        raise rejected(Cause.NOT_SAFETENSORS, "The file is no safetensors file: no JSON header.")
    stream.seek(8)
    return _parse_header(stream.read(length)), 8 + length


def _parse_header(text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise rejected(Cause.HEADER_INVALID, f"The header is no JSON: {str(error)[:100]}.") from error
    if not isinstance(header, dict):
        raise rejected(Cause.HEADER_INVALID, "The header is no JSON object.")
    return header


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            raise rejected(Cause.DUPLICATE_KEY, f"The header names {name[:200]!r} twice.", name)
        fields[name] = value
    return fields


def _checked_metadata(metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise rejected(Cause.HEADER_INVALID, "The header's __metadata__ is no table of strings.", "__metadata__")
    return metadata


def _checked_tensors(header: dict[str, Any], data_start: int, size_bytes: int) -> dict[str, RawTensor]:
    if not header:
        raise rejected(Cause.NO_TENSORS, "The file holds no tensors.")
    if len(header) > MAX_TENSORS:
        raise rejected(Cause.HEADER_INVALID, f"The file names {len(header)} tensors; at most {MAX_TENSORS} are read.")
    tensors = {name: _checked_tensor(name, fields, data_start) for name, fields in header.items()}
    end = data_start
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
        if tensor.offset != end:
            kind = "overlaps the one before it" if tensor.offset < end else "leaves a hole before it"
            raise rejected(Cause.OFFSETS_INVALID, f"The data of {tensor.name!r} {kind}.", tensor.name)
        end += tensor.size_bytes
    if end > size_bytes:
        raise rejected(Cause.TRUNCATED, f"The file has {size_bytes} bytes, its tensors end at {end}.")
    if end < size_bytes:
        raise rejected(Cause.TRAILING_BYTES, f"The file goes on for {size_bytes - end} bytes after its last tensor.")
    return tensors


def _checked_tensor(name: str, fields: Any, data_start: int) -> RawTensor:
    if not name or not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        raise rejected(Cause.HEADER_INVALID, f"The header's entry for {name[:200]!r} is malformed.", name)
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    is_alpha = name.endswith("alpha")
    if not isinstance(dtype, str) or dtype not in (SIZES if is_alpha else FLOAT_SIZES):
        raise rejected(Cause.DTYPE_UNSUPPORTED, f"{name!r} has dtype {str(dtype)[:20]!r}.", name)
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise rejected(Cause.HEADER_INVALID, f"{name!r} has a shape or offsets that are no sizes.", name)
    if len(shape) > 4 or 0 in shape or (not shape and not is_alpha):
        raise rejected(Cause.SHAPE_INVALID, f"{name!r} has shape {shape}; 1 to 4 dimensions from 1 up are read.", name)
    begin, end = offsets
    if end - begin != math.prod(shape) * SIZES[dtype]:
        raise rejected(Cause.OFFSETS_INVALID, f"{name!r} has {end - begin} bytes for shape {shape} of {dtype}.", name)
    return RawTensor(name, dtype, tuple(shape), data_start + begin, end - begin)


def _are_sizes(numbers: Any) -> bool:
    return isinstance(numbers, list) and all(type(n) is int and 0 <= n < 1 << 48 for n in numbers)


def _check_with_safetensors(path: Path) -> None:
    try:
        with safetensors.safe_open(path, framework="np"):
            pass
    except safetensors.SafetensorError as error:
        raise rejected(Cause.HEADER_INVALID, "safetensors refuses the file.") from error
