"""The forward pass on Hopper: FlashAttention-2's loop over keys (Dao 2023), with FlashAttention-3's warpgroups.

A block has two warpgroups that compute, each with 64 queries of its own, and one that copies keys and values by TMA
(Shah et al. 2024). The two take turns: while one uses the tensor cores, the other computes exponentials. Persistent
blocks fetch an item's queries and first keys while the previous item is written out. Each warpgroup fetches its own
queries: waiting for the other one's would stop both.

Without a warpgroup that copies, the first of the two fills each slot as soon as both are certainly done with it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.aot import SHARED_MEMORY
from pallas_kernels.dispatch import Target
from pallas_kernels.flash_attention.gpu_walk import (
    LOG2E,
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

_SPARE = 3072  # bytes of shared memory for barriers and for Mosaic


def shared_memory(d: int, dv: int, keys: int, slots: int) -> int:
    """Return bytes of a block's buffers when the output has a buffer of its own."""
    rows = WARPGROUPS * ROWS
    return 2 * (rows * (d + dv) + slots * keys * (d + dv)) + 4 * rows + _SPARE


def attend(
    target: Target,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    plan: jax.Array,
    tokens: Sequence[jax.Array],
    walk: Walk,
    seen: Callable[[Sequence[Any]], Seen],
    weigher: Weigher,
    *,
    keys: int,
    slots: int,
    copier: bool,
) -> tuple[jax.Array, jax.Array]:
    """Return the output in q's dtype, and the float32 log-sum-exp as (B, H, S).

    Args:
      target: the device to compile for.
      q: (B, S, H, D), S whole tiles.
      k: (B, T, K, D), T whole tiles.
      v: (B, T, K, Dv).
      plan: of `walk`.
      tokens: segments and then positions, where there are any, of queries (B, S) and keys (B, T).
      walk: the walk over tiles of 128 queries.
      seen: makes the mask from references to `tokens`.
      weigher: computes the weights.
      keys: keys of a tile.
      slots: tiles of keys in flight at a time.
      copier: a warpgroup of its own copies tiles and leaves registers to the others; else the first of these copies.
    """
    (b, s, h, d), dv, dtype = q.shape, v.shape[3], q.dtype
    fits = shared_memory(d, dv, keys, slots) <= SHARED_MEMORY
    softmax, heads, rate = weigher.score.kind == "softmax", walk.heads, weigher.score.dropout
    row_layout = plgpu.Layout.WGMMA.reduce(1)

    def flash_forward(q_ref: Any, k_ref: Any, v_ref: Any, plan_ref: Any, *refs: Any) -> None:
        of_tokens, refs = list(refs[: len(tokens)]), refs[len(tokens) :]
        out_ref, lse_ref, q_s, k_s, v_s, lse_s, *refs_ = refs
        out_s, refs_ = (refs_[0], refs_[1:]) if fits else (q_s, refs_)
        q_full, k_full, v_full, k_free, v_free, turn = refs_
        wg, visible = lax.axis_index("wg"), seen(of_tokens)
        ring_k, ring_v = Ring(k_full, k_free, slots), Ring(v_full, v_free, slots)

        def swap() -> None:
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(turn)

        def bring(what: str, item: Item, done: Any, n: Any) -> None:
            """Copy the n-th tile of an item that comes after `done` tiles: keys ("k"), values ("v") or both ("kv")."""
            slot, rows = lax.rem(done + n, slots), pl.ds(item.visit(n) * keys, keys)
            if "k" in what:
                ring_k.to_fill(done + n)
                plgpu.copy_gmem_to_smem(k_ref.at[item.b, rows, item.kv], k_s.at[slot], k_full.at[slot])
            if "v" in what:
                ring_v.to_fill(done + n)
                plgpu.copy_gmem_to_smem(v_ref.at[item.b, rows, item.kv], v_s.at[slot], v_full.at[slot])

        def drain(done: Any) -> None:
            ring_k.drain(done)
            ring_v.drain(done)

        def in_one(i: int, run: Callable[[], None]) -> None:
            """Run in warpgroup i where the first one copies."""
            if not copier:
                pl.when(wg == i)(run)

        def compute() -> None:
            mine, out_mine = q_s.at[wg], out_s.at[wg]

            def fetch(n: Any) -> None:
                item = walk.item(n, plan_ref)
                rows = pl.ds((item.tile * WARPGROUPS + wg) * ROWS, ROWS)
                plgpu.copy_gmem_to_smem(q_ref.at[item.b, rows, item.kv * heads + item.g], mine, q_full.at[wg])

            def fetch_next(item: Item) -> None:
                pl.when(item.n + 1 < walk.count())(lambda: fetch(item.n + 1))

            def attend_item(item: Item, done: Any) -> Any:
                q0 = (item.tile * WARPGROUPS + wg) * ROWS
                count = item.count

                fill_k, fill_v = (functools.partial(bring, of, item, done) for of in "kv")

                def begin() -> None:
                    ring_k.begin(fill_k, count)
                    ring_v.begin(fill_v, count)

                in_one(0, begin)
                in_one(1, swap)

                def step(n: Any, carry: Any, masked: bool) -> Any:
                    acc, top, total = carry
                    slot = lax.rem(done + n, slots)
                    # The turn before ended after the other warpgroup had begun its product with these keys, which
                    # waits for nothing more. Its product with the values waits for this turn's swap.
                    in_one(0, lambda: ring_k.go_on(fill_k, n, count))
                    plgpu.barrier_wait(k_full.at[slot])
                    raw = product(q_s.at[again(wg, n)], k_s.at[slot].T, (ROWS, keys), swap)
                    plgpu.barrier_arrive(k_free.at[slot])
                    fold = weigher.folded
                    x = raw if fold is not None else weigher.base2(raw)[0]
                    if masked:
                        (x,) = visible.hide(item.b, q0, item.visit(n) * keys, -jnp.inf, x)
                    fold = 1.0 if fold is None else fold
                    if softmax:
                        higher = jnp.maximum(top, x.max(1) * fold)
                        finite = jnp.where(higher == -jnp.inf, 0.0, higher) if masked else higher
                        fade = jnp.exp2(top - finite)
                        p = jnp.exp2(x * fold - spread(finite, x.shape, 0))
                        acc, total, top = acc * spread(fade, acc.shape, 0), total * fade + p.sum(1), higher
                    else:
                        p = 1 / (1 + jnp.exp2(-x))
                    if rate:
                        head = item.kv * heads + item.g
                        p = jnp.where(visible.keeps(rate, item.b, head, q0, item.visit(n) * keys, (ROWS, keys)), p, 0.0)
                    p = p.astype(dtype)
                    if not target.interpret:  # finish all of it before the other warpgroup's turn
                        acc, total, top, p = lax.optimization_barrier((acc, total, top, p))
                    plgpu.barrier_arrive(turn)
                    plgpu.barrier_wait(v_full.at[slot])
                    plgpu.barrier_wait(turn)
                    # The other one is past its product with the values of the turn before.
                    in_one(0, lambda: ring_v.go_on(fill_v, n, count))
                    acc = accumulate(target, {"out": acc}, lambda add: add("out", p, v_s.at[slot]))["out"]
                    if target.interpret:
                        plgpu.commit_smem()  # the interpreter's dot has read what TMA overwrites next
                    plgpu.barrier_arrive(v_free.at[slot])
                    return acc, top, total

                plgpu.barrier_wait(q_full.at[wg])
                carry = (
                    zeros((ROWS, dv), plgpu.Layout.WGMMA),
                    zeros((ROWS,), row_layout, -jnp.inf),
                    zeros((ROWS,), row_layout),
                )
                carry = lax.fori_loop(0, item.full, lambda n, c: step(n, c, False), carry)
                acc, top, total = lax.fori_loop(item.full, count, lambda n, c: step(n, c, True), carry)
                in_one(0, swap)  # the other one's last product needs it, and the next item's first fills need that
                if fits:
                    fetch_next(item)
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the previous item has been copied
                if softmax:
                    acc = acc * spread(jnp.where(total == 0.0, 0.0, weigher.grown / total), acc.shape, 0)
                    lse = jnp.where(total == 0.0, -jnp.inf, top * (1 / LOG2E) + jnp.log(total))
                    lse_s[wg] = lse
                out_mine[...] = acc.astype(dtype)
                plgpu.commit_smem()
                head = item.kv * heads + item.g
                plgpu.copy_smem_to_gmem(out_mine, out_ref.at[item.b, pl.ds(q0, ROWS), head])
                if softmax:
                    plgpu.copy_smem_to_gmem(lse_s.at[wg], lse_ref.at[item.b, head, pl.ds(q0, ROWS)])
                if not fits:
                    plgpu.wait_smem_to_gmem(0)
                    fetch_next(item)
                return done + count

            fetch(0)
            if copier:
                pl.when(wg == 1)(swap)
            done = walk.each(attend_item, 0, plan_ref)
            if copier:
                pl.when(wg == 0)(swap)
            plgpu.wait_smem_to_gmem(0)
            in_one(0, lambda: drain(done))

        def copy() -> None:
            def bring_item(item: Item, done: Any) -> Any:
                lax.fori_loop(0, item.count, lambda n, _: bring("kv", item, done, n), None)
                return done + item.count

            drain(walk.each(bring_item, 0, plan_ref))

        run_warpgroups(target, wg, copier, compute, copy)

    def buffer(*shape: int) -> Any:
        return plgpu.SMEM(shape, dtype, transforms=swizzled(shape[-1], dtype))

    barrier = plgpu.Barrier
    return plgpu.kernel(
        flash_forward,
        out_type=(jax.ShapeDtypeStruct((b, s, h, dv), dtype), jax.ShapeDtypeStruct((b, h, s), jnp.float32)),
        grid=(walk.blocks,),
        grid_names=("block",),
        num_threads=WARPGROUPS + copier,
        thread_name="wg",
        scratch_types=[
            buffer(WARPGROUPS, ROWS, d),
            buffer(slots, keys, d),
            buffer(slots, keys, dv),
            plgpu.SMEM((WARPGROUPS, ROWS), jnp.float32),
            *([buffer(WARPGROUPS, ROWS, dv)] if fits else []),
            barrier(num_barriers=WARPGROUPS),
            barrier(num_barriers=slots),
            barrier(num_barriers=slots),
            barrier(num_arrivals=WARPGROUPS, num_barriers=slots),
            barrier(num_arrivals=WARPGROUPS, num_barriers=slots),
            barrier(num_arrivals=WARPGROUPS),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **target.gpu(),
    )(q, k, v, plan, *tokens)
