"""The module's name: tables from every spelling to the layout's modules, generated from the layout itself.

Underscored names are looked up and never taken apart: `a_b.c` and `a.b_c` look the same underscored.
"""

from collections.abc import Iterable, Iterator, Mapping

from adapter_store.dialects import encoders, targets
from adapter_store.dialects.families import Family, family_of_pipeline
from adapter_store.dialects.prefixes import ANY, DENOISER, KNOWN_PREFIXES, TEXT_ENCODERS, ModuleName
from adapter_store.dialects.targets import Share, Target
from adapter_store.errors import Cause, rejected
from loraplex.errors import AdapterRejected, InvalidRequest
from loraplex.layout import Layout

__all__ = ["Names", "Share", "Target"]

# A name that leads to two different modules is known, and refused.
_Table = Mapping[str, Target | None]


class Names:
    """All names of one layout's modules."""

    def __init__(self, layout: Layout, denoiser: str = "") -> None:
        """`denoiser` is the one that names without a component mean. Raises InvalidRequest if the layout lacks it."""
        own: dict[str, dict[str, Target]] = {module.component: {} for module in layout.modules}
        for index, module in enumerate(layout.modules):
            own[module.component][module.name] = targets.whole(index, module.out_features)
        self.layout, self._denoiser = layout, denoiser
        self._denoisers = [component for component in own if component not in TEXT_ENCODERS]
        if denoiser and denoiser not in self._denoisers:
            message = f"{layout.base_model} has no denoiser {denoiser[:80]!r}; it has {', '.join(self._denoisers)}."
            raise InvalidRequest(message, remedy="Name one of them, or none.", field="denoiser")
        family = family_of_pipeline(layout.family)
        self._dotted = {component: _dotted(component, table, family) for component, table in own.items()}
        self._flat = {component: _flattened(table) for component, table in self._dotted.items()}
        self._kinds = {
            component: {encoders.kind_of(path) for path in table}
            for component, table in own.items()
            if component in TEXT_ENCODERS
        }

    def find(self, name: ModuleName, key: str) -> Target:
        """The target of `name`. Raises AdapterRejected: UNKNOWN_MODULE, AMBIGUOUS_MODULE or COMPONENT_NOT_SERVED."""
        components = self._components(name)
        if not components:
            raise self._not_served(name, key)
        found = self._found(name, components)
        if not found:
            raise self._unknown(name, key)
        if len(found) > 1:
            message = f"{key[:200]!r} could be of {' or '.join(found)}; the file does not tell which."
            raise rejected(Cause.AMBIGUOUS_COMPONENT, message, key)
        target = next(iter(found.values()))
        if target is None:
            raise rejected(Cause.AMBIGUOUS_MODULE, f"{key[:200]!r} could mean several modules.", key)
        return target

    def knows(self, name: ModuleName) -> bool:
        """Whether `name` leads to a module, if perhaps to several."""
        return bool(self._found(name, self._components(name)))

    def _found(self, name: ModuleName, components: Iterable[str]) -> dict[str, Target | None]:
        tables: Mapping[str, _Table] = self._flat if name.flat else self._dotted
        found = {one: tables[one][name.path] for one in components if name.path in tables[one]}
        in_denoisers = {one: target for one, target in found.items() if one in self._denoisers}
        return in_denoisers or found

    def _components(self, name: ModuleName) -> list[str]:
        if name.component == ANY:
            return [one for one in self._dotted if one in TEXT_ENCODERS or self._denoiser in ("", one)]
        if name.by_path:
            return self._encoders(name)
        # diffusers saves an adapter of either denoiser as one of "transformer".
        either = self._denoiser and name.component == self._denoisers[0]
        if name.component == DENOISER or either:
            return [one for one in self._denoisers if self._denoiser in ("", one)]
        if name.component in self._denoisers and self._denoiser not in ("", name.component):
            return []
        return [name.component] if name.component in self._dotted else []

    def _encoders(self, name: ModuleName) -> list[str]:
        """The encoder that the number means if it is of the path's kind, else the one that is.

        CLIP is not looked for beside a numbered encoder that is missing: there are two, of different widths.
        """
        kind = encoders.kind_of(name.path)
        served = name.component in self._kinds
        if served and (kind in self._kinds[name.component] or not kind):
            return [name.component]
        if kind in encoders.FOUND_BY_PATH or (kind == encoders.CLIP and served):
            return [component for component, kinds in self._kinds.items() if kind in kinds]
        return []

    def _not_served(self, name: ModuleName, key: str) -> AdapterRejected:
        served = ", ".join(self._dotted)
        what = f"{key[:200]!r} adapts {name.component}; this layout has {served}."
        if name.component in self._denoisers:
            what = f"{key[:200]!r} adapts {name.component}; the caller asked for {self._denoiser}."
        elif name.by_path:
            kind = encoders.kind_of(name.path) or "a text encoder"
            what = f"{key[:200]!r} adapts {kind} ({name.component}); this layout has {served}."
        return rejected(Cause.COMPONENT_NOT_SERVED, what, key)

    def _unknown(self, name: ModuleName, key: str) -> AdapterRejected:
        what = f"{key[:200]!r} names no module of {self.layout.base_model} ({self.layout.family})."
        if name.component == ANY:
            what += f" The prefixes known here are {', '.join(KNOWN_PREFIXES)}."
        return rejected(Cause.UNKNOWN_MODULE, what, key)


def _dotted(component: str, own: dict[str, Target], family: Family) -> dict[str, Target | None]:
    """Every dotted name of a component's modules; the layout's own names come first."""
    table: dict[str, Target | None] = dict(own)
    if component in TEXT_ENCODERS:
        _add(table, ((name, target) for path, target in own.items() for name in encoders.spellings(path)))
        return table
    parts = {name: target for name, target in targets.pieces(family.fused, own) if name not in own}
    _add(table, parts.items())
    if component == "unet":
        _add(table, ((name, target) for path, target in own.items() for name in _first_generation(path)))
    _add(table, targets.originals(family.original_names(own), own | parts).items())
    return table


def _add(table: dict[str, Target | None], names: Iterable[tuple[str, Target]]) -> None:
    for name, target in names:
        if table.setdefault(name, target) != target:
            table[name] = None


def _first_generation(path: str) -> Iterator[str]:
    """What diffusers called a UNet's attention in 2023: `attn1.processor.to_q_lora` and `to_out_lora`."""
    block, _, layer = path.removesuffix(".0").rpartition(".")
    if layer in ("to_q", "to_k", "to_v", "to_out", "add_k_proj", "add_v_proj"):
        yield f"{block}.processor.{layer}_lora"


def _flattened(table: _Table) -> dict[str, Target | None]:
    """Underscored names; None where two modules share one."""
    flat: dict[str, Target | None] = {}
    for path, target in table.items():
        name = path.replace(".", "_")
        flat[name] = target if flat.get(name, target) == target else None
    return flat
