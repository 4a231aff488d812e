"""The boundary to object stores: files under `s3://`, `gs://` and what else fsspec reads, below roots of the operator.

Keys, endpoints and regions come from the environment and from fsspec's own configuration. No message of ours quotes
one of a backend. All methods block; any thread.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fsspec

from adapter_store.refs import AdapterRef
from adapter_store.source import Version
from adapter_store.transfer import Body, BrokenOff
from adapter_store.versions import Changed
from loraplex.errors import AdapterAccessDenied, AdapterNotFound, InvalidAdapterRef, ServiceError

_READ_BYTES = 1 << 20
# What backends call the things that change with the content.
_TELLING = (
    *("etag", "e_tag", "md5hash", "content_md5", "md5", "checksum", "crc32c", "generation", "versionid"),
    *("lastmodified", "last_modified", "updated", "mtime", "modified", "created"),
)


class ObjectStores:
    """The stores below `roots`, URLs that all end in "/". Raises ImportError when a root's backend is not installed."""

    def __init__(self, roots: tuple[str, ...]) -> None:
        self._roots = roots
        for root in roots:
            fsspec.get_filesystem_class(root.partition("://")[0])

    def look(self, ref: AdapterRef, before: Version | None) -> Version:
        """What the URL holds now; `before` itself when that is unchanged."""
        store, path = self._store(ref)
        with _our_errors(ref):
            store.invalidate_cache()
            found = store.info(path)
            told = [f"{name}={found[name]}" for name in sorted(found) if name.lower() in _TELLING and found[name]]
            stamp = hashlib.sha256("\n".join(told or [store.ukey(path)]).encode()).hexdigest()
        if found.get("type") == "directory":
            raise _missing(ref)
        version = Version(size_bytes=int(found.get("size") or 0), stamp=stamp)
        return before if before == version else version

    @contextmanager
    def open(self, ref: AdapterRef, version: Version, start: int) -> Iterator[Body]:
        """The bytes of `version` from `start` on. Raises Changed when the URL holds another one, also at the end."""
        self._check_unchanged(ref, version)
        store, path = self._store(ref)
        with _our_errors(ref):
            stream = store.open(path, "rb", block_size=_READ_BYTES, cache_type="readahead")
        with stream:
            yield Body(start, version.size_bytes or None, self._chunks(ref, version, stream, start))

    def _chunks(self, ref: AdapterRef, version: Version, stream: Any, start: int) -> Iterator[bytes]:
        with _our_errors(ref):
            stream.seek(start)
            while chunk := stream.read(_READ_BYTES):
                yield chunk
        self._check_unchanged(ref, version)

    def _check_unchanged(self, ref: AdapterRef, version: Version) -> None:
        if self.look(ref, version) is not version:
            raise Changed("The file was changed at its source.", remedy="Ask again.", retry_after_s=1.0)

    def _store(self, ref: AdapterRef) -> tuple[Any, str]:
        """The file system of a reference, and the path in it."""
        if not any(ref.name.startswith(root) for root in self._roots):
            message = "The adapter reference is not below a URL that this store may read from."
            raise InvalidAdapterRef(message, field="ref", remedy="Ask the operator to add it to fsspec_roots.")
        with _our_errors(ref):
            store, path = fsspec.core.url_to_fs(ref.name)
        return store, path


@contextmanager
def _our_errors(ref: AdapterRef) -> Iterator[None]:
    try:
        yield
    except ServiceError:
        raise
    except FileNotFoundError:
        raise _missing(ref) from None
    except PermissionError:
        remedy = "Give the store credentials that may read it."
        raise AdapterAccessDenied("The object store refuses the file.", remedy=remedy) from None
    except Exception:  # noqa: BLE001 - every backend has errors of its own, and they quote buckets and keys
        message = "The object store cannot be reached, or broke off."
        raise BrokenOff(message, remedy="Try again later.", retry_after_s=10.0) from None


def _missing(ref: AdapterRef) -> AdapterNotFound:
    message = f"The object store has no file {ref.name[:200]!r}."
    return AdapterNotFound(message, field="ref", remedy="Check the reference.", metadata={"missing": "file"})
