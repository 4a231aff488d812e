"""One adapter file at its source, as a reference resolved to it."""

from dataclasses import dataclass
from pathlib import Path

from adapter_store.refs import AdapterRef


@dataclass(frozen=True)
class Version:
    """What a URL held when it was last asked: its size (0 where it is not stated) and what tells versions apart.

    `etag` and `modified` are as the source writes them; `stamp` is another text that changes with the content.
    """

    size_bytes: int = 0
    etag: str = ""
    modified: str = ""
    stamp: str = ""

    @property
    def validator(self) -> str:
        """What `If-Range` takes: a strong ETag, or a time; "" without either."""
        return self.etag if self.etag and not self.etag.startswith("W/") else self.modified

    @property
    def identity(self) -> str:
        """A text that is another one for another content; "" when the source says nothing to go by."""
        told = (self.etag, self.modified, self.stamp)
        return " ".join((str(self.size_bytes), *told)) if any(told) else ""


@dataclass(frozen=True)
class Source:
    """One adapter file. `identity` names its content, `canonical` is the reference to list it under.

    `path` is set for a local file; its `weight_name` is the path below the operator's folder. `commit` and `sha256`
    are "" where they are only known once the bytes were read, `size_bytes` is 0 where it is. `config_name` is the
    adapter_config.json that belongs to it, "" without one. `version` is set for a URL.
    """

    ref: AdapterRef
    canonical: str
    identity: str
    weight_name: str
    size_bytes: int
    commit: str = ""
    sha256: str = ""
    path: Path | None = None
    config_name: str = ""
    version: Version | None = None

    @property
    def is_resumable(self) -> bool:
        """Whether a later transfer can be told from one of another content."""
        return self.version is None or bool(self.version.validator or self.version.stamp)
