"""Step 2: a resolved source -> its bytes on the disk, hashed."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from adapter_store.downloads import Downloads, Fetched, Wanted
from adapter_store.errors import Cause, rejected
from adapter_store.hashing import sha256_of
from adapter_store.resolve import CONFIG_NAME
from adapter_store.source import Source
from adapter_store.transfer import Limits, RemoteFile, Report
from adapter_store.validate import open_file
from loraplex.errors import AdapterRejected

_MAX_CONFIG_BYTES = 1 << 20


class Opens(Protocol):
    """A kind of source: `hub.Hub`, or `versions.Versions` for URLs."""

    def local_copy(self, source: Source, name: str) -> Path | None:
        """A file of the source that is on this machine already."""

    def remote_file(self, source: Source, name: str) -> RemoteFile:
        """A file of the source, to be opened."""


class DownloadsFiles(Protocol):
    """What downloading needs; `Downloader` in production."""

    def fetch(self, source: Source, name: str, limits: Limits, report: Report) -> Fetched:
        """Bring one file of `source` to the disk and hash it."""

    def stop(self) -> None:
        """Make running transfers end."""


class Downloader:
    """Fetches files of any kind of source into the store's folder of downloads."""

    def __init__(self, downloads: Downloads, kinds: Mapping[str, Opens]) -> None:
        self._downloads, self._kinds = downloads, kinds

    def stop(self) -> None:
        """Make running transfers end."""
        self._downloads.stop()

    def fetch(self, source: Source, name: str, limits: Limits, report: Report) -> Fetched:
        """The file `name` of `source`. Raises FILE_TOO_LARGE, SourceUnavailable, StorageExhausted, and what the source
        raises."""
        kind = self._kinds[source.ref.source]
        is_weights = name == source.weight_name
        copy = kind.local_copy(source, name)
        if copy is not None:
            digest = sha256_of(copy)
            if not is_weights or digest == (source.sha256 or digest):
                return Fetched(copy, digest)
        wanted = Wanted(
            identity=source.identity if is_weights else f"{source.identity}#{name}",
            size_bytes=source.size_bytes if is_weights else 0,
            sha256=source.sha256 if is_weights else "",
            is_resumable=source.is_resumable,
            looks_right=partial(_is_container, max_bytes=limits.max_file_bytes) if is_weights else lambda _: True,
        )
        return self._downloads.fetch(wanted, kind.remote_file(source, name), limits, report)


@dataclass(frozen=True)
class SourceFile:
    """A source on the disk: the sha256 of the file, and its adapter_config.json with its sha256, if it has one.

    A download is kept from removal for as long as this object lives.
    """

    path: Path
    digest: str
    config: bytes | None = None
    held: Fetched | None = None

    @property
    def config_digest(self) -> str:
        """sha256 of the config, "" without one."""
        return "" if self.config is None else hashlib.sha256(self.config).hexdigest()


def download(source: Source, files: DownloadsFiles, limits: Limits, report: Report) -> SourceFile:
    """Bring `source` to the disk and hash it. Blocking; any thread.

    Raises FILE_TOO_LARGE, SourceUnavailable, StorageExhausted, and what the source raises.
    """
    if source.size_bytes > limits.max_file_bytes:
        message = f"The file has {source.size_bytes} bytes; at most {limits.max_file_bytes} are read."
        raise rejected(Cause.FILE_TOO_LARGE, message)
    if source.path is not None:
        return local_file(source.path, source.config_name)
    fetched = files.fetch(source, source.weight_name, limits, report)
    config_bytes = None
    if source.config_name:
        small = Limits(_MAX_CONFIG_BYTES + 1, limits.timeout_s)
        config_file = files.fetch(source, source.config_name, small, lambda *_: None)
        config_bytes = _read_config(config_file.path)
    return SourceFile(fetched.path, fetched.digest, config_bytes, fetched)


def local_file(path: Path, config_name: str) -> SourceFile:
    """A file that lies on the disk already, hashed, with the config beside it unless that is ""."""
    config = path.with_name(config_name) if config_name else None
    return SourceFile(path, sha256_of(path), _read_config(config))


def _is_container(path: Path, max_bytes: int) -> bool:
    """Whether the bytes are a safetensors file at all, and not an error page or half of one."""
    try:
        with open_file(path, max_bytes):
            return True
    except AdapterRejected:
        return False


def _read_config(path: Path | None) -> bytes | None:
    if path is None:
        return None
    with path.open("rb") as stream:
        text = stream.read(_MAX_CONFIG_BYTES + 1)
    if len(text) > _MAX_CONFIG_BYTES:
        raise rejected(Cause.METADATA_INVALID, f"{CONFIG_NAME} has more than {_MAX_CONFIG_BYTES} bytes.", CONFIG_NAME)
    return text
