"""Attention's forward pass on TPUs: a tile of queries stays and walks over the keys that it sees (see `tpu_walk`)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Target
from pallas_kernels.flash_attention.inputs import Inputs, Score
from pallas_kernels.flash_attention.masks import Mask
from pallas_kernels.flash_attention.tpu_steps import LANES, Cut
from pallas_kernels.flash_attention.tpu_walk import Refs, lanes, product, scores, units, walk


def forward(target: Target, inputs: Inputs, mask: Mask, score: Score) -> tuple[jax.Array, jax.Array | None]:
    """Return the output in q's dtype, and the float32 log-sum-exp (B, S, H), `None` for sigmoid.

    The softmax is the online one (Milakov & Gimelshein 2018): running maximum and sum, in float32.
    """
    cut = Cut.of_inputs(target, "forward", inputs, mask)
    q, k, v = cut.wide(inputs.q, "queries"), cut.wide(inputs.k, "keys"), cut.wide(inputs.v, "keys")
    width, softmax = v.shape[3], score.kind == "softmax"
    unit, exp = units(q.dtype)

    def begin(refs: Refs) -> None:
        refs["acc"][...] = jnp.zeros((cut.q_tile, width), jnp.float32)
        if softmax:
            refs["top"][...] = jnp.full((cut.q_tile, LANES), -jnp.inf, jnp.float32)
            refs["total"][...] = jnp.zeros((cut.q_tile, LANES), jnp.float32)

    def add(refs: Refs, seen: jax.Array | None) -> None:
        tile_scores, _ = scores(refs["q"][...], refs["k"][...], score, seen)
        value = refs["v"][...]
        if not softmax:
            refs["acc"][...] += product(jax.nn.sigmoid(tile_scores).astype(value.dtype), value, (1, 0))
            return
        top = refs["top"][...]
        higher = jnp.maximum(top, tile_scores.max(1, keepdims=True))
        finite = jnp.where(higher == -jnp.inf, 0.0, higher)  # without visible keys so far, weights are 0 and not NaN
        fade, weights = exp(top - finite), exp(tile_scores - lanes(finite, cut.k_tile))
        refs["top"][...] = higher
        refs["total"][...] = refs["total"][...] * fade + weights.sum(1, keepdims=True)
        mixed = product(weights.astype(value.dtype), value, (1, 0))
        refs["acc"][...] = refs["acc"][...] * lanes(fade, width) + mixed

    def end(refs: Refs) -> None:
        acc = refs["acc"][...]
        if softmax:
            total = refs["total"][...]
            some = total != 0  # true for NaN, so that it shows in the result
            total = jnp.where(some, total, 1.0)
            acc = acc * lanes(1 / total, width)
            refs["lse"][...] = jnp.where(some, refs["top"][...] * (1 / unit) + jnp.log(total), -jnp.inf).T[:1]
        refs["out"][...] = acc.astype(refs["out"].dtype)

    outs = {"out": jax.ShapeDtypeStruct((*q.shape[:3], width), q.dtype)}
    scratch = {"acc": (cut.q_tile, width)}
    if softmax:
        outs["lse"] = jax.ShapeDtypeStruct((*q.shape[:2], 1, q.shape[2]), jnp.float32)
        scratch |= {"top": (cut.q_tile, LANES), "total": (cut.q_tile, LANES)}
    results = walk(
        target,
        cut,
        inputs.tokens,
        "queries",
        {"q": q, "k": k, "v": v},
        outs,
        scratch,
        begin=begin,
        add=add,
        end=end,
        products=2,
    )
    return cut.narrow(results["out"], cut.s, inputs.v.shape[3]), cut.unrows(results["lse"]) if softmax else None
