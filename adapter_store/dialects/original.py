"""The shape of a table of module names: rows of data, and what a layout makes of them."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

_EACH, _LAST = "{}", "{last}"


class OriginalName(NamedTuple):
    """A module of other code: the rows of its B are the rows of `modules`, one after the other.

    `{}` stands for every index of a block in the layout, `{last}` for the last one. `swapped` marks a module whose two
    halves of rows stand in the other order in diffusers. Of two rows for one name the later counts.
    """

    name: str
    modules: tuple[str, ...]
    swapped: bool = False


class Fused(NamedTuple):
    """A module of the layout that files may have in pieces, by the end of its name.

    All pieces have the same number of rows, but the last, which has `last` times as many.
    """

    end: str
    pieces: tuple[str, ...]
    last: int = 1


# What diffusers' `fuse_qkv_projections` leaves, and ComfyUI's Z-Image.
FUSED = (
    Fused("to_qkv", ("to_q", "to_k", "to_v")),
    Fused("to_kv", ("to_k", "to_v")),
    Fused("to_added_qkv", ("add_q_proj", "add_k_proj", "add_v_proj")),
    Fused("attention.qkv", ("attention.to_q", "attention.to_k", "attention.to_v")),
)


def in_blocks(original: str, ours: str, rows: Iterable[tuple[str, Sequence[str]]]) -> Iterator[OriginalName]:
    """Rows of a block: `original` and `ours` are the block's names, with `{}` for its index.

    Of each row the second is one module or several.
    """
    for name, modules in rows:
        paths = (modules,) if isinstance(modules, str) else tuple(modules)
        yield OriginalName(f"{original}.{name}", tuple(f"{ours}.{path}" for path in paths))


def expand(table: Iterable[OriginalName], paths: Collection[str]) -> Iterator[OriginalName]:
    """The rows with the indexes that the blocks of a layout have; `paths` are its modules."""
    known: dict[str, list[int]] = {}
    for row in table:
        mark = next((mark for mark in (_EACH, _LAST) if mark in row.name), "")
        if not mark:
            yield row
            continue
        container = row.modules[0].partition(mark)[0]
        if container not in known:
            known[container] = _indexes(container, paths)
        for index in known[container][-1:] if mark == _LAST else known[container]:
            modules = tuple(module.replace(mark, str(index)) for module in row.modules)
            yield OriginalName(row.name.replace(mark, str(index)), modules, row.swapped)


def _indexes(container: str, paths: Collection[str]) -> list[int]:
    heads = {path.removeprefix(container).partition(".")[0] for path in paths if path.startswith(container)}
    return sorted(int(head) for head in heads if head.isdecimal())
