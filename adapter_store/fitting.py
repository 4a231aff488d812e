"""Step 4 on an open file, from its header: its groups and their places in a layout, ready to be packed."""

from dataclasses import dataclass

from adapter_store.convert import Conversion, convert
from adapter_store.groups import FileGroups, read_groups
from adapter_store.pack import Packing
from adapter_store.scaling import read_configs
from adapter_store.validate import RawFile
from adapter_store.waivers import Waivers
from loraplex.layout import Layout
from loraplex.pack_options import PackOptions


@dataclass(frozen=True)
class FittedFile:
    """What a file holds, where it goes, and what is to be packed of it."""

    found: FileGroups
    conversion: Conversion
    packing: Packing


def fit_file(file: RawFile, config: bytes | None, layout: Layout, options: PackOptions, max_rank: int) -> FittedFile:
    """Fit the file, with the adapter_config.json beside it if any. Raises AdapterRejected. Blocking; any thread."""
    found = read_groups(file, Waivers(options, layout))
    conversion = convert(file, found, layout, read_configs(file.metadata, config), options)
    packing = Packing(layout, conversion.placed, options.limit(max_rank), options.max_error)
    return FittedFile(found, conversion, packing)
