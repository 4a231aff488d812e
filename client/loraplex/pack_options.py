"""How an adapter's file may be fitted to a base model; by default exactly, every tensor of it, or not at all."""

from dataclasses import dataclass

from loraplex.v1 import layout_pb2


@dataclass(frozen=True)
class PackOptions:
    """What the adapter store may do to a file; it checks the values. Equal options give equal bytes."""

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
