"""The module's name: tables from every spelling to the layout's modules, generated from the layout itself.

Underscored names are looked up and never taken apart: `a_b.c` and `a.b_c` look the same underscored.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from adapter_store.dialects import flux
from adapter_store.dialects.prefixes import ANY, DENOISER, KNOWN_PREFIXES, TEXT_ENCODERS, ModuleName
from adapter_store.errors import Cause, rejected
from loraplex.layout import Layout

_TEXT_MODEL = "text_model."  # a level of CLIP's names that newer releases of transformers dropped


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


class Names:
    """All names of one layout's modules."""

    def __init__(self, layout: Layout, denoiser: str = "") -> None:
        self._layout, self._denoiser = layout, denoiser
        self._dotted: dict[str, dict[str, Target]] = {module.component: {} for module in layout.modules}
        for index, module in enumerate(layout.modules):
            target = Target(module.out_features, (Share(index, (slice(0, module.out_features),)),))
            for spelling in _spellings(module.component, module.name):
                self._dotted[module.component].setdefault(spelling, target)
        if layout.family.startswith("Flux") and not layout.family.startswith("Flux2"):
            self._dotted["transformer"] |= dict(_flux_names(self._dotted.get("transformer", {})))
        self._flat = {component: _flattened(table) for component, table in self._dotted.items()}

    def find(self, name: ModuleName, key: str) -> Target:
        """The target of `name`. Raises AdapterRejected: UNKNOWN_MODULE, AMBIGUOUS_MODULE or COMPONENT_NOT_SERVED."""
        tables = self._flat if name.flat else self._dotted
        components = self._components(name)
        found = [c for c in components if name.path in tables[c]]
        if name.component in found:
            found = [name.component]
        if name.component == ANY and found:
            found = [c for c in found if c not in TEXT_ENCODERS] or found
        targets = [tables[component][name.path] for component in found]
        if len(targets) > 1 or targets == [None]:
            raise rejected(Cause.AMBIGUOUS_MODULE, f"{key[:200]!r} could mean several modules.", key)
        if targets and targets[0] is not None:
            return targets[0]
        raise self._unknown(name, components, key)

    def _components(self, name: ModuleName) -> list[str]:
        served = list(self._dotted)
        if name.component == ANY:
            return served
        if name.component == DENOISER:
            denoisers = [component for component in served if component not in TEXT_ENCODERS]
            return [one for one in denoisers if self._denoiser in ("", one)]
        if name.by_path:
            head = _encoder_head(name.path)
            encoders = [component for component in served if component in TEXT_ENCODERS]
            return [c for c in encoders if any(_encoder_head(path) == head for path in self._dotted[c])]
        return [component for component in served if component == name.component]

    def _unknown(self, name: ModuleName, components: list[str], key: str) -> Exception:
        served = ", ".join(self._dotted)
        if not components:
            what = f"{key[:200]!r} adapts {name.component}; this layout has {served}."
            return rejected(Cause.COMPONENT_NOT_SERVED, what, key)
        what = f"{key[:200]!r} names no module of {self._layout.base_model} ({self._layout.family})."
        if name.component == ANY:
            what += f" The prefixes known here are {', '.join(KNOWN_PREFIXES)}."
        return rejected(Cause.UNKNOWN_MODULE, what, key)


def _spellings(component: str, path: str) -> tuple[str, ...]:
    if component in TEXT_ENCODERS and path.startswith(_TEXT_MODEL):
        return path, path.removeprefix(_TEXT_MODEL)
    if component in TEXT_ENCODERS and path.startswith("encoder.layers."):
        return path, _TEXT_MODEL + path
    return (path,)


def _encoder_head(path: str) -> str:
    """Tells CLIP (`encoder_layers`) from T5 (`encoder_block`)."""
    words = path.replace(".", "_").removeprefix("text_model_").split("_")
    return "_".join(words[:2])


def _flattened(table: dict[str, Target]) -> dict[str, Target | None]:
    """Underscored names; None where two modules share one."""
    flat: dict[str, Target | None] = {}
    for path, target in table.items():
        name = path.replace(".", "_")
        flat[name] = target if flat.get(name, target) == target else None
    return flat


def _flux_names(modules: dict[str, Target]) -> Iterator[tuple[str, Target]]:
    num_double = _count(modules, r"transformer_blocks\.(\d+)\.")
    num_single = _count(modules, r"single_transformer_blocks\.(\d+)\.")
    for name, paths, swapped in flux.original_names(num_double, num_single):
        if not all(path in modules for path in paths):
            continue
        shares: list[Share] = []
        start = 0
        for part, path in enumerate(paths):
            target = modules[path]
            index, rows = target.shares[0].module, (slice(start, start + target.out_features),)
            shares.append(Share(index, _swap_halves(rows[0]) if swapped else rows))
            start += target.out_features
            if len(paths) > 1:  # OneTrainer cuts fused modules itself and numbers the pieces
                yield f"{name}.{part}", target
        yield name, Target(start, tuple(shares))


def _swap_halves(rows: slice) -> tuple[slice, slice]:
    middle = (rows.start + rows.stop) // 2
    return slice(middle, rows.stop), slice(rows.start, middle)


def _count(modules: dict[str, Target], pattern: str) -> int:
    indexes = [int(match[1]) for path in modules if (match := re.match(pattern, path))]
    return max(indexes, default=-1) + 1
