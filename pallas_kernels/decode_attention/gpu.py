"""Attention to a cache on Hopper in Mosaic GPU: stream-K over the keys, with pages copied by TMA from their place.

There are as many blocks as multiprocessors, and each takes an equal stretch of the list of all rows' and key heads'
tiles (`split`). A block has one warpgroup that copies tiles by TMA, page by page in the order of the row's table, and
two that compute, each with its half of a tile's keys and all queries of the key head: 64 rows of a wgmma, most of them
empty, which costs nothing since memory is the bottleneck. Each writes a part for every row and head of its stretch, and
XLA merges the parts. Where heads are wider than 192 or values than 128, one warpgroup computes: its output takes 128
registers of each thread, of which three warpgroups have 168 and two have 255.

A page that no query sees is not read. Keys and values that no query sees, in a page that some query sees, have weight 0
and have to be finite: they are multiplied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.aot import SHARED_MEMORY
from pallas_kernels.decode_attention import examples
from pallas_kernels.decode_attention.inputs import Inputs, Settings
from pallas_kernels.decode_attention.split import Tiles, bounds, cost, merged, shares
from pallas_kernels.dispatch import JAX_VERSION, Target, hopper
from pallas_kernels.flash_attention.gpu_walk import (
    LOG2E,
    ROWS,
    WARPGROUPS,
    Ring,
    Weigher,
    accumulate,
    plgpu,
    product,
    spread,
    swizzled,
    zeros,
)
from pallas_kernels.tiles import lookup

DTYPES = ("bfloat16", "float16")
_SPARE = 2048  # bytes of shared memory for barriers and for Mosaic
_NOWHERE = 2**30  # a position after every query


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
    if why := hopper(target):
        return why
    if settings.maximum is not None:
        return "the option maximum is left to XLA"
    if settings.codes:
        return "keys and values of 8 bits are left to XLA"
    if dtype not in DTYPES:
        return f"Hopper's tensor cores take {' and '.join(DTYPES)}, and {dtype} is left to XLA"
    if v is None:
        return "values that are stored in the keys are left to XLA"
    (_, page, kv, d), dv, rows = k, settings.value_dim, q[1] * q[2] // k[2]
    if d % 16 or dv % 16 or not (64 <= d <= 256 and 64 <= dv <= 256):
        return f"a kernel takes keys and values of width 64 to 256, multiples of 16, not {d} and {dv}"
    if rows > ROWS:
        return f"{q[1]} queries with {q[2] // kv} heads per key head are {rows} rows, and a tile has {ROWS}"
    tile = _tile(target, d, dv)
    half = tile["keys"] // warpgroups(d, dv)
    if page % 8 or (page < tile["keys"] and half % page):
        return f"a page has a multiple of 8 keys that divides {half} in a kernel, or {tile['keys']} or more, not {page}"
    if shared_memory(d, dv, tile) > SHARED_MEMORY:
        return f"keys of width {d} and values of width {dv} do not fit in shared memory"
    return None


def _tile(target: Target, d: int, dv: int) -> dict[str, Any]:
    if warpgroups(d, dv) == 1:
        d, dv = WIDTHS[-1]
    return lookup("decode_attention", target.kind, width=d, values=dv)


def warpgroups(d: int, dv: int) -> int:
    """Return how many warpgroups compute: an output wider than 128 takes the registers of a thread of two."""
    return 1 if d > 192 or dv > 128 else WARPGROUPS


def shared_memory(d: int, dv: int, tile: dict[str, Any]) -> int:
    """Return bytes of a block's buffers."""
    ring = tile["slots"] * tile["keys"] * (d + dv) + tile["queries"] * ROWS * d
    return 2 * ring + 4 * warpgroups(d, dv) * ROWS * (_columns(dv) + 1) + _SPARE


def _columns(dv: int) -> int:
    """Return how many columns of an output are written at a time."""
    return math.gcd(dv, 64)


def run(target: Target, inputs: Inputs, *, settings: Settings, **_: Any) -> tuple[jax.Array, jax.Array]:
    """Return the output and the log-sum-exp."""
    q, k, positions, tables, first = inputs.q, inputs.k, inputs.positions, inputs.tables, inputs.first
    (b, n, h, d), kv, dv = q.shape, k.shape[2], settings.value_dim
    tile = _tile(target, d, dv)
    tile["workers"] = min(target.cores, tile["workers"])
    tiles = Tiles.of(inputs, settings, tile["keys"])
    assigned = shares(tiles, inputs, settings, workers=tile["workers"], heads=kv)
    low, last = bounds(inputs, settings)
    entry_of = lambda place: (place // tiles.page - first) // settings.stride  # noqa: E731
    nearest, farthest = (jnp.clip(entry_of(x), 0, tables.shape[1] - 1) for x in (low + 1, last))
    rows = n * (h // kv)
    # (B, K, rows, D): the queries of a key head side by side
    packed = q.reshape(b, n, kv, h // kv, d).transpose(0, 2, 3, 1, 4).reshape(b, kv, rows, d)
    packed = jnp.pad(packed, ((0, 0), (0, 0), (0, ROWS - rows), (0, 0)))
    at = jnp.pad(jnp.tile(positions, (1, h // kv)), ((0, 0), (0, ROWS - rows)), constant_values=-1)
    count = jnp.diff(assigned.offset)
    of_rows = jnp.stack([assigned.lowest, assigned.offset[:-1] * kv, count, nearest, farthest], 1)
    ends = (assigned.offset[:-1, None] * kv + (jnp.arange(kv, dtype=jnp.int32) + 1) * count[:, None]).reshape(-1)

    def pair_of(unit: jax.Array) -> jax.Array:
        return jnp.sum(ends <= unit[:, None], 1, dtype=jnp.int32)

    begin, end = assigned.begin[:-1], assigned.begin[1:]
    pair = pair_of(begin)
    pairs = jnp.where(end > begin, pair_of(end - 1) - pair + 1, 0)
    plan = jnp.stack([begin, end, pair, pairs], 1)
    out, lse = parts(target, packed, inputs, at, tables, plan, of_rows, first.reshape(1), settings, tiles, tile, rows)
    out, lse = merged(out, lse, assigned, heads=kv, inner=warpgroups(d, dv))
    ungroup = lambda x: x[:, :rows].reshape(b, kv, h // kv, n, *x.shape[2:])  # noqa: E731
    out, lse = ungroup(out).transpose(0, 3, 1, 2, 4), ungroup(lse).transpose(0, 3, 1, 2)
    return out.reshape(b, n, h, dv), lse.reshape(b, n, h)


def parts(
    target: Target,
    q: jax.Array,
    inputs: Inputs,
    at: jax.Array,
    tables: jax.Array,
    plan: jax.Array,
    of_rows: jax.Array,
    first: jax.Array,
    settings: Settings,
    tiles: Tiles,
    tile: dict[str, Any],
    rows: int,
) -> tuple[jax.Array, jax.Array]:
    """Return each warpgroup's output and log-sum-exp for every row and key head of its stretch, for `split.merged`.

    Args:
      target: the device to compile for.
      q: (B, K, 64, D).
      inputs: keys and values.
      at: (B, 64), the position of each of q's rows, -1 for an empty row.
      tables: (B, N).
      plan: (workers, 4): each worker's first unit, its end, its first row and key head, and the number of these.
      of_rows: (B, 5): first tile, first unit, number of tiles, first and last entry of the table that is visible.
      first: (1,).
      settings: the op's settings.
      tiles: how rows are cut into tiles.
      tile: the tile sizes.
      rows: rows of q that are not empty.
    """
    k, v, dtype = inputs.k, inputs.v, q.dtype
    assert v is not None
    (b, kv, _, d), dv, entries, total = q.shape, v.shape[3], tables.shape[1], k.shape[0]
    keys, slots, q_slots, workers = tile["keys"], tile["slots"], tile["queries"], tile["workers"]
    computing = warpgroups(d, dv)
    half, columns, written = keys // computing, _columns(dv), -(-rows // 8) * 8
    registers_move = computing > 1 and not target.interpret  # two computing have as many as there are from the start
    piece = min(tiles.page, half)  # keys of one copy
    copies = keys // piece
    shape = (ROWS, half)
    weigher, row_layout, column_layout = (
        Weigher(settings.score),
        plgpu.Layout.WGMMA.reduce(1),
        plgpu.Layout.WGMMA.reduce(0),
    )

    def kernel(
        q_ref: Any, k_ref: Any, v_ref: Any, at_ref: Any, tables_ref: Any, plan_ref: Any, rows_ref: Any, first_ref: Any,
        out_ref: Any, lse_ref: Any, q_s: Any, k_s: Any, v_s: Any, out_s: Any, lse_s: Any,
        q_full: Any, k_full: Any, v_full: Any, q_free: Any, k_free: Any, v_free: Any,
    ) -> None:  # fmt: skip
        wg, worker = lax.axis_index("wg"), lax.axis_index("block")
        ring_q, ring_k, ring_v = Ring(q_full, q_free, q_slots), Ring(k_full, k_free, slots), Ring(v_full, v_free, slots)
        begin, end, pair, pairs = (plan_ref[worker, i] for i in range(4))
        start = first_ref[0]

        def segment(i: Any) -> tuple[Any, Any, Any, Any]:
            """Return row, key head, first tile and number of tiles of this block's i-th row and key head."""
            row, head = lax.div(pair + i, kv), lax.rem(pair + i, kv)
            count = rows_ref[row, 2]
            unit = rows_ref[row, 1] + head * count
            low = lax.max(begin, unit)
            return row, head, low - unit + rows_ref[row, 0], lax.max(lax.min(end, unit + count) - low, 0)

        def back(n: Any) -> tuple[Any, Any]:
            """Return where in its page a tile begins, and how many of its keys the previous tile has."""
            if tiles.per_page == 1:
                return 0, 0
            regular = lax.rem(n, tiles.per_page) * keys
            origin = lax.min(regular, tiles.page - keys)
            return origin, regular - origin

        @pl.when(wg < computing)
        def _() -> None:
            if registers_move:
                plgpu.set_max_registers(216, action="increase")

            def places(n: Any) -> Any:
                """Return the position of each of this warpgroup's keys of a tile."""
                origin, had = back(n)
                entry = lax.div(n, tiles.per_page) * tiles.pages
                layout = column_layout
                key = plgpu.broadcasted_iota(jnp.int32, (half,), 0, layout=layout) + wg * half
                place = key + ((start + entry * settings.stride) * tiles.page + origin)
                if settings.stride > 1 and tiles.pages > 1:  # here, a page is a power of two
                    apart = lax.shift_right_logical(key, tiles.page.bit_length() - 1)
                    place = place + apart * ((settings.stride - 1) * tiles.page)
                if tiles.per_page > 1 and tiles.page % keys:
                    place = jnp.where(key >= had, place, _NOWHERE)
                if entries % tiles.pages:
                    place = jnp.where(key < (entries - entry) * tiles.page, place, _NOWHERE)
                return plgpu.layout_cast(place, layout)

            def attend(i: Any, done: Any) -> Any:
                row, _, tile0, count = segment(i)
                mine = plgpu.load(at_ref.at[row], layout=row_layout, optimized=False)
                q_slot = ring_q.slot(i)
                plgpu.barrier_wait(q_full.at[q_slot])

                def step(n: Any, carry: Any) -> Any:
                    acc, top, sums = carry
                    slot = lax.rem(done + n, slots)
                    place = places(tile0 + n)
                    plgpu.barrier_wait(k_full.at[slot])
                    raw = product(q_s.at[q_slot], k_s.at[slot, wg].T, shape)
                    plgpu.barrier_arrive(k_free.at[slot])
                    fold = weigher.folded
                    x = raw if fold is not None else weigher.base2(raw)[0]
                    seen = spread(mine, shape, 0) >= spread(place, shape, 1)
                    if settings.window is not None:
                        seen = seen & (spread(mine - settings.window, shape, 0) < spread(place, shape, 1))
                    x = jnp.where(seen, x, -jnp.inf)
                    fold = 1.0 if fold is None else fold
                    higher = jnp.maximum(top, x.max(1) * fold)
                    finite = jnp.where(higher == -jnp.inf, 0.0, higher)
                    fade = jnp.exp2(top - finite)
                    p = jnp.exp2(x * fold - spread(finite, shape, 0))
                    acc, sums, top = acc * spread(fade, (ROWS, dv), 0), sums * fade + p.sum(1), higher
                    p = p.astype(dtype)
                    plgpu.barrier_wait(v_full.at[slot])
                    acc = accumulate(target, {"out": acc}, lambda add: add("out", p, v_s.at[slot, wg]))["out"]
                    if target.interpret:
                        plgpu.commit_smem()  # the interpreter's dot has read what TMA overwrites next
                    plgpu.barrier_arrive(v_free.at[slot])
                    return acc, top, sums

                carry = (
                    zeros((ROWS, dv), plgpu.Layout.WGMMA),
                    zeros((ROWS,), row_layout, -jnp.inf),
                    zeros((ROWS,), row_layout),
                )
                acc, top, sums = lax.fori_loop(0, count, step, carry)
                plgpu.barrier_arrive(q_free.at[q_slot])
                write(worker + pair + i, acc, top, sums)
                return done + count

            def write(to: Any, acc: Any, top: Any, sums: Any) -> None:
                acc = acc * spread(jnp.where(sums == 0.0, 0.0, 1 / sums), acc.shape, 0)
                lse = jnp.where(sums == 0.0, -jnp.inf, top * (1 / LOG2E) + jnp.log(sums))
                for c in range(0, dv, columns):
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    if c == 0:
                        lse_s[wg] = plgpu.layout_cast(lse, row_layout)
                    out_s[wg] = plgpu.layout_cast(lax.slice(acc, (0, c), (ROWS, c + columns)), plgpu.Layout.WGMMA)
                    plgpu.commit_smem()
                    of = out_ref.at[to, wg, :, pl.ds(c, columns)]
                    plgpu.copy_smem_to_gmem(out_s.at[wg, pl.ds(0, written)], of)
                    if c == 0:
                        plgpu.copy_smem_to_gmem(lse_s.at[wg, pl.ds(0, written)], lse_ref.at[to, wg])

            lax.fori_loop(0, pairs, attend, 0)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(wg == computing)
        def _() -> None:
            if registers_move:
                plgpu.set_max_registers(72, action="decrease")

            def bring(i: Any, done: Any) -> Any:
                row, head, tile0, count = segment(i)
                ring_q.to_fill(i)
                plgpu.copy_gmem_to_smem(q_ref.at[row, head], q_s.at[ring_q.slot(i)], q_full.at[ring_q.slot(i)])

                def one(n: Any, _: None) -> None:
                    slot = ring_k.slot(done + n)
                    origin, _ = back(tile0 + n)
                    entry = lax.div(tile0 + n, tiles.per_page) * tiles.pages
                    # An entry that no query sees may be any page, with any contents: read the nearest visible entry.
                    nearest, farthest = rows_ref[row, 3], rows_ref[row, 4]
                    entries_read = [lax.clamp(nearest, entry + p, farthest) for p in range(tiles.pages)]
                    ids = [lax.clamp(0, tables_ref[row, e], total - 1) for e in entries_read]
                    for ring, ref, buffer, full in ((ring_k, k_ref, k_s, k_full), (ring_v, v_ref, v_s, v_full)):
                        ring.to_fill(done + n)
                        for c in range(copies):
                            key = c * piece
                            page = key // tiles.page if tiles.pages > 1 else 0
                            rows_ = pl.ds(origin + key - page * tiles.page, piece)
                            into = buffer.at[slot, key // half, pl.ds(key % half, piece)]
                            plgpu.copy_gmem_to_smem(ref.at[ids[page], rows_, head], into, full.at[slot])

                lax.fori_loop(0, count, one, None)
                return done + count

            done = lax.fori_loop(0, pairs, bring, 0)
            ring_q.drain(pairs)
            ring_k.drain(done)
            ring_v.drain(done)

    def buffer(*shape: int, dtype: Any = dtype) -> Any:
        return plgpu.SMEM(shape, dtype, transforms=swizzled(shape[-1], dtype))

    barrier, made = plgpu.Barrier, workers + b * kv - 1
    return plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((made, computing, written, dv), jnp.float32),
            jax.ShapeDtypeStruct((made, computing, written), jnp.float32),
        ),
        grid=(workers,),
        grid_names=("block",),
        num_threads=computing + 1,
        thread_name="wg",
        scratch_types=[
            buffer(q_slots, ROWS, d),
            buffer(slots, computing, half, d),
            buffer(slots, computing, half, dv),
            buffer(computing, ROWS, columns, dtype=jnp.float32),
            plgpu.SMEM((computing, ROWS), jnp.float32),
            barrier(num_barriers=q_slots),
            barrier(num_arrivals=copies, num_barriers=slots),
            barrier(num_arrivals=copies, num_barriers=slots),
            barrier(num_arrivals=computing, num_barriers=q_slots),
            barrier(num_arrivals=computing, num_barriers=slots),
            barrier(num_arrivals=computing, num_barriers=slots),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **({"cost_estimate": cost(inputs, settings)} if JAX_VERSION >= (0, 12) else {}),  # an argument since 0.12
        **target.gpu(),
    )(q, k, v, at, tables, plan, of_rows, first)


def configurations(op: Any) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Yield (name, function, arguments) of what ships, for the gate."""
    for width in WIDTHS:
        for name, options in FEATURES.items():
            yield f"{width[0]}/{width[1]} {name}", *examples.case(run, d=width[0], dv=width[1], **options)


WIDTHS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256))
"""Widths of keys and values that have tiles in the table."""

FEATURES: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "odd length, window, softcap": {"t": 4008, "window": 1024, "softcap": 30.0},
    "pages of 16, dealt": {"page": 16, "stride": 2},
    "pages of 16, window, 4 queries": {"page": 16, "window": 1024, "queries": 4, "dtype": "float16"},
    "pages of 256, softcap": {"page": 256, "softcap": 30.0},
}
"""Cases that the gate compiles: a name -> arguments of `examples.case`."""
