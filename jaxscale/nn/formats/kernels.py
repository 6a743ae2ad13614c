"""Products with stored weights by kernels, which unpack a tile of the weight in registers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxscale.layout import constrain, current
from jaxscale.nn.formats.blocks import spread
from jaxscale.nn.formats.numbers import numbers_of
from jaxscale.nn.formats.packing import unit
from jaxscale.parallel.sharded import cut_over, free_and_manual, sharded_op
from pallas_kernels.dispatch import device, hopper
from pallas_kernels.stored_matmul import Codebook, Packed, stored_matmul

if TYPE_CHECKING:
    from jaxscale.nn.formats.weight import StoredWeight

Names = tuple[str | None, ...]

MOST_ROWS = 256
"""Rows of activations on a device up to which a kernel multiplies: with more, unpacking the weight once is cheaper."""
MOST_ROWS_HOPPER = 128
"""The same on Hopper GPUs, where 1, 16 and 128 rows took 0.42, 0.47 and 0.73 of XLA's time (int4, one H200)."""
MOST_EXPERT_ROWS = 4096
"""Rows of all experts of a device up to which experts are unpacked one at a time, where no kernel unpacks tiles."""


def kernel_product(
    x: Float[Array, "..."],
    weight: StoredWeight,
    axes: tuple[str, ...],
    names: Sequence[Names],
    summed: tuple[int, ...],
    dtype: DTypeLike,
    out_dtype: DTypeLike,
    implementation: str | None = None,
) -> Float[Array, "..."] | None:
    """Return `x · kernel` by a kernel, each device with its shards, or `None` where there is none.

    Args:
      x: activations, whose last dimensions are summed over.
      weight: the kernel.
      axes: logical axis per dimension of the kernel.
      names: the same of each array of the weight.
      summed: dimensions of the kernel that are summed over, all leading or all trailing.
      dtype: of the operands.
      out_dtype: of the product.
      implementation: see `pallas_kernels.stored_matmul.stored_matmul`.
    """
    most = MOST_ROWS if implementation or device().platform == "tpu" else MOST_ROWS_HOPPER
    if most == MOST_ROWS_HOPPER and (device().platform != "cuda" or hopper(device())):
        return None
    tokens = x.ndim - len(summed)
    rest = tuple(axes[d] for d in range(len(axes)) if d not in summed)
    free, _ = free_and_manual()
    shared = current() is not None and bool(free)
    if shared and tokens != 2:  # the names of other activations are not known
        return None
    of_tokens = ("batch", "seq") if tokens == 2 else (None,) * tokens
    if _local_rows(x.shape[:tokens], of_tokens) > most or not _matrix(weight, summed):
        return None
    leaves, tree = jax.tree.flatten(weight)
    if shared and not all(_divides(weight, a, n) for a, n in zip(leaves, names, strict=True)):
        return None
    leaves = [constrain(constrain(a, *n, kind="params"), *n) for a, n in zip(leaves, names, strict=True)]
    over = tuple(dict.fromkeys(m for d in summed for m in cut_over(axes[d]))) if shared else ()

    def local(x: Array, *leaves: Array) -> Array:
        here = jax.tree.unflatten(tree, leaves)
        matrix, first = as_packed(here, summed), summed[0] == 0
        flat = x.astype(dtype).reshape(math.prod(x.shape[:tokens]), -1)
        y = stored_matmul(
            flat,
            matrix,
            transposed=not first,
            out_dtype=jnp.float32 if over else out_dtype,
            implementation=implementation,
        )
        outputs = [n for d, n in enumerate(here.shape) if d not in summed]
        y = y.reshape(*x.shape[:tokens], *outputs)
        return lax.psum(y, over).astype(out_dtype) if over else y

    into = (*of_tokens, *(axes[d] for d in summed))
    return sharded_op(local, x, *leaves, axes=(into, *names), out_axes=(*of_tokens, *rest), name="a stored weight")


def grouped_here(weight: StoredWeight, names: Sequence[Names], rows: int) -> bool:
    """Return whether a grouped product multiplies with experts' stored matrices.

    Args:
      weight: the matrices (experts, inputs, outputs).
      names: logical axis per dimension of each of its arrays.
      rows: tokens of all experts of one device, about.
    """
    if len(weight.shape) != 3 or weight.activations is not None or weight.divided or weight.axis == -1:
        return False
    if device().platform != "tpu" and rows > MOST_EXPERT_ROWS:
        return False
    leaves = jax.tree.leaves(weight)
    alike = all(a.ndim >= 3 and a.shape[0] in (1, weight.shape[0]) for a in leaves)
    one = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), weight)
    shared = current() is not None and bool(free_and_manual()[0])
    return (
        alike
        and _matrix(one, (0,))
        and (not shared or all(_divides(weight, a, n) for a, n in zip(leaves, names, strict=True)))
    )


def experts_as_packed(weight: StoredWeight) -> Packed:
    """Return experts' matrices as those of `grouped_stored_matmul`.

    Args:
      weight: the matrices (experts, inputs, outputs).
    """
    every = jax.tree.map(lambda a: jnp.broadcast_to(a, (weight.shape[0], *a.shape[1:])), weight)
    return jax.vmap(lambda one: as_packed(one, (0,)))(every)


def _local_rows(shape: Sequence[int], names: Sequence[str | None]) -> int:
    """Return rows of activations on a device."""
    return math.prod(shape) // math.prod(_devices(n) for n in names)


def _devices(name: str | None) -> int:
    """Return how many devices shard a dimension of this name here."""
    layout = current()
    if layout is None or name is None:
        return 1
    return math.prod(layout.sizes[m] for m in cut_over(name))


def _divides(weight: StoredWeight, a: Array, names: Sequence[str | None]) -> bool:
    """Return whether devices get whole units of words, and whole blocks."""
    width = 8 * weight.codes.dtype.itemsize
    for d, (size, name) in enumerate(zip(a.shape, names, strict=True)):
        words = unit(numbers_of(weight.numbers).bits, width)[1]
        piece = words if a is weight.codes and d == weight.axis % a.ndim else 1
        if size % (piece * _devices(name)):
            return False
    return True


def _matrix(weight: StoredWeight, summed: Sequence[int]) -> bool:
    """Return whether the kernel is a matrix whose rows are packed, and its numbers have a kernel."""
    rank, rows = len(weight.shape), _rows(len(weight.shape), summed)
    if any(weight.shape[d] > 1 for d in range(weight.axis % rank + 1, rows)) or weight.axis % rank >= rows:
        return False
    kind = numbers_of(weight.numbers)
    if weight.table is not None and (kind.bits > 4 or weight.table.size != 2**kind.bits):
        return False
    parts = (weight.scale, weight.zero, weight.offset)
    return (weight.table is not None or kind.computed is not None) and all(
        p is None or _uniform(p.shape[:rows], weight.shape[:rows]) for p in parts
    )


def _rows(rank: int, summed: Sequence[int]) -> int:
    """Return how many leading dimensions are the matrix' rows: those summed over, or in a transpose the others."""
    return len(summed) if summed[0] == 0 else rank - len(summed)


def _uniform(part: Sequence[int], whole: Sequence[int]) -> bool:
    """Return whether blocks of some dimensions are equal stretches of the flattened ones."""
    inside = False
    for m, n in zip(part, whole, strict=True):
        if inside and m > 1:
            return False
        inside = inside or m < n
    return True


def as_packed(weight: StoredWeight, summed: Sequence[int]) -> Packed:
    """Return a kernel as the matrix of a product by a kernel.

    Args:
      weight: the kernel.
      summed: dimensions that are summed over.
    """
    shape, rows = weight.shape, _rows(len(weight.shape), summed)
    columns = math.prod(shape[rows:])
    kind = numbers_of(weight.numbers)

    def flat(a: Array) -> Array:
        wide = (*a.shape[:rows], *(shape[rows:] if max(a.shape[rows:]) > 1 else a.shape[rows:]))
        a = jnp.broadcast_to(spread(a, wide), wide)
        return a.reshape(math.prod(a.shape[:rows]), -1)

    scale, factor = weight.scale, None
    more: dict[str, Any] = {}
    if scale is not None and not isinstance(scale, jax.Array):
        one = scale.scale
        alone = scale.zero is None and scale.offset is None and scale.table is None
        single = one is None or (isinstance(one, jax.Array) and one.size == 1)
        decoded = numbers_of(scale.numbers)
        if alone and single and decoded.bits == 8 and decoded.computed is not None:
            more = {"scale_numbers": decoded.computed}
            factor = one.astype(jnp.float32).reshape(1, 1) if isinstance(one, jax.Array) else None
            factor = 1.0 / factor if scale.divided and factor is not None else factor
            scale = scale.unpacked()
        else:
            scale = scale.dense()
    zero = weight.zero
    if zero is not None and not isinstance(zero, jax.Array):
        plain = zero.numbers == "uint8" and all(p is None for p in (zero.scale, zero.zero, zero.offset, zero.table))
        zero = zero.unpacked() if plain else zero.dense()
    offset = weight.offset
    if offset is not None and not isinstance(offset, jax.Array):
        offset = offset.dense()
    numbers = kind.computed if weight.table is None else Codebook(kind.bits)
    assert numbers is not None
    return Packed(
        weight.codes.reshape(-1, columns),
        None if scale is None else flat(scale),
        None if zero is None else flat(zero),
        None if offset is None else flat(offset),
        factor,
        None if weight.table is None else weight.table.reshape(-1),
        numbers=numbers,
        **more,
    )
