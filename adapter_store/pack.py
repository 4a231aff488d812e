"""Step 6: placed pairs -> rank rows in the layout's dtype, and the one file that holds them.

The file is an ordinary safetensors file as `loraplex.packed` describes it. Its metadata suffice to unpack it without
the layout, and to find its place in the cache again. Same input, same bytes: so the commit is not part of it.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from adapter_store import container
from adapter_store.algebra.ranks import Fitted
from adapter_store.dtypes import OVERFLOWS, STORAGE_TYPES, Float32, Stored, count_nonzero, encode
from adapter_store.errors import Cause, rejected
from adapter_store.groups import Group
from adapter_store.placing import Factors, Placed, load_factors
from adapter_store.rows_file import RowsFile
from adapter_store.validate import RawFile
from loraplex.layout import Layout
from loraplex.packed import FORMAT

# Raise it when the same file would be packed to other bytes: it is part of every cache key.
CONVERTER_VERSION = "3"
MAX_UNDERFLOW_SHARE = 0.01
_LONGEST_ERROR = -1.2345678901234567e-300


@dataclass(frozen=True)
class Packing:
    """Modules to be packed for `layout` with at most `limit` ranks each, where a cut may cost `max_error`."""

    layout: Layout
    placed: Sequence[Placed]
    limit: int
    max_error: float = 0.0

    @property
    def indexes(self) -> tuple[int, ...]:
        """Indexes of the modules, ascending."""
        return tuple(one.index for one in self.placed)

    @property
    def width(self) -> int:
        """How many columns the rows have."""
        return self.layout.packed_width(self.indexes)

    @property
    def largest_ranks(self) -> tuple[int, ...]:
        """The ranks of the modules, as far as the file's header tells: the numbers may need fewer."""
        return tuple(min(self.limit, one.rank) for one in self.placed)

    @property
    def largest_bytes(self) -> int:
        """The size of the rows at those ranks."""
        return max(self.largest_ranks) * self.width * STORAGE_TYPES[self.layout.dtype].itemsize


@dataclass(frozen=True)
class Packed:
    """What became of the modules: `ranks` are those before padding, `errors` what a cut cost, 0.0 where it is exact."""

    module_indexes: tuple[int, ...]
    ranks: tuple[int, ...]
    errors: tuple[float, ...]

    @property
    def rank(self) -> int:
        """The largest rank: how many rows there are."""
        return max(self.ranks)

    @property
    def error(self) -> float:
        """The largest error of any module."""
        return max(self.errors)


@dataclass(frozen=True)
class Written:
    """A packed file: its sha256, its size in bytes, and what is in it."""

    digest: str
    size_bytes: int
    packed: Packed


# Takes the numbers of a module, [rank, width], for the rows from a column on.
Put = Callable[[int, Stored], None]


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

    def count(self, before: Float32, after: Stored, dtype: str, key: str) -> None:
        if after.dtype == before.dtype:
            return
        numbers, kept = int(np.count_nonzero(before)), count_nonzero(after, dtype)
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


def pack(file: RawFile, packing: Packing, put: Put = lambda *_: None) -> Packed:
    """Read the numbers and `put` them, module by module; without a `put` they are only checked.

    Raises NOT_FINITE, OVERFLOW, UNDERFLOW, RANK_TOO_LARGE, naming the key. In memory are the factors of as many groups
    as share one module.
    """
    placed, dtype = packing.placed, packing.layout.dtype
    columns = dict(zip(packing.indexes, accumulate((one.module.width for one in placed), initial=0), strict=False))
    underflow, load = _Underflow(), _Loader(file, placed)
    fits: dict[int, tuple[int, float]] = {}
    for one in _neighbours(placed):
        if one.is_as_stored(file, dtype, packing.limit):
            block, error = _copied(file, one), 0.0
            underflow.numbers += count_nonzero(block, dtype)
        else:
            fitted = one.fit(load, packing.limit, packing.max_error)
            block, error = _converted(fitted, one, dtype, underflow), fitted.error
        put(columns[one.index], block)
        fits[one.index] = len(block), error
    underflow.check(dtype)
    ranks, errors = zip(*(fits[index] for index in packing.indexes), strict=True)
    return Packed(packing.indexes, ranks, errors)


def write(file: RawFile, packing: Packing, origin: Origin, path: Path) -> Written:
    """Pack into a new file at `path`, on the disk when this returns. Raises as `pack` does, and OSError."""
    width, layout = packing.width, packing.layout
    # The header comes first and is known last: room is left for the longest, which is almost always what it needs.
    errors = (_LONGEST_ERROR if packing.max_error else 0.0,) * len(packing.placed)
    longest = Packed(packing.indexes, packing.largest_ranks, errors)
    start = len(_header(packing, longest, origin))
    with RowsFile(path, start, width * STORAGE_TYPES[layout.dtype].itemsize) as rows:
        packed = pack(file, packing, rows.put)
        return Written(*rows.finish(_header(packing, packed, origin, start), packed.rank), packed)


def _neighbours(placed: Sequence[Placed]) -> list[Placed]:
    """The same modules, those with rows of one group next to each other."""
    first: dict[Group, int] = {}
    for one in placed:
        for group in one.groups:
            first.setdefault(group, one.index)
    return sorted(placed, key=lambda one: min(first[group] for group in one.groups))


def _copied(file: RawFile, one: Placed) -> Stored:
    """The rows of a module from numbers that need no arithmetic: much of the time that a large file takes."""
    group = one.groups[0]
    A, B = (file.load_stored(group.parts[part]) for part in "AB")
    return np.concatenate([A.reshape(len(A), -1), B.reshape(len(B), -1).T], axis=1)


def _converted(fitted: Fitted, one: Placed, dtype: str, underflow: _Underflow) -> Stored:
    """The rows of a module in the layout's dtype."""
    block, column = np.empty((len(fitted.A), one.module.width), STORAGE_TYPES[dtype]), 0
    for values, key in ((fitted.A, one.groups[0].key), (fitted.B.T, one.groups[0].out_key)):
        part = block[:, column : column + values.shape[1]]
        part[:] = _stored(values, dtype, key)
        underflow.count(values, part, dtype, key)
        column += values.shape[1]
    return block


def _stored(values: Float32, dtype: str, key: str) -> Stored:
    largest = max(float(values.max()), -float(values.min()))  # NaN stays NaN
    if not largest < OVERFLOWS[dtype]:
        raise rejected(Cause.OVERFLOW, f"{key!r} holds numbers up to {largest:.3g}, too large for {dtype}.", key)
    return encode(values, dtype)


def _header(packing: Packing, packed: Packed, origin: Origin, length: int = 0) -> bytes:
    layout, names = packing.layout, []
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
    return container.header(metadata, [("rows", layout.dtype, (packed.rank, packing.width))], length)


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
