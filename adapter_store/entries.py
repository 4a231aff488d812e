"""What the cache knows of a packed adapter. No I/O."""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

MAX_REFS = 16


@dataclass(frozen=True)
class KnownRef:
    """A reference that led to a packed adapter, and the file that it named."""

    ref: str
    weight_name: str
    local: bool


@dataclass(frozen=True)
class Entry:
    """One packed adapter in the cache.

    `waived_tensors` and `error` say what its options allowed: tensors left out, and the largest cost of a cut.
    """

    key: str
    digest: str
    size_bytes: int
    rank: int
    module_indexes: tuple[int, ...]
    layout_digest: str
    last_used_s: float
    refs: tuple[KnownRef, ...] = ()
    waived_tensors: int = 0
    error: float = 0.0

    def __repr__(self) -> str:
        return f"<Entry {self.digest[:12]} rank {self.rank}, {self.size_bytes} bytes, {len(self.refs)} refs>"

    def used(self, now_s: float, ref: KnownRef | None) -> "Entry":
        """The entry after a use through `ref`; only the latest references are kept."""
        refs = self.refs if ref is None else (ref, *(known for known in self.refs if known != ref))[:MAX_REFS]
        return dataclasses.replace(self, last_used_s=now_s, refs=refs)

    def to_json(self) -> str:
        """The text that `from_json` reads."""
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "Entry":
        """Read an entry; ValueError when it is none."""
        try:
            fields: dict[str, Any] = json.loads(text)
            refs = tuple(KnownRef(**ref) for ref in fields.pop("refs"))
            return cls(**fields | {"module_indexes": tuple(fields["module_indexes"]), "refs": refs})
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError("no entry of the cache") from error
