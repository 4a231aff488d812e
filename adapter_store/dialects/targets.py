"""Where a name leads: rows of B, shared out to modules of the layout."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from adapter_store.dialects.original import Fused, OriginalName


@dataclass(frozen=True)
class Share:
    """The rows of a name's B that belong to one module of the layout, in the module's order.

    They are the module's rows from `start` on: not all of them where a file has a fused module in pieces.
    """

    module: int
    rows: tuple[slice, ...]
    start: int = 0


@dataclass(frozen=True)
class Target:
    """Where a name leads: `out_features` rows of B, shared out to one or several modules."""

    out_features: int
    shares: tuple[Share, ...]


def whole(module: int, out_features: int) -> Target:
    """All rows of a module."""
    return Target(out_features, (Share(module, (slice(0, out_features),)),))


def pieces(fused: Iterable[Fused], table: Mapping[str, Target]) -> Iterator[tuple[str, Target]]:
    """The pieces of the fused modules in `table`, which maps the layout's own names."""
    for end, names, last in fused:
        for path, target in table.items():
            if path.endswith(f".{end}"):
                step, rest = divmod(target.out_features, len(names) - 1 + last)
                if rest == 0:
                    yield from _cut(path.removesuffix(end), names, step, target)


def _cut(block: str, names: tuple[str, ...], step: int, target: Target) -> Iterator[tuple[str, Target]]:
    module = target.shares[0].module
    for number, name in enumerate(names):
        start = number * step
        rows = target.out_features - start if name == names[-1] else step
        yield block + name, Target(rows, (Share(module, (slice(0, rows),), start),))


def originals(rows: Iterable[OriginalName], table: Mapping[str, Target]) -> dict[str, Target]:
    """The names of other code whose modules `table` has; the parts of a fused name by their numbers, as OneTrainer."""
    found: dict[str, Target] = {}
    for name, paths, swapped in rows:
        if all(path in table for path in paths):
            parts = [table[path] for path in paths]
            if len(parts) > 1:
                found |= {f"{name}.{number}": part for number, part in enumerate(parts)}
            found[name] = _swapped(parts[0]) if swapped else _joined(parts)
    return found


def _joined(parts: list[Target]) -> Target:
    """One part after the other; neighbours in one module become one share."""
    shares: list[Share] = []
    start = 0
    for part in parts:
        for share in part.shares:
            rows = tuple(slice(start + one.start, start + one.stop) for one in share.rows)
            moved = replace(share, rows=rows)
            if shares and _continues(shares[-1], moved):
                shares[-1] = replace(shares[-1], rows=(slice(shares[-1].rows[0].start, rows[0].stop),))
            else:
                shares.append(moved)
        start += part.out_features
    return Target(start, tuple(shares))


def _continues(first: Share, second: Share) -> bool:
    if first.module != second.module or len(first.rows) + len(second.rows) != 2:
        return False
    above, below = first.rows[0], second.rows[0]
    return above.stop == below.start and second.start == first.start + above.stop - above.start


def _swapped(target: Target) -> Target:
    middle = target.out_features // 2
    share = replace(target.shares[0], rows=(slice(middle, target.out_features), slice(0, middle)))
    return Target(target.out_features, (share,))
