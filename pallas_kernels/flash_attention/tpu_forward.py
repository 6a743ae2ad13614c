"""Attention's forward pass on TPUs: a tile of queries stays and walks over the keys that it sees (see `tpu_walk`).

A step works on parts of a tile, and the scores of the parts that come next are computed beside the weights of this one:
the matrix units and the unit for exponentials have about equally much to do, and each would wait for the other. Scores
are (keys, queries), so that numbers of a query are along the lanes of a row and cost next to nothing.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Target
from pallas_kernels.flash_attention.inputs import Inputs, Score
from pallas_kernels.flash_attention.masks import Mask
from pallas_kernels.flash_attention.tpu_steps import Cut
from pallas_kernels.flash_attention.tpu_walk import Keeps, Refs, Seen, product, scores, units, walk

PART = 256
"""Queries and keys of a part, as many as the matrix unit of a v6e has rows."""
AHEAD = 4
"""Parts whose scores are computed before the weights of a part, by what LLO's schedules say (experiments' log)."""


def forward(target: Target, inputs: Inputs, mask: Mask, score: Score) -> tuple[jax.Array, jax.Array | None]:
    """Return the output in q's dtype, and the float32 log-sum-exp (B, S, H), `None` for sigmoid.

    The softmax is the online one (Milakov & Gimelshein 2018): running maximum and sum, in float32.
    """
    cut = Cut.of_inputs(target, "forward", inputs, mask)
    q, k, v = cut.wide(inputs.q, "queries"), cut.wide(inputs.k, "keys"), cut.wide(inputs.v, "keys")
    width, softmax = v.shape[3], score.kind == "softmax"
    unit, exp = units(q.dtype)

    def begin(refs: Refs) -> None:
        refs["acc"][...] = jnp.zeros((width, cut.q_tile), jnp.float32)
        if softmax:
            refs["top"][...] = jnp.full((1, cut.q_tile), -jnp.inf, jnp.float32)
            refs["total"][...] = jnp.zeros((1, cut.q_tile), jnp.float32)

    def add(refs: Refs, seen: Seen | None, keep: Keeps | None) -> None:
        parts = list(itertools.product(_parts(cut.q_tile), _parts(cut.k_tile)))

        def scored(queries: slice, keys: slice) -> jax.Array:
            return scores(refs["k"][keys], refs["q"][queries], score, seen and seen(keys, queries))[0]

        ready = [scored(*part) for part in parts[:AHEAD]]
        for n, (queries, keys) in enumerate(parts):
            ready += [scored(*part) for part in parts[n + AHEAD : n + AHEAD + 1]]
            mix(refs, queries, refs["v"][keys], ready[n], keep and keep(keys, queries))

    def mix(refs: Refs, queries: slice, value: jax.Array, part: jax.Array, keep: jax.Array | None) -> None:
        if not softmax:
            refs["acc"][:, queries] += product(value, jax.nn.sigmoid(part).astype(value.dtype), (0, 0))
            return
        top = refs["top"][:, queries]
        higher = jnp.maximum(top, part.max(0, keepdims=True))
        finite = jnp.where(higher == -jnp.inf, 0.0, higher)  # without visible keys so far, weights are 0 and not NaN
        fade, weights = exp(top - finite), exp(part - finite)
        refs["top"][:, queries] = higher
        refs["total"][:, queries] = refs["total"][:, queries] * fade + weights.sum(0, keepdims=True)
        used = weights if keep is None else jnp.where(keep, weights, 0.0)
        mixed = product(value, used.astype(value.dtype), (0, 0))
        refs["acc"][:, queries] = refs["acc"][:, queries] * fade + mixed

    def end(refs: Refs) -> None:
        acc = refs["acc"][...]
        if softmax:
            total = refs["total"][...]
            some = total != 0  # true for NaN, so that it shows in the result
            total = jnp.where(some, total, 1.0)
            acc = acc * (1 / total)
            if score.dropout:
                acc = acc * (1 / (1 - score.dropout))
            refs["lse"][...] = jnp.where(some, refs["top"][...] * (1 / unit) + jnp.log(total), -jnp.inf)
        refs["out"][...] = acc.T.astype(refs["out"].dtype)

    outs = {"out": jax.ShapeDtypeStruct((*q.shape[:3], width), q.dtype)}
    scratch = {"acc": (width, cut.q_tile)}
    if softmax:
        outs["lse"] = jax.ShapeDtypeStruct((*q.shape[:2], 1, q.shape[2]), jnp.float32)
        scratch |= {"top": (1, cut.q_tile), "total": (1, cut.q_tile)}
    results = walk(
        target,
        cut,
        inputs.tokens,
        inputs.drop,
        "queries",
        {"q": q, "k": k, "v": v},
        outs,
        scratch,
        begin=begin,
        add=add,
        end=end,
        products=2,
        rows="keys",
        rate=score.dropout,
    )
    return cut.narrow(results["out"], cut.s, inputs.v.shape[3]), cut.unrows(results["lse"]) if softmax else None


def _parts(size: int) -> list[slice]:
    return [slice(start, min(start + PART, size)) for start in range(0, size, PART)]
