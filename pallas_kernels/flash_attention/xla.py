"""Attention in tiles, as XLA computes it on any platform: a scan over tiles of keys for each tile of queries.

Scores exist for one tile of queries and one of keys at a time, at most `TILE` x `TILE` for every example and head, so
memory grows with S + T and never with S x T. The softmax is the online one (Milakov & Gimelshein 2018), in float32; the
backward pass computes the weights again from the log-sum-exp (Dao et al. 2022), one tile of keys after another. A tile
is not computed where `tile_table` shows that no example sees any of it (under `vmap` it is computed and dropped). A
full tile is masked like a partial one: XLA fuses that with the exponential, and a third branch only costs compile time.

Tiles are the first axis, and heads are grouped by the key head that they read: queries are (nq, B, K, G, q, D) and keys
(nk, B, K, k, D).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.arguments import varying
from pallas_kernels.flash_attention.dropout import Drop, keeps
from pallas_kernels.flash_attention.inputs import Inputs, Score
from pallas_kernels.flash_attention.masks import SKIP, Mask, Tokens, tile_table, visible

__all__ = ["TILE", "backward", "forward", "of_rows"]

TILE = 512
"""Most queries and keys of a tile, so that no larger matrix of scores exists."""


def _product(subscripts: str, *arrays: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, *arrays, preferred_element_type=jnp.float32)


def forward(inputs: Inputs, mask: Mask, score: Score) -> tuple[jax.Array, jax.Array | None]:
    """Return the output in q's dtype, and the float32 log-sum-exp (B, S, H), `None` for sigmoid."""
    cut = _Cut.of(inputs, mask, score)
    # Masks depend only on tokens and tile numbers. When a scan over layers is differentiated, JAX would therefore
    # compute the masks of all tiles before the scan and store them, S x T for every head. Make them depend on q.
    numbers = jnp.arange(cut.nq), jnp.arange(cut.nk), jnp.asarray(cut.table)
    (rows, columns, table), inputs = lax.optimization_barrier((numbers, inputs))
    cut = dataclasses.replace(cut, drop=inputs.drop)
    keys, like = cut.keys(inputs), _like(inputs)

    def queries(xs: tuple[Any, ...]) -> tuple[jax.Array, jax.Array | None]:
        i, query, row = xs
        acc = jnp.zeros((*query.x.shape[:-1], cut.dv), jnp.float32)
        start = like((acc, *(jnp.full(acc.shape[:-1], x, jnp.float32) for x in (-jnp.inf, 0.0))))

        def step(carry: Any, xs: tuple[Any, ...]) -> tuple[Any, None]:
            j, (key, value), state = xs

            def add() -> Any:
                return _attend(carry, cut.scores(query, key, i, j)[0], value, score, cut.keeps(query, key))

            return cut.unless_skipped(state, add, lambda: carry), None

        (acc, top, total), _ = lax.scan(step, start, (columns, keys, row))
        if score.kind == "sigmoid":
            return acc.astype(inputs.q.dtype), None
        some = total != 0  # true for NaN, so that it shows in the result
        out = acc / jnp.where(some, total, 1)[..., None]
        if score.dropout:
            out = out / (1 - score.dropout)
        return out.astype(inputs.q.dtype), jnp.where(some, top + jnp.log(jnp.where(some, total, 1)), -jnp.inf)

    out, lse = lax.map(queries, (rows, cut.queries(inputs.q, inputs.tokens), table))
    return cut.join(out), None if lse is None else cut.join(lse[..., None])[..., 0]


def backward(
    inputs: Inputs,
    mask: Mask,
    score: Score,
    out: jax.Array,
    lse: jax.Array | None,
    dout: jax.Array,
    dlse: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Return the cotangents of q, k, v and bias."""
    cut = _Cut.of(inputs, mask, score)
    queries, douts, stats = cut.queries(inputs.q, inputs.tokens), cut.split(dout), None
    like = _like((inputs, dout, dlse))
    if lse is not None and dlse is not None:
        stats = tuple(cut.split(x[..., None])[..., 0] for x in of_rows(out, lse, dout, dlse))

    def of_keys(carry: Any, xs: tuple[Any, ...]) -> tuple[Any, Any]:
        j, (key, value), column = xs

        def step(carry: Any, xs: tuple[Any, ...]) -> tuple[Any, Any]:
            i, query, dout, stat, state = xs
            work = lambda: _gradients(cut, query, key, value, dout, stat, i, j)  # noqa: E731

            def nothing() -> Any:
                return like(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(work)))

            dq, dk, dv, dbias = cut.unless_skipped(state, work, nothing)
            return (carry[0] + dk, carry[1] + dv), (dq, dbias)

        start = like(tuple(jnp.zeros(x.shape, jnp.float32) for x in (key.x, value)))
        xs = (jnp.arange(cut.nq), queries, douts, stats, column)
        (dk, dv), (dq, dbias) = lax.scan(step, start, xs)
        total, constant = carry
        if cut.bias is not None and cut.bias.shape[4] == 1:  # one number for all keys
            constant, dbias = constant + dbias, None
        return (total + dq, constant), (dk, dv, dbias)

    start = like((jnp.zeros(queries.x.shape, jnp.float32), cut.no_bias()))
    (dq, constant), (dk, dv, dbias) = lax.scan(of_keys, start, (jnp.arange(cut.nk), cut.keys(inputs), cut.table.T))
    return (
        cut.join(dq).astype(inputs.q.dtype),
        cut.join_keys(dk).astype(inputs.k.dtype),
        cut.join_keys(dv).astype(inputs.v.dtype),
        cut.join_bias(constant, dbias, inputs.bias),
    )


def _like(arrays: Any) -> Callable[[Any], Any]:
    """Return what makes arrays differ between devices of a `shard_map`, by their types, where any of `arrays` does."""
    kinds = tuple(jax.typeof(x) for x in jax.tree.leaves(arrays))
    return lambda tree: jax.tree.map(lambda x: varying(x, *kinds), tree)


def of_rows(out: jax.Array, lse: jax.Array, dout: jax.Array, dlse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return a softmax's gradient terms of each row: finite log-sum-exp, and sum of dout * out less dlse; (B, S, H)."""
    # An empty row has no gradient, whatever the cotangent of its log-sum-exp after a merge.
    delta = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), -1) - jnp.where(lse == -jnp.inf, 0, dlse)
    return jnp.where(lse == -jnp.inf, 0, lse), delta


def _attend(carry: Any, scores: jax.Array, value: jax.Array, score: Score, keep: jax.Array | None) -> Any:
    """Add one tile of keys, with scores of -inf where invisible; the sum of weights is that before dropout."""
    acc, top, total = carry
    if score.kind == "sigmoid":
        weights = jax.nn.sigmoid(scores)
        return acc + _product("bkgqt,bktd->bkgqd", weights.astype(value.dtype), value), top, total
    higher = jnp.maximum(top, scores.max(-1))
    finite = jnp.where(higher == -jnp.inf, 0, higher)
    fade, weights = jnp.exp(top - finite), jnp.exp(scores - finite[..., None])
    used = weights if keep is None else jnp.where(keep, weights, 0)
    mixed = _product("bkgqt,bktd->bkgqd", used.astype(value.dtype), value)
    return acc * fade[..., None] + mixed, higher, total * fade + weights.sum(-1)


def _gradients(
    cut: _Cut, query: _Tile, key: _Tile, value: jax.Array, dout: jax.Array, stat: Any, i: jax.Array, j: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Return what one tile adds to the cotangents of its queries, keys, values and bias, in float32."""
    scores, slope = cut.scores(query, key, i, j)
    dweights = _product("bkgqd,bktd->bkgqt", dout, value)
    keep = cut.keeps(query, key)
    if keep is not None:
        dweights = jnp.where(keep, dweights / (1 - cut.score.dropout), 0)
    if cut.score.kind == "sigmoid":
        weights = jax.nn.sigmoid(scores)
        dscores = dweights * weights * (1 - weights)
    else:
        lse, delta = stat
        weights = jnp.exp(scores - lse[..., None])
        dscores = weights * (dweights - delta[..., None])
    used = weights if keep is None else jnp.where(keep, weights / (1 - cut.score.dropout), 0)
    dbias = cut.sum_bias(dscores)
    if slope is not None:
        dscores = dscores * slope
    dscores = (dscores * cut.score.scale).astype(query.x.dtype)
    return (
        _product("bkgqt,bktd->bkgqd", dscores, key.x),
        _product("bkgqt,bkgqd->bktd", dscores, query.x),
        _product("bkgqt,bkgqd->bktd", used.astype(dout.dtype), dout),
        dbias,
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Tile:
    """Queries or keys, one tile of them or all, with their segments, positions and places (B, length) or `None`."""

    x: jax.Array
    segments: jax.Array | None
    positions: jax.Array | None
    places: jax.Array | None


@dataclasses.dataclass(frozen=True)
class _Cut:
    """How sequences are cut into tiles, and the work on a tile.

    Args:
      mask: the mask.
      score: how scores become weights.
      s: queries.
      t: keys.
      groups: query heads for each key head.
      dv: width of a value.
      q: queries of a tile; the last tile is padded with zeros.
      k: keys of a tile; the last tile is padded with zeros.
      nq: tiles of queries.
      nk: tiles of keys.
      bias: float32 (B or 1, K or 1, G or 1, padded S or 1, padded T or 1), or `None`.
      table: `tile_table`.
      skips: whether the table has, or may have, a tile to skip.
      drop: what decides which weights are dropped, or `None`.
    """

    mask: Mask
    score: Score
    s: int
    t: int
    groups: int
    dv: int
    q: int
    k: int
    nq: int
    nk: int
    bias: jax.Array | None
    table: Any
    skips: bool
    drop: Drop | None

    @classmethod
    def of(cls, inputs: Inputs, mask: Mask, score: Score) -> _Cut:
        (_, s, h, _), (_, t, kv, dv) = inputs.q.shape, inputs.v.shape
        blocks = mask.blocks
        q, k = _size(s, None if blocks is None else blocks.query), _size(t, None if blocks is None else blocks.key)
        nq, nk = -(-s // q), -(-t // k)
        table = tile_table(mask, inputs.tokens, s=s, t=t, q_tile=q, k_tile=k)
        skips = not isinstance(table, np.ndarray) or bool((table == SKIP).any())
        bias = inputs.bias
        if bias is not None:
            pad = [(0, 0), (0, 0)] + [
                (0, n * size - length if length > 1 else 0)
                for n, size, length in ((nq, q, bias.shape[2]), (nk, k, bias.shape[3]))
            ]
            bias = jnp.pad(bias.astype(jnp.float32), pad)
            heads = (kv, h // kv) if bias.shape[1] > 1 else (1, 1)
            bias = bias.reshape(bias.shape[0], *heads, *bias.shape[2:])
        return cls(mask, score, s, t, h // kv, dv, q, k, nq, nk, bias, table, skips, inputs.drop)

    def split(self, x: jax.Array) -> jax.Array:
        """Return (B, S, H, D) as (nq, B, K, G, q, D)."""
        b, s, h, d = x.shape
        x = jnp.pad(x, ((0, 0), (0, self.nq * self.q - s), (0, 0), (0, 0)))
        x = x.reshape(b, self.nq, self.q, h // self.groups, self.groups, d)
        return x.transpose(1, 0, 3, 4, 2, 5)

    def join(self, x: jax.Array) -> jax.Array:
        """Undo `split`."""
        nq, b, kv, groups, q, d = x.shape
        return x.transpose(1, 0, 4, 2, 3, 5).reshape(b, nq * q, kv * groups, d)[:, : self.s]

    def queries(self, x: jax.Array, tokens: Tokens) -> _Tile:
        """Return all queries, with tiles along the first axis."""
        places = None if self.drop is None else self.drop.q_places
        rows = (_rows(a, self.nq, self.q) for a in (tokens.q_segments, tokens.q_positions, places))
        return _Tile(self.split(x), *rows)

    def keys(self, inputs: Inputs) -> tuple[_Tile, jax.Array]:
        """Return all keys and values, with tiles along the first axis."""

        def split(x: jax.Array) -> jax.Array:
            b, t, kv, d = x.shape
            x = jnp.pad(x, ((0, 0), (0, self.nk * self.k - t), (0, 0), (0, 0)))
            return x.reshape(b, self.nk, self.k, kv, d).transpose(1, 0, 3, 2, 4)

        places = None if self.drop is None else self.drop.k_places
        tokens = inputs.tokens
        rows = (_rows(a, self.nk, self.k) for a in (tokens.k_segments, tokens.k_positions, places))
        return _Tile(split(inputs.k), *rows), split(inputs.v)

    def join_keys(self, x: jax.Array) -> jax.Array:
        """Return (nk, B, K, k, D) as (B, T, K, D)."""
        nk, b, kv, k, d = x.shape
        return x.transpose(1, 0, 3, 2, 4).reshape(b, nk * k, kv, d)[:, : self.t]

    def unless_skipped(self, state: jax.Array, work: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
        """Return `work()`, or `otherwise()` where the tile is skipped."""
        return lax.cond(state != SKIP, work, otherwise) if self.skips else work()

    def scores(self, query: _Tile, key: _Tile, i: jax.Array, j: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Return a tile's scores, -inf where invisible, and the derivative of the soft-cap, or `None`."""
        scores, slope = _product("bkgqd,bktd->bkgqt", query.x, key.x) * self.score.scale, None
        if self.score.softcap is not None:
            tanh = jnp.tanh(scores / self.score.softcap)
            scores, slope = self.score.softcap * tanh, 1 - tanh * tanh
        if self.bias is not None:
            *_, rows, columns = self.bias.shape
            start = (0, 0, 0, i * self.q if rows > 1 else 0, j * self.k if columns > 1 else 0)
            scores = scores + lax.dynamic_slice(self.bias, start, self._bias_tile())
        if self.score.shift:
            scores = scores + self.score.shift
        q_index, k_index = i * self.q + jnp.arange(self.q), j * self.k + jnp.arange(self.k)
        tokens = Tokens(query.segments, key.segments, query.positions, key.positions)
        seen = visible(self.mask, tokens, q_index, k_index, s=self.s, t=self.t)
        if self.nk * self.k > self.t:
            real = (k_index < self.t)[None, None]
            seen = real if seen is None else seen & real
        return (scores if seen is None else jnp.where(seen[:, None, None], scores, -jnp.inf)), slope

    def keeps(self, query: _Tile, key: _Tile) -> jax.Array | None:
        """Return which of a tile's weights are kept, (B, K, G, q, k); `None` for all."""
        if self.drop is None or query.places is None or key.places is None:
            return None
        b, h, _ = self.drop.seeds.shape
        seeds = self.drop.seeds.reshape(b, h // self.groups, self.groups, 1, 1, 2)
        of_q, of_k = query.places[:, None, None, :, None], key.places[:, None, None, None]
        return keeps(self.score.dropout, (seeds[..., 0], seeds[..., 1]), of_q, of_k)

    def _bias_tile(self) -> tuple[int, ...]:
        assert self.bias is not None
        *whole, s, t = self.bias.shape
        return *whole, self.q if s > 1 else 1, self.k if t > 1 else 1

    def no_bias(self) -> jax.Array | None:
        """Return the initial cotangent of a bias without a key axis, or `None`."""
        if self.bias is None or self.bias.shape[4] > 1:
            return None
        tile = self._bias_tile()
        return jnp.zeros((self.nq, *tile), jnp.float32)

    def sum_bias(self, dscores: jax.Array) -> jax.Array | None:
        """Return a tile's part of the bias's cotangent."""
        if self.bias is None:
            return None
        over = tuple(a for a, n in enumerate(self._bias_tile()) if n == 1)
        return dscores.sum(over, keepdims=True)

    def join_bias(self, constant: jax.Array | None, parts: jax.Array | None, bias: jax.Array | None) -> Any:
        """Return the bias's cotangent from (nq, tile) or from (nk, nq, tile)."""
        if self.bias is None or bias is None:
            return None
        if constant is not None:
            parts = constant[None]
        assert parts is not None
        if self.bias.shape[3] == 1:
            parts = parts.sum(1, keepdims=True)
        nk, nq, b, kv, groups, q, k = parts.shape
        whole = parts.transpose(2, 3, 4, 1, 5, 0, 6).reshape(b, kv * groups, nq * q, nk * k)
        return whole[:, :, : bias.shape[2], : bias.shape[3]].astype(bias.dtype)


def _size(length: int, block: int | None) -> int:
    """Return a tile's size, at most `TILE`: as few tiles as possible, of one size, or a multiple of a mask's blocks."""
    if block is not None and block <= TILE:
        return min(TILE // block, -(-length // block)) * block
    count = -(-length // TILE)
    even = -(-length // count)
    return even if count == 1 else -(-even // 8) * 8


def _rows(x: jax.Array | None, count: int, tile: int) -> jax.Array | None:
    """Return (B, length) as (count, B, tile), padded with its last number."""
    if x is None:
        return None
    x = jnp.pad(x, ((0, 0), (0, count * tile - x.shape[1])), mode="edge")
    return x.reshape(x.shape[0], count, tile).swapaxes(0, 1)
