"""The packed adapter: an ordinary safetensors file with one tensor `rows` [rank, width] of the layout's dtype.

Its columns are, in layout order, the A columns and then the B columns of each touched module; row j holds row j of
every A and column j of every B, with alpha / rank folded into B. A module of smaller rank has zero rows below its own.
"""

from dataclasses import dataclass

from loraplex.errors import CorruptAdapter
from loraplex.layout import DTYPE_SIZES, Layout
from loraplex.v1 import adapter_store_pb2

FORMAT = "loraplex-packed/1"
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class PackedHeader:
    """What the store says of a packed adapter before its bytes."""

    digest: str
    size_bytes: int
    rank: int
    module_indexes: tuple[int, ...]
    commit: str

    @classmethod
    def from_proto(cls, wire: adapter_store_pb2.AdapterHeader) -> "PackedHeader":
        """The header of a message."""
        return cls(
            digest=wire.digest,
            size_bytes=wire.size_bytes,
            rank=wire.rank,
            module_indexes=tuple(wire.module_indexes),
            commit=wire.commit,
        )

    def rows_bytes(self, layout: Layout) -> int:
        """Bytes of the tensor `rows`, which ends the file; CorruptAdapter when the header does not fit the layout."""
        try:
            layout.column_runs(self.module_indexes)
        except ValueError as error:
            raise CorruptAdapter(f"packed adapter {self.digest[:12]} does not fit the layout: {error}") from error
        expected = self.rank * layout.packed_width(self.module_indexes) * DTYPE_SIZES[layout.dtype]
        if self.rank < 1 or not self.module_indexes or expected >= self.size_bytes:
            raise CorruptAdapter(
                f"packed adapter {self.digest[:12]} claims rank {self.rank}, {len(self.module_indexes)} modules and "
                f"{self.size_bytes} bytes, which do not fit together"
            )
        return expected
