"""Numbers to the dtype of a layout: rounding and overflow exactly as torch has them."""

import numpy as np
import pytest
import torch

from adapter_store.dtypes import OVERFLOWS, encode

TORCH = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16).numpy()


@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("transposed", [False, True])
def test_every_magnitude_is_rounded_as_torch_rounds(dtype: str, transposed: bool):
    random = np.random.default_rng(0).integers(0, 1 << 32, (512, 128), dtype=np.uint32)
    values = np.where(np.isfinite(random.view(np.float32)), random.view(np.float32), np.float32(0))
    values[0, :4] = [0.0, -0.0, 1e-45, -1e-45]
    values[1] = (np.arange(128, dtype=np.uint32) << 15 | 0x3F800000).view(np.float32)  # ties
    if transposed:
        values = values.T
    expected = torch.from_numpy(np.ascontiguousarray(values)).to(TORCH[dtype])
    got = np.ascontiguousarray(encode(values, dtype))
    assert np.array_equal(got.view(bits(expected).dtype), bits(expected))


@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("sign", [1, -1])
def test_overflow_begins_where_rounding_gives_infinity(dtype: str, sign: int):
    if dtype == "F32":
        assert OVERFLOWS[dtype] == float("inf")
        return
    first = np.float32(OVERFLOWS[dtype])
    below = np.nextafter(first, np.float32(0))
    edges = torch.tensor([sign * first, sign * below]).to(TORCH[dtype])
    assert edges.isinf().tolist() == [True, False]
