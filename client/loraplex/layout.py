"""The layout of rank rows: which modules have columns, in which order, and which columns an adapter fills.

Shared by both services; the wire form is `protos/loraplex/v1/layout.proto`.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal, NamedTuple

from loraplex.v1 import layout_pb2

ModuleKind = Literal["linear", "conv2d"]

DTYPE_SIZES = {"F32": 4, "BF16": 2, "F16": 2}

_KIND_TO_WIRE = {"linear": layout_pb2.MODULE_KIND_LINEAR, "conv2d": layout_pb2.MODULE_KIND_CONV2D}
_KIND_FROM_WIRE: dict[int, ModuleKind] = {
    layout_pb2.MODULE_KIND_LINEAR: "linear",
    layout_pb2.MODULE_KIND_CONV2D: "conv2d",
}


@dataclass(frozen=True)
class TargetModule:
    """A linear or convolution layer that A and B attach to; `name` is its dotted path inside `component`."""

    component: str
    name: str
    kind: ModuleKind
    in_features: int
    out_features: int
    kernel: tuple[int, int] = (1, 1)

    @property
    def a_width(self) -> int:
        """Width of one row of A: in_features * kernel height * kernel width."""
        return self.in_features * self.kernel[0] * self.kernel[1]

    @property
    def b_width(self) -> int:
        """Width of one row of B transposed: out_features."""
        return self.out_features

    @property
    def width(self) -> int:
        """Columns that the module takes in a rank row."""
        return self.a_width + self.b_width

    @property
    def path(self) -> str:
        """`component.name`, unique in a layout."""
        return f"{self.component}.{self.name}"


class ColumnRun(NamedTuple):
    """`length` columns that stand together both in the arena's rows and in a packed adapter's rows."""

    arena_start: int
    packed_start: int
    length: int


@dataclass(frozen=True)
class Layout:
    """The ordered target modules of one base model. Raises ValueError when it could not lay out rows."""

    base_model: str
    family: str
    dtype: str
    modules: tuple[TargetModule, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_SIZES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPE_SIZES)}, got {self.dtype!r}")
        if not self.modules:
            raise ValueError("a layout needs at least one target module")
        if len({module.path for module in self.modules}) != len(self.modules):
            raise ValueError("a layout names a target module twice")
        for module in self.modules:
            if min(module.in_features, module.out_features, *module.kernel) < 1:
                raise ValueError(f"{module.path} has a dimension below 1")

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First column of every module, and the width of a row as the last entry."""
        return (0, *accumulate(module.width for module in self.modules))

    @property
    def width(self) -> int:
        """Elements of one rank row."""
        return self.offsets[-1]

    @property
    def row_bytes(self) -> int:
        """Bytes of one rank row."""
        return self.width * DTYPE_SIZES[self.dtype]

    @cached_property
    def digest(self) -> str:
        """sha256 in hex, as `layout.proto` defines it."""
        rows = [[m.component, m.name, m.kind, m.in_features, m.out_features, *m.kernel] for m in self.modules]
        text = json.dumps([self.base_model, self.family, self.dtype, rows], separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def packed_width(self, module_indexes: Iterable[int]) -> int:
        """Elements of one row of a packed adapter that touches these modules."""
        return sum(self.modules[index].width for index in module_indexes)

    def column_runs(self, module_indexes: Sequence[int]) -> list[ColumnRun]:
        """Where the columns of a packed adapter belong in the arena; neighbours are merged.

        Raises ValueError unless `module_indexes` ascend inside the layout.
        """
        runs: list[ColumnRun] = []
        packed, last = 0, -1
        for index in module_indexes:
            if not last < index < len(self.modules):
                raise ValueError(f"module index {index} after {last}: must ascend and be below {len(self.modules)}")
            start, length = self.offsets[index], self.modules[index].width
            if runs and runs[-1].arena_start + runs[-1].length == start:
                runs[-1] = runs[-1]._replace(length=runs[-1].length + length)
            else:
                runs.append(ColumnRun(start, packed, length))
            packed, last = packed + length, index
        return runs

    def to_proto(self) -> layout_pb2.Layout:
        """The wire form."""
        modules = [
            layout_pb2.TargetModule(
                component=m.component,
                name=m.name,
                kind=_KIND_TO_WIRE[m.kind],
                in_features=m.in_features,
                out_features=m.out_features,
                kernel_height=m.kernel[0],
                kernel_width=m.kernel[1],
            )
            for m in self.modules
        ]
        return layout_pb2.Layout(base_model=self.base_model, family=self.family, dtype=self.dtype, modules=modules)

    @classmethod
    def from_proto(cls, wire: layout_pb2.Layout) -> "Layout":
        """The layout of a message; ValueError when it is not one."""
        for m in wire.modules:
            if m.kind not in _KIND_FROM_WIRE:
                raise ValueError(f"{m.component}.{m.name} has no known kind")
        modules = tuple(
            TargetModule(
                component=m.component,
                name=m.name,
                kind=_KIND_FROM_WIRE[m.kind],
                in_features=m.in_features,
                out_features=m.out_features,
                kernel=(m.kernel_height, m.kernel_width),
            )
            for m in wire.modules
        )
        return cls(base_model=wire.base_model, family=wire.family, dtype=wire.dtype, modules=modules)
