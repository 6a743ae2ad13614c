"""Which attention weights are dropped: a counter-based generator, so that no mask is stored and every tile agrees.

The weight of a query and a key is kept if a hash of the head's seed and of the two tokens' places in the row is at
least `rate * 2**32`. The hash is the first word of Threefry-2x32 with 13 rounds, the fewest that pass BigCrush (Salmon
et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", table 2). It has no state, so a backward pass computes the
bits again, in tiles of any size and on any device.

It is about 75 operations on integers for each weight, which bound the TPU's kernels: `pallas_kernels/BOUNDS.md` has
their steps with dropout and without, for a v6e 19,629 bundles forward where there are 2,485 without.

On Hopper it is 43 instructions of a warp for 32 weights, rotations among them in one; most of them are on the unit of
integers, which takes two cycles for each and has four times the work of the tensor cores in the forward pass.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.arguments import as_int32
from pallas_kernels.errors import KernelError

__all__ = ["ROUNDS", "Drop", "dropped_from", "keeps", "threefry"]

ROUNDS = 13
_ROTATIONS = 13, 15, 26, 6, 17, 29, 16, 24
_PARITY = 0x1BD11BDA


class Drop(NamedTuple):
    """What decides which weights are dropped.

    Args:
      seeds: int32 (B, H, 2), the bits of two uint32 for each example and query head.
      q_places: int32 (B, S), the place of each query in its row.
      k_places: int32 (B, T), the place of each key in its row.
    """

    seeds: jax.Array
    q_places: jax.Array
    k_places: jax.Array


def threefry(key: tuple[Any, Any], x: Any, y: Any, *, rounds: int = ROUNDS) -> tuple[jax.Array, jax.Array]:
    """Return Threefry-2x32 of a key and a counter of two words each, all int32 and broadcast against each other.

    Words are int32, whose additions wrap around as those of uint32 and which every kernel's compiler has.

    Args:
      key: two words.
      x: the counter's first word.
      y: the counter's second word.
      rounds: 20 is JAX's generator.
    """
    keys = (*key, key[0] ^ key[1] ^ np.int32(_PARITY))
    x, y = x + keys[0], y + keys[1]
    for n in range(rounds):
        x = x + y
        by = _ROTATIONS[n % 8]
        y = (lax.shift_left(y, np.int32(by)) | lax.shift_right_logical(y, np.int32(32 - by))) ^ x
        if n % 4 == 3:
            turn = n // 4 + 1
            x, y = x + keys[turn % 3], y + (keys[(turn + 1) % 3] + np.int32(turn))
    return x, y


def keeps(rate: float, seeds: tuple[Any, Any], queries: Any, keys: Any) -> jax.Array:
    """Return whether weights are kept; every argument is int32 and broadcasts to the weights' shape.

    Args:
      rate: the probability that a weight is dropped.
      seeds: the two words of each head's seed.
      queries: places of the queries.
      keys: places of the keys.
    """
    bits, _ = threefry(seeds, queries, keys)
    # int32 compares as signed, so both sides are moved by 2**31
    return (bits ^ np.int32(-(2**31))) >= np.int32(min(round(rate * 2**32), 2**32 - 1) - 2**31)


def dropped_from(rate: Any, seeds: Any, places: Any, shape: tuple[int, int, int, int]) -> tuple[float, Drop | None]:
    """Check and convert `flash_attention`'s arguments.

    Args:
      rate: `dropout`.
      seeds: `dropout_seeds`.
      places: `dropout_places`.
      shape: examples, queries, query heads and keys.

    Returns:
      the rate, and the arrays, `None` for a rate of 0.

    Raises:
      KernelError: a rate outside of [0, 1), or seeds or places of another shape or type.
    """
    if isinstance(rate, bool) or not isinstance(rate, int | float | np.floating) or not 0 <= rate < 1:
        raise KernelError(f"flash_attention: dropout has to be a number of at least 0 and below 1, not {rate!r}")
    if rate == 0:
        return 0.0, None
    b, s, h, t = shape
    if seeds is None:
        raise KernelError(
            f"flash_attention: dropout={rate} needs dropout_seeds, uint32 of shape {(b, h, 2)}, new ones in every step"
        )
    seeds = jnp.asarray(seeds)
    if seeds.dtype != jnp.uint32 or seeds.shape != (b, h, 2):
        raise KernelError(
            f"flash_attention: dropout_seeds have to be uint32 of shape {(b, h, 2)} (batch, query heads, 2), not "
            f"{seeds.dtype.name} of shape {seeds.shape}"
        )
    if places is None:
        places = jnp.arange(s, dtype=jnp.int32)[None], jnp.arange(t, dtype=jnp.int32)[None]
    elif not isinstance(places, tuple):
        places = places, places
    elif len(places) != 2:
        raise KernelError(f"flash_attention: dropout_places are of queries and of keys, not {len(places)} arrays")
    q, k = (as_int32("flash_attention", "dropout_places", x) for x in places)
    for x, length, what in ((q, s, "queries"), (k, t, "keys")):
        if x.ndim != 2 or x.shape[0] not in (1, b) or x.shape[1] != length:
            raise KernelError(
                f"flash_attention: dropout_places of the {what} have to be of shape {(b, length)}, not {x.shape}"
            )
    whole = (jnp.broadcast_to(x, (b, x.shape[1])) for x in (q, k))
    return float(rate), Drop(lax.bitcast_convert_type(seeds, jnp.int32), *whole)
