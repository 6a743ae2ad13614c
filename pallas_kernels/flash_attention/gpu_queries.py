"""The backward pass on Hopper with queries that stay: their cotangent alone, with additions in a fixed order.

As in the forward pass, each of a block's two computing warpgroups keeps 64 queries and their arrays, and walks over the
keys that they see. With `gpu_keys.of_keys` for keys and values this is the deterministic mode, and serves the widths
whose sums do not all fit in registers at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.dispatch import Target
from pallas_kernels.flash_attention.gpu_walk import (
    ROWS,
    WARPGROUPS,
    Item,
    Ring,
    Seen,
    Walk,
    Weigher,
    accumulate,
    again,
    plgpu,
    product,
    run_warpgroups,
    spread,
    swizzled,
    zeros,
)


def of_queries(
    target: Target,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    dout: jax.Array,
    stats: jax.Array | None,
    plan: jax.Array,
    tokens: Sequence[jax.Array],
    walk: Walk,
    seen: Callable[[Sequence[Any]], Seen],
    weigher: Weigher,
    *,
    keys: int,
    slots: tuple[int, int],
    early: bool,
    copier: bool,
) -> jax.Array:
    """Return the cotangent of q, in its dtype.

    Args:
      target: as for `gpu_keys.of_keys`.
      q: as for `gpu_keys.of_keys`.
      k: as for `gpu_keys.of_keys`.
      v: as for `gpu_keys.of_keys`.
      dout: as for `gpu_keys.of_keys`.
      stats: as for `gpu_keys.of_keys`.
      plan: of `walk`.
      tokens: as for `gpu_keys.of_keys`.
      walk: the walk over tiles of 128 queries.
      seen: as for `gpu_keys.of_keys`.
      weigher: as for `gpu_keys.of_keys`.
      keys: keys of a tile.
      slots: tiles of keys, and of values, in flight at a time.
      early: as for `gpu_keys.of_keys`.
      copier: as for `gpu_keys.of_keys`.
    """
    d, dv, dtype = q.shape[3], v.shape[3], q.dtype
    power, rate = weigher.early(dtype), weigher.score.dropout
    softmax, heads = stats is not None, walk.heads

    def flash_backward_queries(q_ref: Any, k_ref: Any, v_ref: Any, dout_ref: Any, *refs: Any) -> None:
        stats_ref: Any = refs[0] if softmax else None
        refs = refs[softmax:]
        plan_ref, of_tokens, refs = refs[0], refs[1 : 1 + len(tokens)], refs[1 + len(tokens) :]
        out_ref, q_s, dout_s, k_s, v_s, own_full, own_free, k_full, k_free, v_full, v_free = refs
        wg, visible = lax.axis_index("wg"), seen(of_tokens)
        ring_k, ring_v = Ring(k_full, k_free, slots[0]), Ring(v_full, v_free, slots[1])

        def bring_own(item: Item) -> None:
            head = item.kv * heads + item.g
            pl.when(item.n > 0)(lambda: plgpu.barrier_wait(own_free))
            for i in range(WARPGROUPS):
                rows = pl.ds((item.tile * WARPGROUPS + i) * ROWS, ROWS)
                plgpu.copy_gmem_to_smem(q_ref.at[item.b, rows, head], q_s.at[i], own_full)
                plgpu.copy_gmem_to_smem(dout_ref.at[item.b, rows, head], dout_s.at[i], own_full)

        def bring_k(item: Item, done: Any, n: Any) -> None:
            rows, slot = pl.ds(item.visit(n) * keys, keys), ring_k.slot(done + n)
            ring_k.to_fill(done + n)
            plgpu.copy_gmem_to_smem(k_ref.at[item.b, rows, item.kv], k_s.at[slot], k_full.at[slot])

        def bring_v(item: Item, done: Any, n: Any) -> None:
            rows, slot = pl.ds(item.visit(n) * keys, keys), ring_v.slot(done + n)
            ring_v.to_fill(done + n)
            plgpu.copy_gmem_to_smem(v_ref.at[item.b, rows, item.kv], v_s.at[slot], v_full.at[slot])

        def drain(done: Any) -> None:
            plgpu.barrier_wait(own_free)
            ring_k.drain(done)
            ring_v.drain(done)

        def compute() -> None:

            def queries_item(item: Item, done: Any) -> Any:
                q0 = (item.tile * WARPGROUPS + wg) * ROWS
                count, full, head = item.count, item.full, item.kv * heads + item.g
                fills = [(ring_k, functools.partial(bring_k, item, done))]
                fills.append((ring_v, functools.partial(bring_v, item, done)))
                if not copier:

                    @pl.when(wg == 0)
                    def _() -> None:
                        bring_own(item)
                        for ring, fill in fills:
                            ring.begin(fill, count)

                def stat(row: int) -> Any:
                    part = stats_ref.at[item.b, head, row, pl.ds(q0, ROWS)]
                    return plgpu.load(part, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)

                lse, delta = (stat(0), stat(1)) if softmax else (None, None)
                plgpu.barrier_wait(own_full)

                def turn(n: Any, acc: Any) -> Any:
                    u = done + n
                    slot, v_slot = ring_k.slot(u), ring_v.slot(u)
                    me = again(wg, u)
                    if not copier:

                        @pl.when(wg == 0)
                        def _() -> None:
                            for ring, fill in fills:
                                ring.go_on(fill, n, count)

                    plgpu.barrier_wait(k_full.at[slot])
                    raw = product(q_s.at[me], k_s.at[slot].T, (ROWS, keys))

                    def weigh() -> Any:
                        w = weigher.weights(raw, lambda: spread(lse, raw.shape, 0), lambda x: x)[1]
                        blank = lambda w: visible.hide(item.b, q0, item.visit(n) * keys, 0.0, w)[0]  # noqa: E731
                        w = lax.cond(n < full, lambda w: w, blank, w)
                        if rate:
                            keep = visible.keeps(rate, item.b, head, q0, item.visit(n) * keys, w.shape)
                            w = jnp.where(keep, w, -w)
                        return w

                    plgpu.barrier_wait(v_full.at[v_slot])
                    w = None if early else weigh()
                    dp = product(dout_s.at[me], v_s.at[v_slot].T, (ROWS, keys), weigh if early else None)
                    dp, w = dp if early else (dp, w)
                    plgpu.barrier_arrive(v_free.at[v_slot])
                    ds = weigher.of_scores(w, dp, spread(delta, dp.shape, 0) if softmax else None)
                    ds = (ds if power == 1 else ds * power).astype(dtype)
                    acc = accumulate(target, {"q": acc}, lambda add: add("q", ds, k_s.at[slot]))["q"]
                    if target.interpret:
                        plgpu.commit_smem()  # the interpreter's dot has read what TMA overwrites next
                    plgpu.barrier_arrive(k_free.at[slot])
                    return acc

                acc = lax.fori_loop(0, count, turn, zeros((ROWS, d), plgpu.Layout.WGMMA))
                q_s[wg] = (acc * (weigher.score.scale / power)).astype(dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(q_s.at[wg], out_ref.at[item.b, pl.ds(q0, ROWS), head])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(own_free)
                return done + count

            turns = walk.each(queries_item, 0, plan_ref)
            plgpu.wait_smem_to_gmem(0)
            if not copier:
                pl.when(wg == 0)(lambda: drain(turns))

        def copy() -> None:
            def bring_item(item: Item, done: Any) -> Any:
                bring_own(item)

                def bring(n: Any, _: None) -> None:
                    bring_k(item, done, n)
                    bring_v(item, done, n)

                lax.fori_loop(0, item.count, bring, None)
                return done + item.count

            drain(walk.each(bring_item, 0, plan_ref))

        run_warpgroups(target, wg, copier, compute, copy)

    def buffer(*shape: int) -> Any:
        return plgpu.SMEM(shape, dtype, transforms=swizzled(shape[-1], dtype))

    barrier = plgpu.Barrier
    return plgpu.kernel(
        flash_backward_queries,
        out_type=jax.ShapeDtypeStruct(q.shape, dtype),
        grid=(walk.blocks,),
        grid_names=("block",),
        num_threads=WARPGROUPS + copier,
        thread_name="wg",
        scratch_types=[
            buffer(WARPGROUPS, ROWS, d),
            buffer(WARPGROUPS, ROWS, dv),
            buffer(slots[0], keys, d),
            buffer(slots[1], keys, dv),
            barrier(num_arrivals=2 * WARPGROUPS),
            barrier(num_arrivals=WARPGROUPS),
            barrier(num_barriers=slots[0]),
            barrier(num_arrivals=WARPGROUPS, num_barriers=slots[0]),
            barrier(num_barriers=slots[1]),
            barrier(num_arrivals=WARPGROUPS, num_barriers=slots[1]),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **target.gpu(),
    )(q, k, v, dout, *([] if stats is None else [stats]), plan, *tokens)
