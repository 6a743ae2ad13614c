"""`Scaled`: products of 8-bit operands, each with scales by its largest magnitudes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Num, UInt32

from jaxscale.errors import ConfigError
from jaxscale.parallel.arithmetic import Cut, Dims, Numbers, cut_along
from jaxscale.parallel.seeds import uniform
from pallas_kernels.grouped_matmul import bias_of_rows, grouped_matmul, grouped_outer

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
"""The types of codes, and the largest number of each. -128 is not used, so that int8 is symmetric."""

INT32_TERMS = (2**31 - 1) // 127**2
"""How many products of int8 codes an int32 sum holds, whatever the codes."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Coded:
    """An operand as codes and scales.

    Args:
      codes: int8 or 8-bit floats.
      scale: float32, or the exponents of powers of two as bytes; 1 long in dimensions that share a scale, and shorter
        than `codes` by the block along the dimension that has blocks.
    """

    codes: Num[Array, "..."]
    scale: Num[Array, "..."]

    def scales(self) -> Float[Array, "..."]:
        """Return the scales in float32."""
        return powers_of_two(self.scale) if self.scale.dtype == jnp.uint8 else self.scale

    def dense(self, dtype: DTypeLike) -> Float[Array, "..."]:
        """Return codes times scales.

        Args:
          dtype: dtype of the result.
        """
        scale = self.scales()
        for d, (n, m) in enumerate(zip(self.codes.shape, scale.shape, strict=True)):
            scale = jnp.repeat(scale, n // m, d) if 1 < m < n else scale
        return (self.codes.astype(jnp.float32) * scale).astype(dtype)


@dataclasses.dataclass(frozen=True)
class Scaled(Numbers):
    """Operands in 8 bits, with a scale for each group of numbers: its largest magnitude becomes the largest code.

    With one scale for all terms of a sum the product is one of codes, multiplied by both scales afterwards. With
    `block` the scales differ within a sum, which no matrix unit but Blackwell's supports: codes are multiplied by their
    scales before the product, in `dtype`, which is exact in bfloat16 if scales are powers of two.

    Args:
      left_type: type of the left operand's codes, a key of `LARGEST`.
      right_type: type of the right operand's codes.
      dtype: dtype of products of blocks.
      shared: an operand has one scale (for each index of batch dimensions); else one for all terms of a sum, such as
        one for each token and each output.
      block: the consecutive terms of a sum that share a scale, along the last summed dimension; `None` is all.
      powers: scales are powers of two, rounded up, stored in a byte (the type E8M0).
      stochastic: round the cotangent up or down at random, which operand it is: "left", "right" or "".
      seed: of the random numbers, see `seeded`; `None` is the same in every step.
      history: the earlier steps whose largest magnitudes scale the operands (delayed scaling).
      earlier: the largest magnitudes of both operands in them, see `scaled_by`; 0 or `None` is those of this step.
    """

    left_type: str
    right_type: str
    dtype: DTypeLike
    shared: bool = False
    block: int | None = None
    powers: bool = False
    stochastic: str = ""
    seed: UInt32[Array, "..."] | None = None
    history: int = 0
    earlier: tuple[Float[Array, ""], Float[Array, ""]] | None = None

    def scaled_by(self, left: Float[Array, ""], right: Float[Array, ""]) -> Scaled:
        """See `Numbers`. A larger number of this step becomes the largest code."""
        return dataclasses.replace(self, earlier=(left, right)) if self.history else self

    @property
    def random(self) -> bool:
        """See `Numbers`."""
        return bool(self.stochastic)

    def seeded(self, seed: UInt32[Array, "..."] | None) -> Scaled:
        """See `Numbers`."""
        if seed is None or not self.stochastic:
            return self
        return dataclasses.replace(self, seed=seed ^ jnp.uint32(0x6C078965) if self.stochastic == "right" else seed)

    def left(self, a: Float[Array, "..."], dims: Sequence[int], batch: Sequence[int] = (), cut: Cut = ()) -> Coded:
        """See `Numbers`."""
        return self._encode(a, 0, dims, batch, cut)

    def right(self, a: Float[Array, "..."], dims: Sequence[int], batch: Sequence[int] = (), cut: Cut = ()) -> Coded:
        """See `Numbers`."""
        return self._encode(a, 1, dims, batch, cut)

    def dot(
        self, left: Coded, right: Coded, dims: Dims, out_dtype: DTypeLike, parts: Sequence[int] = ()
    ) -> Float[Array, "..."]:
        """See `Numbers`. Devices sum integers in `out_dtype`, which may be half as long as int32."""
        (summed, summed_right), (batch, batch_right) = ((tuple(a), tuple(b)) for a, b in dims)
        dims = (summed, summed_right), (batch, batch_right)
        if self.block is not None:
            x, y = left.dense(self.dtype), right.dense(self.dtype)
            return lax.dot_general(x, y, dims, preferred_element_type=out_dtype)
        split = [n for n in parts if n > 1] if self.left_type == "int8" else []
        if split:  # each device's part of a sum is a batch dimension
            left, summed, batch, more = _split(left, summed, batch, parts)
            right, summed_right, batch_right, more_right = _split(right, summed_right, batch_right, parts)
            dims = (summed, summed_right), ((*batch, *more), (*batch_right, *more_right))
        self._check_terms(math.prod(left.codes.shape[d] for d in summed))
        y = lax.dot_general(left.codes, right.codes, dims, preferred_element_type=self._sums(out_dtype))
        y = self._scaled(y, left, right, dims).astype(out_dtype)
        over = range(len(batch), len(batch) + len(split))
        return lax.reduce(y, np.zeros([], y.dtype), lax.add, tuple(over)) if split else y

    def ragged_dot(
        self,
        rows: Coded,
        matrices: Coded,
        sizes: Int[Array, " x"],
        transposed: bool = False,
        bias: Float[Array, "x o"] | None = None,
    ) -> Float[Array, "n o"]:
        """See `Numbers`; the result has the dtype of products of blocks."""
        if self.block is not None:
            x, w = rows.dense(self.dtype), matrices.dense(self.dtype)
            return grouped_matmul(x, w, sizes, bias=bias, transposed=transposed)
        self._check_terms(rows.codes.shape[1])
        sums = self._sums(jnp.float32)
        y = grouped_matmul(rows.codes, matrices.codes, sizes, transposed=transposed, out_dtype=sums)
        scales = jnp.squeeze(matrices.scales(), 2 if transposed else 1)
        of_row = jnp.repeat(scales, sizes, axis=0, total_repeat_length=len(rows.codes))
        y = y.astype(jnp.float32) * rows.scales() * of_row
        return (y if bias is None else y + bias_of_rows(bias, sizes, len(y))).astype(self.dtype)

    def ragged_outer(
        self, rows: Coded, other: Coded, sizes: Int[Array, " x"], out_dtype: DTypeLike
    ) -> Float[Array, "x i o"]:
        """See `Numbers`."""
        if self.block is not None:
            x, y = rows.dense(self.dtype), other.dense(self.dtype)
            return grouped_outer(x, y, sizes, out_dtype=out_dtype)
        self._check_terms(rows.codes.shape[0])
        y = grouped_outer(rows.codes, other.codes, sizes, out_dtype=self._sums(jnp.float32))
        scale = jnp.swapaxes(rows.scales(), 0, 1) * other.scales()
        return (y.astype(jnp.float32) * scale).astype(out_dtype)

    def _sums(self, out_dtype: DTypeLike) -> DTypeLike:
        return jnp.int32 if self.left_type == "int8" else out_dtype

    def _check_terms(self, terms: int) -> None:
        if self.left_type == "int8" and terms > INT32_TERMS:
            raise ConfigError(
                f"a product of 8-bit integers sums {terms:,} terms, and int32 holds the sum of {INT32_TERMS:,} for "
                "certain; sum fewer (train.accumulation splits a batch), or leave this product in the model's dtype"
            )

    def _scaled(self, y: Array, left: Coded, right: Coded, dims: Dims) -> Float[Array, "..."]:
        """Multiply a product of codes by the scales of its operands."""
        (summed, summed_right), (batch, batch_right) = dims
        y = y.astype(jnp.float32)
        rest = [d for d in range(left.scale.ndim) if d not in (*summed, *batch)]
        rest_right = [d for d in range(right.scale.ndim) if d not in (*summed_right, *batch_right)]
        x_scale, y_scale = left.scales(), right.scales()
        x_scale = jnp.transpose(x_scale, (*batch, *rest, *summed)).reshape(
            *(x_scale.shape[d] for d in (*batch, *rest)), *(1 for _ in rest_right)
        )
        y_scale = jnp.transpose(y_scale, (*batch_right, *rest_right, *summed_right)).reshape(
            *(y_scale.shape[d] for d in batch_right), *(1 for _ in rest), *(y_scale.shape[d] for d in rest_right)
        )
        return y * x_scale * y_scale

    def _encode(self, a: Array, side: int, dims: Sequence[int], batch: Sequence[int], cut: Cut) -> Coded:
        name, stochastic = (self.left_type, self.right_type)[side], self.stochastic == ("left", "right")[side]
        a, dims, largest_code = a.astype(jnp.float32), sorted(dims), LARGEST[name]
        if self.earlier is not None:
            known = self.earlier[side]
            largest = lax.cond(known > 0, lambda: known, lambda: jnp.max(magnitudes(a))).reshape((1,) * a.ndim)
        elif self.block is None:
            over = [d for d in range(a.ndim) if d not in batch] if self.shared else dims
            largest = jnp.max(magnitudes(a), axis=tuple(over), keepdims=True)
            if axes := cut_along(over, cut):
                largest = lax.pmax(largest, axes)
        else:
            at, n = dims[-1], a.shape[dims[-1]]
            if n % self.block:
                fit = math.gcd(n, self.block)
                raise ConfigError(
                    f"blocks of {self.block} do not divide the {n} terms of a sum that a device has; use blocks of "
                    f"{fit}, or leave this product in the model's dtype"
                )
            blocks = magnitudes(a).reshape(*a.shape[:at], n // self.block, self.block, *a.shape[at + 1 :])
            largest = jnp.max(blocks, axis=at + 1)
        scale = largest / largest_code
        scale = jnp.where(scale == 0, 1.0, scale)  # infinite if a number of the group is not finite
        stored = exponents(scale) if self.powers else scale
        scale = powers_of_two(stored) if self.powers else scale
        for d, (n, m) in enumerate(zip(a.shape, scale.shape, strict=True)):
            scale = jnp.repeat(scale, n // m, d) if 1 < m < n else scale
        codes = jnp.clip(a / scale, -largest_code, largest_code)
        if stochastic:
            codes = rounded_at_random(codes, name, self.seed)
        elif name == "int8":
            codes = jnp.round(codes)
        return Coded(codes.astype(name), stored)


def _split(
    a: Coded, summed: tuple[int, ...], batch: tuple[int, ...], parts: Sequence[int]
) -> tuple[Coded, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Split summed dimensions in parts: return the operand, its summed and batch dimensions, and those of the parts."""
    of = dict(zip(summed, parts, strict=True))
    place, more, at = {}, [], 0
    for d in range(a.codes.ndim):
        if of.get(d, 1) > 1:
            more.append((d, at))
            at += 1
        place[d], at = at, at + 1

    def reshape(x: Array) -> Array:
        sizes = ((of.get(d, 1), n) for d, n in enumerate(x.shape))
        return x.reshape(*(m for k, n in sizes for m in ((k, n // k) if k > 1 < n else (1, 1) if k > 1 else (n,))))

    by_dim = dict(more)
    ordered = tuple(by_dim[d] for d in summed if d in by_dim)
    coded = Coded(reshape(a.codes), reshape(a.scale))
    return coded, tuple(place[d] for d in summed), tuple(place[d] for d in batch), ordered


def magnitudes(a: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return magnitudes, infinite in place of NaN, so that a scale tells that a number is not finite.

    A product with an infinite scale is NaN or infinite. XLA's maximum on CPUs can leave NaN out.

    Args:
      a: any numbers.
    """
    return jnp.where(jnp.isnan(a), jnp.inf, jnp.abs(a))


def exponents(scale: Float[Array, "..."]) -> Int[Array, "..."]:
    """Return the exponents of the smallest powers of two that are not below the scales, as bytes (E8M0).

    Args:
      scale: float32, positive.

    Returns:
      uint8: the exponent plus 127, at least 1; 255 for infinity and NaN.
    """
    bits = lax.bitcast_convert_type(scale, jnp.uint32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) > 0)
    return jnp.where(jnp.isfinite(scale), jnp.clip(exponent, 1, 254), 255).astype(jnp.uint8)


def powers_of_two(exponents: Int[Array, "..."]) -> Float[Array, "..."]:
    """Return powers of two from their exponents, the inverse of `exponents`.

    Args:
      exponents: uint8; 255 is NaN.
    """
    power = lax.bitcast_convert_type(exponents.astype(jnp.uint32) << 23, jnp.float32)
    return jnp.where(exponents == 255, jnp.nan, power)


def rounded_at_random(
    a: Float[Array, "..."], name: str, seed: UInt32[Array, "..."] | None = None
) -> Float[Array, "..."]:
    """Round numbers to a type's up or down, with probabilities by which the mean is the number.

    The random number of an element is a hash of the seed and of its place in the array, the same on every layout.

    Args:
      a: float32, in the type's range.
      name: a key of `LARGEST`.
      seed: one seed, or one for each index of the first dimension; see `jaxscale.parallel.seeds`.
    """
    unit = jnp.ones_like(a)
    if name != "int8":
        info = jnp.finfo(name)
        exponent = lax.bitcast_convert_type(lax.bitcast_convert_type(a, jnp.uint32) & 0x7F800000, jnp.float32)
        unit = jnp.maximum(exponent, jnp.float32(info.smallest_normal)) * jnp.float32(2.0**-info.nmant)
    return jnp.floor(a / unit + uniform(a.shape, seed)) * unit
