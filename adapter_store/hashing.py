"""sha256 of a file."""

import hashlib
from pathlib import Path

_READ_BYTES = 8 << 20


def sha256_of(path: Path) -> str:
    """64 hex digits. Blocking; reads the whole file."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
