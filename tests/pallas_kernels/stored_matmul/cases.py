"""What the tests of products with stored weights share: weights packed by NumPy, and their float64 values."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.stored_matmul import Codebook, Floats, Integers, Packed, Powers, Table
from pallas_kernels.stored_matmul.examples import FORMATS, shapes

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the OCP's MX specification, table 5
_E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def values(numbers: Any, table: np.ndarray | None = None) -> np.ndarray:
    """Return the float64 number of each code."""
    match numbers:
        case Integers(bits, signed):
            codes = np.arange(2**bits)
            return np.where(codes >= 2 ** (bits - 1), codes - 2**bits, codes).astype(float) if signed else codes * 1.0
        case Floats(2, 1):
            return np.array([*_E2M1, *(-v for v in _E2M1)])
        case Floats(3, 2):
            return np.arange(64, dtype=np.uint8).view(ml_dtypes.float6_e3m2fn).astype(np.float64)
        case Floats(4, 3):
            return _E4M3
        case Powers():
            return 2.0 ** (np.arange(256) - 127.0)
        case Table(numbers_):
            return np.array(numbers_)
        case Codebook():
            assert table is not None
            return table.astype(np.float64)
    raise AssertionError(numbers)


def make(name: str, k: int, n: int, seed: int = 0) -> tuple[Packed, np.ndarray]:
    """Return a weight of a format of `FORMATS`, and its matrix in float64."""
    random, options = np.random.default_rng(seed), FORMATS[name]
    like, numbers = shapes(k, n, **options), options["numbers"]
    table = None
    if like.table is not None:
        table = random.normal(size=like.table.shape).astype(np.float32)
    codes = random.integers(0, 2**numbers.bits, (k, n)).astype(np.uint8)
    if numbers == Floats(4, 3):
        codes[codes % 128 == 127] = 0  # NaN
    bits = (codes[:, None] >> np.arange(numbers.bits)[:, None]) & 1
    words = np.packbits(bits.reshape(-1, n).astype(np.uint8), axis=0, bitorder="little")
    if like.codes.dtype == np.uint32:
        words = np.ascontiguousarray(words.T).view("<u4").T
    matrix = values(numbers, table)[codes]
    parts: dict[str, Any] = {}
    for part in ("zero", "scale", "offset"):
        shape = getattr(like, part)
        if shape is None:
            continue
        if shape.dtype != jnp.uint8:
            stored = random.uniform(0.5, 1.5, shape.shape) * (-1 if part == "offset" else 1)
            stored = np.asarray(jnp.asarray(stored, shape.dtype))
            exact = stored.astype(np.float64)
        elif part == "zero":
            stored = random.integers(0, 16, shape.shape).astype(np.uint8)
            exact = stored.astype(np.float64)
        else:
            low = 120 if like.scale_numbers == Powers() else 40
            stored = random.integers(low, low + 20, shape.shape).astype(np.uint8)
            exact = values(like.scale_numbers)[stored]
        parts[part] = jnp.asarray(stored)
        wide = np.repeat(exact, k // exact.shape[0], axis=0)
        matrix = {"zero": matrix - wide, "scale": matrix * wide, "offset": matrix + wide}[part]
    if like.factor is not None:
        parts["factor"] = jnp.full((1, 1), 0.75, jnp.float32)
        matrix = matrix * 0.75
    if table is not None:
        parts["table"] = jnp.asarray(table)
    return dataclasses.replace(like, codes=jnp.asarray(words), **parts), matrix


def error(got: Any, truth: np.ndarray) -> float:
    """Return the deviation's norm over the truth's."""
    return float(np.linalg.norm(np.asarray(got, np.float64) - truth) / np.linalg.norm(truth))
