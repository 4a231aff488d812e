"""What a file contains and whether it fits a layout, without putting anything in the cache."""

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapter_store.accounting import Accounting
from adapter_store.convert import convert
from adapter_store.dialects.prefixes import ANY, split_prefix
from adapter_store.dialects.recognise import family_of
from adapter_store.download import Limits, SourceFile
from adapter_store.groups import FileGroups, Group, read_groups
from adapter_store.pack import Origin, Packed, Packing, Written, pack, write
from adapter_store.placing import Placed
from adapter_store.scaling import read_configs
from adapter_store.source import Source
from adapter_store.validate import open_file
from adapter_store.waivers import Waivers
from loraplex.errors import AdapterRejected
from loraplex.layout import Layout
from loraplex.pack_options import EXACTLY, PackOptions

_NOTHING = Accounting((), (), ())


@dataclass(frozen=True)
class InspectedModule:
    """One adapted module; `component` is "" where the file does not tell.

    `rank` and `alpha` are the file's; `packed_rank` and `error` are known once it is packed.
    """

    component: str
    name: str
    rank: int
    alpha: float | None
    algorithm: str
    packed_rank: int = 0
    error: float = 0.0


@dataclass(frozen=True)
class Inspection:
    """The report on one file. Without a layout neither `applicable` nor `rejection` is set.

    `accounting` has a place for every tensor when the file is applicable; without a layout as far as the file tells.
    """

    commit: str
    weight_name: str
    size_bytes: int
    source_digest: str
    dialects: tuple[str, ...] = ()
    tensors: int = 0
    modules: tuple[InspectedModule, ...] = ()
    applicable: bool = False
    rejection: AdapterRejected | None = None
    family: str = ""
    accounting: Accounting = _NOTHING

    @property
    def rank(self) -> int:
        """The largest rank."""
        return max((module.rank for module in self.modules), default=0)


@dataclass(frozen=True)
class Examined:
    """The report on one file, and the packed file when that was asked for and it is applicable."""

    report: Inspection
    written: Written | None = None


def examine(
    source: Source,
    file: SourceFile,
    layout: Layout | None,
    limits: Limits,
    max_rank: int,
    options: PackOptions = EXACTLY,
    into: Path | None = None,
) -> Examined:
    """Read the file as far as it can be read; what stops that is the report's `rejection`. Blocking; any thread.

    Packs it to `into`, a new file, unless that is None; what is there after a rejection is of no use.
    """
    written = None
    report = Inspection(source.commit or file.digest, source.weight_name, file.path.stat().st_size, file.digest)
    try:
        with open_file(file.path, limits.max_file_bytes) as raw:
            report = dataclasses.replace(report, tensors=len(raw.tensors))
            found = read_groups(raw, Waivers(options, layout))
            report = dataclasses.replace(report, **_as_the_file_says(found, raw.tensors))
            if layout is None:
                return Examined(report)
            fitted = convert(raw, found, layout, read_configs(raw.metadata, file.config), options)
            modules = tuple(_as_the_layout_says(one) for one in fitted.placed)
            report = dataclasses.replace(report, modules=modules, accounting=fitted.accounting)
            packing = Packing(layout, fitted.placed, options.limit(max_rank), options.max_error)
            if into:
                origin = Origin(file.digest, file.config_digest, str(options), len(fitted.accounting.waived))
                written = write(raw, packing, origin, into)
            packed = written.packed if written else pack(raw, packing)
    except AdapterRejected as error:
        return Examined(dataclasses.replace(report, rejection=error))
    report = dataclasses.replace(report, applicable=True, modules=_as_packed(modules, packed))
    return Examined(report, written)


def _as_the_file_says(found: FileGroups, tensors: Collection[str]) -> dict[str, Any]:
    applied = [key for group in found.groups for key in group.keys]
    return {
        "dialects": found.dialects,
        "family": family_of(group.stem for group in found.groups),
        "modules": tuple(_inspected(group) for group in found.groups),
        "accounting": Accounting.of(tensors, applied, found.zero, found.waived),
    }


def _inspected(group: Group) -> InspectedModule:
    name = split_prefix(group.stem)
    component = "" if name.component == ANY else name.component
    return InspectedModule(component, name.path, group.sizes.rank, group.alpha, group.label)


def _as_the_layout_says(one: Placed) -> InspectedModule:
    alphas = {group.alpha for group in one.groups}
    return InspectedModule(
        component=one.module.component,
        name=one.module.name,
        rank=max(group.sizes.rank for group in one.groups),
        alpha=alphas.pop() if len(alphas) == 1 else None,
        algorithm=" + ".join(sorted({group.label for group in one.groups})),
    )


def _as_packed(modules: tuple[InspectedModule, ...], packed: Packed) -> tuple[InspectedModule, ...]:
    fits = zip(modules, packed.ranks, packed.errors, strict=True)
    return tuple(dataclasses.replace(one, packed_rank=rank, error=error) for one, rank, error in fits)
