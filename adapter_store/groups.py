"""The first half of step 4: a file's keys -> groups, one for every difference of a module. Knows no layout.

Every tensor goes to a group, or is dropped because it is zero, or is left out as the caller allowed; else the file is
refused for it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from adapter_store.dialects.suffixes import ALPHA, NORM_DIFFERENCE, Algorithm, Suffix, split_suffix
from adapter_store.errors import Cause, rejected
from adapter_store.sizes import SIZES_OF, Shapes, Sizes
from adapter_store.validate import RawFile
from adapter_store.waivers import NO_WAIVERS, Waivers

# What a part is called in messages, where its own name would not tell.
_PART_NAMES = {"A": "A (down)", "B": "B (up)"}
# Sets of parts that make an algorithm complete.
_COMPLETE: dict[Algorithm, tuple[frozenset[str], ...]] = {
    Algorithm.LORA: (frozenset("AB"), frozenset(("A", "mid", "B"))),
    Algorithm.LOHA: (
        frozenset(("w1_a", "w1_b", "w2_a", "w2_b")),
        frozenset(("w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2")),
    ),
    Algorithm.LOKR: tuple(
        frozenset((*first, *second))
        for first in (("w1",), ("w1_a", "w1_b"))
        for second in (("w2",), ("w2_a", "w2_b"), ("w2_a", "w2_b", "t2"))
    ),
    Algorithm.FULL: (frozenset(("diff",)),),
}


@dataclass(frozen=True, eq=False)
class Group:
    """The tensors of one difference: part -> key. `alpha` is the tensor's value, None without one."""

    stem: str
    algorithm: Algorithm
    parts: dict[str, str]
    sizes: Sizes
    alpha: float | None
    dialect: str

    @property
    def key(self) -> str:
        """The key that errors name: that of A where there is one."""
        return next(iter(self.parts.values()))

    @property
    def out_key(self) -> str:
        """The key of the factor that decides about the rows: that of B where there is one."""
        return self.parts.get("B") or self.key

    @property
    def alpha_key(self) -> str:
        """The key to name when the scaling is at fault."""
        return self.key if self.alpha is None else f"{self.stem}.{ALPHA}"

    @property
    def keys(self) -> tuple[str, ...]:
        """All its keys, alpha included."""
        return (*self.parts.values(), *(() if self.alpha is None else (self.alpha_key,)))

    @property
    def label(self) -> str:
        """The algorithm's name for reports."""
        return "Tucker" if "mid" in self.parts else self.algorithm.value


@dataclass(frozen=True)
class FileGroups:
    """What a file holds, in its own order; `zero` and `waived` are the keys of tensors that are not applied."""

    groups: tuple[Group, ...]
    zero: tuple[str, ...]
    waived: tuple[str, ...]

    @property
    def dialects(self) -> tuple[str, ...]:
        """The namings that occur, in alphabetical order."""
        return tuple(sorted({group.dialect for group in self.groups}))


@dataclass
class _Stem:
    """The tensors of one module as the file names it: one group per algorithm, infix and dialect."""

    alpha: str = ""
    parts: dict[tuple[Algorithm, str, str], dict[str, str]] = field(default_factory=dict)


def read_groups(file: RawFile, waivers: Waivers = NO_WAIVERS) -> FileGroups:
    """All groups of the file. Raises AdapterRejected for the first key that has no place and may not be left out."""
    stems: dict[str, _Stem] = {}
    zero: list[str] = []
    waived: list[str] = []
    for key in file.tensors:
        found = NORM_DIFFERENCE if _is_of_norm(file, key) else split_suffix(key)
        if waivers.component_of(key):
            waived.append(key)
        elif isinstance(found, Suffix):
            _add(stems.setdefault(found.stem, _Stem()), key, found)
        elif found.adds and file.is_zero(key):
            zero.append(key)
        elif waivers.kind(found.kind):
            waived.append(key)
        else:
            raise found.refusal(key)
    groups: list[Group] = []
    for name, stem in stems.items():
        for group in _groups_of(file, name, stem):
            if group.algorithm is Algorithm.FULL and is_zero(file, group):
                zero.extend(group.keys)
            else:
                groups.append(group)
    return FileGroups(tuple(groups), tuple(zero), tuple(waived))


def is_zero(file: RawFile, group: Group) -> bool:
    """Whether one factor is all zero, so that the difference is zero whatever the others are."""
    return any(file.is_zero(key) for key in group.parts.values())


def _is_of_norm(file: RawFile, key: str) -> bool:
    """A full difference of a vector: only norms have those."""
    return key.endswith(".diff") and len(file.tensors[key].shape) == 1


def _add(stem: _Stem, key: str, suffix: Suffix) -> None:
    if suffix.part == ALPHA:
        stem.alpha = key
        return
    parts = stem.parts.setdefault((suffix.algorithm, suffix.infix, suffix.dialect), {})
    if suffix.part in parts:
        message = f"{key[:200]!r} and {parts[suffix.part][:200]!r} are the same factor of one module."
        raise rejected(Cause.DUPLICATE_MODULE, message, key)
    parts[suffix.part] = key


def _groups_of(file: RawFile, name: str, stem: _Stem) -> Iterator[Group]:
    if not stem.parts:
        raise rejected(Cause.INCOMPLETE_PAIR, f"{stem.alpha!r} stands without its A and B.", stem.alpha)
    alpha = _alpha(file, stem.alpha) if stem.alpha else None
    for (algorithm, _, dialect), parts in stem.parts.items():
        _check_complete(algorithm, parts)
        ordered = {part: parts[part] for part in sorted(parts)}
        sizes = SIZES_OF[algorithm](Shapes(ordered, {part: file.tensors[key].shape for part, key in parts.items()}))
        if alpha is not None and algorithm is Algorithm.FULL:
            message = f"{stem.alpha[:200]!r} stands beside a full difference, which has no alpha."
            raise rejected(Cause.ALPHA_INVALID, message, stem.alpha)
        yield Group(name, algorithm, ordered, sizes, alpha, dialect)


def _check_complete(algorithm: Algorithm, parts: dict[str, str]) -> None:
    choices = _COMPLETE[algorithm]
    if parts.keys() in choices:
        return
    present = next(iter(parts.values()))
    missing = min((choice - parts.keys() for choice in choices if choice > parts.keys()), key=len, default=frozenset())
    if not missing:
        message = f"{present[:200]!r} stands beside other factors of {algorithm.value} that it does not go with."
        raise rejected(Cause.INCOMPLETE_PAIR, message, present)
    names = ", ".join(_PART_NAMES.get(part, part) for part in sorted(missing))
    raise rejected(Cause.INCOMPLETE_PAIR, f"{names} is missing for {present[:200]!r}.", present)


def _alpha(file: RawFile, key: str) -> float:
    count = math.prod(file.tensors[key].shape)
    if count != 1:
        raise rejected(Cause.ALPHA_INVALID, f"{key[:200]!r} has {count} numbers; alpha is one.", key)
    return file.load(key).item()
