"""The key of a packed adapter: whatever decides about its bytes."""

import hashlib

from adapter_store.pack import CONVERTER_VERSION


def cache_key(source_digest: str, config_digest: str, layout_digest: str, options: str = "") -> str:
    """The key for a source file with its adapter_config.json ("" without one), packed for a layout.

    `options` is `str` of the PackOptions.
    The layout's digest covers its dtype. The largest rank of the store is no part: it decides only what is refused,
    except where a cut is allowed, and then the options name the rank.
    """
    parts = (source_digest, config_digest, layout_digest, CONVERTER_VERSION, options)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
