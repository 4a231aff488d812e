"""The first half of step 4: a file's keys -> pairs of A and B, every tensor accounted for. Knows no layout."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from adapter_store.dialects.suffixes import Part, Suffix, split_suffix
from adapter_store.errors import Cause, rejected
from adapter_store.validate import RawFile


@dataclass(frozen=True)
class Pair:
    """The A and B of one module, by their keys in the file. `alpha` is the tensor's value, None without one."""

    stem: str
    A: str
    B: str
    rank: int
    alpha: float | None
    dialect: str


@dataclass(frozen=True)
class FilePairs:
    """What a file holds: its pairs in the file's order, and the tensors that are dropped because they are zero."""

    pairs: tuple[Pair, ...]
    zero: tuple[str, ...]

    @property
    def dialects(self) -> tuple[str, ...]:
        """The namings that occur, in alphabetical order."""
        return tuple(sorted({pair.dialect for pair in self.pairs}))


@dataclass
class _Group:
    """The tensors of one stem; one pair per infix and dialect."""

    alpha: str = ""
    keys: dict[tuple[str, str], dict[Part, str]] = field(default_factory=dict)


def read_pairs(file: RawFile) -> FilePairs:
    """All pairs of the file. Raises AdapterRejected for the first key that is not part of one and not zero."""
    groups: dict[str, _Group] = {}
    zero: list[str] = []
    for key in file.tensors:
        suffix = split_suffix(key)
        if suffix.part is Part.DIFFERENCE:
            _check_is_zero(file, key, suffix)
            zero.append(key)
        else:
            _add(groups.setdefault(suffix.stem, _Group()), key, suffix)
    pairs = tuple(pair for stem, group in groups.items() for pair in _pairs_of(file, stem, group))
    if not pairs:
        raise rejected(Cause.NO_TENSORS, "The file holds no A and B of any module.")
    return FilePairs(pairs, tuple(zero))


def _check_is_zero(file: RawFile, key: str, suffix: Suffix) -> None:
    if not file.is_zero(key):
        raise rejected(
            suffix.cause, f"{key[:200]!r} is {suffix.algorithm} that is not zero; it is not applied here.", key
        )


def _add(group: _Group, key: str, suffix: Suffix) -> None:
    if suffix.part is Part.ALPHA:
        group.alpha = key
        return
    group.keys.setdefault((suffix.infix, suffix.dialect), {})[suffix.part] = key


def _pairs_of(file: RawFile, stem: str, group: _Group) -> Iterable[Pair]:
    if not group.keys:
        raise rejected(Cause.INCOMPLETE_PAIR, f"{group.alpha!r} stands without its A and B.", group.alpha)
    alpha = _alpha(file, group.alpha) if group.alpha else None
    for (_, dialect), keys in group.keys.items():
        if len(keys) != 2:
            present = next(iter(keys.values()))
            missing = "B (up)" if Part.A in keys else "A (down)"
            raise rejected(Cause.INCOMPLETE_PAIR, f"{missing} is missing for {present[:200]!r}.", present)
        A, B = keys[Part.A], keys[Part.B]
        yield Pair(stem, A, B, _rank(file, A, B), alpha, dialect)


def _rank(file: RawFile, A: str, B: str) -> int:
    for key in (A, B):
        if len(file.tensors[key].shape) not in (2, 4):
            shape = list(file.tensors[key].shape)
            raise rejected(Cause.SHAPE_MISMATCH, f"{key[:200]!r} has shape {shape}, which is no matrix.", key)
    rank, rank_of_B = file.tensors[A].shape[0], file.tensors[B].shape[1]
    if rank != rank_of_B:
        raise rejected(Cause.RANK_MISMATCH, f"{A[:200]!r} has rank {rank}, its B has rank {rank_of_B}.", B)
    return rank


def _alpha(file: RawFile, key: str) -> float:
    count = math.prod(file.tensors[key].shape)
    if count != 1:
        raise rejected(Cause.ALPHA_INVALID, f"{key[:200]!r} has {count} numbers; alpha is one.", key)
    return file.load(key).item()
