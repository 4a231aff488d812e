"""Step 4: pairs in any trainer's naming -> the layout's modules.

Decides from the header alone which rows of which B go where; no numbers are read, except to compare two pairs that
claim one module. What it returns is complete: every tensor of the file is applied, or is zero and was dropped.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from adapter_store import algebra
from adapter_store.dialects.names import Names, Target
from adapter_store.dialects.prefixes import ModuleName, split_prefix
from adapter_store.dialects.recognise import describe_family
from adapter_store.dtypes import Float32
from adapter_store.errors import Cause, rejected
from adapter_store.pairs import FilePairs, Pair
from adapter_store.scaling import PeftConfig, scaling_of
from adapter_store.validate import RawFile
from loraplex.errors import AdapterRejected
from loraplex.layout import Layout, TargetModule


@dataclass(frozen=True)
class Placed:
    """One pair on one module: delta = scaling * B[rows] @ A. `fused` when B holds rows of other modules too."""

    index: int
    module: TargetModule
    pair: Pair
    rows: tuple[slice, ...]
    scaling: float
    fused: bool

    @property
    def rank(self) -> int:
        """The largest rank that it can take in the packed adapter."""
        return algebra.needed_rank(self.pair.rank, self.module.a_width, self.module.b_width)

    def load(self, file: RawFile) -> tuple[Float32, Float32]:
        """A [rank, a_width] and B [b_width, rank], scaling folded in. Raises NOT_FINITE."""
        return algebra.lora(file.load(self.pair.A), file.load(self.pair.B), self.rows, self.scaling)


def convert(
    file: RawFile, found: FilePairs, layout: Layout, configs: dict[str, PeftConfig], max_rank: int
) -> tuple[Placed, ...]:
    """Place every pair, in the layout's order. Raises AdapterRejected; reads no numbers unless two pairs collide."""
    names = Names(layout)
    placed: dict[int, Placed] = {}
    for one in _place_all(file, found, layout, names, configs):
        if one.index in placed:
            _check_equal(file, placed[one.index], one)
        _check_rank(one, max_rank)
        placed.setdefault(one.index, one)
    for config in configs.values():
        config.check_patterns_used()
    return tuple(placed[index] for index in sorted(placed))


def _place_all(
    file: RawFile, found: FilePairs, layout: Layout, names: Names, configs: dict[str, PeftConfig]
) -> Iterator[Placed]:
    for pair in found.pairs:
        name = split_prefix(pair.stem)
        target = _find(names, name, pair, found)
        modules = [layout.modules[share.module] for share in target.shares]
        _check_shapes(file, pair, target, modules)
        config = configs.get(modules[0].component) or configs.get("")
        path = name.path if name.flat or len(modules) > 1 else modules[0].name
        key = pair.A if pair.alpha is None else f"{pair.stem}.alpha"
        scaling = scaling_of(key, path, pair.rank, pair.alpha, config)
        for share, module in zip(target.shares, modules, strict=True):
            yield Placed(share.module, module, pair, share.rows, scaling, fused=len(modules) > 1)


def _find(names: Names, name: ModuleName, pair: Pair, found: FilePairs) -> Target:
    try:
        return names.find(name, pair.A)
    except AdapterRejected as error:
        family = describe_family(other.stem for other in found.pairs)
        raise rejected(Cause(error.cause), f"{error.message} {family}".rstrip(), error.key) from None


def _check_shapes(file: RawFile, pair: Pair, target: Target, modules: list[TargetModule]) -> None:
    module = modules[0]
    expected_A = (pair.rank, module.in_features, *module.kernel)
    expected_B = (target.out_features, pair.rank, 1, 1)
    for key, expected in ((pair.A, expected_A), (pair.B, expected_B)):
        shape = file.tensors[key].shape
        if shape != expected and not (shape == expected[:2] and expected[2:] == (1, 1)):
            raise rejected(Cause.SHAPE_MISMATCH, _shape_message(key, shape, expected, module), key)


def _shape_message(key: str, shape: tuple[int, ...], expected: tuple[int, ...], module: TargetModule) -> str:
    if expected[2:] == (1, 1):
        expected = expected[:2]
    message = f"{key[:200]!r} has shape {list(shape)}, {module.path} needs {list(expected)}."
    if shape == expected[::-1]:
        return f"{message} The matrix is transposed."
    return f"{message} The adapter was trained for a base model with other widths."


def _check_rank(one: Placed, max_rank: int) -> None:
    if one.rank > max_rank:
        message = f"{one.pair.A[:200]!r} has rank {one.pair.rank}; this store packs ranks up to {max_rank}."
        raise rejected(Cause.RANK_TOO_LARGE, message, one.pair.A)


def _check_equal(file: RawFile, first: Placed, second: Placed) -> None:
    A, B = first.load(file)
    other_A, other_B = second.load(file)
    if not (np.array_equal(A, other_A) and np.array_equal(B, other_B)):
        message = f"{second.pair.A[:200]!r} and {first.pair.A[:200]!r} adapt {first.module.path} differently."
        raise rejected(Cause.DUPLICATE_MODULE, message, second.pair.A)
