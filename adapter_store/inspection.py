"""What a file contains and whether it fits a layout, without putting anything in the cache."""

import dataclasses
from dataclasses import dataclass

from adapter_store.convert import Placed, convert
from adapter_store.dialects.prefixes import ANY, split_prefix
from adapter_store.download import Limits, SourceFile
from adapter_store.pack import pack
from adapter_store.pairs import FilePairs, Pair, read_pairs
from adapter_store.scaling import read_configs
from adapter_store.source import Source
from adapter_store.validate import open_file
from loraplex.errors import AdapterRejected
from loraplex.layout import Layout


@dataclass(frozen=True)
class InspectedModule:
    """One adapted module; `component` is "" where the file does not tell."""

    component: str
    name: str
    rank: int
    alpha: float | None


@dataclass(frozen=True)
class Inspection:
    """The report on one file. Without a layout neither `applicable` nor `rejection` is set."""

    commit: str
    weight_name: str
    size_bytes: int
    source_digest: str
    dialects: tuple[str, ...] = ()
    tensors: int = 0
    modules: tuple[InspectedModule, ...] = ()
    applicable: bool = False
    rejection: AdapterRejected | None = None

    @property
    def rank(self) -> int:
        """The largest rank."""
        return max((module.rank for module in self.modules), default=0)


def inspect_file(source: Source, file: SourceFile, layout: Layout | None, limits: Limits, max_rank: int) -> Inspection:
    """Read the file as far as it can be read; what stops that is the report's `rejection`. Blocking; any thread."""
    report = Inspection(source.commit or file.digest, source.weight_name, file.path.stat().st_size, file.digest)
    try:
        with open_file(file.path, limits.max_file_bytes) as raw:
            report = dataclasses.replace(report, tensors=len(raw.tensors))
            found = read_pairs(raw)
            report = dataclasses.replace(report, dialects=found.dialects, modules=_as_the_file_says(found))
            if layout is None:
                return report
            placed = convert(raw, found, layout, read_configs(raw.metadata, file.config), max_rank)
            report = dataclasses.replace(report, modules=tuple(_as_the_layout_says(one) for one in placed))
            pack(raw, placed, layout)
    except AdapterRejected as error:
        return dataclasses.replace(report, rejection=error)
    return dataclasses.replace(report, applicable=True)


def _as_the_file_says(found: FilePairs) -> tuple[InspectedModule, ...]:
    return tuple(_inspected(pair) for pair in found.pairs)


def _inspected(pair: Pair) -> InspectedModule:
    name = split_prefix(pair.stem)
    return InspectedModule("" if name.component == ANY else name.component, name.path, pair.rank, pair.alpha)


def _as_the_layout_says(one: Placed) -> InspectedModule:
    return InspectedModule(one.module.component, one.module.name, one.pair.rank, one.pair.alpha)
