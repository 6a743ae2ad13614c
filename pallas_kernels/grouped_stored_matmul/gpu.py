"""The grouped product with stored matrices on Hopper: some groups' matrices unpacked by XLA, then `grouped_matmul`'s.

A loop goes over chunks of groups. A step unpacks the matrices of a chunk into one buffer and multiplies the rows of
these groups with `grouped_matmul`'s kernel, which writes them into the output in place: no step reads, copies or writes
rows of other groups. The number of steps is known while tracing, so the host does not wait for a step's end.

Groups without rows come last, and a chunk takes as many groups as rows could reach: with fewer rows than groups (tokens
of generation) most matrices are never unpacked.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap
from jax.experimental import pallas as pl

from pallas_kernels import withdrawn
from pallas_kernels.dispatch import Target
from pallas_kernels.grouped_matmul import gpu as dense_kernel
from pallas_kernels.grouped_matmul.inputs import Facts as Dense
from pallas_kernels.grouped_stored_matmul import examples
from pallas_kernels.grouped_stored_matmul.inputs import Facts
from pallas_kernels.stored_matmul.inputs import Packed
from pallas_kernels.stored_matmul.numbers import Powers
from pallas_kernels.stored_matmul.reference import dense

__all__ = ["MOST", "chunks_of", "configurations", "run", "supported"]

MOST = 144 * 2**20
"""Bytes of dense matrices of a chunk; a larger matrix is a chunk by itself.

A step's unpacking writes as many and its product reads them: 63 us at the 4.8 TB/s of an H200's data sheet, beside
which the launches of a step, about five of 3 us, count little. A chunk that stays in the L2 cache, 24 MB of its 50 with
what else passes through, would save most of both, but has one matrix of GPT-OSS-20B or seven of Qwen3-30B-A3B: 15 or 21
tiles for 132 multiprocessors, of which this many bytes give them 120 and 129.
"""


def supported(target: Target, *, facts: Facts) -> str | None:
    """Return why chunks cannot serve a case, or `None`."""
    product = _product_of(facts, facts.groups)
    why = dense_kernel.supported(target, facts=product)
    if why is None and not (target.interpret or withdrawn.is_allowed()):
        why = withdrawn.why("grouped_matmul", "mosaic_gpu", target.kind, {"facts": product})
    if why is None and chunks_of(facts)[1] == 1:
        columns = dense_kernel.tile_of(target, product)[0]
        tiles = -(-facts.each.m // (min(facts.groups, facts.each.m) * dense_kernel.TILE)) * -(-product.n // columns)
        if 2 * tiles < target.cores:
            return (
                f"a chunk is one matrix, whose {tiles} tiles leave most of {target.cores} multiprocessors idle; XLA's "
                "loop over groups moves the same bytes"
            )
    return why


def chunks_of(facts: Facts) -> tuple[int, int]:
    """Return how many chunks there are, and the groups of each.

    Args:
      facts: of the product.
    """
    each, groups = facts.each, min(facts.groups, facts.each.m)  # no more than that have rows
    most = max(1, MOST // (each.k * each.n * jnp.dtype(each.dtype).itemsize))
    chunks = -(-groups // most)
    return chunks, -(-groups // chunks)


def _product_of(facts: Facts, groups: int) -> Dense:
    each = facts.each
    k, n = (each.n, each.k) if each.transposed else (each.k, each.n)
    return Dense("matmul", groups, each.m, k, n, each.dtype, each.dtype, each.out, each.transposed)


def run(target: Target, rows: jax.Array, weight: Packed, sizes: jax.Array, *, facts: Facts) -> jax.Array:
    """See `dispatch.Implementation`."""
    # what writes in place has no rule for `vmap`
    each: Any = sequential_vmap(functools.partial(_run, target, facts))
    return each(rows, weight, sizes)


def _run(target: Target, facts: Facts, rows: jax.Array, weight: Packed, sizes: jax.Array) -> jax.Array:
    m, (chunks, groups) = facts.each.m, chunks_of(facts)
    product = _product_of(facts, groups)
    rows = jnp.pad(rows, ((0, dense_kernel.short(m)), (0, 0)))
    ends = jnp.minimum(jnp.cumsum(sizes, dtype=jnp.int32), m)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])

    # those with rows in their order; after them, lines past all groups, which have no rows
    with_rows = jnp.cumsum(ends > starts, dtype=jnp.int32)
    place = jnp.arange(chunks * groups, dtype=jnp.int32)
    order = jnp.sum(with_rows <= place[:, None], 1, dtype=jnp.int32).reshape(chunks, groups)
    starts, ends = (jnp.append(edge, m)[order] for edge in (starts, ends))
    tables = jax.vmap(lambda start, end: dense_kernel.tiles_between(start, end, len(rows)))(starts, ends)
    own = jnp.minimum(order, facts.groups - 1)

    def walk(out: Any) -> None:
        def step(carry: None, chunk: tuple[jax.Array, jax.Array]) -> tuple[None, None]:
            own, table = chunk
            stored = _exponents(jax.tree.map(lambda a: a.at[own].get(mode="promise_in_bounds"), weight))
            matrices = jax.vmap(lambda one: dense(one).astype(rows.dtype))(stored)
            dense_kernel.multiply_into(target, out, table, rows, matrices, product)
            return carry, None

        lax.scan(step, None, (own, tables))

    return pl.run_state(walk)(jnp.zeros((len(rows), product.n), product.out))[:m]


def _exponents(weight: Packed) -> Packed:
    """Return the weight with powers of two as bfloat16, which holds them exactly.

    Decoded in the same loop as the codes of mxfp4, XLA for GPUs first copies all codes of a chunk; so it reads them
    where it unpacks them.
    """
    if weight.scale is None or weight.scale.dtype != jnp.uint8 or weight.scale_numbers != Powers():
        return weight
    scale = weight.scale_numbers.decode(weight.scale.astype(jnp.int32)).astype(jnp.bfloat16)
    return dataclasses.replace(weight, scale=lax.optimization_barrier(scale))


def configurations(op: Any) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Yield (name, function, shapes) of what ships, for the gate."""
    for name, fn, shapes in examples.cases(run):
        if shapes[0].dtype != "float32":  # which the kernel leaves to XLA
            yield name, fn, shapes
