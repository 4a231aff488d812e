"""The adapters that the store can serve without a download: the operator's files, and what is in the cache."""

import base64
import binascii
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from adapter_store.entries import Entry
from adapter_store.refs import SUFFIX, name_of
from loraplex.errors import InvalidRequest

DEFAULT_PAGE, LARGEST_PAGE = 100, 1000


@dataclass
class Listed:
    """One adapter; `cached` holds its packed forms, one per layout."""

    ref: str
    weight_name: str
    local: bool
    cached: list[Entry] = field(default_factory=list)


def list_adapters(roots: tuple[Path, ...], entries: Iterable[Entry]) -> list[Listed]:
    """All that can be asked for, in the order of their references: each leads to its file. Blocking."""
    listed: dict[str, Listed] = {}
    for root in roots:
        for path in root.rglob(f"*{SUFFIX}"):
            ref = name_of(path, roots)
            if ref is not None:
                listed.setdefault(ref, Listed(ref, path.relative_to(root).as_posix(), local=True))
    newest_first = sorted(entries, key=lambda entry: -entry.last_used_s)
    for entry in newest_first:
        for known in entry.refs:
            if known.local and known.ref not in listed:
                continue  # the file is gone
            one = listed.setdefault(known.ref, Listed(known.ref, known.weight_name, known.local))
            if all(other.layout_digest != entry.layout_digest for other in one.cached):
                one.cached.append(entry)
    return [listed[ref] for ref in sorted(listed)]


def page(listed: list[Listed], size: int, token: str) -> tuple[list[Listed], str]:
    """The page that `token` points at, and the token of the next one, "" after the last. Raises InvalidRequest."""
    if size < 0:
        raise InvalidRequest("page_size must not be negative.", field="page_size", remedy="Use 0 for the default.")
    size = min(size or DEFAULT_PAGE, LARGEST_PAGE)
    after = _read_token(token)
    rest = [one for one in listed if one.ref > after]
    return rest[:size], _token(rest[size - 1].ref) if len(rest) > size else ""


def _token(ref: str) -> str:
    return base64.urlsafe_b64encode(ref.encode()).decode()


def _read_token(token: str) -> str:
    try:
        return base64.b64decode(token.encode(), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeError) as error:
        remedy = "Pass the next_page_token of the last answer."
        raise InvalidRequest("page_token is none of ours.", field="page_token", remedy=remedy) from error
