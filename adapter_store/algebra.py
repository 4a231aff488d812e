"""Step 5: what a file stores for a module -> A [rank, a_width] and B [b_width, rank] in float32, scaling folded into B.

All of it is exact up to float32 rounding: delta = B @ A is what the trainer meant.
"""

import numpy as np

from adapter_store.dtypes import Float32


def lora(A: Float32, B: Float32, rows: tuple[slice, ...], scaling: float) -> tuple[Float32, Float32]:
    """A plain pair: A is shared by all modules of a fused B, each takes its `rows` of B. Convolutions are flattened.

    A: [rank, in, kh, kw] or [rank, in]; B: [out, rank, 1, 1] or [out, rank].
    """
    rank = A.shape[0]
    cut = np.concatenate([B.reshape(-1, rank)[part] for part in rows])
    with np.errstate(over="ignore"):  # Inf is refused by name when it is packed
        return A.reshape(rank, -1), cut * np.float32(scaling)


def drop_dead_ranks(A: Float32, B: Float32) -> tuple[Float32, Float32]:
    """Without the ranks that add nothing: where a fused B is block-diagonal, each module has only its own share."""
    alive = np.logical_and(A.any(axis=1), B.any(axis=0))
    if not alive.any():
        return A[:1], B[:, :1]
    return A[alive], B[:, alive]


def needed_rank(rank: int, a_width: int, b_width: int) -> int:
    """The rank that `reduce_rank` leaves: no product of two matrices has a rank above its own widths."""
    return min(rank, a_width, b_width)


def reduce_rank(A: Float32, B: Float32) -> tuple[Float32, Float32]:
    """The same delta with `needed_rank` ranks: where a module is narrower than the rank, B @ A itself is smaller."""
    if len(A) <= min(A.shape[1], len(B)):
        return A, B
    if A.shape[1] <= len(B):
        return np.eye(A.shape[1], dtype=np.float32), B @ A
    return B @ A, np.eye(len(B), dtype=np.float32)
