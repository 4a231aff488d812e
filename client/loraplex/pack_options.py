"""How an adapter's file may be fitted to a base model; by default exactly, every tensor of it, or not at all."""

import json
from dataclasses import dataclass

from loraplex.errors import InvalidRequest
from loraplex.v1 import layout_pb2

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
    """What the adapter store may do to a file. Equal options give equal bytes.

    The store has `checked` look at the values; others carry them as they are.
    """

    denoiser: str = ""
    """The denoiser that the file adapts, where the base has two, as in "transformer_2"; "": the file tells."""
    waived: tuple[str, ...] = ()
    """Parts that may be left out: components, as in "text_encoder_2", and the kinds "bias", "norm", "embedding"."""
    max_rank: int = 0
    """Cut modules of a larger rank down to this one, where that costs at most `max_error`; 0: the store's limit."""
    max_error: float = 0.0
    """How much a cut may cost in any module, relative to its whole difference; 0: nothing is cut."""

    def __post_init__(self) -> None:
        if isinstance(self.waived, str):
            raise TypeError(f"waived is a tuple of names, not the string {self.waived!r}")
        object.__setattr__(self, "waived", tuple(sorted(set(self.waived))))

    def __str__(self) -> str:
        """A text that is the same for the same options, "" for the defaults: part of the key of the store's cache."""
        fields = (self.denoiser, self.waived, self.max_rank, self.max_error)
        return "" if self == PackOptions() else json.dumps(fields, separators=(",", ":"))

    def checked(self) -> "PackOptions":
        """The same options. Raises InvalidRequest for a value of no use, naming the field."""
        if self.denoiser and self.denoiser not in DENOISERS:
            raise _invalid("denoiser", self.denoiser, f"one of {', '.join(DENOISERS)}")
        words = (*COMPONENTS, *WAIVABLE_KINDS)
        for word in self.waived:
            if word not in words:
                raise _invalid("waived", word, f"some of {', '.join(words)}")
        if self.max_rank < 0:
            raise _invalid("max_rank", self.max_rank, "0 for the store's largest rank, or more")
        if not 0 <= self.max_error < 1:  # NaN is refused here too
            raise _invalid("max_error", self.max_error, "at least 0 and below 1")
        return self

    def limit(self, largest: int) -> int:
        """The rank that a module may have in a store that packs ranks up to `largest`."""
        return min(self.max_rank or largest, largest)

    def to_proto(self) -> layout_pb2.PackOptions | None:
        """The wire form; None for the defaults, which need not be sent."""
        if self == PackOptions():
            return None
        return layout_pb2.PackOptions(
            denoiser=self.denoiser, waived=self.waived, max_rank=self.max_rank, max_error=self.max_error
        )

    @classmethod
    def from_proto(cls, wire: layout_pb2.PackOptions) -> "PackOptions":
        """The options of a message."""
        return cls(denoiser=wire.denoiser, waived=tuple(wire.waived), max_rank=wire.max_rank, max_error=wire.max_error)


EXACTLY = PackOptions()
"""Every tensor of the file, or not at all."""


def _invalid(field: str, value: object, needed: str) -> InvalidRequest:
    message = f"options.{field} is {str(value)[:100]!r}; it must be {needed}."
    return InvalidRequest(message, field=f"options.{field}", remedy="Correct the field, or leave it out.")
