"""The update in plain JAX: blocks by reshape, one scale each. The truth of this room, and what runs without a kernel.

A tile (t0, t1) of an array (n0, n1) is seen as (n0 / t0, t0, n1 / t1, t1): odd dimensions are the inside of a block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.blockwise.codecs import codec
from pallas_kernels.blockwise.rules import Rule

_TINY = float(jnp.finfo(jnp.float32).tiny)
_HUGE = 2.0**100
"""A scale above this is made smaller before it is inverted: 1 / 8.6e37 is no normal float32, and would count as 0."""


def blocks_of(x: jax.Array, tile: tuple[int, ...], flat: int | None) -> jax.Array:
    """x seen in blocks: (n / t, t) for every dimension, or (blocks, `flat`) padded with zeros."""
    if flat is not None:
        short = -x.size % flat
        return jnp.pad(x.reshape(-1), (0, short)).reshape(-1, flat)
    return x.reshape([n for size, t in zip(x.shape, tile, strict=True) for n in (size // t, t)])


def unblock(blocks: jax.Array, shape: Sequence[int]) -> jax.Array:
    """What `blocks_of` was given."""
    return blocks.reshape(-1)[: math.prod(shape)].reshape(shape) if blocks.ndim == 2 else blocks.reshape(shape)


def absmax_of(blocks: jax.Array, tile: tuple[int, ...], flat: int | None) -> jax.Array:
    """The largest magnitude of each block, its inner dimensions kept as 1; infinite where the block holds a NaN."""
    inside = (1,) if flat is not None else tuple(range(1, blocks.ndim, 2))
    return jnp.max(magnitude(blocks), axis=inside, keepdims=True)


def magnitude(x: jax.Array) -> jax.Array:
    """|x|, infinite for a NaN: a maximum may lose NaNs (XLA's on CPUs does), and a fault has to show."""
    return jnp.where(x != x, jnp.inf, jnp.abs(x))


def inverse(scales: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two factors, one after the other, of 1 / scale; 0 for a scale that is 0, not normal, infinite or NaN."""
    first = jnp.where(scales > _HUGE, 2.0**-30, 1.0)
    smaller = scales * first
    return first, jnp.where(scales >= _TINY, 1.0 / jnp.maximum(smaller, _TINY), 0.0)


def scaled(x: jax.Array, scales: jax.Array) -> jax.Array:
    """x / scale, in [-1, 1]; 0 (a NaN where x is no number) where `inverse` is 0."""
    first, second = inverse(scales)
    return x * first * second


def update(
    rule: Rule,
    derived: dict[str, jax.Array],
    param: jax.Array,
    grad: jax.Array,
    codes: Sequence[jax.Array],
    scales: Sequence[jax.Array],
    *,
    tile: tuple[int, ...],
    flat: int | None,
    format: str,
    apply: bool,
) -> tuple[jax.Array, tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """One step: dequantise, apply the rule in float32, quantise the states it returned.

    The parameter moves by the states before they are rounded; only what is kept is.

    Returns:
      the new parameter (of its dtype) or the float32 update, the new codes and the new scales.
    """
    view = lambda x: blocks_of(x, tile, flat)  # noqa: E731
    codecs = [codec(format, signed) for signed in rule.states]
    seen = [s.reshape(-1, 1) if flat is not None else s.reshape([n for d in s.shape for n in (d, 1)]) for s in scales]
    states = tuple(c.decode(view(q)) * s for c, q, s in zip(codecs, codes, seen, strict=True))
    p = view(param).astype(jnp.float32)
    change, new = rule.step(p, view(grad).astype(jnp.float32), states, derived)
    out = (p + change).astype(param.dtype) if apply else change
    maxima = [absmax_of(x, tile, flat) for x in new]
    new_codes = [c.encode_moment(scaled(x, a)) for c, x, a in zip(codecs, new, maxima, strict=True)]
    return (
        unblock(out, param.shape),
        tuple(unblock(x, param.shape) for x in new_codes),
        tuple(a.reshape(s.shape) for a, s in zip(maxima, scales, strict=True)),
    )
