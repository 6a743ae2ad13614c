"""Attention's backward pass on TPUs: one walk for the cotangents of keys and values, and one for those of queries.

Each computes the weights again from the log-sum-exp (Dao et al. 2022) and sums in a fixed order, so that equal inputs
give equal bits with or without `deterministic`. Where a tile of keys stays, scores are (keys, queries): the queries'
log-sum-exp is then along the lanes, as in memory, and every product but the first is plain rows by columns.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Target
from pallas_kernels.flash_attention import xla
from pallas_kernels.flash_attention.inputs import Inputs, Score
from pallas_kernels.flash_attention.masks import Mask
from pallas_kernels.flash_attention.tpu_steps import LANES, Cut, Side
from pallas_kernels.flash_attention.tpu_walk import ALL, Keeps, Refs, Seen, column, lanes, product, scores, units, walk


def backward(
    target: Target,
    inputs: Inputs,
    mask: Mask,
    score: Score,
    out: jax.Array,
    lse: jax.Array | None,
    dout: jax.Array,
    dlse: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    """Return the cotangents of q, k and v, and `None` for a bias."""
    cut = Cut.of_inputs(target, "backward", inputs, mask)
    arrays = {
        "q": cut.wide(inputs.q, "queries"),
        "k": cut.wide(inputs.k, "keys"),
        "v": cut.wide(inputs.v, "keys"),
        "dout": cut.wide(dout, "queries"),
    }
    if lse is not None and dlse is not None:
        lse, delta = xla.of_rows(out, lse, dout, dlse)
        arrays |= {"lse": cut.rows(lse * units(inputs.q.dtype)[0]), "delta": cut.rows(delta)}
    dk, dv = _of_keys(target, cut, inputs, score, arrays)
    return (
        cut.narrow(_of_queries(target, cut, inputs, score, arrays), cut.s, inputs.q.shape[3]),
        cut.narrow(dk, cut.t, inputs.k.shape[3]),
        cut.narrow(dv, cut.t, inputs.v.shape[3]),
        None,
    )


def _of_queries(target: Target, cut: Cut, inputs: Inputs, score: Score, arrays: dict[str, jax.Array]) -> jax.Array:
    """Return the cotangent of q, in the layout of `Cut.wide`."""
    q = arrays["q"]
    stats = [n for n in ("lse", "delta") if n in arrays]
    width = q.shape[3]

    def begin(refs: Refs) -> None:
        refs["acc"][...] = jnp.zeros((cut.q_tile, width), jnp.float32)
        for name in stats:
            refs[f"{name}_column"][...] = column(refs[name][...])

    def add(refs: Refs, seen: Seen | None, keep: Keeps | None) -> None:
        key = refs["k"][...]
        tile_scores, slope = scores(refs["q"][...], key, score, seen and seen(ALL, ALL))
        dweights = product(refs["dout"][...], refs["v"][...], (1, 1))
        lse, delta = (lanes(refs[f"{n}_column"][...], cut.k_tile) for n in stats) if stats else (None, None)
        dweights = _dropped(dweights, keep and keep(ALL, ALL), score)
        dscores = _gradient(key.dtype, tile_scores, slope, dweights, lse, delta)[1]
        refs["acc"][...] += product(dscores.astype(key.dtype), key, (1, 0))

    def end(refs: Refs) -> None:
        refs["dq"][...] = (refs["acc"][...] * score.scale).astype(refs["dq"].dtype)

    outs = {"dq": jax.ShapeDtypeStruct(q.shape, q.dtype)}
    scratch = {"acc": (cut.q_tile, width)} | {f"{n}_column": (cut.q_tile, LANES) for n in stats}
    own: Side = "queries"
    return walk(
        target, cut, inputs.tokens, inputs.drop, own, arrays, outs, scratch, begin=begin, add=add, end=end, products=3,
        rows=own, rate=score.dropout,
    )["dq"]  # fmt: skip


def _of_keys(
    target: Target, cut: Cut, inputs: Inputs, score: Score, arrays: dict[str, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Return the cotangents of k and v, in the layout of `Cut.wide`."""
    k, v = arrays["k"], arrays["v"]

    def begin(refs: Refs) -> None:
        for name in ("dk", "dv"):
            refs[f"{name}_acc"][...] = jnp.zeros(refs[f"{name}_acc"].shape, jnp.float32)

    def add(refs: Refs, seen: Seen | None, keep: Keeps | None) -> None:
        query, dout = refs["q"][...], refs["dout"][...]
        tile_scores, slope = scores(refs["k"][...], query, score, seen and seen(ALL, ALL))
        dweights = product(refs["v"][...], dout, (1, 1))
        lse, delta = (refs["lse"][...], refs["delta"][...]) if "lse" in refs else (None, None)
        mine = keep and keep(ALL, ALL)
        dweights = _dropped(dweights, mine, score)
        weights, dscores = _gradient(query.dtype, tile_scores, slope, dweights, lse, delta)
        weights = _dropped(weights, mine, score)
        refs["dv_acc"][...] += product(weights.astype(dout.dtype), dout, (1, 0))
        refs["dk_acc"][...] += product(dscores.astype(query.dtype), query, (1, 0))

    def end(refs: Refs) -> None:
        refs["dk"][...] = (refs["dk_acc"][...] * score.scale).astype(refs["dk"].dtype)
        refs["dv"][...] = refs["dv_acc"][...].astype(refs["dv"].dtype)

    outs = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in (("dk", k), ("dv", v))}
    scratch = {f"{name}_acc": (cut.k_tile, x.shape[3]) for name, x in outs.items()}
    own: Side = "keys"
    grads = walk(
        target, cut, inputs.tokens, inputs.drop, own, arrays, outs, scratch, begin=begin, add=add, end=end, products=4,
        rows=own, rate=score.dropout,
    )  # fmt: skip
    return grads["dk"], grads["dv"]


def _dropped(x: jax.Array, keep: jax.Array | None, score: Score) -> jax.Array:
    """Return a tile's weights after dropout, or the cotangent of its weights before."""
    return x if keep is None else jnp.where(keep, x * (1 / (1 - score.dropout)), 0.0)


def _gradient(
    dtype: Any,
    scores: jax.Array,
    slope: jax.Array | None,
    dweights: jax.Array,
    lse: jax.Array | None,
    delta: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Return the weights, from a log-sum-exp in the scores' units, and the cotangent of scale * q k."""
    if lse is None or delta is None:
        weights = jax.nn.sigmoid(scores)
        dscores = dweights * weights * (1 - weights)
    else:
        weights = units(dtype)[1](scores - lse)
        dscores = weights * (dweights - delta)
    return weights, dscores if slope is None else dscores * slope
