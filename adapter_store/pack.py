"""Step 6: placed pairs -> rank rows in the layout's dtype, and the one file that holds them.

The file is an ordinary safetensors file as `loraplex.packed` describes it. Its metadata suffice to unpack it without
the layout, and to find its place in the cache again. Same input, same bytes: so the commit is not part of it.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from adapter_store import algebra
from adapter_store.convert import Placed
from adapter_store.dtypes import STORAGE_TYPES, Float32, Stored, encode
from adapter_store.errors import Cause, rejected
from adapter_store.validate import RawFile
from loraplex.layout import Layout
from loraplex.packed import FORMAT

# Raise it when the same file would be packed to other bytes: it is part of every cache key.
CONVERTER_VERSION = "1"
MAX_UNDERFLOW_SHARE = 0.01
_WRITE_BYTES = 16 << 20


@dataclass(frozen=True)
class RankRows:
    """The rows of one adapter: `rows` [rank, packed width], `ranks` of its modules before padding."""

    layout: Layout
    rows: Stored
    module_indexes: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def rank(self) -> int:
        """The largest rank."""
        return len(self.rows)


class _Underflow:
    """Counts the numbers of an adapter that become zero in the layout's dtype."""

    def __init__(self) -> None:
        self.numbers, self.lost, self.worst, self.key = 0, 0, 0, ""

    def count(self, before: Float32, after: Stored, key: str) -> None:
        magnitudes = after & 0x7FFF if after.dtype == np.uint16 else after  # BF16 without its sign: -0 is zero too
        numbers, kept = int(np.count_nonzero(before)), int(np.count_nonzero(magnitudes))
        self.numbers += numbers
        self.lost += numbers - kept
        if numbers - kept > self.worst:
            self.worst, self.key = numbers - kept, key

    def check(self, dtype: str) -> None:
        if self.lost > MAX_UNDERFLOW_SHARE * self.numbers:
            share = f"{100 * self.lost / self.numbers:.0f} %"
            message = f"{share} of the numbers are too small for {dtype}, most of them in {self.key!r}."
            raise rejected(Cause.UNDERFLOW, message, self.key)


def pack(file: RawFile, placed: Sequence[Placed], layout: Layout) -> RankRows:
    """Read the numbers and lay them out. Raises NOT_FINITE, OVERFLOW, UNDERFLOW, naming the key."""
    indexes = tuple(one.index for one in placed)
    most = max(one.rank for one in placed)
    rows = np.zeros((most, layout.packed_width(indexes)), STORAGE_TYPES[layout.dtype])
    underflow = _Underflow()
    ranks: list[int] = []
    column = 0
    for one in placed:
        A, B = one.load(file)
        if one.fused:
            A, B = algebra.drop_dead_ranks(A, B)
        A, B = algebra.reduce_rank(A, B)
        for values, key in ((A, one.pair.A), (np.ascontiguousarray(B.T), one.pair.B)):
            stored = _stored(values, layout.dtype, key)
            underflow.count(values, stored, key)
            rows[: len(values), column : column + values.shape[1]] = stored
            column += values.shape[1]
        ranks.append(len(A))
    underflow.check(layout.dtype)
    return RankRows(layout, rows[: max(ranks)], indexes, tuple(ranks))


def write(packed: RankRows, source_digest: str, config_digest: str, path: Path) -> tuple[str, int]:
    """Write the packed file to `path`, on the disk when this returns. Returns its sha256 and its size in bytes."""
    header = _header(packed, source_digest, config_digest)
    data = np.ascontiguousarray(packed.rows).reshape(-1).view(np.uint8).data
    digest = hashlib.sha256(header)
    with path.open("xb") as stream:
        stream.write(header)
        for start in range(0, len(data), _WRITE_BYTES):
            chunk = data[start : start + _WRITE_BYTES]
            digest.update(chunk)
            stream.write(chunk)
        stream.flush()
        os.fsync(stream.fileno())
    return digest.hexdigest(), len(header) + len(data)


def _stored(values: Float32, dtype: str, key: str) -> Stored:
    stored = encode(values, dtype)
    largest = float(np.abs(values).max(initial=0.0))
    overflows = (stored & 0x7F80 == 0x7F80).any() if dtype == "BF16" else not np.isfinite(stored).all()
    if overflows:
        raise rejected(Cause.OVERFLOW, f"{key!r} holds numbers up to {largest:.3g}, too large for {dtype}.", key)
    return stored


def _header(packed: RankRows, source_digest: str, config_digest: str) -> bytes:
    layout, names = packed.layout, []
    for index in packed.module_indexes:
        module = layout.modules[index]
        names.append([index, module.path, module.kind, module.in_features, module.out_features, *module.kernel])
    size_bytes = packed.rows.size * _itemsize(layout)
    fields = {
        "__metadata__": {
            "format": FORMAT,
            "layout": layout.digest,
            "dtype": layout.dtype,
            "modules": _json(names),
            "ranks": _json(packed.ranks),
            "source": source_digest,
            "config": config_digest,
            "converter": CONVERTER_VERSION,
        },
        "rows": {"dtype": layout.dtype, "shape": list(packed.rows.shape), "data_offsets": [0, size_bytes]},
    }
    text = _json(fields).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _itemsize(layout: Layout) -> int:
    return STORAGE_TYPES[layout.dtype].itemsize
