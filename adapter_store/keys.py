"""The key of a packed adapter: whatever decides about its bytes."""

import hashlib

from adapter_store.pack import CONVERTER_VERSION


def cache_key(source_digest: str, config_digest: str, layout_digest: str) -> str:
    """The key for a source file with its adapter_config.json ("" without one), packed for a layout.

    The layout's digest covers its dtype.
    """
    parts = (source_digest, config_digest, layout_digest, CONVERTER_VERSION)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
