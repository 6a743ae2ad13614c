"""What the three TPU kernels share: the walk over the tiles that are seen, and the scores of two tiles that meet.

A kernel stays at a tile of one side, its own (queries or keys), and meets those tiles of the other side of which it
sees something. Every meeting is one step of the grid; the steps are listed beforehand, and the list is prefetched into
SMEM, where the index maps read which tiles to bring. A tile that nobody sees is thus never brought, and where the list
is known while tracing it is no step either. Where it depends on data, there are as many steps as the part of the mask
that does not depend on it leaves, and those left over at the end do nothing and bring nothing.

Scores are (own, other). What belongs to a row of them, a number for every token of the own side, is a column of 128
equal lanes, made once for each tile; what belongs to a column lies along the lanes of a row as it comes from memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.dispatch import Target
from pallas_kernels.flash_attention.inputs import Score
from pallas_kernels.flash_attention.masks import Tokens, first_seen
from pallas_kernels.flash_attention.tpu_steps import ADD_ALL, ADD_SEEN, BEGIN, END, LANES, OF_KEYS, Cut, Side, steps

VMEM_LIMIT = 48 * 2**20
"""Bytes that Mosaic may use; the smallest VMEM among v5e, v5p, v6e and tpu7x has 64 MiB."""

Refs = Mapping[str, Any]
"""A kernel's references by name."""

_ROWS = ("lse", "delta")


def column(row: jax.Array) -> jax.Array:
    """(1, n) as (n, 128), every lane the same."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def lanes(x: jax.Array, n: int) -> jax.Array:
    """(rows, 128) of equal lanes as (rows, n)."""
    return x[:, :n] if n <= LANES else jnp.tile(x, (1, n // LANES))


def product(x: jax.Array, y: jax.Array, over: tuple[int, int]) -> jax.Array:
    """Over an axis of each, float32: exact for float32, else products of the arrays' dtype."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(
        x, y, (((over[0],), (over[1],)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )  # fmt: skip


def units(dtype: Any) -> tuple[float, Callable[[jax.Array], jax.Array]]:
    """What a softmax's scores are multiplied by, and the function that makes weights of them.

    A TPU has `exp2`, and `exp` multiplies once more; but scores in units of log(2) round once more, as float32 shows.
    """
    return (1.0, jnp.exp) if dtype == jnp.float32 else (math.log2(math.e), jnp.exp2)


def scores(x: jax.Array, y: jax.Array, score: Score, seen: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    """A tile's scores, -inf where unseen, and what a soft-cap multiplies their gradient by, or `None`.

    Those of a softmax are in `units`.
    """
    unit = units(x.dtype)[0] if score.kind == "softmax" else 1.0
    found, slope = product(x, y, (1, 1)), None
    if score.softcap is None:
        found = found * (score.scale * unit)
    else:
        tanh = jnp.tanh(found * (score.scale / score.softcap))
        found, slope = (score.softcap * unit) * tanh, 1 - tanh * tanh
    if score.shift:
        found = found + score.shift * unit
    return (found if seen is None else jnp.where(seen, found, -jnp.inf)), slope


def _seen(cut: Cut, own: Side, refs: Refs, i: Any, j: Any) -> jax.Array | None:
    """`masks.visible`'s rule for tiles `i` of the own side and `j` of the other; blocks are never cut by a tile."""
    shape = (cut.q_tile, cut.k_tile) if own == "queries" else (cut.k_tile, cut.q_tile)
    mine, other = ("q", "k") if own == "queries" else ("k", "q")
    index = [
        at * size + lax.broadcasted_iota(jnp.int32, shape, axis)
        for axis, (at, size) in enumerate(zip((i, j), shape, strict=True))
    ]
    rules = []
    if cut.mask.causal or cut.mask.window is not None:
        if cut.positions:
            first, second = lanes(refs["own_positions"][...], shape[1]), refs[f"{other}_positions"][...]
        else:
            first, second = index
        q, k = (first, second) if own == "queries" else (second, first)
        if not cut.positions:
            q = q + (cut.t - cut.s)
        if cut.mask.causal:
            rules.append(q >= k)
        if cut.mask.window is not None:
            rules.append(first_seen(q, cut.mask.window) <= k)
            if not cut.mask.causal:
                rules.append(first_seen(k, cut.mask.window) <= q)
    if cut.segments:
        rules.append(lanes(refs["own_segments"][...], shape[1]) == refs[f"{other}_segments"][...])
    if own == "queries" and cut.t % cut.k_tile:
        rules.append(index[1] < cut.t)
    seen = None
    for rule in rules:
        seen = rule if seen is None else seen & rule
    return seen


def walk(
    target: Target,
    cut: Cut,
    tokens: Tokens,
    own: Side,
    arrays: Mapping[str, jax.Array],
    outs: Mapping[str, jax.ShapeDtypeStruct],
    scratch: Mapping[str, tuple[int, int]],
    *,
    begin: Callable[[Refs], None],
    add: Callable[[Refs, jax.Array | None], None],
    end: Callable[[Refs], None],
    products: int,
) -> dict[str, jax.Array]:
    """Runs a kernel.

    A kernel of queries is run for every query head. One of keys is run for every key head and meets a tile of queries
    once for each query head that reads it.

    Args:
      target: what for.
      cut, tokens: the tiles, and what the mask asks of data.
      own: the side at whose tiles it stays.
      arrays, outs: by the names that `Refs` has them under: "q", "k", "v", "lse", ...
      scratch: a name -> a float32 shape.
      begin: done at a tile's first step.
      add: done for every tile met, with what is seen in it, boolean (own, other), or `None` for everything.
      end: done at a tile's last step: writes the outputs.
      products: matrix products of a step, for the estimate of its cost.
    """
    plan = steps(cut, tokens, own)
    groups = cut.h // cut.kv
    heads, inner = (cut.h, 1) if own == "queries" else (cut.kv, groups)
    of_tokens = cut.tokens(tokens)
    kept = [n for n in ("segments", "positions") if f"q_{n}" in of_tokens]
    own_tile = cut.q_tile if own == "queries" else cut.k_tile

    def spec(name: str, x: Any) -> pl.BlockSpec:
        of_keys = name in OF_KEYS
        tile = cut.k_tile if of_keys else cut.q_tile

        def place(b: Any, h: Any, n: Any, g: Any, own_ref: Any, other_ref: Any, todo_ref: Any) -> tuple[Any, ...]:
            n = b * plan.length + n if plan.each else n
            at = (own_ref if of_keys == (own == "keys") else other_ref)[n]
            if name in of_tokens:
                return b, 0, at
            if of_keys:
                head = h // groups if own == "queries" else h
            elif own == "queries":
                head = h
            else:  # a step without anything to do brings nothing new
                head = h * groups + (g if groups == 1 else jnp.where(todo_ref[n] == 0, groups - 1, g))
            return (b, head, 0, at) if name in _ROWS else (b, head, at, 0)

        if name in of_tokens:
            return pl.BlockSpec((None, 1, tile), place)
        return pl.BlockSpec((None, None, 1, tile) if name in _ROWS else (None, None, tile, x.shape[3]), place)

    given = {**arrays, **of_tokens}
    shapes = {**scratch, **{f"own_{n}": (own_tile, LANES) for n in kept}}
    names = (*given, *outs, *shapes)

    def kernel(own_ref: Any, other_ref: Any, todo_ref: Any, *references: Any) -> None:
        refs = dict(zip(names, references, strict=True))
        b, n, g = pl.program_id(0), pl.program_id(2), pl.program_id(3)
        n = b * plan.length + n if plan.each else n
        i, j, todo = own_ref[n], other_ref[n], todo_ref[n]

        @pl.when((todo & BEGIN != 0) & (g == 0))
        def _() -> None:
            for name in kept:
                mine = "q" if own == "queries" else "k"
                refs[f"own_{name}"][...] = column(refs[f"{mine}_{name}"][...])
            begin(refs)

        if plan.may(ADD_ALL):

            @pl.when(todo & ADD_ALL != 0)
            def _full() -> None:
                add(refs, None)

        if plan.may(ADD_SEEN):

            @pl.when(todo & ADD_SEEN != 0)
            def _partial() -> None:
                add(refs, _seen(cut, own, refs, i, j))

        @pl.when((todo & END != 0) & (g == inner - 1))
        def _() -> None:
            end(refs)

    pairs = cut.b * cut.h * plan.length * cut.q_tile * cut.k_tile
    wide: list[Any] = [x for named in (arrays, outs) for n, x in named.items() if n not in _ROWS]
    results = pl.pallas_call(
        kernel,
        out_shape=tuple(outs.values()),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(cut.b, heads, plan.length, inner),
            in_specs=[spec(n, x) for n, x in given.items()],
            out_specs=tuple(spec(n, x) for n, x in outs.items()),
            scratch_shapes=[
                pltpu.VMEM(shape, jnp.int32 if name.startswith("own_") else jnp.float32)
                for name, shape in shapes.items()
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * products * pairs * max(x.shape[3] for x in wide),
            transcendentals=pairs,
            bytes_accessed=sum(math.prod(x.shape) * x.dtype.itemsize for x in wide),
        ),
        interpret=target.tpu(),
    )(*(jnp.asarray(x) for x in plan[:3]), *given.values())
    return dict(zip(outs, results, strict=True))
