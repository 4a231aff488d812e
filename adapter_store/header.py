"""The header of a safetensors file: bytes -> tensors and metadata, or a refusal. Nothing in it is trusted.

The format: 8 bytes little-endian length n, n bytes JSON {name: {dtype, shape, data_offsets}}, then the data. What is
accepted here, safetensors accepts too (a test holds the two together); the other way round this is stricter.
"""

import json
import math
from dataclasses import dataclass
from typing import Any

from adapter_store.dtypes import FLOAT_SIZES, SIZES
from adapter_store.errors import Cause, quoted, rejected

# Real headers have some 150 bytes per tensor and up to about 5,000 tensors (0.75 MB). The metadata
# beside them, a trainer's tags or a thumbnail, may take some MB.
MAX_HEADER_BYTES = 16 << 20
MAX_TENSORS = 20_000
MAX_NAME_LENGTH = 256
_MAX_METADATA = 10_000
_MAX_DIGITS = 15
_METADATA = "__metadata__"


@dataclass(frozen=True)
class RawTensor:
    """One tensor of a file; `offset` counts from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


@dataclass(frozen=True)
class Header:
    """A checked header: the tensors, in its order, fill the data section without holes."""

    tensors: dict[str, RawTensor]
    metadata: dict[str, str]


def parse_header(text: bytes, data_start: int, size_bytes: int) -> Header:
    """Check the JSON of a file of `size_bytes`. Raises AdapterRejected.

    Cost: at most about 150 MB and a second for any text of MAX_HEADER_BYTES.
    """
    fields = _parsed(text)
    metadata = _checked_metadata(fields.pop(_METADATA, {}))
    return Header(_checked_tensors(fields, data_start, size_bytes), metadata)


def _parsed(text: bytes) -> dict[str, Any]:
    _check_extent(text)
    try:
        fields = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_without_duplicates,
            parse_int=_size,
            parse_float=_no_size,
            parse_constant=_no_size,
        )
    except (ValueError, RecursionError) as error:
        raise rejected(Cause.HEADER_INVALID, f"The header is no JSON: {str(error)[:100]}.") from error
    if not isinstance(fields, dict):
        raise rejected(Cause.HEADER_INVALID, "The header is no JSON object.")
    return fields


def _check_extent(text: bytes) -> None:
    """Refuse before parsing what would take a hundred times its size in memory; linear in the text's length."""
    unescaped = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    strings = unescaped.count(b'"') // 2
    if strings <= 5 * MAX_TENSORS + 2 * _MAX_METADATA:
        outside = b"".join(unescaped.split(b'"')[::2])
        containers = outside.count(b"{") + outside.count(b"[")
        if containers <= 3 * MAX_TENSORS + 2 and outside.count(b",") <= 10 * MAX_TENSORS + _MAX_METADATA:
            return
    message = f"The header holds more than the names of {MAX_TENSORS} tensors and {_MAX_METADATA} metadata."
    raise rejected(Cause.HEADER_INVALID, message)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        seen: set[str] = set()
        name = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise rejected(Cause.DUPLICATE_KEY, f"The header names {quoted(name)} twice.", name)
    return fields


def _size(digits: str) -> int | None:
    # -0 is an integer to Python and none to safetensors.
    return None if len(digits) > _MAX_DIGITS or digits.startswith("-") else int(digits)


def _no_size(digits: str) -> None:
    return None


def _checked_metadata(metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise rejected(Cause.HEADER_INVALID, "The header's __metadata__ is no table of strings.", _METADATA)
    for key, value in metadata.items():
        if not (_is_unicode(key) and _is_unicode(value)):
            message = f"The metadata {quoted(key)} hold half of a surrogate pair, which is no text."
            raise rejected(Cause.HEADER_INVALID, message, _METADATA)
    return metadata


def _checked_tensors(fields: dict[str, Any], data_start: int, size_bytes: int) -> dict[str, RawTensor]:
    if not fields:
        raise rejected(Cause.NO_TENSORS, "The file holds no tensors.")
    if len(fields) > MAX_TENSORS:
        message = f"The file names {len(fields)} tensors; at most {MAX_TENSORS} are read."
        raise rejected(Cause.HEADER_INVALID, message)
    tensors = {name: _checked_tensor(name, entry, data_start) for name, entry in fields.items()}
    end = data_start
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
        if tensor.offset != end:
            kind = "overlaps the one before it" if tensor.offset < end else "leaves a hole before it"
            raise rejected(Cause.OFFSETS_INVALID, f"The data of {quoted(tensor.name)} {kind}.", tensor.name)
        end += tensor.size_bytes
    if end > size_bytes:
        raise rejected(Cause.TRUNCATED, f"The file has {size_bytes} bytes, its tensors end at {end}.")
    if end < size_bytes:
        raise rejected(Cause.TRAILING_BYTES, f"The file goes on for {size_bytes - end} bytes after its last tensor.")
    return tensors


def _checked_tensor(name: str, entry: Any, data_start: int) -> RawTensor:
    if not name or len(name) > MAX_NAME_LENGTH or not name.isprintable():
        message = f"The header names a tensor {quoted(name)}; names have 1 to {MAX_NAME_LENGTH} printable characters."
        raise rejected(Cause.HEADER_INVALID, message, name)
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise rejected(Cause.HEADER_INVALID, f"The header's entry for {quoted(name)} is malformed.", name)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    is_alpha = name.endswith("alpha")
    if not isinstance(dtype, str) or dtype not in (SIZES if is_alpha else FLOAT_SIZES):
        raise rejected(Cause.DTYPE_UNSUPPORTED, f"{quoted(name)} has dtype {str(dtype)[:20]!r}.", name)
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise rejected(Cause.HEADER_INVALID, f"{quoted(name)} has a shape or offsets that are no sizes.", name)
    if len(shape) > 4 or 0 in shape or (not shape and not is_alpha):
        message = f"{quoted(name)} has shape {str(shape)[:100]}; 1 to 4 dimensions from 1 up are read."
        raise rejected(Cause.SHAPE_INVALID, message, name)
    begin, end = offsets
    if end - begin != math.prod(shape) * SIZES[dtype]:
        message = f"{quoted(name)} has {end - begin} bytes for shape {shape} of {dtype}."
        raise rejected(Cause.OFFSETS_INVALID, message, name)
    return RawTensor(name, dtype, tuple(shape), data_start + begin, end - begin)


def _are_sizes(numbers: Any) -> bool:
    return isinstance(numbers, list) and all(type(number) is int for number in numbers)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
