"""A model's target modules as a short text that people can read, and back.

One line per module, `name in out [kernel]`, indented below what its name goes on from. Numbered blocks that are alike
and stand together are written once: `transformer_blocks.{0-18}`.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import groupby

from loraplex.layout import TargetModule

_INDENT = "  "
# One module: its name's segments, and the rest of its line.
_Row = tuple[tuple[str, ...], str]
# Names such as Z-Image's `all_x_embedder.2-1` exist, so a range needs its braces.
_RANGE = re.compile(r"(.*\.)\{(\d+)-(\d+)\}")


def write_outline(modules: Sequence[TargetModule]) -> str:
    """The modules of one component, in their order. Raises ValueError for names that could not be read back."""
    for module in modules:
        if not re.fullmatch(r"[^\s{}]+", module.name):
            raise ValueError(f"an outline cannot hold the name {module.name!r}")
    rows = [(tuple(module.name.split(".")), _shape(module)) for module in modules]
    return "".join(f"{line}\n" for line in _lines(rows))


def read_outline(text: str, component: str) -> list[TargetModule]:
    """The modules that `write_outline` wrote."""
    lines = [(len(line) - len(line.lstrip()), line.split()) for line in text.splitlines()]
    return [_module(component, ".".join(name), shape) for name, shape in _rows(lines)]


def _shape(module: TargetModule) -> str:
    kernel = "x".join(map(str, module.kernel))
    return f"{module.in_features} {module.out_features}" + (f" {kernel}" if module.kind == "conv2d" else "")


def _module(component: str, name: str, shape: Sequence[str]) -> TargetModule:
    inputs, outputs, *kernel = shape
    if not kernel:
        return TargetModule(component, name, "linear", int(inputs), int(outputs))
    height, width = map(int, kernel[0].split("x"))
    return TargetModule(component, name, "conv2d", int(inputs), int(outputs), (height, width))


def _lines(rows: Sequence[_Row]) -> list[str]:
    blocks: list[tuple[str, list[str]]] = []  # what a name starts with, and the lines below it
    for head, group in groupby(rows, key=lambda row: _head(row[0])):
        members = list(group)
        if members[0][0] == head:
            blocks.append((f"{'.'.join(head)} {members[0][1]}", []))
        else:
            blocks.append((".".join(head), _lines([(name[len(head) :], shape) for name, shape in members])))
    written: list[str] = []
    for heading, below in _merged(blocks):
        written += [heading, *(_INDENT + line for line in below)]
    return written


def _head(name: tuple[str, ...]) -> tuple[str, ...]:
    """What stands on a line of its own: up to the first number, else up to the second-last segment, else all."""
    numbers = [position for position, segment in enumerate(name) if segment.isdigit()]
    if numbers and numbers[0] < len(name) - 1:
        return name[: numbers[0] + 1]
    return name


def _merged(blocks: Sequence[tuple[str, list[str]]]) -> Iterator[tuple[str, list[str]]]:
    """Neighbours `x.3` and `x.4` with the same lines below become `x.3-4`."""
    position = 0
    while position < len(blocks):
        heading, below = blocks[position]
        stem, _, first = heading.rpartition(".")
        last = position
        while (
            below
            and last + 1 < len(blocks)
            and blocks[last + 1] == (f"{stem}.{int(first) + last + 1 - position}", below)
        ):
            last += 1
        yield (heading if last == position else f"{stem}.{{{first}-{int(first) + last - position}}}"), below
        position = last + 1


def _rows(lines: Sequence[tuple[int, list[str]]]) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    position = 0
    while position < len(lines):
        depth, (name, *shape) = lines[position]
        end = position + 1
        while end < len(lines) and lines[end][0] > depth:
            end += 1
        below = list(_rows(lines[position + 1 : end])) or [((), shape)]
        for head in _numbered(name):
            yield from (((head, *rest), values) for rest, values in below)
        position = end


def _numbered(name: str) -> list[str]:
    several = _RANGE.fullmatch(name)
    if several is None:
        return [name]
    stem, first, last = several.groups()
    return [f"{stem}{number}" for number in range(int(first), int(last) + 1)]
