"""A packed adapter -> an ordinary adapter file, as diffusers and peft read and write them.

Names are `component.module.lora_A.weight` [rank, in] and `.lora_B.weight` [out, rank], 4-D for convolutions. There is
no alpha: the scaling is in B, and without one readers take alpha = rank.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from adapter_store import container
from adapter_store.dtypes import STORAGE_TYPES, Stored
from adapter_store.errors import Cause, rejected
from adapter_store.validate import open_file
from loraplex.layout import ModuleKind, TargetModule
from loraplex.packed import FORMAT

_METADATA = {"format": "pt", "software": "loraplex"}
_SIZE_LIMIT = 1 << 40


@dataclass(frozen=True)
class Unpacked:
    """What a packed file holds: `tensors` are views of the file's rows, by their names in peft's naming."""

    dtype: str
    modules: tuple[TargetModule, ...]
    tensors: dict[str, Stored]


def unpack(packed: Path, output: Path) -> Unpacked:
    """Write the adapter in `packed` to `output`, replacing it.

    Raises AdapterRejected when `packed` is no packed adapter; then, and when writing fails, `output` is as it was.
    """
    adapter = read_packed(packed)
    specs = [(name, adapter.dtype, tensor.shape) for name, tensor in adapter.tensors.items()]
    partial = output.with_name(f".{output.name}.partial")
    try:
        with partial.open("wb") as stream:
            stream.write(container.header(_METADATA, specs))
            for tensor in adapter.tensors.values():
                stream.write(np.ascontiguousarray(tensor).data)
        partial.replace(output)
    finally:
        partial.unlink(missing_ok=True)
    return adapter


def read_packed(path: Path) -> Unpacked:
    """Read a packed file by nothing but its own metadata. Raises AdapterRejected when it is none."""
    with open_file(path, _SIZE_LIMIT) as file:
        metadata, found = file.metadata, file.tensors.get("rows")
    if metadata.get("format") != FORMAT or found is None:
        raise rejected(Cause.NOT_PACKED, f"The file is no packed adapter of the format {FORMAT}.")
    try:
        names, ranks = json.loads(metadata["modules"]), json.loads(metadata["ranks"])
        modules = tuple(_module(*name) for _, *name in names)
        rows = np.memmap(path, STORAGE_TYPES[found.dtype], "r", found.offset, found.shape)
        tensors = dict(_tensors(rows, modules, ranks))
    except (KeyError, ValueError, TypeError) as error:
        raise rejected(Cause.NOT_PACKED, "The packed adapter's own metadata do not fit its rows.") from error
    return Unpacked(found.dtype, modules, tensors)


def _module(path: str, kind: ModuleKind, inputs: int, outputs: int, *kernel: int) -> TargetModule:
    component, _, name = path.partition(".")
    height, width = kernel
    return TargetModule(component, name, kind, inputs, outputs, (height, width))


def _tensors(rows: Stored, modules: tuple[TargetModule, ...], ranks: list[int]) -> Iterator[tuple[str, Stored]]:
    if sum(module.width for module in modules) != rows.shape[1]:
        raise ValueError("the modules' widths do not add up to the rows'")
    column = 0
    for module, rank in zip(modules, ranks, strict=True):
        is_convolution = module.kind == "conv2d"
        A = rows[:rank, column : column + module.a_width]
        B = rows[:rank, column + module.a_width : column + module.width].T
        yield f"{module.path}.lora_A.weight", A.reshape(rank, module.in_features, *module.kernel * is_convolution)
        yield f"{module.path}.lora_B.weight", B.reshape(module.out_features, rank, *(1, 1) * is_convolution)
        column += module.width
