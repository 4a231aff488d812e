"""Steps 3 to 6 on an open file: its groups, their places in a layout, and the rank rows."""

from dataclasses import dataclass

from adapter_store.convert import Conversion, convert
from adapter_store.groups import FileGroups, read_groups
from adapter_store.pack import RankRows, pack
from adapter_store.scaling import read_configs
from adapter_store.validate import RawFile
from adapter_store.waivers import Waivers
from loraplex.layout import Layout
from loraplex.pack_options import PackOptions


@dataclass(frozen=True)
class FittedFile:
    """What a file holds, where it goes, and the rows."""

    found: FileGroups
    conversion: Conversion
    packed: RankRows


def fit_file(file: RawFile, config: bytes | None, layout: Layout, options: PackOptions, max_rank: int) -> FittedFile:
    """Fit the file, with the adapter_config.json beside it if any. Raises AdapterRejected. Blocking; any thread."""
    found = read_groups(file, Waivers(options, layout))
    conversion = convert(file, found, layout, read_configs(file.metadata, config), options)
    packed = pack(file, conversion.placed, layout, options.limit(max_rank), options.max_error)
    return FittedFile(found, conversion, packed)
