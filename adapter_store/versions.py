"""Step 1 for URLs: what one holds now. A URL is mutable, so it is asked again after a while, if it can by condition."""

import dataclasses
import hashlib
import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import structlog

from adapter_store.refs import AdapterRef
from adapter_store.source import Source, Version
from adapter_store.transfer import Body
from loraplex.errors import SourceUnavailable

log = structlog.stdlib.get_logger("loraplex.store")

_MAX_RECENT = 4096


class Notes(Protocol):
    """Texts by name that outlive the process but may be lost; `cache.PackedCache` in production."""

    def note(self, name: str, text: str) -> None:
        """Keep a text."""

    def read_note(self, name: str) -> str | None:
        """The text that was kept, if it still is."""


class Changed(SourceUnavailable):
    """The URL holds another content than when it was resolved."""


class Urls(Protocol):
    """A kind of URL: `https.HttpsHosts`, `object_stores.ObjectStores`."""

    def look(self, ref: AdapterRef, before: Version | None) -> Version:
        """What the URL holds now; `before` itself when that is unchanged."""

    def open(self, ref: AdapterRef, version: Version, start: int) -> AbstractContextManager[Body]:
        """The bytes of that version from `start` on. Raises Changed when there is another one."""


class Versions:
    """The versions of URLs of one kind, each asked for again after `ttl_s`. Blocking; any thread."""

    def __init__(self, urls: Urls, notes: Notes, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._urls, self._notes, self._ttl_s, self._clock = urls, notes, ttl_s, clock
        self._lock = threading.Lock()
        self._recent: dict[AdapterRef, tuple[float, Source]] = {}

    def resolve(self, ref: AdapterRef) -> Source:
        """The file under the URL. When its server is unavailable, the version that was seen last."""
        now_s = self._clock()
        with self._lock:
            asked_s, recent = self._recent.get(ref, (0.0, None))
        if recent is not None and now_s - asked_s < self._ttl_s:
            return recent
        version = self._version(ref, recent.version if recent else self._remembered(ref))
        source = recent if recent and recent.version is version else _source(ref, version)
        with self._lock:
            self._recent.pop(ref, None)
            while len(self._recent) >= _MAX_RECENT:
                self._recent.pop(next(iter(self._recent)))
            self._recent[ref] = now_s, source
        return source

    def local_copy(self, source: Source, name: str) -> Path | None:
        """None: what was downloaded before is found by the folder of downloads."""

    def remote_file(self, source: Source, name: str) -> "UrlFile":
        """The file, to be opened."""
        return UrlFile(self, source)

    @contextmanager
    def open(self, source: Source, start: int) -> Iterator[Body]:
        """The bytes from `start` on. After a change the URL is asked again at once."""
        try:
            with self._urls.open(source.ref, source.version or Version(), start) as body:
                yield body
        except Changed:
            with self._lock:
                self._recent.pop(source.ref, None)
            raise

    def _version(self, ref: AdapterRef, before: Version | None) -> Version:
        try:
            version = self._urls.look(ref, before)
        except SourceUnavailable:
            if before is None:
                raise
            log.warning("source unavailable; using the version that was seen before")
            return before
        if version is not before and version.identity:
            self._notes.note(_note_name(ref), json.dumps(dataclasses.asdict(version)))
        return version

    def _remembered(self, ref: AdapterRef) -> Version | None:
        text = self._notes.read_note(_note_name(ref))
        return Version(**json.loads(text)) if text else None


@dataclass(frozen=True)
class UrlFile:
    """The file of a resolved URL."""

    versions: Versions
    source: Source

    def open(self, start: int) -> AbstractContextManager[Body]:
        """The bytes from `start` on."""
        return self.versions.open(self.source, start)


def _source(ref: AdapterRef, version: Version) -> Source:
    # A server that tells nothing to go by may hold another content every time.
    identity = version.identity or f"unknown {uuid.uuid4().hex}"
    has_strong_etag = version.etag and version.validator == version.etag
    query = "" if has_strong_etag else hashlib.sha256(ref.query.encode()).hexdigest()
    return Source(
        ref=ref,
        canonical=str(ref),
        identity=f"{ref.source}:{ref.name} {query} {identity}",
        weight_name=ref.name.rpartition("/")[2],
        size_bytes=version.size_bytes,
        version=version,
    )


def _note_name(ref: AdapterRef) -> str:
    """By a hash: the query may be a signature, and notes are kept on the disk."""
    return f"version:{hashlib.sha256(f'{ref.name}?{ref.query}'.encode()).hexdigest()}"
