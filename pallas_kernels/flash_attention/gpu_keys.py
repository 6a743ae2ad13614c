"""The backward pass on Hopper with keys that stay: cotangents of keys and values, and of queries by addition in memory.

A block keeps 128 keys and values, 64 for each of its two computing warpgroups, and walks over the queries that see them
(Dao 2023, algorithm 2; Shah et al. 2024). Scores are transposed, with keys along rows, so that weights and their
gradients go from registers into the products for values and keys. For the queries' cotangent the two warpgroups
exchange score gradients through shared memory, each multiplies them with its half, and TMA adds the float32 result to
memory. These are five products; the order of the additions differs from run to run.
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


def of_keys(
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
    outputs: str,
    queries: int,
    slots: tuple[int, int],
    early: bool,
    copier: bool,
) -> dict[str, jax.Array]:
    """Return some cotangents: "k" and "v" in their dtypes, and "q" in float32.

    Args:
      target: the device to compile for.
      q: (B, S, H, D), S whole tiles.
      k: (B, T, K, D), T whole tiles.
      v: (B, T, K, Dv).
      dout: (B, S, H, Dv).
      stats: for softmax, float32 (B, H, 2, S): the log-sum-exp in base 2, and the sum of dout * out less its cotangent.
      plan: of `walk`.
      tokens: segments and then positions, where there are any.
      walk: the walk over tiles of 128 keys.
      seen: makes the mask from references to `tokens`.
      weigher: computes the weights.
      outputs: the cotangents to compute, such as "kvq".
      queries: queries of a tile: with 64, each warpgroup computes half of a query's cotangent; with 128, that of 64
        queries.
      slots: tiles of queries, and of their cotangents, in flight at a time.
      early: compute the weights while the product for their cotangents runs, which takes more registers.
      copier: a warpgroup of its own copies tiles and leaves registers to the others; else the first of these copies.
    """
    (b, s, h, d), dv, dtype = q.shape, v.shape[3], q.dtype
    power, rate = weigher.early(dtype), weigher.score.dropout
    groups, softmax = h // k.shape[2], stats is not None
    need_dp, fused = "k" in outputs or "q" in outputs, "q" in outputs
    made = [w for w in outputs if w != "q"]
    part = (ROWS, d // WARPGROUPS) if queries == ROWS else (ROWS, d)  # a warpgroup's part of the queries' cotangent
    dq = None
    if fused:
        # The interpreter has no additions in memory: there, every tile of keys writes a term of its own.
        terms = walk.tiles if target.interpret else 1
        dq = jax.new_ref(jnp.zeros((terms, b, s, h, d), jnp.float32))

    def flash_backward_keys(q_ref: Any, k_ref: Any, v_ref: Any, dout_ref: Any, *refs: Any) -> None:
        def take(n: int) -> tuple[Any, ...]:
            nonlocal refs
            first, refs = refs[:n], refs[n:]
            return first

        (stats_ref,) = take(1) if softmax else (None,)
        (plan_ref,), of_tokens, (dq_ref,) = take(1), take(len(tokens)), take(1) if fused else (None,)
        outs = dict(zip(made, take(len(made)), strict=True))
        k_s, v_s, q_s, dout_s, stats_s = take(5)
        ds_s, dq_s = take(2) if fused else (None, None)
        kv_full, kv_free, q_full, q_free, dout_full, dout_free, exchanged = refs
        wg, visible = lax.axis_index("wg"), seen(of_tokens)
        queue, douts = Ring(q_full, q_free, slots[0]), Ring(dout_full, dout_free, slots[1])

        def bring_own(item: Item) -> None:
            pl.when(item.n > 0)(lambda: plgpu.barrier_wait(kv_free))
            for i in range(WARPGROUPS):
                rows = pl.ds((item.tile * WARPGROUPS + i) * ROWS, ROWS)
                plgpu.copy_gmem_to_smem(k_ref.at[item.b, rows, item.kv], k_s.at[i], kv_full)
                if need_dp:
                    plgpu.copy_gmem_to_smem(v_ref.at[item.b, rows, item.kv], v_s.at[i], kv_full)

        def place(item: Item, u: Any) -> tuple[Any, Any]:
            """Return the head and the rows of turn u of an item."""
            return item.kv * groups + lax.div(u, item.count), pl.ds(
                item.visit(lax.rem(u, item.count)) * queries, queries
            )

        def bring_q(item: Item, done: Any, u: Any) -> None:
            (head, rows), slot = place(item, u), queue.slot(done + u)
            queue.to_fill(done + u)
            plgpu.copy_gmem_to_smem(q_ref.at[item.b, rows, head], q_s.at[slot], q_full.at[slot])
            if softmax:
                plgpu.copy_gmem_to_smem(stats_ref.at[item.b, head, :, rows], stats_s.at[slot], q_full.at[slot])

        def bring_dout(item: Item, done: Any, u: Any) -> None:
            (head, rows), slot = place(item, u), douts.slot(done + u)
            douts.to_fill(done + u)
            plgpu.copy_gmem_to_smem(dout_ref.at[item.b, rows, head], dout_s.at[slot], dout_full.at[slot])

        def drain(done: Any) -> None:
            plgpu.barrier_wait(kv_free)
            queue.drain(done)
            douts.drain(done)

        def compute() -> None:
            mine_k, mine_v = k_s.at[wg], v_s.at[wg]

            def keys_item(item: Item, done: Any) -> Any:
                tile, count, full = item.tile, item.count, item.full
                k0 = (tile * WARPGROUPS + wg) * ROWS
                fills = [(queue, functools.partial(bring_q, item, done))]
                fills.append((douts, functools.partial(bring_dout, item, done)))
                if not copier:

                    @pl.when(wg == 0)
                    def _() -> None:
                        bring_own(item)
                        for ring, fill in fills:
                            ring.begin(fill, groups * count)

                plgpu.barrier_wait(kv_full)

                def turn(u: Any, n: Any, g: Any, sums: Any) -> Any:
                    slot, dout_slot = queue.slot(u), douts.slot(u)
                    i = item.visit(n)
                    if not copier:

                        @pl.when(wg == 0)
                        def _() -> None:
                            for ring, fill in fills:
                                ring.go_on(fill, u - done, groups * count)

                    me = again(wg, u)
                    plgpu.barrier_wait(q_full.at[slot])
                    raw = product(k_s.at[me], q_s.at[slot].T, (ROWS, queries))

                    def column(row: int) -> Any:
                        part = plgpu.load(stats_s.at[slot, row], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
                        return spread(part, raw.shape, 1)

                    def blank(by: float, *xs: Any) -> tuple[Any, ...]:
                        # A second loop for masked tiles would need registers of its own.
                        hide_tile = lambda *xs: visible.hide(item.b, i * queries, k0, by, *xs)  # noqa: E731
                        return lax.cond(n < full, lambda *xs: xs, hide_tile, *xs)

                    def weigh() -> tuple[Any, Any]:
                        """Return the weights, and the factor of dp. Few registers are left for anything else."""
                        p, w = seen_weights()
                        if rate:
                            head = item.kv * groups + g
                            keep = visible.keeps(rate, item.b, head, i * queries, k0, raw.shape)
                            p, w = jnp.where(keep, p * weigher.grown, 0.0), jnp.where(keep, w, -w)
                        return p.astype(dtype), w

                    def seen_weights() -> tuple[Any, Any]:
                        if queries > ROWS:  # registers suffice if scores are masked here, and weights below
                            p, w = weigher.weights(raw, lambda: column(0), lambda x: blank(-jnp.inf, x)[0])
                            return p, w
                        p, w = weigher.weights(raw, lambda: column(0), lambda x: x)
                        return blank(0.0, p) * 2 if p is w else blank(0.0, p, w)

                    plgpu.barrier_wait(dout_full.at[dout_slot])
                    of_weights = lambda meanwhile: product(  # noqa: E731
                        v_s.at[me], dout_s.at[dout_slot].T, (ROWS, queries), meanwhile
                    )
                    if early and need_dp:
                        dp, (p, w) = of_weights(weigh)
                    else:
                        p, w = weigh()
                    if "v" in outputs:
                        add_v = lambda add: add("v", p, dout_s.at[dout_slot])  # noqa: E731
                        sums = {**sums, **accumulate(target, {"v": sums["v"]}, add_v)}
                    if need_dp:
                        dp = dp if early else of_weights(None)
                        ds = weigher.of_scores(w, dp, column(1) if softmax else None)
                        ds = (ds if power == 1 else ds * power).astype(dtype)
                        if fused:
                            ds_s[lax.rem(u, 2), me] = ds
                            plgpu.commit_smem()
                            plgpu.barrier_arrive(exchanged)
                        if "k" in outputs:
                            add_k = lambda add: add("k", ds, q_s.at[slot])  # noqa: E731
                            sums = {**sums, **accumulate(target, {"k": sums["k"]}, add_k)}
                    if target.interpret:
                        plgpu.commit_smem()  # the interpreter's dots have read what TMA overwrites next
                    plgpu.barrier_arrive(q_free.at[slot])
                    plgpu.barrier_arrive(dout_free.at[dout_slot])
                    if fused:
                        plgpu.barrier_wait(exchanged)
                        add_queries(lax.rem(u, 2), me, item.b, i, item.kv * groups + g, tile)
                    return sums

                def add_queries(now: Any, me: Any, b: Any, i: Any, head: Any, tile: Any) -> None:
                    """Add this warpgroup's part to the cotangent of the queries in tile i."""

                    def run(acc: Any) -> Any:
                        for j in range(WARPGROUPS):
                            if queries == ROWS:
                                plgpu.wgmma(acc, ds_s.at[now, j].T, k_s.at[j, :, pl.ds(me * part[1], part[1])])
                            else:
                                plgpu.wgmma(acc, ds_s.at[now, j, :, pl.ds(me * ROWS, ROWS)].T, k_s.at[j])
                        return acc[...]

                    dq_part = pl.run_scoped(run, plgpu.ACC(part, jnp.float32))
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    dq_s[me] = dq_part
                    plgpu.commit_smem()
                    to: tuple[Any, ...]
                    if queries == ROWS:
                        to = (b, pl.ds(i * queries, ROWS), head, pl.ds(me * part[1], part[1]))
                    else:
                        to = (b, pl.ds(i * queries + me * ROWS, ROWS), head)
                    if target.interpret:
                        plgpu.copy_smem_to_gmem(dq_s.at[me], dq_ref.at[(tile, *to)])
                    else:
                        plgpu.copy_smem_to_gmem(dq_s.at[me], dq_ref.at[(0, *to)], reduction_op="add")

                def of_head(g: Any, sums: Any) -> Any:
                    at = done + g * count
                    return lax.fori_loop(0, count, lambda n, c: turn(at + n, n, g, c), sums)

                sums = {w: zeros((ROWS, {"k": d, "v": dv}[w]), plgpu.Layout.WGMMA) for w in outs}
                sums = lax.fori_loop(0, groups, of_head, sums)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                for w, ref in outs.items():
                    # Only this warpgroup reads its values, and also its keys unless `fused`: reuse them as a buffer.
                    buffer = mine_v if w == "v" or fused else mine_k
                    x = sums[w] * (weigher.score.scale / power) if w == "k" else sums[w]
                    buffer[...] = x.astype(dtype)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(buffer, ref.at[item.b, pl.ds(k0, ROWS), item.kv])
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(kv_free)
                return done + groups * count

            turns = walk.each(keys_item, 0, plan_ref)
            plgpu.wait_smem_to_gmem(0)
            if not copier:
                pl.when(wg == 0)(lambda: drain(turns))

        def copy() -> None:
            def bring_item(item: Item, done: Any) -> Any:
                bring_own(item)

                def bring(u: Any, _: None) -> None:
                    bring_q(item, done, u)
                    bring_dout(item, done, u)

                turns = groups * item.count
                lax.fori_loop(0, turns, bring, None)
                return done + turns

            drain(walk.each(bring_item, 0, plan_ref))

        run_warpgroups(target, wg, copier, compute, copy)

    def buffer(*shape: int, of: Any = dtype) -> Any:
        return plgpu.SMEM(shape, of, transforms=swizzled(shape[-1], of))

    barrier = plgpu.Barrier
    arrays = plgpu.kernel(
        flash_backward_keys,
        out_type=tuple(jax.ShapeDtypeStruct({"k": k, "v": v}[w].shape, dtype) for w in made),
        grid=(walk.blocks,),
        grid_names=("block",),
        num_threads=WARPGROUPS + copier,
        thread_name="wg",
        scratch_types=[
            buffer(WARPGROUPS, ROWS, d),
            buffer(WARPGROUPS, ROWS, dv),
            buffer(slots[0], queries, d),
            buffer(slots[1], queries, dv),
            plgpu.SMEM((slots[0], 2, queries), jnp.float32),
            *([buffer(2, WARPGROUPS, ROWS, queries), buffer(WARPGROUPS, *part, of=jnp.float32)] if fused else []),
            barrier(num_arrivals=WARPGROUPS * (1 + need_dp)),
            barrier(num_arrivals=WARPGROUPS),
            barrier(num_arrivals=1 + softmax, num_barriers=slots[0]),
            barrier(num_arrivals=WARPGROUPS, num_barriers=slots[0]),
            barrier(num_barriers=slots[1]),
            barrier(num_arrivals=WARPGROUPS, num_barriers=slots[1]),
            barrier(num_arrivals=WARPGROUPS),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **target.gpu(),
    )(q, k, v, dout, *([] if stats is None else [stats]), plan, *tokens, *([] if dq is None else [dq]))
    grads = dict(zip(made, arrays, strict=True))
    return grads if dq is None else {**grads, "q": jnp.sum(dq[...], axis=0)}
