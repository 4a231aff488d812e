"""The second half of step 4: a group's numbers on the rows of a module."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from adapter_store.algebra import products, ranks
from adapter_store.dialects.suffixes import Algorithm
from adapter_store.dtypes import Float32
from adapter_store.errors import Cause, rejected
from adapter_store.groups import Group
from adapter_store.validate import RawFile
from loraplex.errors import AdapterRejected
from loraplex.layout import TargetModule

# Two copies of one difference may be rounded differently.
_EQUAL = 1e-6

_FACTORS: dict[Algorithm, Callable[[products.Parts], tuple[Float32, Float32]]] = {
    Algorithm.LORA: products.lora,
    Algorithm.LOHA: products.loha,
    Algorithm.LOKR: products.lokr,
    Algorithm.FULL: products.full,
}


@dataclass(frozen=True)
class Factors:
    """A [rank, a_width] and B [out, rank] of a whole group, unscaled; `sides` where it is a Kronecker product."""

    A: Float32
    B: Float32
    sides: ranks.Sides | None = None


@dataclass(frozen=True)
class Piece:
    """Rows of one group's difference, as the rows of a module from `start` on; `fused` when others have the rest."""

    group: Group
    rows: tuple[slice, ...]
    start: int
    scaling: float
    fused: bool

    @property
    def stop(self) -> int:
        """The module's row after the last."""
        return self.start + self.num_rows

    @property
    def num_rows(self) -> int:
        """How many rows it has."""
        return sum(part.stop - part.start for part in self.rows)

    def take(self, factors: Factors) -> tuple[Float32, Float32]:
        """A, and the piece's rows of B times the scaling. Rows of an exact B are exact, whatever the algorithm."""
        A, B = factors.A, self._scaled(factors.B)
        return ranks.drop_dead_ranks(A, B) if self.fused else (A, B)

    def fit(self, factors: Factors, limit: int, max_error: float) -> ranks.Fitted:
        """The piece with at most `limit` ranks. Raises ranks.TooManyRanks."""
        A, B = self.take(factors)
        sides = factors.sides
        if sides is None or self.num_rows != len(factors.B):
            return ranks.fit(A, B, limit, max_error)

        def best(limit: int) -> ranks.Fitted:
            # The order of the rows and the scaling concern B alone, and change nothing about which cut is best.
            fitted = ranks.cut_kron(sides, limit)
            return ranks.Fitted(fitted.A, self._scaled(fitted.B), fitted.error)

        return ranks.fit(A, B, limit, max_error, best)

    def _scaled(self, B: Float32) -> Float32:
        cut = B[self.rows[0]] if len(self.rows) == 1 else np.concatenate([B[part] for part in self.rows])
        with np.errstate(over="ignore"):  # Inf is refused by name when it is packed
            return cut if self.scaling == 1.0 else cut * np.float32(self.scaling)


@dataclass(frozen=True)
class Placed:
    """What a file adds to one module: pieces at disjoint rows, in their order."""

    index: int
    module: TargetModule
    pieces: tuple[Piece, ...]

    @property
    def groups(self) -> list[Group]:
        """The groups of the pieces."""
        return [piece.group for piece in self.pieces]

    @property
    def rank(self) -> int:
        """The most ranks that it can need, as far as the header tells."""
        ranks_written = sum(group.sizes.exact_rank for group in self.groups)
        return ranks.needed_rank(ranks_written, self.module.a_width, self.module.b_width)

    def is_as_stored(self, file: RawFile, dtype: str, limit: int) -> bool:
        """Whether the rows are the file's own numbers: one whole LoRA pair in the layout's dtype, unscaled."""
        piece, group = self.pieces[0], self.groups[0]
        is_whole = len(self.pieces) == 1 and piece.rows == (slice(0, self.module.b_width),) and not piece.fused
        is_plain = group.algorithm is Algorithm.LORA and "mid" not in group.parts and piece.scaling == 1.0
        is_low = group.sizes.rank <= min(limit, self.module.a_width, self.module.b_width)
        return is_whole and is_plain and is_low and all(file.tensors[k].dtype == dtype for k in group.parts.values())

    def fit(self, load: Callable[[Group], Factors], limit: int, max_error: float) -> ranks.Fitted:
        """A [rank, a_width], B [b_width, rank], at most `limit` ranks. Raises RANK_TOO_LARGE, NOT_FINITE, OVERFLOW."""
        try:
            if len(self.pieces) == 1 and self.pieces[0].num_rows == self.module.b_width:
                return self.pieces[0].fit(load(self.groups[0]), limit, max_error)
            return ranks.fit(*self._composed(load), limit, max_error)
        except ranks.TooManyRanks as error:
            raise self._too_large(error, limit, max_error) from None
        except OverflowError:
            key = self.groups[0].out_key
            message = f"The factors of {key[:200]!r} multiply to numbers that are too large for F32."
            raise rejected(Cause.OVERFLOW, message, key) from None

    def _composed(self, load: Callable[[Group], Factors]) -> tuple[Float32, Float32]:
        """The ranks of all pieces one after the other; each has its own rows of B, the rest of them are zero."""
        parts = [(piece, *piece.take(load(piece.group))) for piece in self.pieces]
        B = np.zeros((self.module.b_width, sum(len(A) for _, A, _ in parts)), np.float32)
        rank = 0
        for piece, A, rows in parts:
            B[piece.start : piece.stop, rank : rank + len(A)] = rows
            rank += len(A)
        return np.concatenate([A for _, A, _ in parts]), B

    def _too_large(self, error: ranks.TooManyRanks, limit: int, max_error: float) -> AdapterRejected:
        key, written = self.groups[0].key, self.groups[0].sizes.rank
        needs = f"{key[:200]!r} has rank {written} and needs {error.needed} rank rows; at most {limit} are packed."
        if error.error is None:
            hint = "A max_error above 0 allows a cut."
        else:
            hint = f"A cut to {limit} would cost {error.error:.4g} of the difference, max_error is {max_error:g}."
        return rejected(Cause.RANK_TOO_LARGE, f"{needs} {hint}", key)


def load_factors(file: RawFile, group: Group) -> Factors:
    """Read the tensors of a group. Raises NOT_FINITE; one thread at a time."""
    parts = {part: file.load(key) for part, key in group.parts.items()}
    with np.errstate(over="ignore", invalid="ignore"):  # Inf is refused by name when it is packed
        A, B = _FACTORS[group.algorithm](parts)
        return Factors(A, B, products.lokr_sides(parts) if group.algorithm is Algorithm.LOKR else None)


def are_equal(file: RawFile, one: Piece, other: Piece) -> bool:
    """Whether two pieces are the same difference, up to how a trainer rounds."""
    (A, B), (other_A, other_B) = (piece.take(load_factors(file, piece.group)) for piece in (one, other))
    if A.shape == other_A.shape and np.array_equal(A, other_A) and np.array_equal(B, other_B):
        return True
    whole = ranks.norm(A, B)
    between = ranks.norm(np.concatenate([A, other_A]), np.concatenate([B, -other_B], axis=1))
    return between <= _EQUAL * whole
