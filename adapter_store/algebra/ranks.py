"""The same delta with fewer ranks, exactly or, where a caller allows it, with the least possible error.

delta = B @ A with A [rank, a_width] and B [b_width, rank]. It is never made as a whole where it is a product of fewer
ranks than it is wide: all that is decomposed is [rank, rank].
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adapter_store.algebra.products import dense
from adapter_store.dtypes import Float32

Float64 = NDArray[np.float64]
Sides = tuple[tuple[Float32, Float32], tuple[Float32, Float32]]

# What float64 arithmetic leaves of a number that is zero, relative to the whole delta.
_ROUNDING = 1e-12
# Relative to the largest singular value: what squares in float64 tell apart from zero.
_SMALL = 1e-7
_TINY = 1e-300
# Rows of delta that are made at a time to measure what a reduction lost.
_ROWS = 1024


@dataclass(frozen=True)
class Fitted:
    """A and B with at most the ranks asked for; `error` is the Frobenius norm of what was cut off over delta's."""

    A: Float32
    B: Float32
    error: float = 0.0


Best = Callable[[int], Fitted]


class TooManyRanks(Exception):
    """The delta needs `needed` ranks; cut to the limit it would be off by `error`, None when that was not asked."""

    def __init__(self, needed: int, error: float | None) -> None:
        super().__init__(f"{needed} ranks are needed")
        self.needed, self.error = needed, error


def drop_dead_ranks(A: Float32, B: Float32) -> tuple[Float32, Float32]:
    """Without the ranks that add nothing: where a fused B is block-diagonal, each module has only its own share."""
    alive = np.logical_and(A.any(axis=1), B.any(axis=0))
    if alive.all():
        return A, B
    if not alive.any():
        return A[:1], np.zeros_like(B[:, :1])
    return A[alive], B[:, alive]


def norm(A: Float32, B: Float32) -> float:
    """The Frobenius norm of delta, to about 1e-8 of what its ranks have where they cancel each other out.

    NaN when A or B is not finite.
    """
    wide, tall = A.astype(np.float64), B.astype(np.float64)
    with np.errstate(invalid="ignore"):
        return float(np.sqrt(np.maximum(0.0, np.sum((tall.T @ tall) * (wide @ wide.T)))))


def needed_rank(rank: int, a_width: int, b_width: int) -> int:
    """The rank that `reduce_rank` leaves: no product of two matrices has a rank above its own widths."""
    return min(rank, a_width, b_width)


def reduce_rank(A: Float32, B: Float32) -> tuple[Float32, Float32]:
    """The same delta with `needed_rank` ranks: where a module is narrower than the rank, B @ A itself is smaller."""
    if len(A) <= min(A.shape[1], len(B)):
        return A, B
    return dense(_rounded(B.astype(np.float64) @ A.astype(np.float64)))


def fit(A: Float32, B: Float32, limit: int, max_error: float, best: Best | None = None) -> Fitted:
    """The delta with at most `limit` ranks. `best` makes the best cut where there is a faster way than `cut`.

    Exactly where that many suffice: to them counts, in float64, what is only written with more. Else with the largest
    `limit` singular values, if what they leave out is at most `max_error` of the whole. Raises TooManyRanks, and
    OverflowError when what is to be decomposed is not finite.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        A, B = reduce_rank(A, B)
    if len(A) <= limit:
        return Fitted(A, B)
    if not (np.isfinite(A).all() and np.isfinite(B).all()):
        raise OverflowError("the numbers of the delta are too large for float32")
    fitted = (best(limit) if best else cut(A, B, limit)) if max_error > 0 else None
    if fitted is None or fitted.error < 10 * _SMALL:
        exact = _exactly(A.astype(np.float64), B.astype(np.float64), limit)
        if exact is not None:
            return exact
    if fitted is None or fitted.error > max_error:
        raise TooManyRanks(len(A), fitted.error if fitted else None)
    return fitted


def cut(A: Float32, B: Float32, limit: int) -> Fitted:
    """The best approximation of rank `limit`: the largest singular values, those that are zero left out."""
    return _balanced(_decomposed(A, B), limit)


def cut_kron(sides: Sides, limit: int) -> Fitted:
    """`cut` of kron(B1 A1, B2 A2), from the two alone: its singular values are all products of theirs."""
    first, second = (_decomposed(*side) for side in sides)
    known = [side.values[: side.U.shape[1]] for side in (first, second)]
    products = np.multiply.outer(*known).ravel()
    order = np.argsort(-products, kind="stable")
    i, j = np.divmod(order[:limit], len(known[1]))
    U = (first.U[:, None, i] * second.U[None, :, j]).reshape(-1, len(i))
    V = (first.V[i, :, None] * second.V[j, None, :]).reshape(len(i), -1)
    return _balanced(_Svd(U, products[order], V), limit)


@dataclass(frozen=True)
class _Svd:
    """delta = U @ diag(values) @ V, values descending; U and V may lack the vectors of the smallest values."""

    U: Float64
    values: Float64
    V: Float64


def _decomposed(A: Float32, B: Float32) -> _Svd:
    """With A = L Q for any Q of orthonormal rows, B L has delta's singular values and left vectors: they come from the
    eigenvectors of (B L)^T (B L). The right vectors follow by projection, so that what a cut loses is orthogonal to
    what it keeps. Costs two eigenvalue problems of [rank, rank], and products, which are faster than a QR of A and B.
    """
    if _is_identity(B):  # the same for the transposed delta, where the identity is A
        flipped = _left_first(B.T.astype(np.float64), A.T.astype(np.float64))
        return _Svd(flipped.V.T, flipped.values, flipped.U.T)
    return _left_first(A.astype(np.float64), B.astype(np.float64))


def _left_first(A: Float64, B: Float64) -> _Svd:
    left = B if _is_identity(A) else B @ _root(A @ A.T)
    squares, vectors = np.linalg.eigh(left.T @ left)
    values = np.sqrt(np.maximum(squares[::-1], 0.0))
    # Squaring halves the digits: of smaller values nothing is known but that they are small.
    known = max(1, int(np.count_nonzero(values > _SMALL * values[0])))
    U = left @ vectors[:, ::-1][:, :known] / np.maximum(values[:known], _TINY)
    V = ((U / np.maximum(values[:known], _TINY)).T @ B) @ A
    return _Svd(U, values, V)


def _balanced(svd: _Svd, limit: int) -> Fitted:
    """A and B of the largest values; both get their roots, so that neither is harder to store than the other."""
    keep = min(limit, svd.U.shape[1])
    roots, squares = np.sqrt(svd.values[:keep]), np.square(svd.values)
    error = np.sqrt(squares[keep:].sum() / max(squares.sum(), _TINY))
    return Fitted(_rounded(svd.V[:keep] * roots[:, None]), _rounded(svd.U[:, :keep] * roots), float(error))


def _root(gram: Float64) -> Float64:
    """L with L L^T = gram."""
    squares, vectors = np.linalg.eigh(gram)
    return vectors * np.sqrt(np.maximum(squares, 0.0))


def _exactly(A: Float64, B: Float64, limit: int) -> Fitted | None:
    """The same delta with at most `limit` ranks if that many suffice, told by what it makes of some random columns."""
    random = np.random.default_rng(0).standard_normal((A.shape[1], limit + 1))
    images = B @ (A @ random)
    basis, _ = np.linalg.qr(images[:, :limit])
    probe = images[:, limit]
    if np.linalg.norm(probe - basis @ (basis.T @ probe)) > _ROUNDING * np.linalg.norm(probe):
        return None
    U, values, V = np.linalg.svd((basis.T @ B) @ A, full_matrices=False)
    alive = values > _ROUNDING * values[0]
    alive[0] = True
    roots = np.sqrt(values[alive])
    new_A, new_B = V[alive] * roots[:, None], basis @ U[:, alive] * roots
    return Fitted(_rounded(new_A), _rounded(new_B)) if _lost(A, B, new_A, new_B) <= _ROUNDING else None


def _lost(A: Float64, B: Float64, new_A: Float64, new_B: Float64) -> float:
    """The Frobenius norm of the difference of two deltas over that of the first, from the numbers themselves."""
    lost = whole = 0.0
    for start in range(0, len(B), _ROWS):
        rows = slice(start, start + _ROWS)
        delta = B[rows] @ A
        lost += float(np.square(delta - new_B[rows] @ new_A).sum())
        whole += float(np.square(delta).sum())
    return float(np.sqrt(lost / whole)) if whole else 0.0


def _is_identity(matrix: NDArray[Any]) -> bool:
    return matrix.shape[0] == matrix.shape[1] and np.array_equal(matrix, np.eye(len(matrix), dtype=matrix.dtype))


def _rounded(values: Float64) -> Float32:
    with np.errstate(over="ignore"):
        return values.astype(np.float32)
