"""One function for every algorithm: the tensors of a difference -> A [rank, a_width] and B [out, rank], unscaled.

Kernels of convolutions are flattened into the columns of A. The arithmetic is float32 where each number of A and B is
one product, float64 where it is a sum. Factors that are too large become Inf, which is refused when they are packed.
"""

from collections.abc import Mapping

import numpy as np

from adapter_store.dtypes import Float32

Parts = Mapping[str, Float32]


def lora(parts: Parts) -> tuple[Float32, Float32]:
    """A: [rank, in] or [rank, in, kh, kw], B: [out, rank]; with mid [rank, rank, kh, kw] a Tucker product.

    B @ mid @ A sums over two ranks; mid and A do not depend on `out`, so they are one A of the kernel's size.
    """
    A = _core(parts["mid"], _matrix(parts["A"])) if "mid" in parts else _matrix(parts["A"])
    return A, _matrix(parts["B"])


def loha(parts: Parts) -> tuple[Float32, Float32]:
    """(w1_a @ w1_b) * (w2_a @ w2_b), number by number: rank r1 * r2 by the row-wise Khatri-Rao product.

    sum_i a[o,i] b[i,x] times sum_j c[o,j] d[j,x] = sum_ij (a[o,i] c[o,j]) (b[i,x] d[j,x]).
    """
    (A_1, B_1), (A_2, B_2) = (_side(parts, side) for side in "12")
    if len(A_1) * len(A_2) >= min(len(B_1), A_1.shape[1]):
        return dense(_product(B_1, A_1) * _product(B_2, A_2))
    A = (A_1[:, None] * A_2[None]).reshape(-1, A_1.shape[1])
    B = (B_1[:, :, None] * B_2[:, None]).reshape(len(B_1), -1)
    return A, B


def lokr(parts: Parts) -> tuple[Float32, Float32]:
    """kron(w1, w2), the kernel in w2: rank r1 * r2, because kron(B1 A1, B2 A2) = kron(B1, B2) @ kron(A1, A2)."""
    (A_1, B_1), (A_2, B_2) = lokr_sides(parts)
    return np.kron(A_1, A_2), np.kron(B_1, B_2)


def lokr_sides(parts: Parts) -> tuple[tuple[Float32, Float32], tuple[Float32, Float32]]:
    """A and B of w1 and of w2, neither with more ranks than it is wide."""
    first, second = (
        dense(_matrix(parts[f"w{side}"])) if f"w{side}" in parts else _narrow(*_side(parts, side)) for side in "12"
    )
    return first, second


def full(parts: Parts) -> tuple[Float32, Float32]:
    """The difference itself, times one."""
    return dense(_matrix(parts["diff"]))


def dense(delta: Float32) -> tuple[Float32, Float32]:
    """A and B of a whole matrix: it is the one, and the identity of its shorter side the other."""
    out, width = delta.shape
    if width <= out:
        return np.eye(width, dtype=np.float32), delta
    return delta, np.eye(out, dtype=np.float32)


def _side(parts: Parts, side: str) -> tuple[Float32, Float32]:
    """A and B of one side of a LoHa or LoKr. Beside a core `a` is stored transposed: [rank, out]."""
    left, right = parts[f"w{side}_a"], _matrix(parts[f"w{side}_b"])
    if f"t{side}" not in parts:
        return right, _matrix(left)
    return _core(parts[f"t{side}"], right), np.ascontiguousarray(_matrix(left).T)


def _core(core: Float32, right: Float32) -> Float32:
    """sum over j of core[i, j, kernel] right[j, in], as rows [i, in * kernel]."""
    summed = np.tensordot(core.astype(np.float64), right.astype(np.float64), axes=(1, 0))  # [i, *kernel, in]
    return _rounded(np.moveaxis(summed, -1, 1).reshape(len(core), -1))


def _narrow(A: Float32, B: Float32) -> tuple[Float32, Float32]:
    return dense(_product(B, A)) if len(A) >= min(A.shape[1], len(B)) else (A, B)


def _product(B: Float32, A: Float32) -> Float32:
    return _rounded(B.astype(np.float64) @ A.astype(np.float64))


def _rounded(values: np.ndarray) -> Float32:
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def _matrix(tensor: Float32) -> Float32:
    return tensor.reshape(len(tensor), -1)
