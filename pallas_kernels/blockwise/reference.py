"""The update in plain JAX: blocks by reshape, one scale each. The reference, and the implementation without a kernel.

With a tile (t0, t1), an array (n0, n1) becomes (n0 / t0, t0, n1 / t1, t1): odd dimensions are the inside of a block.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.blockwise.codecs import codec
from pallas_kernels.blockwise.rules import Rule

_TINY = float(jnp.finfo(jnp.float32).tiny)
_HUGE = 2.0**100
"""Scales above this are reduced before they are inverted: 1 / 8.6e37 is not a normal float32, and would count as 0."""


def blocks_of(x: jax.Array, tile: tuple[int, ...], flat: int | None) -> jax.Array:
    """Return x in blocks: (n / t, t) for every dimension, or (blocks, `flat`) padded with zeros."""
    if flat is not None:
        short = -x.size % flat
        return jnp.pad(x.reshape(-1), (0, short)).reshape(-1, flat)
    return x.reshape([n for size, t in zip(x.shape, tile, strict=True) for n in (size // t, t)])


def unblock(blocks: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Undo `blocks_of`."""
    return blocks.reshape(-1)[: math.prod(shape)].reshape(shape) if blocks.ndim == 2 else blocks.reshape(shape)


def absmax_of(blocks: jax.Array, tile: tuple[int, ...], flat: int | None) -> jax.Array:
    """Return each block's largest magnitude, with inner dimensions of 1; infinite where the block has a NaN."""
    inside = (1,) if flat is not None else tuple(range(1, blocks.ndim, 2))
    return jnp.max(magnitude(blocks), axis=inside, keepdims=True)


def magnitude(x: jax.Array) -> jax.Array:
    """Return |x|, infinite for a NaN: a maximum may drop NaNs (XLA's does on CPUs), and a fault has to show."""
    return jnp.where(x != x, jnp.inf, jnp.abs(x))


def inverse(scales: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return two factors whose product is 1 / scale; 0 for a scale that is 0, not normal, infinite or NaN."""
    first = jnp.where(scales > _HUGE, 2.0**-30, 1.0)
    smaller = scales * first
    return first, jnp.where(scales >= _TINY, 1.0 / jnp.maximum(smaller, _TINY), 0.0)


def scaled(x: jax.Array, scales: jax.Array) -> jax.Array:
    """Return x / scale, in [-1, 1]; 0 (NaN where x is not finite) where `inverse` is 0."""
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
    """Take one step: dequantise, apply the rule in float32, quantise the new states.

    The parameter is updated with the states before they are rounded.

    Returns:
      the new parameter (in its dtype) or the float32 update, the new codes and the new scales.
    """
    view = functools.partial(blocks_of, tile=tile, flat=flat)
    codecs = [codec(format, signed) for signed in rule.states]
    seen = [s.reshape(-1, 1) if flat is not None else s.reshape([n for d in s.shape for n in (d, 1)]) for s in scales]
    states = tuple(c.unbend(c.decode(view(q)), s) * s for c, q, s in zip(codecs, codes, seen, strict=True))
    p = view(param).astype(jnp.float32)
    change, new = rule.step(p, view(grad).astype(jnp.float32), states, derived)
    out = (p + change).astype(param.dtype) if apply else change
    maxima = [c.scales(x, absmax_of(x, tile, flat)) for c, x in zip(codecs, new, strict=True)]
    new_codes = [c.encode_moment(c.bend(scaled(x, a), a)) for c, x, a in zip(codecs, new, maxima, strict=True)]
    return (
        unblock(out, param.shape),
        tuple(unblock(x, param.shape) for x in new_codes),
        tuple(a.reshape(s.shape) for a, s in zip(maxima, scales, strict=True)),
    )
