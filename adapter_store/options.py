"""How a caller lets a file be fitted to a layout: by default exactly, every tensor of it, or not at all."""

import json
from collections.abc import Iterable
from dataclasses import dataclass

from loraplex.errors import InvalidRequest

# What `waived` may name beside components.
WAIVABLE_KINDS = ("bias", "norm", "embedding")
DENOISERS = ("transformer", "transformer_2", "unet")
COMPONENTS = (
    *DENOISERS,
    *("text_encoder", "text_encoder_2", "text_encoder_3"),
    *("connectors", "text_embedding_projection"),
)


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

    @classmethod
    def checked(
        cls, denoiser: str = "", waived: Iterable[str] = (), max_rank: int = 0, max_error: float = 0.0
    ) -> "PackOptions":
        """The options as a caller sends them. Raises InvalidRequest, naming the field."""
        if denoiser and denoiser not in DENOISERS:
            raise _invalid("denoiser", denoiser, f"one of {', '.join(DENOISERS)}")
        words = (*COMPONENTS, *WAIVABLE_KINDS)
        for word in waived:
            if word not in words:
                raise _invalid("waived", word, f"some of {', '.join(words)}")
        if max_rank < 0:
            raise _invalid("max_rank", max_rank, "0 for the store's largest rank, or more")
        if not 0 <= max_error < 1:  # NaN is refused here too
            raise _invalid("max_error", max_error, "at least 0 and below 1")
        return cls(denoiser, tuple(sorted(set(waived))), max_rank, max_error)

    def limit(self, largest: int) -> int:
        """The rank that a module may have in a store that packs ranks up to `largest`."""
        return min(self.max_rank or largest, largest)


EXACTLY = PackOptions()


def _invalid(field: str, value: object, needed: str) -> InvalidRequest:
    message = f"options.{field} is {str(value)[:100]!r}; it must be {needed}."
    return InvalidRequest(message, field=f"options.{field}", remedy="Correct the field, or leave it out.")
