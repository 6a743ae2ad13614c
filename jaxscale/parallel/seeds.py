"""Random numbers of products: a seed for each product of each step, from the random key of the pass."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32


@dataclasses.dataclass
class _Layer:
    """A layer that is being traced: its key, the rows of its batch, its number, and that of its next product."""

    key: Array
    rows: Int[Array, " b"] | None
    number: int
    count: Iterator[int] = dataclasses.field(default_factory=itertools.count)


HEAD = 2
"""`random_products`' number of the output head; a block's mixer has 0 and its feed-forward layer 1."""
_PRODUCTS = 0x70726F64
_LAYER: contextvars.ContextVar[_Layer | None] = contextvars.ContextVar("layer", default=None)


@contextlib.contextmanager
def random_products(key: Array | None, rows: Int[Array, " b"] | None = None, number: int = 0) -> Iterator[None]:
    """Give each product that is traced within a seed of its own; without a key their seeds are the same in every step.

    The seed is an argument of the products, so that nothing traced within is read later.

    Args:
      key: random key of the layer and step, or `None`.
      rows: number of each row in the step's batch; `None` is all, in order.
      number: tells layers with one key apart.
    """
    token = _LAYER.set(None if key is None else _Layer(key, rows, number))
    try:
        yield
    finally:
        _LAYER.reset(token)


def next_seed() -> UInt32[Array, ""] | None:
    """Return the seed of a product; `None` outside of `random_products`."""
    layer = _LAYER.get()
    if layer is None:
        return None
    key = jax.random.fold_in(layer.key, _PRODUCTS + layer.number)  # another key than dropout's
    return jax.random.bits(jax.random.fold_in(key, next(layer.count)), (), jnp.uint32)


def seed_of_rows(x: Array) -> UInt32[Array, "..."] | None:
    """Return the seed of a product of an activation, one for each row of its batch; `None` outside `random_products`.

    With these the random number of an element depends on its row's number in the step's batch, so that it is the same
    for every layout and every division into micro-batches.

    Args:
      x: the activation, whose first dimension is the batch.
    """
    layer, seed = _LAYER.get(), next_seed()
    if layer is None or seed is None or x.ndim < 3:
        return seed
    rows = jnp.arange(x.shape[0]) if layer.rows is None else layer.rows
    return mixed(seed ^ rows.astype(jnp.uint32)) if len(rows) == x.shape[0] else seed


def mixed(bits: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Return a hash of each number.

    Args:
      bits: uint32.
    """
    bits = bits * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 15)) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 13)


def uniform(shape: tuple[int, ...], seed: UInt32[Array, "..."] | None) -> Float[Array, "..."]:
    """Return numbers from 0 to 1, a hash of the seed and of each place.

    Args:
      shape: the shape of the array.
      seed: one seed, or one for each index of the first dimension, which then counts in place of the index.
    """
    by_row = seed is not None and seed.ndim == 1
    bits = jnp.full(shape, 0x9E3779B9, jnp.uint32)
    if seed is not None:
        bits = mixed(bits ^ (seed.reshape(-1, *(1,) * (len(shape) - 1)) if by_row else seed))
    for d in range(1 if by_row else 0, len(shape)):
        bits = mixed(bits ^ jax.lax.broadcasted_iota(jnp.uint32, shape, d))
    return (bits >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)
