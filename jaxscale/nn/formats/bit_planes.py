"""Exact products of integers of any widths by their bits."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int32, UInt8, UInt32

WORD = 32


def planes(codes: UInt8[Array, "... k"], bits: int) -> UInt32[Array, "b ... w"]:
    """Return the bits of codes, one plane for each place, packed in words along the last dimension.

    Args:
      codes: uint8, each below 2^bits.
      bits: of a code, 1 to 8.

    Returns:
      uint32; bit i of word w of plane b is bit b of code `32·w + i`, and 0 past the last code.
    """
    more = -codes.shape[-1] % WORD
    padded = jnp.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, more)])
    each = jnp.stack([(padded >> place) & 1 for place in range(bits)]).astype(jnp.uint32)
    each = each.reshape(*each.shape[:-1], -1, WORD) << jnp.arange(WORD, dtype=jnp.uint32)
    return jnp.sum(each, -1, dtype=jnp.uint32)


def bit_plane_product(
    a: UInt32[Array, "i m w"], b: UInt32[Array, "j n w"], *, signed: tuple[bool, bool] = (True, True)
) -> Int32[Array, "m n"]:
    """Return the product of integers from their planes: the sum of 2^(i + j) times the bits that planes i and j share.

    Exact for every pair of 1 to 8 bits while the result is below 2^31 (Ma et al. 2024, APMM, which sums signs in place
    of bits). The work grows with the product of both widths: for units that multiply bits.

    Args:
      a: from `planes`, of (m, k) codes.
      b: from `planes`, of (n, k) codes.
      signed: whether the codes of each are in two's complement.
    """
    shared = lax.population_count(a[:, None, :, None] & b[None, :, None]).astype(jnp.int32).sum(-1)
    left, right = (
        np.array([-(2**p) if is_signed and p == len(x) - 1 else 2**p for p in range(len(x))], np.int32)
        for x, is_signed in zip((a, b), signed, strict=True)
    )
    return jnp.einsum("ijmn,i,j->mn", shared, left, right, preferred_element_type=jnp.int32)
