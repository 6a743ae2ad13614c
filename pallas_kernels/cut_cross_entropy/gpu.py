"""The forward pass of the loss on Hopper in Mosaic GPU: a matrix product whose tiles are reduced, not stored.

A work item is 128 tokens by a span of the vocabulary: its running maximum and sum (Milakov & Gimelshein 2018) stay in
registers, and three to five numbers per token are written for each span, which XLA merges. `gpu_walk` has the products.

The backward pass is `gpu_backward`'s; with a filter it is XLA's, which leaves out smaller blocks (`xla.backward`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels.cut_cross_entropy import examples, gpu_backward, xla
from pallas_kernels.cut_cross_entropy.gpu_walk import CHUNK, LOG2E, ROWS, WARPGROUPS, Walk
from pallas_kernels.cut_cross_entropy.inputs import Inputs, Logits, Parts, entropy_of, joined
from pallas_kernels.dispatch import Target, hopper
from pallas_kernels.softmax.pairs import LOWEST, pair
from pallas_kernels.tiles import entries, lookup

plgpu: Any = mosaic_gpu  # its names differ between versions

DTYPES = ("bfloat16", "float16")
_MULTIPLE = {"ve": 8, "ev": 64}  # words of a tile of a swizzled copy


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
    if direction != "forward" and logits.filter is not None:
        return "filtered gradients are XLA's, which leaves out blocks of 256 tokens and 512 words"
    # The backward kernel gets pieces of w in x's dtype.
    if dtype not in DTYPES or (w_dtype != dtype and direction == "forward"):
        return f"Hopper's tensor cores take {' and '.join(DTYPES)}, the same for x and w, not {dtype} and {w_dtype}"
    width, vocabulary = x[1], w[logits.words_axis]
    if not x[0]:
        return "there are no tokens"
    if width % CHUNK:
        return f"the width of x has to be a multiple of {CHUNK} in a kernel, not {width}"
    if vocabulary < 256:
        return f"a vocabulary of {vocabulary} is smaller than a tile of 256 words"
    return None


def run(
    target: Target, inputs: Inputs, *others: Any, direction: str, logits: Logits, dw_dtype: str | None = None, **_: Any
) -> Any:
    """Return the parts of every token or, backward, the cotangents of x and of w."""
    if direction == "forward":
        return _forward(target, inputs, logits)
    assert dw_dtype is not None
    lse, slopes = others
    tile = lookup("cut_cross_entropy", target.kind, **_key("backward", logits, inputs))
    sizes = {name: tile[name] for name in ("words", "slots", "buffers")}
    return gpu_backward.gradients(target, inputs, lse, slopes, logits, dw_dtype, **sizes)


def _key(direction: str, logits: Logits, inputs: Inputs) -> dict[str, Any]:
    return {"kernel": direction, "softcap": logits.softcap is not None, "width": inputs.x.shape[1]}


def _forward(target: Target, inputs: Inputs, logits: Logits) -> Parts:
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
    return joined(jax.tree.map(lambda *pieces: jnp.stack(pieces), parts, more))


def _of_words(target: Target, inputs: Inputs, logits: Logits) -> Parts:
    """Return the parts for a vocabulary of whole tiles of a copy."""
    n, vocabulary = inputs.x.shape[0], inputs.w.shape[logits.words_axis]
    tile = lookup("cut_cross_entropy", target.kind, **_key("forward", logits, inputs))
    words, slots = tile["words"], tile["slots"]
    span = min(tile["span"], -(-vocabulary // words))
    short = -n % (ROWS * WARPGROUPS)
    x, rows = jnp.pad(inputs.x, ((0, short), (0, 0))), jnp.pad(inputs.rows, (0, short), constant_values=-1)
    statistics = spans(target, x, inputs.w, rows, logits, words=words, slots=slots, span=span)[:, :, :n]
    top, total, hit, summed, weighted = logits.named(jnp.moveaxis(statistics, 1, 0))
    entropy = None if weighted is None else entropy_of(total, weighted)
    return joined(Parts(pair(jnp.where(top == -jnp.inf, 0, top), total), hit, summed, entropy))


def spans(
    target: Target, x: jax.Array, w: jax.Array, rows: jax.Array, logits: Logits, *, words: int, slots: int, span: int
) -> jax.Array:
    """Return float32 (spans, 3 to 5, N), `logits.statistics` of each token and span.

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
    (n, width), vocabulary = x.shape, w.shape[logits.words_axis]
    word_tiles, stats = -(-vocabulary // words), logits.statistics
    groups = -(-word_tiles // span)
    walk = Walk(target, n, vocabulary, width // CHUNK, words, slots, groups, logits.w_layout == "ve")
    row_layout = plgpu.Layout.WGMMA.reduce(1)

    def count(first: Any) -> Any:
        return lax.min(span, word_tiles - first)

    def cut_cross_entropy(
        x_ref: Any, w_ref: Any, rows_ref: Any, out_ref: Any, x_s: Any, w_s: Any, stats_s: Any, full: Any, free: Any
    ) -> None:
        def multiply(wg: Any) -> None:
            def item(i: Any, group: Any, done: Any) -> Any:
                first, at = group * span, pl.ds((i * WARPGROUPS + wg) * ROWS, ROWS)
                mine = plgpu.load(rows_ref.at[at], layout=row_layout, optimized=False)
                shape = (ROWS, words)
                spread = lambda v: lax.broadcast_in_dim(v, shape, (0,))  # noqa: E731

                def tile(j: Any, state: tuple[Any, ...]) -> tuple[Any, ...]:
                    top, total, hit, summed, weighted = logits.named(state)
                    y = walk.multiply(done + j * walk.chunks, wg, x_s, w_s, full, free)
                    if (cap := logits.softcap) is not None:
                        # tanh(z) = 1 - 2r, as exact as float32
                        y = cap - (2 * cap) / (1 + jnp.exp2(y * (2 * LOG2E / cap)))
                    start = walk.start_of(first + j)
                    word = plgpu.broadcasted_iota(jnp.int32, (words,), 0, layout=plgpu.Layout.WGMMA.reduce(0)) + start
                    word = lax.broadcast_in_dim(word, shape, (1,))
                    fresh = None
                    if vocabulary % words:
                        fresh = word >= spread(jnp.full((ROWS,), (first + j) * words, jnp.int32))
                    own = word == spread(mine)
                    hit = hit + jnp.where(own if fresh is None else own & fresh, y, 0.0).sum(1)
                    if summed is not None:
                        summed = summed + (y if fresh is None else jnp.where(fresh, y, 0.0)).sum(1)
                    seen = y if fresh is None else jnp.where(fresh, y, -jnp.inf)
                    higher = jnp.maximum(top, seen.max(1))
                    finite = jnp.where(higher == -jnp.inf, 0.0, higher)
                    u, scale = seen * LOG2E - spread(finite * LOG2E), jnp.exp2((top - finite) * LOG2E)
                    power = jnp.exp2(u)
                    if weighted is not None:
                        below = jnp.where(top == -jnp.inf, 0.0, top) - finite
                        weighted = scale * (weighted + below * total)
                        u = u if fresh is None else jnp.maximum(u, LOWEST)  # 0 times -inf would be no number
                        weighted = weighted + (1 / LOG2E) * (power * u).sum(1)
                    total = total * scale + power.sum(1)
                    return tuple(x for x in (higher, total, hit, summed, weighted) if x is not None)

                blank = lambda value: plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), row_layout)  # noqa: E731
                state = lax.fori_loop(0, count(first), tile, (blank(-jnp.inf), *(blank(0.0),) * (stats - 1)))
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the previous item has been copied
                for k, value in enumerate(state):
                    stats_s[wg, k] = value
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(stats_s.at[wg], out_ref.at[group, :, at])
                return done + count(first) * walk.chunks

            walk.each(item, 0)

        def bring() -> None:
            refs = x_ref, w_ref, x_s, w_s
            item = lambda i, group, done: walk.bring(  # noqa: E731
                i, group * span, count(group * span), done, refs, full, free
            )
            walk.drain(free, walk.each(item, 0))

        walk.roles(multiply, bring)

    out = jax.ShapeDtypeStruct((groups, stats, n), jnp.float32)
    scratch = plgpu.SMEM((WARPGROUPS, stats, ROWS), jnp.float32)
    return walk.kernel(cut_cross_entropy, out, x.dtype, 1 if logits.softcap is None else 3, scratch)(x, w, rows)


def configurations(op: Any) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Yield (name, function, arguments) of what ships, for the gate."""
    target = Target("NVIDIA H200", "cuda")
    for entry in entries("cut_cross_entropy"):
        if not entry["device"].startswith("NVIDIA"):
            continue
        direction, softcap, width = (entry["key"][name] for name in ("kernel", "softcap", "width"))
        for layout, vocabulary, dtype in (
            ("ve", 128256, "bfloat16"),
            ("ev", 50257, "bfloat16"),
            ("ve", 50257, "float16"),
        ):
            for summed, entropy in ((False, False), (True, False), (True, True)):
                options = {"layout": layout, "vocabulary": vocabulary, "width": width, "dtype": dtype}
                options |= {"softcap": 30.0 if softcap else None, "summed": summed, "entropy": entropy}
                options |= {"direction": direction}
                more = f"{' softcap' * softcap}{' sum' * summed}{' entropy' * entropy}"
                more += " backward" * (direction == "backward")
                yield f"{dtype} {width} {layout} {vocabulary}{more}", *examples.case(run, target, **options)
