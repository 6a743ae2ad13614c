"""Shared by the three TPU kernels: the walk over the visible tiles, and the scores of two tiles that meet.

A kernel stays at a tile of one side, its own (queries or keys), and visits the tiles of the other side of which it sees
something. Every visit is one step of the grid. The list of steps is made beforehand and prefetched into SMEM, where the
index maps read which tiles to copy. So an invisible tile is never copied, and where the list is known while tracing it
has no step. Where the list depends on data, the number of steps is that of the mask without data, and steps left over
at the end do nothing and copy nothing. A list too long for SMEM is walked in pieces of whole tiles: a scan calls the
kernel once for each, and every call writes its tiles into the same outputs.

A kernel says which side of its scores lies along rows. Numbers of a row of scores, one for every token of that side,
are a column with 128 equal lanes; those of a column are along the lanes of a row, as in memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.dispatch import Target
from pallas_kernels.flash_attention.dropout import Drop, keeps
from pallas_kernels.flash_attention.inputs import Score
from pallas_kernels.flash_attention.masks import Tokens, first_seen
from pallas_kernels.flash_attention.tpu_steps import ADD_ALL, ADD_SEEN, BEGIN, END, LANES, OF_KEYS, Cut, Side, steps

VMEM_LIMIT = 48 * 2**20
"""Bytes that Mosaic may use; the smallest VMEM among v5e, v5p, v6e and tpu7x has 64 MiB."""

Refs = Mapping[str, Any]
"""A kernel's references by name."""

Seen = Callable[[slice, slice], jax.Array]
"""Returns the boolean mask of some rows and columns of a tile's scores."""
ALL = slice(None)

Keeps = Callable[[slice, slice], jax.Array]
"""Returns which weights of some rows and columns of a tile dropout keeps."""

_ROWS = ("lse", "delta")


def column(row: jax.Array) -> jax.Array:
    """Return (1, n) as (n, 128), with equal lanes."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def lanes(x: jax.Array, n: int) -> jax.Array:
    """Return (rows, 128) with equal lanes as (rows, n)."""
    return x[:, :n] if n <= LANES else jnp.tile(x, (1, n // LANES))


def product(x: jax.Array, y: jax.Array, over: tuple[int, int]) -> jax.Array:
    """Return the product over an axis of each, float32: exact for float32, else of products in the arrays' dtype."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(
        x, y, (((over[0],), (over[1],)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )  # fmt: skip


def units(dtype: Any) -> tuple[float, Callable[[jax.Array], jax.Array]]:
    """Return the factor of a softmax's scores, and the function that turns them into weights.

    A TPU has `exp2`, and `exp` costs one more multiplication; but scores in units of log(2) are rounded once more,
    which shows in float32.
    """
    return (1.0, jnp.exp) if dtype == jnp.float32 else (math.log2(math.e), jnp.exp2)


def scores(x: jax.Array, y: jax.Array, score: Score, seen: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    """Return a tile's scores, -inf where invisible, and the derivative of the soft-cap, or `None`.

    A softmax's scores are in `units`.
    """
    unit = units(x.dtype)[0] if score.kind == "softmax" else 1.0
    result, slope = product(x, y, (1, 1)), None
    if score.softcap is None:
        result = result * (score.scale * unit)
    else:
        tanh = jnp.tanh(result * (score.scale / score.softcap))
        result, slope = (score.softcap * unit) * tanh, 1 - tanh * tanh
    if score.shift:
        result = result + score.shift * unit
    return (result if seen is None else jnp.where(seen, result, -jnp.inf)), slope


def _seen(cut: Cut, own: Side, rows: Side, refs: Refs, i: Any, j: Any) -> Seen:
    """Apply `masks.visible`'s rule to tile `i` of the own side and tile `j` of the other; a tile never cuts blocks."""
    first, second = (i, j) if rows == own else (j, i)
    tiles = (cut.q_tile, cut.k_tile) if rows == "queries" else (cut.k_tile, cut.q_tile)
    along = "k" if rows == "queries" else "q"

    def seen(*part: slice) -> jax.Array:
        ranges = [range(size)[of] for size, of in zip(tiles, part, strict=True)]
        shape = tuple(len(x) for x in ranges)

        def pair(name: str) -> tuple[jax.Array, jax.Array]:
            """Return numbers of the queries and of the keys."""
            x, y = lanes(refs[f"{name}_column"][part[0]], shape[1]), refs[f"{along}_{name}"][:, part[1]]
            return (x, y) if rows == "queries" else (y, x)

        index = [
            at * size + x.start + lax.broadcasted_iota(jnp.int32, shape, axis)
            for axis, (at, size, x) in enumerate(zip((first, second), tiles, ranges, strict=True))
        ]
        of_q, of_k = index if rows == "queries" else index[::-1]
        rules = []
        if cut.mask.causal or cut.mask.window is not None:
            q, k = pair("positions") if cut.positions else (of_q + (cut.t - cut.s), of_k)
            if cut.mask.causal:
                rules.append(q >= k)
            if cut.mask.window is not None:
                rules.append(first_seen(q, cut.mask.window) <= k)
                if not cut.mask.causal:
                    rules.append(first_seen(k, cut.mask.window) <= q)
        if cut.segments:
            rules.append(jnp.equal(*pair("segments")))
        if own == "queries" and cut.t % cut.k_tile:
            rules.append(of_k < cut.t)
        return functools.reduce(jnp.logical_and, rules)

    return seen


def _keeps(rate: float, rows: Side, refs: Refs) -> Keeps:
    """Apply `dropout.keeps`'s rule to a tile; a padded token has some place, and no weight."""
    of_rows, along = ("q", "k") if rows == "queries" else ("k", "q")

    def keep(first: slice, second: slice) -> jax.Array:
        y = refs[f"{along}_places"][:, second]
        x = lanes(refs["places_column"][first], y.shape[1])
        seeds = refs["seeds"][0:1, 0:1], refs["seeds"][1:2, 0:1]
        return keeps(rate, seeds, *((x, y) if of_rows == "q" else (y, x)))

    return keep


def walk(
    target: Target,
    cut: Cut,
    tokens: Tokens,
    drop: Drop | None,
    own: Side,
    arrays: Mapping[str, jax.Array],
    outs: Mapping[str, jax.ShapeDtypeStruct],
    scratch: Mapping[str, tuple[int, int]],
    *,
    begin: Callable[[Refs], None],
    add: Callable[[Refs, Seen | None, Keeps | None], None],
    end: Callable[[Refs], None],
    products: int,
    rows: Side,
    rate: float = 0.0,
) -> dict[str, jax.Array]:
    """Run a kernel along its list of steps.

    A kernel of queries runs for every query head. One of keys runs for every key head and visits a tile of queries once
    for each query head that reads it.

    Args:
      target: the device to compile for.
      cut: how arrays are cut into tiles.
      tokens: segments and positions.
      drop: what decides which weights are dropped, or `None`.
      own: the side at whose tiles it stays.
      arrays: inputs, by their names in `Refs`: "q", "k", "v", "lse", ...
      outs: outputs, by their names in `Refs`.
      scratch: a name -> a float32 shape.
      begin: runs at a tile's first step.
      add: runs for every visit, with the mask (rows, columns), or `None` for a fully visible tile; and with which
        weights are kept (rows, columns), or `None` for all.
      end: runs at a tile's last step: writes the outputs.
      products: matrix products of a step, for the estimate of its cost.
      rows: the side whose tokens are the rows of scores.
      rate: probability that a weight is dropped.
    """
    plan = steps(cut, tokens, own)
    groups = cut.h // cut.kv
    heads, inner = (cut.h, 1) if own == "queries" else (cut.kv, groups)
    of_tokens = cut.tokens(tokens, drop)
    token_kinds = [n for n in ("segments", "positions", "places") if f"q_{n}" in of_tokens]
    row_tile = cut.q_tile if rows == "queries" else cut.k_tile

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
            else:  # a step without work copies nothing new
                head = h * groups + (g if groups == 1 else jnp.where(todo_ref[n] == 0, groups - 1, g))
            if name == "seeds":
                return b, head, 0, 0
            return (b, head, 0, at) if name in _ROWS else (b, head, at, 0)

        if name in of_tokens:
            return pl.BlockSpec((None, 1, tile), place)
        if name == "seeds":
            return pl.BlockSpec((None, None, *x.shape[2:]), place)
        return pl.BlockSpec((None, None, 1, tile) if name in _ROWS else (None, None, tile, x.shape[3]), place)

    operands = {**arrays, **of_tokens}
    if drop is not None:
        operands["seeds"] = jnp.broadcast_to(drop.seeds[..., None], (*drop.seeds.shape, LANES))
    shapes = {**scratch, **{f"{n}_column": (row_tile, LANES) for n in token_kinds}}
    # outputs of the pieces before, which this piece's outputs share their memory with; never read
    before = {f"before_{n}": x for n, x in outs.items()} if len(plan.own) > 1 else {}
    names = (*operands, *before, *outs, *shapes)

    def kernel(own_ref: Any, other_ref: Any, todo_ref: Any, *references: Any) -> None:
        refs = dict(zip(names, references, strict=True))
        b, n, g = pl.program_id(0), pl.program_id(2), pl.program_id(3)
        n = b * plan.length + n if plan.each else n
        i, j, todo = own_ref[n], other_ref[n], todo_ref[n]

        keep = None if drop is None else _keeps(rate, rows, refs)

        def columns(kinds: list[str] = token_kinds) -> None:
            for name in kinds:
                refs[f"{name}_column"][...] = column(refs[f"{rows[0]}_{name}"][...])

        @pl.when((todo & BEGIN != 0) & (g == 0))
        def _() -> None:
            if rows == own:
                columns()
            begin(refs)

        if plan.may(ADD_ALL):

            @pl.when(todo & ADD_ALL != 0)
            def _full() -> None:
                if rows != own and keep is not None:
                    columns(["places"])
                add(refs, None, keep)

        if plan.may(ADD_SEEN):

            @pl.when(todo & ADD_SEEN != 0)
            def _partial() -> None:
                if rows != own:
                    columns()
                add(refs, _seen(cut, own, rows, refs, i, j), keep)

        @pl.when((todo & END != 0) & (g == inner - 1))
        def _() -> None:
            end(refs)

    pairs = cut.b * cut.h * plan.length * cut.q_tile * cut.k_tile
    wide: list[Any] = [x for named in (arrays, outs) for n, x in named.items() if n not in _ROWS]

    def call(own: Any, other: Any, todo: Any, steps: Any, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        return pl.pallas_call(
            kernel,
            out_shape=tuple(outs.values()),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=3,
                grid=(cut.b, heads, steps, inner),
                in_specs=[
                    *(spec(n, x) for n, x in operands.items()),
                    *[pl.BlockSpec(memory_space=pl.ANY)] * len(before),
                ],
                out_specs=tuple(spec(n, x) for n, x in outs.items()),
                scratch_shapes=[
                    pltpu.VMEM(shape, jnp.float32 if name in scratch else jnp.int32) for name, shape in shapes.items()
                ],
            ),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
            ),
            cost_estimate=pl.CostEstimate(
                flops=2 * products * pairs * max(x.shape[3] for x in wide),
                transcendentals=pairs,
                bytes_accessed=sum(math.prod(x.shape) * x.dtype.itemsize for x in wide) // len(plan.own),
            ),
            input_output_aliases={3 + len(operands) + i: i for i in range(len(before))},
            interpret=target.tpu(),
        )(own, other, todo, *arrays)

    if not before:
        first, second, third = (jnp.asarray(x[0]) for x in plan[:3])
        return dict(zip(outs, call(first, second, third, plan.length, *operands.values()), strict=True))
    start = tuple(jnp.zeros(x.shape, x.dtype) for x in outs.values())

    def walk_piece(made: tuple[jax.Array, ...], piece: tuple[jax.Array, ...]) -> tuple[tuple[jax.Array, ...], None]:
        return call(*piece, *operands.values(), *made), None

    results, _ = lax.scan(walk_piece, start, tuple(jnp.asarray(x) for x in plan[:4]))
    return dict(zip(outs, results, strict=True))
