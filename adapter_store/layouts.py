"""Registered layouts, on disk so that a prefetch works before any executor has started. Blocking; any thread."""

import uuid
from pathlib import Path

from google.protobuf.message import DecodeError

from adapter_store.disk import full_disk_is_exhausted
from loraplex.errors import InvalidRequest, UnknownLayout
from loraplex.layout import Layout
from loraplex.v1 import layout_pb2

_DIGEST_LENGTH = 64


class Layouts:
    """Layouts by digest: one file each below `folder`, and in memory once they were used.

    A file that was removed or damaged is written again when its layout is registered again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, Layout] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def __repr__(self) -> str:
        return f"<Layouts {len(self._known)} in memory, {len(list(self._folder.glob('*.binpb')))} on disk>"

    def register(self, wire: layout_pb2.Layout) -> Layout:
        """Keep a layout. Idempotent. Raises InvalidRequest when it is none."""
        try:
            layout = Layout.from_proto(wire)
        except ValueError as error:
            message = f"The layout cannot be used: {error}."
            raise InvalidRequest(message, field="layout", remedy="Send the layout as the model has it.") from error
        path = self._path(layout.digest)
        if _read(path) != layout:
            with full_disk_is_exhausted():
                _write(path, layout)
        self._known[layout.digest] = layout
        return layout

    def get(self, digest: str) -> Layout:
        """The layout of a digest. Raises UnknownLayout, also when its file was damaged."""
        if digest in self._known:
            return self._known[digest]
        if len(digest) == _DIGEST_LENGTH and set(digest) <= set("0123456789abcdef"):
            layout = _read(self._path(digest))
            if layout is not None and layout.digest == digest:
                self._known[digest] = layout
                return layout
        raise UnknownLayout(
            f"The layout {digest[:12]!r} is not registered here.",
            field="layout_digest",
            remedy="Register the layout with RegisterLayout, then ask again.",
        )

    def all(self) -> list[Layout]:
        """Every layout that is registered here, in the order of their digests; damaged files are left out."""
        layouts = (_read(path) for path in sorted(self._folder.glob("*.binpb")))
        return [layout for layout in layouts if layout is not None]

    def _path(self, digest: str) -> Path:
        return self._folder / f"{digest}.binpb"


def _read(path: Path) -> Layout | None:
    """The layout in a file; None when it is missing or damaged."""
    try:
        return Layout.from_proto(layout_pb2.Layout.FromString(path.read_bytes()))
    except (OSError, DecodeError, ValueError):
        return None


def _write(path: Path, layout: Layout) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)  # somebody may have removed it
    temp = path.with_suffix(f".{uuid.uuid4().hex}")
    try:
        temp.write_bytes(layout.to_proto().SerializeToString(deterministic=True))
        temp.replace(path)
    finally:
        temp.unlink(missing_ok=True)
