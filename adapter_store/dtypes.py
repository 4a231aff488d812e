"""Numbers as safetensors stores them, to float32 and back; numpy has neither bfloat16 nor float8."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
Stored = NDArray[Any]

# safetensors' names -> bytes per element. The integers are for alpha only.
FLOAT_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1}
INTEGER_TYPES = {"I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "<i1", "U8": "<u1"}
SIZES = FLOAT_SIZES | {name: np.dtype(code).itemsize for name, code in INTEGER_TYPES.items()}

# What `encode` returns for the dtype of a layout.
STORAGE_TYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}

_EXPONENTS = {"F16": np.uint16(0x7C00), "BF16": np.uint16(0x7F80)}

# The smallest magnitude that `encode` rounds to Inf.
OVERFLOWS = {"F32": float("inf"), "F16": 65520.0, "BF16": 255.5 * 2.0**120}


def decode(raw: bytes | bytearray, dtype: str) -> Float32:
    """The numbers of `raw` as a flat float32 array; exact except for F64 and long integers, which are rounded."""
    if dtype == "BF16":
        return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
    if dtype == "F8_E5M2":
        return (np.frombuffer(raw, np.uint8).astype(np.uint16) << 8).view(np.float16).astype(np.float32)
    if dtype == "F8_E4M3":
        return _E4M3[np.frombuffer(raw, np.uint8)]
    code = INTEGER_TYPES.get(dtype) or f"<f{FLOAT_SIZES[dtype]}"
    with np.errstate(over="ignore"):  # too large a number becomes Inf, which the caller refuses by name
        return np.frombuffer(raw, code).astype(np.float32)


def are_finite(stored: Stored, dtype: str) -> bool:
    """Whether numbers as `encode` returns them hold neither NaN nor Inf: those have all bits of the exponent set."""
    exponent = _EXPONENTS.get(dtype)
    if exponent is None:
        return bool(np.isfinite(stored).all())
    return not bool(((stored.view(np.uint16) & exponent) == exponent).any())


def count_nonzero(stored: Stored, dtype: str) -> int:
    """How many of such numbers are neither 0 nor -0."""
    magnitudes = stored & np.uint16(0x7FFF) if dtype == "BF16" else stored
    return int(np.count_nonzero(magnitudes))


def encode(values: Float32, dtype: str) -> Stored:
    """`values` in the dtype of a layout, rounded to nearest even; BF16 as its 16 bits. Not for NaN. May be a view."""
    if dtype == "BF16":
        bits = np.ascontiguousarray(values).view("<u4")
        rounded = bits >> 16
        rounded &= 1  # ties go to the even one
        rounded += bits
        rounded += 0x7FFF
        return rounded.view("<u2")[..., 1::2]
    with np.errstate(over="ignore", under="ignore"):
        return values.astype(STORAGE_TYPES[dtype], copy=False)


def _e4m3_values() -> Float32:
    """All 256 numbers of float8 e4m3fn: 4 exponent bits with bias 7, 3 of mantissa, no Inf, NaN at all ones."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    magnitude = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    values = np.where(codes & 0x80, -magnitude, magnitude).astype(np.float32)
    values[[0x7F, 0xFF]] = np.nan
    return values


_E4M3 = _e4m3_values()
