"""Attention to a cache on TPUs: each grid step takes one tile of a row's keys, of all heads.

Keys stay in their layout, (keys, key heads, width), and count as keys * heads keys of one head: a query meets the keys
of all heads, and those of other heads are masked like keys that it does not see. A TPU's matrix unit takes 128 queries
for the price of one, and nothing is transposed. The list of tiles is made beforehand (`split`) and prefetched with the
pages' tables, so that each page is copied from its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.decode_attention import examples
from pallas_kernels.decode_attention.inputs import Inputs, Settings
from pallas_kernels.decode_attention.split import Tiles, bounds, cost, merged, shares
from pallas_kernels.dispatch import NO_FLOAT16, Target
from pallas_kernels.flash_attention.tpu_steps import LANES
from pallas_kernels.flash_attention.tpu_walk import VMEM_LIMIT, product, units
from pallas_kernels.tiles import lookup

_OPERANDS = 16
"""Most pages of a tile; each page is an operand of its own."""
_SMEM = 2**19
"""Most bytes of tables and lists in scalar memory."""


def supported(
    target: Target,
    *,
    settings: Settings,
    q: tuple[int, ...],
    k: tuple[int, ...],
    v: tuple[int, ...] | None,
    entries: int,
    dtype: str,
) -> str | None:
    """Return why the kernel cannot serve a case, or `None`."""
    if settings.maximum is not None:
        return "the option maximum is left to XLA"
    if settings.codes:
        return "keys and values of 8 bits are left to XLA"
    if dtype == "float16":
        return NO_FLOAT16
    rows = q[1] * q[2]
    if k[2] == 1:
        return "a single key head has another memory layout on a TPU, and would have to be copied for a kernel"
    if rows > 256:
        return f"{q[1]} queries of {q[2]} heads are {rows} rows, and a kernel takes at most 256; more are left to XLA"
    needed = 4 * q[0] * (entries + _tiles(target, settings, k, entries, dtype).count)
    if needed > _SMEM:
        return (
            f"the tables of {q[0]} rows and the list of their tiles take {needed} bytes of scalar memory, over {_SMEM}"
        )
    return None


def lanes(x: jax.Array, n: int) -> jax.Array:
    """Return (rows, 128) with equal lanes as (rows, n)."""
    return jnp.broadcast_to(x[:, :1], (x.shape[0], n))


def _tiles(target: Target, settings: Settings, k: tuple[int, ...], entries: int, dtype: str) -> Tiles:
    columns = lookup("decode_attention", target.kind or "TPU", dtype=dtype, width=k[3])["columns"]
    keys = max(8, columns // k[2])
    return Tiles(k[1], entries, settings.stride, min(keys, k[1] * _OPERANDS))


def run(target: Target, inputs: Inputs, *, settings: Settings, **_: Any) -> tuple[jax.Array, jax.Array]:
    """Return the output and the log-sum-exp."""
    q, k, v, positions, tables, first = inputs[:6]
    (b, n, h, d), kv, dv, entries = q.shape, k.shape[2], settings.value_dim, tables.shape[1]
    tiles = _tiles(target, settings, k.shape, entries, q.dtype.name)
    workers = lookup("decode_attention", target.kind or "TPU", dtype=q.dtype.name, width=d)["workers"]
    assigned = shares(tiles, inputs, settings, workers=workers, heads=1)
    low, last = bounds(inputs, settings)
    columns, packed = tiles.piece * kv, 8 * 4 // q.dtype.itemsize
    rows = n * h
    padded = -(-rows // packed) * packed

    def fill(x: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, padded - rows), *[(0, 0)] * (x.ndim - 2)), constant_values=-1)

    at = jnp.broadcast_to(fill(jnp.repeat(positions, h, axis=1))[..., None], (b, padded, LANES))
    unit, exp = units(q.dtype)
    score = settings.score
    # the row of each step
    listed = jnp.arange(b * tiles.count, dtype=jnp.int32)
    of_row = jnp.minimum(jnp.sum(assigned.offset[1:] <= listed[:, None], 1, dtype=jnp.int32), b - 1)
    scalars = (
        tables.reshape(-1),
        of_row,
        assigned.lowest,
        assigned.offset,
        assigned.begin,
        low,
        last,
        first.reshape(1),
    )

    def step_of(w: Any, s: Any, refs: Any) -> tuple[Any, Any, Any]:
        """Return a step's index in the list, its row and its tile; steps beyond the list stay at the last."""
        _, of_row, lowest, offset, begin, *_ = refs
        at = jnp.maximum(jnp.minimum(begin[w] + s, begin[w + 1] - 1), 0)
        row = of_row[at]
        return at, row, at - offset[row] + lowest[row]

    def kernel(*refs: Any) -> None:
        scalar, (q_ref, at_ref, *refs_) = refs[:8], refs[8:]
        *keys, out_ref, lse_ref, acc_ref, top_ref, total_ref = refs_
        _, _, _, offset, begin, low, last, first = scalar
        w, s = pl.program_id(0), pl.program_id(1)
        place, row, tile = step_of(w, s, scalar)
        live = begin[w] + s < begin[w + 1]

        @pl.when(live & ((s == 0) | (place == offset[row])))
        def _begin() -> None:
            acc_ref[...] = jnp.zeros((padded, dv), jnp.float32)
            top_ref[...] = jnp.full((padded, LANES), -jnp.inf, jnp.float32)
            total_ref[...] = jnp.zeros((padded, LANES), jnp.float32)

        @pl.when(live)
        def _add() -> None:
            shape = (padded, columns)
            column = lax.broadcasted_iota(jnp.int32, shape, 1)
            own = None
            if kv > 1:
                group = lax.broadcasted_iota(jnp.int32, shape, 0)
                own = lax.rem(lax.rem(group, h) // (h // kv), kv) == lax.rem(column, kv)
            tile_scores, used = [], []
            for i in range(tiles.pages):
                begins = tiles.begin(first[0], tile) + i * settings.stride * tiles.page
                within = tiles.page - tile % tiles.per_page * tiles.piece  # keys to the page's end
                # the last tile of a table may have fewer pages
                within = jnp.where(tile // tiles.per_page * tiles.pages + i < entries, within, 0)
                some = lambda x, most=within: jnp.clip(x, 0, jnp.minimum(most, tiles.piece)) * kv  # noqa: E731
                raw = product(q_ref[...], keys[i][...].reshape(columns, d), (1, 1))
                if score.softcap is None:
                    raw = raw * (score.scale * unit)
                else:
                    raw = (score.softcap * unit) * jnp.tanh(raw * (score.scale / score.softcap))
                mine = at_ref[...]
                seen = column < lanes(some(mine + 1 - begins), columns)
                if settings.window is not None:
                    seen &= column >= lanes(some(mine + 1 - settings.window - begins), columns)
                tile_scores.append(jnp.where(seen if own is None else seen & own, raw, -jnp.inf))
                used.append((some(low[row] + 1 - begins), some(last[row] + 1 - begins)))
            top = top_ref[...]
            higher = top
            for x in tile_scores:
                higher = jnp.maximum(higher, x.max(1, keepdims=True))
            finite = jnp.where(higher == -jnp.inf, 0.0, higher)
            fade = exp(top - finite)
            total, acc = total_ref[...] * fade, acc_ref[...] * lanes(fade, dv)
            for i, x in enumerate(tile_scores):
                weights = exp(x - lanes(finite, columns))
                total = total + weights.sum(1, keepdims=True)
                value = keys[i if v is None else tiles.pages + i][...].reshape(columns, -1)[:, :dv]
                key = lax.broadcasted_iota(jnp.int32, value.shape, 0)
                # values that no query sees may be anything
                value = jnp.where((key >= used[i][0]) & (key < used[i][1]), value, jnp.zeros_like(value))
                acc = acc + product(weights.astype(value.dtype), value, (1, 0))
            top_ref[...], total_ref[...], acc_ref[...] = higher, total, acc

        @pl.when(live & ((place + 1 == begin[w + 1]) | (place + 1 == offset[row + 1])))
        def _end() -> None:
            total = total_ref[...]
            some = total != 0  # true for NaN, so that it shows in the result
            total = jnp.where(some, total, 1.0)
            out_ref[...] = acc_ref[...] * lanes(1 / total, dv)
            lse_ref[...] = jnp.where(some, top_ref[...] * (1 / unit) + jnp.log(total), -jnp.inf)

    def of_keys(i: int, width: int) -> pl.BlockSpec:
        def where(w: Any, s: Any, *refs: Any) -> tuple[Any, ...]:
            _, row, tile = step_of(w, s, refs)
            entry = jnp.minimum(tile // tiles.per_page * tiles.pages + i, entries - 1)
            page = jnp.clip(refs[0][row * entries + entry], 0, k.shape[0] - 1)
            return page, tile % tiles.per_page, 0, 0

        return pl.BlockSpec((None, tiles.piece, kv, width), where)

    def of_rows(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, padded, width), lambda w, s, *refs: (step_of(w, s, refs)[1], 0, 0))

    def of_parts(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, padded, width), lambda w, s, *refs: (w + step_of(w, s, refs)[1], 0, 0))

    pages = range(tiles.pages)
    operands = [k] * tiles.pages + ([] if v is None else [v] * tiles.pages)
    specs = [of_keys(i, d) for i in pages] + ([] if v is None else [of_keys(i, dv) for i in pages])
    slots = workers + b - 1
    steps = jnp.max(jnp.diff(assigned.begin))
    out, lse = pl.pallas_call(
        kernel,
        out_shape=(
            jax.ShapeDtypeStruct((slots, padded, dv), jnp.float32),
            jax.ShapeDtypeStruct((slots, padded, LANES), jnp.float32),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(workers, jnp.maximum(steps, 1)),
            in_specs=[of_rows(d), of_rows(LANES), *specs],
            out_specs=(of_parts(dv), of_parts(LANES)),
            scratch_shapes=[pltpu.VMEM((padded, x), jnp.float32) for x in (dv, LANES, LANES)],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
        cost_estimate=cost(inputs, settings),
        interpret=target.tpu(),
    )(*scalars, fill(q.reshape(b, rows, d)), at, *operands)
    out, lse = merged(out[:, None], lse[:, None, :, 0], assigned, heads=1)
    return out[:, :rows].reshape(b, n, h, dv), lse[:, :rows].reshape(b, n, h)


def configurations(op: Any) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Yield (name, function, shapes) of what ships, for the gate."""
    for name, case in CASES.items():
        yield (name, *examples.case(run, **case))


CASES: dict[str, dict[str, Any]] = {
    "bfloat16 128 contiguous": {},
    "bfloat16 128 pages of 16": {"page": 16},
    "bfloat16 128 pages of 64, window, softcap, dealt": {"page": 64, "window": 1000, "softcap": 50.0, "stride": 2},
    "bfloat16 64, 2 key heads": {"d": 64, "dv": 64, "kv": 2},
    "bfloat16 256, 4 queries, 2 key heads": {"d": 256, "dv": 256, "kv": 2, "queries": 4},
    "bfloat16 80, odd length, heads apart": {"d": 80, "dv": 80, "h": 12, "kv": 12, "t": 1000},
    "bfloat16 256/128, values in keys": {"d": 256, "dv": 128, "kv": 2, "shared": True},
    "float32 128 pages of 16, 3 queries": {"dtype": "float32", "page": 16, "queries": 3},
}
"""Cases that the gate compiles: a name -> arguments of `examples.case`."""
