"""What operators do with the cache, also while a store serves from it: look, verify, evict. Blocking; any thread."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from adapter_store.cache import PackedCache
from adapter_store.entries import Entry
from adapter_store.hashing import sha256_of
from adapter_store.packed_files import SUFFIX
from adapter_store.rebuild import entry_of_file
from adapter_store.shelf import Shelf


@dataclass(frozen=True)
class Usage:
    """What the cache holds."""

    entries: int
    size_bytes: int
    limit_bytes: int
    pinned: int
    free_disk_bytes: int


@dataclass(frozen=True)
class Verified:
    """What `verify` found, by digest or file name. Sound files without an entry (`adopted`) have one now; damaged and
    unknown files, and entries without a file (`missing`), are removed."""

    sound: tuple[str, ...]
    adopted: tuple[str, ...]
    damaged: tuple[str, ...]
    unknown: tuple[str, ...]
    missing: tuple[str, ...]


@dataclass(frozen=True)
class Evicted:
    """What `evict` removed; `kept` were chosen too, but are being sent."""

    entries: tuple[Entry, ...]
    freed_bytes: int
    kept: tuple[Entry, ...]


def usage(cache: PackedCache) -> Usage:
    """What the cache holds now."""
    shelf, ledger = cache.shelf, cache.shelf.ledger
    shelf.run(shelf.follow_other_stores)
    free = cache.disk.free(cache.disk.folder)
    return Usage(len(ledger), ledger.size_bytes, cache.limit_bytes, len(shelf.pins), free)


def evict(cache: PackedCache, is_chosen: Callable[[Entry], bool]) -> Evicted:
    """Remove the packed files of the entries that are chosen, except those that this process is sending."""
    chosen = [entry for entry in cache.entries() if is_chosen(entry)]
    shelf, ledger = cache.shelf, cache.shelf.ledger
    with shelf.lock:
        kept = tuple(entry for entry in chosen if entry.digest in shelf.pins)
        digests = {entry.digest for entry in chosen} - {entry.digest for entry in kept}
        removed = [one for digest in sorted(digests) for one in ledger.of_digest(digest)]
        freed_bytes = sum(ledger.size_of(digest) for digest in digests)
        for digest in digests:
            shelf.run(lambda digest=digest: shelf.remove(digest))  # type: ignore[misc]
        shelf.measure()
    return Evicted(tuple(removed), freed_bytes, kept)


def verify(cache: PackedCache) -> Verified:
    """Hash every file, whatever is known of it; remove what is wrong. Other calls go on meanwhile."""
    found: dict[str, list[str]] = {kind: [] for kind in Verified.__dataclass_fields__}
    shelf = cache.shelf
    shelf.files.distrust()
    cache.entries()
    for path in shelf.files:
        kind = _verify_file(shelf, path)
        if kind:
            found[kind].append(path.stem if path.suffix == SUFFIX else path.name)
    for digest in {entry.digest for entry in cache.entries()}:
        if shelf.run(lambda digest=digest: _remove_without_file(shelf, digest)):  # type: ignore[misc]
            found["missing"].append(digest)
    return Verified(**{kind: tuple(sorted(names)) for kind, names in found.items()})


def _verify_file(shelf: Shelf, path: Path) -> str:
    """What a file of the folder is; "" when it went away meanwhile."""
    digest = path.stem
    try:
        size_bytes = path.stat().st_size
        is_odd = path.suffix != SUFFIX or not path.is_file()
        if is_odd or (entry_of_file(path) is None and sha256_of(path) == digest):
            shelf.files.set_aside(path)
            return "unknown"
    except FileNotFoundError:
        return ""
    if not shelf.files.is_sound(digest, size_bytes):
        shelf.run(lambda: shelf.remove(digest))
        return "damaged"
    return shelf.run(lambda: shelf.adopt(path))


def _remove_without_file(shelf: Shelf, digest: str) -> bool:
    with shelf.transact():
        is_missing = not shelf.files.path(digest).exists()
        if is_missing:
            shelf.remove(digest)
    return is_missing
