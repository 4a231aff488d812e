"""What the shapes of a group's tensors say of its difference, from the header alone."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

from adapter_store.dialects.suffixes import Algorithm
from adapter_store.errors import Cause, rejected
from loraplex.errors import AdapterRejected
from loraplex.layout import TargetModule

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Sizes:
    """A difference of `out` rows.

    `inner` is the shape of one of them: (in,), (in, kh, kw), or with `flat` one number for in * kh * kw. `rank` is what
    alpha is divided by, `exact_rank` the rank of the factorisation that `algebra` makes; `scaled` is False where alpha
    has no meaning.
    """

    out: int
    inner: Shape
    rank: int
    exact_rank: int
    flat: bool = False
    scaled: bool = True

    def fits(self, module: TargetModule) -> bool:
        """Whether a row is as wide as the module needs; a 1x1 convolution is a matrix."""
        if self.flat:
            return self.inner[0] == module.a_width
        kernel = self.inner[1:] or (1, 1)
        return self.inner[0] == module.in_features and kernel == module.kernel


class Shapes:
    """The shapes of one group's parts, to be asked with the key at hand for the error."""

    def __init__(self, keys: Mapping[str, str], shapes: Mapping[str, Shape]) -> None:
        self._keys, self._shapes = keys, shapes

    def __contains__(self, part: str) -> bool:
        return part in self._keys

    def __getitem__(self, part: str) -> Shape:
        """The shape of a part that is a matrix or the kernel of a convolution. Raises SHAPE_MISMATCH."""
        key, shape = self._keys[part], self._shapes[part]
        if len(shape) not in (2, 4):
            raise rejected(Cause.SHAPE_MISMATCH, f"{key[:200]!r} has shape {list(shape)}, which is no matrix.", key)
        return shape

    def agree(self, part: str, rank: int, other: str, other_rank: int) -> None:
        """Refuse two parts of different rank."""
        if rank != other_rank:
            names = f"{self._keys[part][:200]!r} has rank {rank}, {self._keys[other][:200]!r} has rank {other_rank}."
            raise rejected(Cause.RANK_MISMATCH, names, self._keys[other])

    def differ(self, part: str, other: str) -> AdapterRejected:
        """The error for two factors of one difference that are not equally large."""
        key = self._keys[other]
        message = f"{key[:200]!r} makes a difference of another size than {self._keys[part][:200]!r}."
        return rejected(Cause.SHAPE_MISMATCH, message, key)

    def matrix(self, part: str) -> Shape:
        """The shape of a part that is a matrix, perhaps written as a 1x1 convolution. Raises SHAPE_MISMATCH."""
        shape = self[part]
        if shape[2:] not in ((), (1, 1)):
            key = self._keys[part]
            message = f"{key[:200]!r} has shape {list(shape)}; a kernel has no place in it."
            raise rejected(Cause.SHAPE_MISMATCH, message, key)
        return shape[:2]

    def tucker(self, core: str, left: str, right: str) -> tuple[int, Shape, int]:
        """(out, inner, rank) of the sum over i, j of left[i, out] core[i, j, kernel] right[j, in]."""
        (rank, out), (rank_in, width), shape = self.matrix(left), self.matrix(right), self[core]
        self.agree(left, rank, core, shape[0])
        self.agree(right, rank_in, core, shape[1])
        self.agree(left, rank, right, rank_in)
        return out, (width, *shape[2:]), rank


def lora(shapes: Shapes) -> Sizes:
    """A: [rank, in, ...]; B: [out, rank]; mid: [rank, rank, kh, kw] between them."""
    A, B = shapes["A"], shapes["B"]
    shapes.agree("A", A[0], "B", B[1])
    if "mid" not in shapes:
        return Sizes(B[0], A[1:], A[0], A[0])
    mid = shapes["mid"]
    shapes.agree("A", A[0], "mid", mid[1])
    shapes.agree("B", B[1], "mid", mid[0])
    return Sizes(B[0], (shapes.matrix("A")[1], *mid[2:]), A[0], A[0])


def loha(shapes: Shapes) -> Sizes:
    """Two products of rank r; with cores, Tucker products."""
    sides = [_loha_side(shapes, side) for side in "12"]
    (out, inner, rank), other = sides
    if (out, prod(inner)) != (other[0], prod(other[1])):
        raise shapes.differ("w1_a", "w2_a")
    shapes.agree("w1_b", rank, "w2_b", other[2])
    flat = "t1" not in shapes and "t2" not in shapes and len(inner) == 1
    return Sizes(out, inner, rank, min(rank * other[2], out, prod(inner)), flat)


def _loha_side(shapes: Shapes, side: str) -> tuple[int, Shape, int]:
    left, right, core = f"w{side}_a", f"w{side}_b", f"t{side}"
    if core in shapes:
        return shapes.tucker(core, left, right)
    (out, rank), inner = shapes.matrix(left), shapes[right]
    shapes.agree(left, rank, right, inner[0])
    return out, inner[1:], rank


def lokr(shapes: Shapes) -> Sizes:
    """kron(w1, w2), each whole or a product; a kernel belongs to w2."""
    out, inner, rank = _lokr_side(shapes, "1")
    out_2, inner_2, rank_2 = _lokr_side(shapes, "2")
    if len(inner) > 1:
        shapes.matrix("w1" if "w1" in shapes else "w1_b")
    if rank and rank_2:
        shapes.agree("w1_b", rank, "w2_b", rank_2)
    exact_1 = min(rank or out, out, inner[0])
    exact_2 = min(rank_2 or out_2, out_2, prod(inner_2))
    decomposed = rank or rank_2
    flat = len(inner_2) == 1
    exact = exact_1 * exact_2
    whole = (inner[0] * inner_2[0], *inner_2[1:])
    return Sizes(out * out_2, whole, decomposed or exact, exact, flat, scaled=bool(decomposed))


def _lokr_side(shapes: Shapes, side: str) -> tuple[int, Shape, int]:
    """(rows, shape of one, rank); rank 0 when the side is whole."""
    whole, left, right, core = f"w{side}", f"w{side}_a", f"w{side}_b", f"t{side}"
    if whole in shapes:
        return shapes[whole][0], shapes[whole][1:], 0
    if core in shapes:
        return shapes.tucker(core, left, right)
    (out, rank), inner = shapes.matrix(left), shapes[right]
    shapes.agree(left, rank, right, inner[0])
    return out, inner[1:], rank


def full(shapes: Shapes) -> Sizes:
    """diff: [out, in, ...]."""
    out, *inner = shapes["diff"]
    rank = min(out, prod(inner))
    return Sizes(out, tuple(inner), rank, rank, scaled=False)


SIZES_OF: dict[Algorithm, Callable[[Shapes], Sizes]] = {
    Algorithm.LORA: lora,
    Algorithm.LOHA: loha,
    Algorithm.LOKR: lokr,
    Algorithm.FULL: full,
}
