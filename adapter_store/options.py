"""How a caller lets a file be fitted to a layout: by default exactly, every tensor of it, or not at all."""

import json
from dataclasses import dataclass

# What `waived` may name beside components.
WAIVABLE_KINDS = ("bias", "norm", "embedding")


@dataclass(frozen=True)
class PackOptions:
    """The fields of the proto's PackOptions, which explains them; `waived` is sorted."""

    denoiser: str = ""
    waived: tuple[str, ...] = ()
    max_rank: int = 0
    max_error: float = 0.0

    def __str__(self) -> str:
        """A text that is the same for the same options, "" for the defaults: part of the cache's key."""
        fields = (self.denoiser, self.waived, self.max_rank, self.max_error)
        return "" if self == PackOptions() else json.dumps(fields, separators=(",", ":"))
