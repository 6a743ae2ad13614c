"""Products of integers: activations are rounded as well, and 8-bit units multiply the codes."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int8

from jaxscale.parallel.scaled import magnitudes


def integer_product(
    x: Float[Array, "..."],
    codes: Int8[Array, "..."],
    scale: Float[Array, "..."] | None,
    contracted: tuple[int, ...],
    bits: int,
) -> Float[Array, "..."]:
    """Return `x · kernel` by products of integers that are exact in int32, one for each group of inputs.

    A token's inputs of a group become integers of some bits, symmetric around 0, with a scale of their own: the largest
    one over the largest integer (Liu et al. 2024, COMET, has 4-bit blocks of both operands; one group is W8A8).

    Args:
      x: activations, whose last dimensions are summed over.
      codes: of the kernel, -128 to 127.
      scale: float32, of the kernel's rank; one for each block.
      contracted: dimensions of the kernel that are summed over, all leading or all trailing.
      bits: of an activation, 2 to 8.

    Returns:
      float32: the remaining dimensions of `x`, then those of the kernel.
    """
    n, rest = len(contracted), tuple(d for d in range(codes.ndim) if d not in contracted)
    tokens = x.shape[: x.ndim - n]
    scale = jnp.ones((1,) * codes.ndim, jnp.float32) if scale is None else scale
    counts = [scale.shape[d] for d in contracted]
    sizes = [codes.shape[d] for d in contracted]
    cut = [k for size, count in zip(sizes, counts, strict=True) for k in (count, size // count)]
    groups, entries = tuple(range(0, 2 * n, 2)), tuple(range(1, 2 * n, 2))
    kernel = jnp.transpose(codes, (*contracted, *rest)).reshape(*cut, *(codes.shape[d] for d in rest))
    left = x.astype(jnp.float32).reshape(*tokens, *cut)
    at = tuple(len(tokens) + d for d in entries)
    whole, own = rounded_activations(left, at, bits)
    batch = tuple(len(tokens) + d for d in groups)
    y = lax.dot_general(whole, kernel, ((at, entries), (batch, groups)), preferred_element_type=jnp.int32)
    # (groups, tokens, outputs)
    wide = jnp.transpose(scale, (*contracted, *rest))
    for d, dim in enumerate(rest):  # blocks of several outputs
        wide = jnp.repeat(wide, codes.shape[dim] // wide.shape[n + d], n + d) if wide.shape[n + d] > 1 else wide
    wide = wide.reshape(*counts, *(1,) * len(tokens), *wide.shape[n:])
    own = jnp.moveaxis(own.reshape(*tokens, *counts), range(len(tokens), len(tokens) + n), range(n))
    y = y.astype(jnp.float32) * wide * own.reshape(*counts, *tokens, *(1,) * len(rest))
    return jnp.sum(y, tuple(range(n))) if math.prod(counts) > 1 else y.reshape(y.shape[n:])


def rounded_activations(
    x: Float[Array, "..."], group: tuple[int, ...], bits: int
) -> tuple[Int8[Array, "..."], Float[Array, "..."]]:
    """Return activations as integers, and their scales: the largest one of a group over the largest integer.

    Args:
      x: float32.
      group: dimensions whose entries share a scale.
      bits: of an integer, 2 to 8.
    """
    own = jnp.max(magnitudes(x), group, keepdims=True) / (2.0 ** (bits - 1) - 1)
    own = jnp.where(own > 0, own, 1.0)
    return jnp.round(x / own).astype(jnp.int8), own
