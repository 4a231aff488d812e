"""An entry of the cache from the packed file alone, for an index that was lost."""

import json
from pathlib import Path

from adapter_store.entries import Entry
from adapter_store.keys import cache_key
from adapter_store.pack import CONVERTER_VERSION
from adapter_store.validate import open_file
from loraplex.errors import AdapterRejected
from loraplex.packed import FORMAT


def entry_of_file(path: Path) -> Entry | None:
    """The entry that the file's metadata describe; None when it is no packed adapter of this version.

    The content is not hashed here: that happens before the file is first served.
    """
    if not path.is_file():
        return None
    try:
        size_bytes = path.stat().st_size
        with open_file(path, size_bytes) as file:
            metadata, rows = file.metadata, file.tensors["rows"]
        if (metadata["format"], metadata["converter"]) != (FORMAT, CONVERTER_VERSION):
            return None
        return Entry(
            key=cache_key(metadata["source"], metadata["config"], metadata["layout"], metadata["options"]),
            digest=path.stem,
            size_bytes=size_bytes,
            rank=rows.shape[0],
            module_indexes=tuple(int(module[0]) for module in json.loads(metadata["modules"])),
            layout_digest=metadata["layout"],
            last_used_s=path.stat().st_mtime,
            waived_tensors=int(metadata["waived"]),
            error=max(float(error) for error in json.loads(metadata["errors"])),
        )
    except (AdapterRejected, KeyError, ValueError, TypeError, IndexError, OSError):
        return None
