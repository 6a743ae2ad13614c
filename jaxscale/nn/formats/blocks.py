"""Blocks of a matrix that share a scale."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float


def block_of(sizes: Sequence[int], size: int | None) -> tuple[int, ...] | None:
    """Return the shape of a block of consecutive entries of some dimensions, flattened.

    Args:
      sizes: of the dimensions.
      size: entries of a block; `None` is all.

    Returns:
      entries along each dimension; `None` if no such block tiles the dimensions.
    """
    if size is None:
        return tuple(sizes)
    block = []
    for n in reversed(sizes):
        take = n if size % n == 0 else size
        if n % take:
            return None
        block.append(take)
        size //= take
    return tuple(reversed(block)) if size == 1 else None


def nearest_block(sizes: Sequence[int], size: int) -> int:
    """Return the largest block of at most `size` entries that tiles the dimensions; see `block_of`.

    Args:
      sizes: of the dimensions.
      size: entries.
    """
    return max(n for n in range(1, min(size, math.prod(sizes)) + 1) if block_of(sizes, n) is not None)


def cut(x: Float[Array, "..."], block: Sequence[int]) -> tuple[Float[Array, "..."], tuple[int, ...]]:
    """Split each dimension into blocks.

    Args:
      x: an array.
      block: entries of a block along each dimension.

    Returns:
      `x` with two dimensions in place of each, the blocks and a block's entries; and the dimensions of entries.
    """
    shape = [n for size, b in zip(x.shape, block, strict=True) for n in (size // b, b)]
    return x.reshape(shape), tuple(range(1, 2 * x.ndim, 2))


def spread(x: Float[Array, "..."], shape: Sequence[int]) -> Float[Array, "..."]:
    """Repeat each block's value for all of its entries; dimensions of size 1 are left to broadcasting.

    Args:
      x: one value per block.
      shape: of the array that is in blocks.
    """
    if all(m in (1, n) for m, n in zip(x.shape, shape, strict=True)):
        return x
    wide, whole = [], []
    for m, n in zip(x.shape, shape, strict=True):
        wide += [m, n // m if m > 1 else 1]
        whole.append(n if m > 1 else 1)
    inner = x.reshape([k for m in x.shape for k in (m, 1)])
    return jnp.broadcast_to(inner, wide).reshape(whole)
