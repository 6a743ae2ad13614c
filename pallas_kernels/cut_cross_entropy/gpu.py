"""The forward pass of the loss on Hopper in Mosaic GPU: a matrix product whose tiles are reduced, not stored.

A persistent block has two warpgroups that multiply, each 64 tokens by `words` words, and one that copies both operands
by TMA. A work item is 128 tokens by a span of the vocabulary: its running maximum and sum (Milakov & Gimelshein 2018)
stay in registers, and three or four numbers per token are written for each span, which XLA merges. Items are ordered so
that blocks that run at the same time share tokens and words in the L2 cache.

The backward pass is XLA's, in chunks of the vocabulary (`xla.backward`): four matrix products, each by cuBLAS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels.cut_cross_entropy import xla
from pallas_kernels.cut_cross_entropy.inputs import Inputs, Logits, Parts
from pallas_kernels.dispatch import Target, hopper
from pallas_kernels.softmax.pairs import combine, combine_all, pair
from pallas_kernels.tiles import entries, lookup

plgpu: Any = mosaic_gpu  # its names differ between versions

ROWS = 64
"""Tokens of a warpgroup: the rows of one wgmma."""
WARPGROUPS = 2
"""Warpgroups that multiply; one more copies memory."""
CHUNK = 64
"""Elements of a vector that one copy moves: 128 bytes, the widest swizzle."""
DTYPES = ("bfloat16", "float16")
_MULTIPLE = {"ve": 8, "ev": 64}  # words of a tile of a swizzled copy
_TOGETHER = 16  # tiles of tokens side by side: they and their words fit in the L2 cache
_LOG2E = 1.4426950408889634


def supported(
    target: Target,
    *,
    direction: str,
    logits: Logits,
    x: tuple[int, ...],
    w: tuple[int, ...],
    dtype: str,
    w_dtype: str,
    **_: Any,
) -> str | None:
    """Return why the kernel cannot serve a case, or `None`; the arguments are those of `dispatch`."""
    if why := hopper(target):
        return why
    if direction != "forward":
        return "the backward pass is XLA's, in pieces of the vocabulary, whose products cuBLAS makes"
    if dtype not in DTYPES or w_dtype != dtype:
        return f"Hopper's tensor cores take {' and '.join(DTYPES)}, the same for x and w, not {dtype} and {w_dtype}"
    width, vocabulary = x[1], w[logits.words_axis]
    if not x[0]:
        return "there are no tokens"
    if width % CHUNK:
        return f"the width of x has to be a multiple of {CHUNK} in a kernel, not {width}"
    if 0 in x:
        return "there are no tokens"
    if vocabulary < 256:
        return f"a vocabulary of {vocabulary} is smaller than a tile of 256 words"
    return None


def run(target: Target, inputs: Inputs, *, logits: Logits, **_: Any) -> Parts:
    """Return the parts of every token.

    TMA copies tiles of `_MULTIPLE` words. Where they do not divide the vocabulary, the kernel gets a copy of w without
    the last words, which are XLA's.
    """
    (x, w, rows), axis = inputs, logits.words_axis
    vocabulary = w.shape[axis]
    whole = vocabulary // _MULTIPLE[logits.w_layout] * _MULTIPLE[logits.w_layout]
    parts = _of_words(target, Inputs(x, lax.slice_in_dim(w, 0, whole, axis=axis), rows), logits)
    if whole == vocabulary:
        return parts
    more = xla.forward(Inputs(x, lax.slice_in_dim(w, whole, vocabulary, axis=axis), rows - whole), logits)
    summed = None if more.summed is None or parts.summed is None else parts.summed + more.summed
    return Parts(combine(parts.total, more.total), parts.hit + more.hit, summed)


def _of_words(target: Target, inputs: Inputs, logits: Logits) -> Parts:
    """Return the parts for a vocabulary of whole tiles of a copy."""
    n, vocabulary = inputs.x.shape[0], inputs.w.shape[logits.words_axis]
    softcap = logits.softcap is not None
    tile = lookup("cut_cross_entropy", target.kind, kernel="forward", softcap=softcap, width=inputs.x.shape[1])
    words, slots = tile["words"], tile["slots"]
    span = min(tile["span"], -(-vocabulary // words))
    short = -n % (ROWS * WARPGROUPS)
    x, rows = jnp.pad(inputs.x, ((0, short), (0, 0))), jnp.pad(inputs.rows, (0, short), constant_values=-1)
    statistics = spans(target, x, inputs.w, rows, logits, words=words, slots=slots, span=span)[:, :, :n]
    top, total, hit, *summed = (statistics[:, i] for i in range(statistics.shape[1]))
    merged = combine_all(pair(jnp.where(top == -jnp.inf, 0, top), total))
    return Parts(merged, hit.sum(0), summed[0].sum(0) if summed else None)


def spans(
    target: Target, x: jax.Array, w: jax.Array, rows: jax.Array, logits: Logits, *, words: int, slots: int, span: int
) -> jax.Array:
    """Return float32 (spans, 3 or 4, N): for each token and span the maximum, sum of exponentials and target's logit.

    The exponentials are of differences from the maximum. A fourth number, the sum of logits, follows where
    `logits.summed`.

    Args:
      target: the device to compile for.
      x: as in `Inputs`, N a multiple of 128.
      w: as in `Inputs`.
      rows: as in `Inputs`.
      logits: how logits are computed.
      words: words of a tile.
      slots: chunks of both operands in flight at a time.
      span: tiles of words of a work item.
    """
    (n, width), dtype = x.shape, x.dtype
    vocabulary, ve = w.shape[logits.words_axis], logits.w_layout == "ve"
    token_tiles, word_tiles, chunks = n // (ROWS * WARPGROUPS), -(-vocabulary // words), width // CHUNK
    groups, stats = -(-word_tiles // span), 4 if logits.summed else 3
    together = max(m for m in range(1, _TOGETHER + 1) if token_tiles % m == 0)
    items = token_tiles * groups
    blocks = min(target.cores, items)
    row_layout = plgpu.Layout.WGMMA.reduce(1)

    def each(body: Callable[[Any, Any, Any, Any], Any], start: Any) -> Any:
        """Call `body(tile of tokens, span, first tile of words, carry)` for each of this block's items."""
        block = lax.axis_index("block")

        def step(k: Any, carry: Any) -> Any:
            item = block + k * blocks
            of_side, inner = lax.div(item, together * groups), lax.rem(item, together * groups)
            group = lax.div(inner, together)
            return body(of_side * together + lax.rem(inner, together), group, group * span, carry)

        return lax.fori_loop(0, lax.div(items - 1 - block, blocks) + 1, step, start)

    def count(first: Any) -> Any:
        return lax.min(span, word_tiles - first)

    def start_of(j: Any) -> Any:
        """Return a tile's first word. The last tile begins earlier, and skips words of the tile before."""
        return lax.min(j * words, vocabulary - words)

    def cut_cross_entropy(
        x_ref: Any, w_ref: Any, rows_ref: Any, out_ref: Any, x_s: Any, w_s: Any, stats_s: Any, *barriers: Any
    ) -> None:
        full, free = barriers
        wg = lax.axis_index("wg")

        @pl.when(wg < WARPGROUPS)
        def _() -> None:
            if not target.interpret:
                plgpu.set_max_registers(240, action="increase")

            def multiply(done: Any, acc: Any) -> Any:
                def chunk(c: Any, _: None) -> None:
                    slot = lax.rem(done + c, slots)
                    plgpu.barrier_wait(full.at[slot])
                    side = w_s.at[slot].T if ve else w_s.at[slot]
                    plgpu.wgmma(acc, x_s.at[slot, wg], side)
                    plgpu.wgmma_wait(1)

                    before = lax.rem(done + c - 1, slots)
                    pl.when(c > 0)(lambda: plgpu.barrier_arrive(free.at[before]))

                lax.fori_loop(0, chunks, chunk, None)
                result = acc[...]
                plgpu.barrier_arrive(free.at[lax.rem(done + chunks - 1, slots)])
                return result

            def item(i: Any, group: Any, first: Any, done: Any) -> Any:
                at = pl.ds((i * WARPGROUPS + wg) * ROWS, ROWS)
                mine = plgpu.load(rows_ref.at[at], layout=row_layout, optimized=False)
                shape = (ROWS, words)
                spread = lambda v: lax.broadcast_in_dim(v, shape, (0,))  # noqa: E731

                def tile(j: Any, state: tuple[Any, ...]) -> tuple[Any, ...]:
                    top, total, hit, *summed = state
                    here = done + j * chunks
                    y = pl.run_scoped(lambda acc: multiply(here, acc), plgpu.ACC(shape, jnp.float32))
                    if (cap := logits.softcap) is not None:
                        # tanh(z) = 1 - 2r, as exact as float32
                        y = cap - (2 * cap) / (1 + jnp.exp2(y * (2 * _LOG2E / cap)))
                    start = start_of(first + j)
                    word = plgpu.broadcasted_iota(jnp.int32, (words,), 0, layout=plgpu.Layout.WGMMA.reduce(0)) + start
                    word = lax.broadcast_in_dim(word, shape, (1,))
                    fresh = None
                    if vocabulary % words:
                        fresh = word >= spread(jnp.full((ROWS,), (first + j) * words, jnp.int32))
                    own = word == spread(mine)
                    hit = hit + jnp.where(own if fresh is None else own & fresh, y, 0.0).sum(1)
                    if summed:
                        summed = [summed[0] + (y if fresh is None else jnp.where(fresh, y, 0.0)).sum(1)]
                    seen = y if fresh is None else jnp.where(fresh, y, -jnp.inf)
                    higher = jnp.maximum(top, seen.max(1))
                    finite = jnp.where(higher == -jnp.inf, 0.0, higher)
                    power = jnp.exp2(seen * _LOG2E - spread(finite * _LOG2E))
                    total = total * jnp.exp2((top - finite) * _LOG2E) + power.sum(1)
                    return (higher, total, hit, *summed)

                blank = lambda value: plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), row_layout)  # noqa: E731
                state = lax.fori_loop(0, count(first), tile, (blank(-jnp.inf), *(blank(0.0),) * (stats - 1)))
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the previous item has been copied
                for k, value in enumerate(state):
                    stats_s[wg, k] = value
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(stats_s.at[wg], out_ref.at[group, :, at])
                return done + count(first) * chunks

            each(item, 0)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(wg == WARPGROUPS)
        def _() -> None:
            if not target.interpret:
                plgpu.set_max_registers(24, action="decrease")

            def item(i: Any, group: Any, first: Any, done: Any) -> Any:
                def bring(k: Any, _: None) -> None:
                    j, c = lax.div(k, chunks), lax.rem(k, chunks)
                    slot, piece = lax.rem(done + k, slots), pl.ds(c * CHUNK, CHUNK)
                    these = pl.ds(start_of(first + j), words)
                    pl.when(done + k >= slots)(lambda: plgpu.barrier_wait(free.at[slot]))
                    for half in range(WARPGROUPS):
                        at = pl.ds((i * WARPGROUPS + half) * ROWS, ROWS)
                        plgpu.copy_gmem_to_smem(x_ref.at[at, piece], x_s.at[slot, half], full.at[slot])
                    source = w_ref.at[these, piece] if ve else w_ref.at[piece, these]
                    plgpu.copy_gmem_to_smem(source, w_s.at[slot], full.at[slot])

                steps = count(first) * chunks
                lax.fori_loop(0, steps, bring, None)
                return done + steps

            done = each(item, 0)

            def drain(k: Any, _: None) -> None:
                plgpu.barrier_wait(free.at[lax.rem(k, slots)])

            lax.fori_loop(lax.max(done - slots, 0), done, drain, None)

    def buffer(*shape: int) -> Any:
        return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))

    return plgpu.kernel(
        cut_cross_entropy,
        out_type=jax.ShapeDtypeStruct((groups, stats, n), jnp.float32),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=WARPGROUPS + 1,
        thread_name="wg",
        scratch_types=[
            buffer(slots, WARPGROUPS, ROWS, CHUNK),
            buffer(slots, words, CHUNK) if ve else buffer(slots, CHUNK, words),
            plgpu.SMEM((WARPGROUPS, stats, ROWS), jnp.float32),
            plgpu.Barrier(num_arrivals=1 + WARPGROUPS, num_barriers=slots),
            plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=slots),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **target.gpu(),
    )(x, w, rows)


def configurations(op: Any) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Yield (name, function, arguments) of what ships, for the gate."""
    target = Target("NVIDIA H200", "cuda")
    for entry in entries("cut_cross_entropy"):
        if not entry["device"].startswith("NVIDIA"):
            continue
        for layout, vocabulary, dtype in (
            ("ve", 128256, "bfloat16"),
            ("ev", 50257, "bfloat16"),
            ("ve", 50257, "float16"),
        ):
            for summed in (False, True):
                logits = Logits(layout, 30.0 if entry["key"]["softcap"] else None, summed)  # type: ignore[arg-type]
                width = entry["key"]["width"]
                shape = (vocabulary, width) if layout == "ve" else (width, vocabulary)
                x, w = jax.ShapeDtypeStruct((8192, width), dtype), jax.ShapeDtypeStruct(shape, dtype)
                arrays: Any = (x, w, jax.ShapeDtypeStruct((8192,), "int32"))
                name = (
                    f"{dtype} {width} {layout} {vocabulary}{' softcap' * (logits.softcap is not None)}{' sum' * summed}"
                )
                yield name, lambda *a, logits=logits: run(target, Inputs(*a), logits=logits), arrays
