"""Fewer ranks for the same delta: exact reductions, and the best cut, against LAPACK's SVD of the dense matrix."""

import numpy as np
import pytest

from adapter_store.algebra import ranks
from adapter_store.algebra.products import dense
from tests.adapter_store.samples import Float64


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def product(A: np.ndarray, B: np.ndarray) -> Float64:
    return B.astype(np.float64) @ A.astype(np.float64)


def best_error(delta: Float64, limit: int) -> float:
    values = np.linalg.svd(delta, compute_uv=False)
    return float(np.sqrt(np.square(values[limit:]).sum() / np.square(values).sum()))


SHAPES = [(24, 40, 60), (40, 40, 60), (40, 60, 40), (8, 200, 12), (70, 40, 60)]


@pytest.mark.parametrize(("rank", "width", "out"), SHAPES)
@pytest.mark.parametrize("decay", [1.0, 0.7])
def test_a_cut_is_the_best_that_there_is_and_says_what_it_costs(rank: int, width: int, out: int, decay: float):
    A, B = normal(rank, width) * decay ** np.arange(rank, dtype=np.float32)[:, None], normal(out, rank, seed=1)
    delta = product(A, B)
    for limit in (1, 5, 7):
        fitted = ranks.cut(*ranks.reduce_rank(A, B), limit)
        error = np.linalg.norm(delta - product(fitted.A, fitted.B)) / np.linalg.norm(delta)
        assert len(fitted.A) == limit
        assert error == pytest.approx(best_error(delta, limit), rel=1e-5, abs=1e-6)
        assert fitted.error == pytest.approx(error, rel=1e-5, abs=1e-6)


def test_a_cut_gives_both_factors_the_same_norm():
    fitted = ranks.cut(normal(8, 20) * 1000, normal(30, 8) / 1000, 4)
    assert np.allclose(np.linalg.norm(fitted.A, axis=1), np.linalg.norm(fitted.B, axis=0), rtol=1e-5)


@pytest.mark.parametrize("transposed", [False, True])
def test_the_cut_of_a_kronecker_product_comes_from_its_factors(transposed: bool):
    w1, w2 = normal(6, 4), normal(5, 9, seed=1)
    if transposed:
        w1, w2 = w1.T, w2.T
    delta = np.kron(w1, w2).astype(np.float64)
    for limit in (1, 7, 15):
        fitted = ranks.cut_kron((dense(w1), dense(w2)), limit)
        error = np.linalg.norm(delta - product(fitted.A, fitted.B)) / np.linalg.norm(delta)
        assert error == pytest.approx(best_error(delta, limit), rel=1e-5)
        assert fitted.error == pytest.approx(error, rel=1e-5)


@pytest.mark.parametrize("written", [12, 40, 64])
def test_ranks_that_are_only_written_are_taken_out_exactly(written: int):
    """A delta of rank 5 that is stored with more: in integers, so that float32 has no rounding to hide behind."""
    generator = np.random.default_rng(0)
    core = generator.integers(-8, 8, (5, 50)).astype(np.float32)
    mixed = generator.integers(-2, 3, (written, 5)).astype(np.float32) @ core
    B = generator.integers(-8, 8, (60, written)).astype(np.float32)
    fitted = ranks.fit(mixed, B, limit=5, max_error=0.0)
    delta = product(mixed, B)
    assert (len(fitted.A), fitted.error) == (5, 0.0)
    assert np.abs(product(fitted.A, fitted.B) - delta).max() <= 1e-6 * np.abs(delta).max()


def test_what_is_almost_of_low_rank_is_not_taken_for_it():
    A, B = normal(4, 50), normal(60, 4, seed=1)
    noise = 1e-6 * normal(60, 50, seed=2)
    with pytest.raises(ranks.TooManyRanks) as refused:
        ranks.fit(*dense((product(A, B) + noise).astype(np.float32)), limit=4, max_error=0.0)
    assert (refused.value.needed, refused.value.error) == (50, None)
    fitted = ranks.fit(*dense((product(A, B) + noise).astype(np.float32)), limit=4, max_error=1e-5)
    assert 0 < fitted.error < 1e-5


def test_a_cut_that_costs_too_much_says_how_much():
    A, B = normal(32, 32), np.eye(32, dtype=np.float32)
    with pytest.raises(ranks.TooManyRanks) as refused:
        ranks.fit(A, B, limit=8, max_error=0.1)
    assert refused.value.error == pytest.approx(best_error(product(A, B), 8), rel=1e-5)


def test_a_delta_of_zeros_needs_one_rank():
    zeros = np.zeros((20, 30), np.float32)
    fitted = ranks.fit(*dense(zeros), limit=4, max_error=0.0)
    assert len(fitted.A) == 1
    assert not product(fitted.A, fitted.B).any()
    assert ranks.cut(*dense(zeros), 4).error == 0.0
