"""What a user writes to name an adapter.

- a repository on the hub: `org/name[@revision][:file.safetensors]`
- a file in one of the operator's folders: `name`, `folder/name.safetensors`, `local:folder/name`
- a file on a web server that the operator allows: `https://host/folder/name.safetensors`
- a file in an object store that the operator allows: `s3://bucket/folder/name.safetensors`, or what else fsspec reads
"""

import contextlib
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from adapter_store.urls import SUFFIX, is_url, shown, split_url
from loraplex.errors import AdapterNotFound, AmbiguousAdapter, InvalidAdapterRef, ServiceError

LOCAL_PREFIX = "local:"
GRAMMAR = (
    "Write `org/name[@revision][:file.safetensors]` for the hub, `name`, `folder/name.safetensors` or "
    "`local:folder/name` for the operator's folders, or `https://host/folder/name.safetensors`."
)
_MAX_LENGTH = 512
_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_HUB = re.compile(rf"(?P<repo>{_PART}/{_PART})(?:@(?P<revision>[^@:\s]+))?(?::(?P<file>[^:]+))?")


@dataclass(frozen=True)
class AdapterRef:
    """One adapter reference.

    `name` is the repository on the hub, a path in or below a local folder, or a URL without its query. A `query` may be
    a signature: it is part of no text that is shown, and so `parse(str(ref))` does not give it back.
    """

    source: Literal["hub", "local", "https", "fsspec"]
    name: str
    revision: str = ""
    weight_name: str = ""
    query: str = field(default="", repr=False)

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        weight_name = f":{self.weight_name}" if self.weight_name else ""
        needs_prefix = self.source == "local" and _looks_like_hub(self.name)
        return f"{LOCAL_PREFIX if needs_prefix else ''}{self.name}{revision}{weight_name}"

    def __repr__(self) -> str:
        return f"<AdapterRef {self.source} {self}>"

    @classmethod
    def parse(cls, text: str) -> "AdapterRef":
        """Read a reference; InvalidAdapterRef when it is none. Touches neither disk nor network."""
        if is_url(text):
            scheme, url, query = split_url(text)
            return cls("https" if scheme == "https" else "fsspec", url, query=query)
        if not text or len(text) > _MAX_LENGTH or not text.isprintable() or text != text.strip():
            raise _invalid("is empty, too long, or holds characters that no name has", text)
        if text.startswith(LOCAL_PREFIX):
            return cls("local", _checked_path(text.removeprefix(LOCAL_PREFIX), text))
        if not _looks_like_hub(text):
            return cls("local", _checked_path(text, text))
        match = _HUB.fullmatch(text)
        if match is None or "--" in match["repo"] or ".." in match["repo"]:
            raise _invalid("is no repository name", text)
        revision, weight_name = match["revision"] or "", match["file"] or ""
        if ".." in revision or revision.startswith(("/", "-")):
            raise _invalid("has a revision that no repository has", text)
        if weight_name and (not weight_name.endswith(SUFFIX) or weight_name.startswith("/")):
            raise _invalid("names a file that is not .safetensors", text)
        return cls("hub", match["repo"], revision, _checked_path(weight_name, text) if weight_name else "")


def find_local(ref: AdapterRef, roots: tuple[Path, ...]) -> Path:
    """The one .safetensors file that a local reference names; `roots` are resolved paths, and so is the result.

    Raises AdapterNotFound; AmbiguousAdapter when a folder holds several files, or stands beside a file of its name; and
    InvalidAdapterRef when the path leaves the roots, also through a symbolic link.
    """
    if Path(ref.name).is_absolute() and not any(Path(ref.name).is_relative_to(root) for root in roots):
        raise _invalid("is outside of the operator's folders", ref.name)
    for root in roots:
        path = _find_below(root, ref, roots)
        if path is not None:
            _check_name(path, ref, roots)
            return path
    raise AdapterNotFound(
        f"No adapter {ref.name!r} in the store's local folders.", field="ref", remedy=f"List the adapters. {GRAMMAR}"
    )


def name_of(path: Path, roots: tuple[Path, ...]) -> str | None:
    """The shortest reference below one of `roots` that `find_local` leads back to `path`; None when there is none."""
    for root in roots:
        if not path.is_relative_to(root):
            continue
        name = path.relative_to(root).as_posix()
        for spelling in (name.removesuffix(SUFFIX), name):
            text = str(AdapterRef("local", spelling))
            with contextlib.suppress(ServiceError):
                if find_local(AdapterRef.parse(text), roots) == path.resolve():
                    return text
    return None


def _looks_like_hub(text: str) -> bool:
    head = re.split(r"[@:]", text, maxsplit=1)[0]
    is_file = text.endswith(SUFFIX) and ":" not in text
    return head.count("/") == 1 and not head.startswith(("/", ".")) and not is_file


def _checked_path(name: str, text: str) -> str:
    if not name or ".." in Path(name).parts or "\\" in name or name.endswith("/"):
        raise _invalid("names no file below a folder", text)
    return name


def _find_below(root: Path, ref: AdapterRef, roots: tuple[Path, ...]) -> Path | None:
    exact = _inside(root / ref.name, roots)
    if exact is not None and exact.is_file() and exact.suffix == SUFFIX:
        return exact
    file = _inside(root / f"{ref.name}{SUFFIX}", roots)
    if file is not None and not (file.is_file() and file.suffix == SUFFIX):
        file = None
    in_folder = sorted(exact.glob(f"*{SUFFIX}")) if exact is not None and exact.is_dir() else []
    if file is not None and in_folder:
        message = f"{ref.name!r} is a file as well as a folder that holds {_listed(in_folder)}."
        remedy = f"Name one: `{ref.name}{SUFFIX}`, or `{ref.name}/{_shown(in_folder[0])}`."
        raise AmbiguousAdapter(message, field="ref", remedy=remedy)
    if len(in_folder) > 1:
        message = f"The folder {ref.name!r} holds several files: {_listed(in_folder)}."
        remedy = f"Name one, as in `{ref.name}/{_shown(in_folder[0])}`."
        raise AmbiguousAdapter(message, field="ref", remedy=remedy)
    if not in_folder:
        return file
    only = _inside(in_folder[0], roots)
    return only if only is not None and only.is_file() else None


def _check_name(path: Path, ref: AdapterRef, roots: tuple[Path, ...]) -> None:
    """A file whose name is no plain text cannot be told to anybody."""
    if not all(str(path.relative_to(root)).isprintable() for root in roots if path.is_relative_to(root)):
        raise _invalid(f"leads to a file named `{_shown(path)}`, which has to be renamed", ref.name)


def _listed(files: list[Path]) -> str:
    return ", ".join(map(_shown, files[:20]))


def _shown(path: Path) -> str:
    """The file's name as text, whatever its bytes are."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in path.name)


def _inside(candidate: Path, roots: tuple[Path, ...]) -> Path | None:
    if not os.path.lexists(candidate):
        return None
    try:
        path = candidate.resolve()
    except (OSError, RuntimeError):  # a symbolic link that leads to itself
        return None
    if not any(path.is_relative_to(root) for root in roots):
        raise _invalid("leads out of the operator's folders", candidate.name)
    return path


def _invalid(what: str, text: str) -> InvalidAdapterRef:
    shown_text = shown(text) if is_url(text) else text[:100]
    return InvalidAdapterRef(f"The adapter reference {shown_text!r} {what}.", field="ref", remedy=GRAMMAR)
