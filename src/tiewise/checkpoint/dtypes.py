"""The types of the safetensors format: bits, and the numpy type that holds one element where there is one."""

from __future__ import annotations

import numpy as np  # before ml_dtypes, whose C part would import it and print what Ctrl-C raises there

# isort: split
import ml_dtypes
from numpy.typing import NDArray

BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
NUMPY = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I16": np.dtype("<i2"),
    "U16": np.dtype("<u2"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I32": np.dtype("<i4"),
    "U32": np.dtype("<u4"),
    "F32": np.dtype("<f4"),
    "C64": np.dtype("<c8"),
    "F64": np.dtype("<f8"),
    "I64": np.dtype("<i8"),
    "U64": np.dtype("<u8"),
}
FLOATING = ("F64", "F32", "F16", "BF16")  # what a table is stored in, unless it is quantised


def widened(values: NDArray) -> NDArray[np.float32] | NDArray[np.float64]:
    """Return floating values as fp32, fp64 as it is; every stored type fits without rounding."""
    return values if values.dtype == np.float64 else values.astype(np.float32, copy=False)


def rounded(values: NDArray[np.float64], dtype: str, lost: NDArray[np.float64] | float = 0.0) -> NDArray:
    """Return `values + lost` in a stored floating type, rounded once, to the nearest and of two to the even.

    `lost` is less than half a unit in the last place of `values`: what an addition in fp64 left over.
    """
    if dtype == "F64":
        return values
    values = _odd(values, lost)
    if dtype == "BF16":  # which numpy reaches by way of fp32, rounding twice
        with np.errstate(over="ignore"):
            single = values.astype(np.float32)
        values = _odd(single, values - single)
    return values.astype(NUMPY[dtype])


def _odd(values: NDArray, lost: NDArray | float) -> NDArray:
    """Make the last bit say that something was lost, so that a narrower type rounds to the right side."""
    even = values.view(f"i{values.itemsize}") & 1 == 0
    return np.where(even & (lost != 0), np.nextafter(values, np.copysign(np.inf, lost).astype(values.dtype)), values)
