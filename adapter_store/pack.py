"""Step 6: placed pairs -> rank rows in the layout's dtype, and the one file that holds them.

The file is an ordinary safetensors file as `loraplex.packed` describes it. Its metadata suffice to unpack it without
the layout, and to find its place in the cache again. Same input, same bytes: so the commit is not part of it.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from adapter_store import container
from adapter_store.dtypes import OVERFLOWS, STORAGE_TYPES, Float32, Stored, encode
from adapter_store.errors import Cause, rejected
from adapter_store.groups import Group
from adapter_store.placing import Factors, Placed, load_factors
from adapter_store.validate import RawFile
from loraplex.layout import Layout
from loraplex.packed import FORMAT

# Raise it when the same file would be packed to other bytes: it is part of every cache key.
CONVERTER_VERSION = "2"
MAX_UNDERFLOW_SHARE = 0.01
_WRITE_BYTES = 16 << 20


@dataclass(frozen=True)
class RankRows:
    """The rows of one adapter: `rows` [rank, packed width].

    `ranks` are those of its modules before padding, `errors` what a cut cost each of them, 0.0 where it is exact.
    """

    layout: Layout
    rows: Stored
    module_indexes: tuple[int, ...]
    ranks: tuple[int, ...]
    errors: tuple[float, ...]

    @property
    def rank(self) -> int:
        """The largest rank."""
        return len(self.rows)

    @property
    def error(self) -> float:
        """The largest error of any module."""
        return max(self.errors)


@dataclass(frozen=True)
class Origin:
    """What a packed adapter was made of: its place in the cache, and what was left out on the way."""

    source_digest: str
    config_digest: str = ""
    options: str = ""
    waived_tensors: int = 0


class _Underflow:
    """Counts the numbers of an adapter that become zero in the layout's dtype."""

    def __init__(self) -> None:
        self.numbers, self.lost, self.worst, self.key = 0, 0, 0, ""

    def count(self, before: Float32, after: Stored, key: str) -> None:
        if after.dtype == before.dtype:
            return
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


class _Loader:
    """The factors of every group, read once, and forgotten after the last module that has rows of them."""

    def __init__(self, file: RawFile, placed: Sequence[Placed]) -> None:
        self._file = file
        self._uses = Counter(group for one in placed for group in one.groups)
        self._loaded: dict[Group, Factors] = {}

    def __call__(self, group: Group) -> Factors:
        factors = self._loaded.pop(group, None) or load_factors(self._file, group)
        self._uses[group] -= 1
        if self._uses[group]:
            self._loaded[group] = factors
        return factors


def pack(file: RawFile, placed: Sequence[Placed], layout: Layout, limit: int, max_error: float = 0.0) -> RankRows:
    """Read the numbers and lay them out. Raises NOT_FINITE, OVERFLOW, UNDERFLOW, RANK_TOO_LARGE, naming the key.

    In memory are the rows, and the factors of as many groups as share one module.
    """
    indexes = tuple(one.index for one in placed)
    columns = dict(zip(indexes, accumulate((one.module.width for one in placed), initial=0), strict=False))
    most = min(limit, max(one.rank for one in placed))
    # Fresh zeros take no memory until they are written: most of what a fused B might need stays untouched.
    rows = np.zeros((most, layout.packed_width(indexes)), STORAGE_TYPES[layout.dtype])
    underflow, load = _Underflow(), _Loader(file, placed)
    fits: dict[int, tuple[int, float]] = {}
    for one in _neighbours(placed):
        fitted = one.fit(load, limit, max_error)
        column = columns[one.index]
        for values, key in ((fitted.A, one.groups[0].key), (fitted.B.T, one.groups[0].out_key)):
            stored = _stored(values, layout.dtype, key)
            underflow.count(values, stored, key)
            rows[: len(values), column : column + values.shape[1]] = stored
            column += values.shape[1]
        fits[one.index] = len(fitted.A), fitted.error
    underflow.check(layout.dtype)
    ranks, errors = zip(*(fits[index] for index in indexes), strict=True)
    return RankRows(layout, rows[: max(ranks)], indexes, ranks, errors)


def _neighbours(placed: Sequence[Placed]) -> list[Placed]:
    """The same modules, those with rows of one group next to each other."""
    first: dict[Group, int] = {}
    for one in placed:
        for group in one.groups:
            first.setdefault(group, one.index)
    return sorted(placed, key=lambda one: min(first[group] for group in one.groups))


def write(packed: RankRows, origin: Origin, path: Path) -> tuple[str, int]:
    """Write the packed file to `path`, on the disk when this returns. Returns its sha256 and its size in bytes."""
    header = _header(packed, origin)
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
    largest = max(float(values.max()), -float(values.min()))  # NaN stays NaN
    if not largest < OVERFLOWS[dtype]:
        raise rejected(Cause.OVERFLOW, f"{key!r} holds numbers up to {largest:.3g}, too large for {dtype}.", key)
    return encode(values, dtype)


def _header(packed: RankRows, origin: Origin) -> bytes:
    layout, names = packed.layout, []
    for index in packed.module_indexes:
        module = layout.modules[index]
        names.append([index, module.path, module.kind, module.in_features, module.out_features, *module.kernel])
    metadata = {
        "format": FORMAT,
        "layout": layout.digest,
        "dtype": layout.dtype,
        "modules": _json(names),
        "ranks": _json(packed.ranks),
        "errors": _json(packed.errors),
        "source": origin.source_digest,
        "config": origin.config_digest,
        "options": origin.options,
        "waived": str(origin.waived_tensors),
        "converter": CONVERTER_VERSION,
    }
    return container.header(metadata, [("rows", layout.dtype, packed.rows.shape)])


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
