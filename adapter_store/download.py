"""Step 2: a resolved source -> its bytes on the disk, hashed."""

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from adapter_store.errors import Cause, rejected
from adapter_store.resolve import CONFIG_NAME, Source
from loraplex.errors import SourceUnavailable

_READ_BYTES = 8 << 20
_MAX_CONFIG_BYTES = 1 << 20

# (bytes so far, bytes in all or 0)
Report = Callable[[int, int], None]


class DownloadsFiles(Protocol):
    """What downloading needs of a hub; `hub.Hub` in production."""

    def download(self, repo: str, commit: str, name: str, report: Callable[[int], None], again: bool = False) -> Path:
        """Bring one file to the disk; `report` gets the bytes received so far, and may raise to stop."""


@dataclass(frozen=True)
class Limits:
    """What a download may take."""

    max_file_bytes: int
    timeout_s: float


@dataclass(frozen=True)
class SourceFile:
    """A source on the disk: the sha256 of the file, and its adapter_config.json with its sha256, if it has one."""

    path: Path
    digest: str
    config: bytes | None = None

    @property
    def config_digest(self) -> str:
        """sha256 of the config, "" without one."""
        return "" if self.config is None else hashlib.sha256(self.config).hexdigest()


def download(source: Source, hub: DownloadsFiles, limits: Limits, report: Report) -> SourceFile:
    """Bring `source` to the disk and hash it. Blocking; any thread.

    Raises FILE_TOO_LARGE, SourceUnavailable, and what the hub raises. What does not have the sha256 that the hub
    promised is fetched once more.
    """
    if source.size_bytes > limits.max_file_bytes:
        message = f"The file has {source.size_bytes} bytes; at most {limits.max_file_bytes} are read."
        raise rejected(Cause.FILE_TOO_LARGE, message)
    if source.path is not None:
        config = source.path.with_name(CONFIG_NAME) if source.config_name else None
        return SourceFile(source.path, _sha256(source.path), _read_config(config))
    for again in (False, True):
        path = _fetch(source, source.weight_name, hub, limits, report, again)
        digest = _sha256(path)
        if digest == (source.sha256 or digest):
            break
    else:
        message = "The hub delivered other bytes than it promised, twice."
        raise SourceUnavailable(message, remedy="Try again later.", retry_after_s=10.0)
    config = _fetch(source, source.config_name, hub, limits, report, False) if source.config_name else None
    return SourceFile(path, digest, _read_config(config))


def _fetch(source: Source, name: str, hub: DownloadsFiles, limits: Limits, report: Report, again: bool) -> Path:
    deadline_s = time.monotonic() + limits.timeout_s

    def watch(received: int) -> None:
        if received > limits.max_file_bytes:
            raise rejected(Cause.FILE_TOO_LARGE, f"The file has more than {limits.max_file_bytes} bytes.")
        if time.monotonic() > deadline_s:
            message = f"The download took longer than {limits.timeout_s:g} s."
            raise SourceUnavailable(message, remedy="Try again, or raise the store's download_timeout_s.")
        report(received, source.size_bytes)

    return hub.download(source.ref.name, source.commit, name, watch, again)


def _read_config(path: Path | None) -> bytes | None:
    if path is None:
        return None
    with path.open("rb") as stream:
        text = stream.read(_MAX_CONFIG_BYTES + 1)
    if len(text) > _MAX_CONFIG_BYTES:
        raise rejected(Cause.METADATA_INVALID, f"{CONFIG_NAME} has more than {_MAX_CONFIG_BYTES} bytes.", CONFIG_NAME)
    return text


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
