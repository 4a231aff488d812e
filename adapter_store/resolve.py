"""Step 1: a reference -> one file whose content cannot change under its identity."""

import dataclasses
import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Protocol

import structlog

from adapter_store.hub import HubFile, Listing
from adapter_store.refs import SUFFIX, AdapterRef, find_local, name_of
from adapter_store.source import Source
from loraplex.errors import AdapterNotFound, AmbiguousAdapter, InvalidAdapterRef, SourceUnavailable

log = structlog.stdlib.get_logger("loraplex.store")

CONFIG_NAME = "adapter_config.json"
_PEFT_NAME = "adapter_model.safetensors"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MAX_RECENT = 4096
_REMEDY = "Use the hub or a local folder, or ask the operator to allow it."


class ListsRepositories(Protocol):
    """What resolving needs of a hub; `hub.Hub` in production."""

    def list(self, repo: str, revision: str) -> Listing:
        """The commit and the files of a revision, "" for the default branch."""

    def list_cached(self, repo: str, revision: str) -> Listing | None:
        """The same without the hub, where that is possible."""


class Notes(Protocol):
    """Texts by name that outlive the process but may be lost; `cache.PackedCache` in production."""

    def note(self, name: str, text: str) -> None:
        """Keep a text."""

    def read_note(self, name: str) -> str | None:
        """The text that was kept, if it still is."""


class ResolvesUrls(Protocol):
    """What resolving needs of a kind of URL; `versions.Versions` in production."""

    def resolve(self, ref: AdapterRef) -> Source:
        """What the URL holds now."""


class Resolver:
    """Resolves references; a mutable revision is asked for again after `ttl_s`. Blocking; any thread."""

    def __init__(
        self,
        hub: ListsRepositories,
        notes: Notes,
        roots: tuple[Path, ...],
        ttl_s: float,
        clock: Callable[[], float] = time.monotonic,
        urls: Mapping[str, ResolvesUrls] | None = None,
    ) -> None:
        self._urls = urls or {}
        self._hub, self._notes, self._ttl_s, self._clock = hub, notes, ttl_s, clock
        self._roots = tuple(root.resolve() for root in roots)
        self._lock = threading.Lock()
        self._recent: dict[tuple[str, str], tuple[float, Listing]] = {}

    def resolve(self, ref: AdapterRef) -> Source:
        """The file that `ref` names now. Raises InvalidAdapterRef, AdapterNotFound, AmbiguousAdapter,
        AdapterAccessDenied, SourceUnavailable."""
        if ref.source == "local":
            return local_source(ref, find_local(ref, self._roots), self._roots)
        if ref.source in self._urls:
            return self._urls[ref.source].resolve(ref)
        if ref.source != "hub":
            raise InvalidAdapterRef(f"This store reads no {ref.source} references.", field="ref", remedy=_REMEDY)
        listing = self._listing(ref)
        name = _weight_name(ref, listing)
        return Source(
            ref=ref,
            canonical=str(ref),
            identity=f"hub:{ref.name}@{listing.commit}:{name}",
            weight_name=name,
            size_bytes=listing.files[name].size_bytes,
            commit=listing.commit,
            sha256=listing.files[name].sha256,
            config_name=_config_name(name, listing.files),
        )

    def _listing(self, ref: AdapterRef) -> Listing:
        key, now_s = (ref.name, ref.revision), self._clock()
        is_commit = _COMMIT.fullmatch(ref.revision) is not None
        with self._lock:
            asked_s, recent = self._recent.get(key, (0.0, None))
        if recent is not None and (is_commit or now_s - asked_s < self._ttl_s):
            return recent
        listing = self._remembered(ref) if is_commit else None
        if listing is None:
            listing = self._ask(ref)
        with self._lock:
            self._recent.pop(key, None)
            while len(self._recent) >= _MAX_RECENT:
                self._recent.pop(next(iter(self._recent)))
            self._recent[key] = now_s, listing
        return listing

    def _ask(self, ref: AdapterRef) -> Listing:
        try:
            listing = self._hub.list(ref.name, ref.revision)
        except SourceUnavailable:
            listing_before = self._remembered(ref) or self._hub.list_cached(ref.name, ref.revision)
            if listing_before is None:
                raise
            log.warning("hub unavailable; using the commit that was resolved before")
            return listing_before
        listing = Listing(listing.commit, {name: file for name, file in listing.files.items() if _is_of_use(name)})
        self._notes.note(_note_name(ref), json.dumps(dataclasses.asdict(listing)))
        return listing

    def _remembered(self, ref: AdapterRef) -> Listing | None:
        text = self._notes.read_note(_note_name(ref))
        if text is None:
            return None
        fields = json.loads(text)
        return Listing(fields["commit"], {name: HubFile(**file) for name, file in fields["files"].items()})


def is_unchanged(source: Source) -> bool:
    """Whether a local file is still the one that was resolved. A file on the hub cannot change under its commit."""
    try:
        return source.path is None or source.identity == _identity(source.path, source.config_name)
    except OSError:
        return False


def local_source(ref: AdapterRef, path: Path, roots: tuple[Path, ...]) -> Source:
    """A file below one of `roots`, all of them absolute."""
    root = next(root for root in roots if path.is_relative_to(root))
    beside = [file.name for file in path.parent.glob(f"*{SUFFIX}")]
    is_its_own = beside == [path.name] or path.name == _PEFT_NAME
    config_name = CONFIG_NAME if is_its_own and path.with_name(CONFIG_NAME).is_file() else ""
    return Source(
        ref=ref,
        canonical=name_of(path, roots) or str(ref),
        identity=_identity(path, config_name),
        weight_name=path.relative_to(root).as_posix(),
        size_bytes=path.stat().st_size,
        path=path,
        config_name=config_name,
    )


def _identity(path: Path, config_name: str) -> str:
    """Another size, time or inode is another identity."""
    files = (path, path.with_name(config_name)) if config_name else (path,)
    return f"local:{path}:{':'.join(_stamp(file) for file in files)}"


def _stamp(path: Path) -> str:
    stat = path.stat()
    return f"{stat.st_size},{stat.st_mtime_ns},{stat.st_ino}"


def _is_of_use(name: str) -> bool:
    return name.endswith(SUFFIX) or PurePosixPath(name).name == CONFIG_NAME


def _note_name(ref: AdapterRef) -> str:
    return f"listing:{ref.name}@{ref.revision}"


def _weight_name(ref: AdapterRef, listing: Listing) -> str:
    candidates = sorted(name for name in listing.files if name.endswith(SUFFIX))
    shown = ", ".join(candidates[:20]) or "none"
    if ref.weight_name:
        if ref.weight_name not in listing.files:
            message = f"The repository {ref.name!r} has no file {ref.weight_name!r}."
            remedy = f"Its {SUFFIX} files: {shown}."
            raise AdapterNotFound(message, field="ref", remedy=remedy, metadata={"missing": "file"})
        return ref.weight_name
    if not candidates:
        message = f"The repository {ref.name!r} has no {SUFFIX} file."
        remedy = "Name a repository that holds an adapter as safetensors."
        raise AdapterNotFound(message, field="ref", remedy=remedy, metadata={"missing": "file"})
    if len(candidates) > 1:
        message = f"The repository {ref.name!r} holds several files: {shown}."
        raise AmbiguousAdapter(message, field="ref", remedy=f"Name one, as in `{ref}:{candidates[0]}`.")
    return candidates[0]


def _config_name(name: str, files: dict[str, HubFile]) -> str:
    folder = PurePosixPath(name).parent
    config = (folder / CONFIG_NAME).as_posix()
    beside = [file for file in files if file.endswith(SUFFIX) and PurePosixPath(file).parent == folder]
    is_its_own = len(beside) == 1 or PurePosixPath(name).name == _PEFT_NAME
    return config if is_its_own and config in files else ""
