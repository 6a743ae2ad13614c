"""Sums over a vocabulary, of functions of logits that exist a tile at a time.

`sums` and `slopes` work on one device's rows of the heads, `largest` finds its largest logits. Tiles of tokens are of
one size (the last is filled with zeros); the last tile of words begins earlier instead and skips what the tile before
has done, so that a head is never copied.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

TILE = (2048, 2048)
"""Most tokens and words of a tile: 16 MiB of float32."""


class Head(NamedTuple):
    """What gives one model's logits: `softcap * tanh(x @ w.T / softcap)`, divided by the temperature beforehand.

    Args:
      x: hidden states, (N, E).
      w: this device's rows of the head, (R, E).
      lse: log-sum-exp of the logits over the whole vocabulary, float32 (N,).
    """

    x: Float[Array, "n e"]
    w: Float[Array, "r e"]
    lse: Float[Array, " n"]


class Summand(Protocol):
    """What is summed over the vocabulary, for each token."""

    def of(self, logprobs: tuple[Array, ...], words: Array, tokens: Array | None) -> Any:
        """Return float32 arrays, (n, ...), of a tile: sums over its words.

        Args:
          logprobs: of each head, float32 (n, m), -inf where a column is no word or belongs to another tile.
          words: the columns' rows, (m,).
          tokens: what else there is for each token, (n, ...).
        """
        ...

    def slopes(
        self, logprobs: tuple[Array, ...], words: Array, tokens: Array | None, total: Any, slope: Any
    ) -> tuple[Array, ...]:
        """Return the derivatives by each head's logits, float32 (n, m).

        Args:
          logprobs: as above.
          words: as above.
          tokens: as above.
          total: the sums over the whole vocabulary.
          slope: their cotangents.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Settings:
    """Static settings of a sum.

    Args:
      summand: what is summed.
      softcaps: of each head's logits, or `None`.
      trained: which heads have gradients.
    """

    summand: Summand
    softcaps: tuple[float | None, ...]
    trained: tuple[bool, ...]


def sums(heads: tuple[Head, ...], tokens: Array | None, words: Array, settings: Settings) -> Any:
    """Return `settings.summand` summed over this device's words, for each token.

    Args:
      heads: of one or several models that have the same vocabulary.
      tokens: what else the summand needs of each token, (N, ...).
      words: how many of the heads' rows are words, from the first on; can be negative or more than there are.
      settings: of the sum.
    """

    def of_tokens(part: tuple[tuple[Array, Array], ...], more: Array | None) -> Any:
        def tile(i: Array) -> Any:
            cut = _words(heads[0].w, i, words)
            logprobs = tuple(
                cut.real(_logits(x, cut.take(h.w, x.dtype), cap)[0] - lse[:, None])
                for h, (x, lse), cap in zip(heads, part, settings.softcaps, strict=True)
            )
            return settings.summand.of(logprobs, cut.rows, more)

        def add(i: Array, total: Any) -> Any:
            return jax.tree.map(jnp.add, total, tile(i))

        zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(tile, jnp.int32(0)))
        return lax.fori_loop(0, _count(heads[0].w.shape[0], TILE[1]), add, zero)

    n = heads[0].x.shape[0]
    out = lax.map(lambda args: of_tokens(*args), _in_tiles((tuple((h.x, h.lse) for h in heads), tokens), n))
    return _together(out, n)


def slopes(
    heads: tuple[Head, ...],
    tokens: Array | None,
    words: Array,
    total: Any,
    slope: Any,
    settings: Settings,
    dtypes: tuple[DTypeLike, ...],
) -> tuple[tuple[Array, Array] | None, ...]:
    """Return the gradients of each trained head's x, float32 (N, E), and w, (R, E); `None` for the others.

    Args:
      heads: as of `sums`.
      tokens: as of `sums`.
      words: as of `sums`.
      total: the sums over the whole vocabulary.
      slope: their cotangents.
      settings: as of `sums`.
      dtypes: of each w's gradient.
    """
    n, rows = heads[0].x.shape[0], heads[0].w.shape[0]
    parts = _in_tiles((tuple((h.x, h.lse) for h in heads), tokens, total, slope), n)
    trained = [i for i, yes in enumerate(settings.trained) if yes]
    tiles, size = _count(rows, TILE[1]), min(rows, TILE[1])

    def of_words(i: Array, state: tuple[list[Array], list[Array]]) -> tuple[list[Array], list[Array]]:
        dxs, dws = state
        cut = _words(heads[0].w, tiles - 1 - i, words)  # the last first: what it skips is written by the one before
        ws = [cut.take(h.w, h.x.dtype) for h in heads]

        def of_tokens(dw: list[Array], part: Any) -> tuple[list[Array], list[Array]]:
            (xs, more, all_of, by), old = part
            pairs = [_logits(x, w, cap) for (x, _), w, cap in zip(xs, ws, settings.softcaps, strict=True)]
            logprobs = tuple(cut.real(y - lse[:, None]) for (y, _), (_, lse) in zip(pairs, xs, strict=True))
            ds = settings.summand.slopes(logprobs, cut.rows, more, all_of, by)
            new_dx, new_dw = [], []
            for at, k in enumerate(trained):
                d, (_, bent), x = ds[k], pairs[k], xs[k][0]
                d = jnp.where(cut.fresh, d if bent is None else d * bent, 0).astype(x.dtype)
                new_dx.append(old[at] + _dot("nv,ve->ne", d, ws[k]))
                new_dw.append(dw[at] + _dot("nv,ne->ve", d, x))
            return new_dw, new_dx

        start = [jnp.zeros((size, heads[k].w.shape[1]), jnp.float32) for k in trained]
        dw, dxs = lax.scan(of_tokens, start, (parts, dxs))
        put = lax.dynamic_update_slice_in_dim
        return dxs, [put(a, b.astype(a.dtype), cut.start, 0) for a, b in zip(dws, dw, strict=True)]

    zeros = [jnp.zeros(parts[0][k][0].shape, jnp.float32) for k in trained]
    dws = [jnp.zeros(heads[k].w.shape, dtypes[k]) for k in trained]
    dxs, dws = lax.fori_loop(0, tiles, of_words, (zeros, dws))
    results = {k: (_together(dxs[at], n), dws[at]) for at, k in enumerate(trained)}
    return tuple(results.get(k) for k in range(len(heads)))


def largest(head: Head, k: int, words: Array, softcap: float | None) -> tuple[Array, Array]:
    """Return each token's `k` largest log-probabilities, float32 (N, k), and their rows, int32 (N, k).

    Args:
      head: of one model.
      k: number of words.
      words: as of `sums`.
      softcap: of the logits.
    """

    def of_tokens(x: Array, lse: Array) -> tuple[Array, Array]:
        def tile(i: Array, best: tuple[Array, Array]) -> tuple[Array, Array]:
            cut = _words(head.w, i, words)
            new = cut.real(_logits(x, cut.take(head.w, x.dtype), softcap)[0] - lse[:, None])
            values = jnp.concatenate([best[0], new], 1)
            index = jnp.concatenate([best[1], jnp.broadcast_to(cut.rows, new.shape)], 1)
            top, at = lax.top_k(values, k)
            return top, jnp.take_along_axis(index, at, 1)

        start = jnp.full((x.shape[0], k), -jnp.inf), jnp.zeros((x.shape[0], k), jnp.int32)
        return lax.fori_loop(0, _count(head.w.shape[0], TILE[1]), tile, start)

    n = head.x.shape[0]
    return _together(lax.map(lambda args: of_tokens(*args), _in_tiles((head.x, head.lse), n)), n)


class _Words(NamedTuple):
    """A tile of words: its first row, all rows, and which are words and in no earlier tile."""

    start: Int[Array, ""]
    rows: Int[Array, " m"]
    fresh: Bool[Array, " m"]

    def take(self, w: Array, dtype: Any) -> Array:
        if w.dtype.itemsize == 2:  # else XLA for CPUs converts all of w to float32 before the loop
            w, start = lax.optimization_barrier((w, self.start))
            return lax.dynamic_slice_in_dim(w, start, len(self.rows), 0).astype(dtype)
        return lax.dynamic_slice_in_dim(w, self.start, len(self.rows), 0).astype(dtype)

    def real(self, logprobs: Array) -> Array:
        return jnp.where(self.fresh, logprobs, -jnp.inf)


def _words(w: Array, i: Array, words: Array) -> _Words:
    size = min(w.shape[0], TILE[1])
    start = jnp.minimum(i * size, w.shape[0] - size)
    index = start + jnp.arange(size, dtype=jnp.int32)
    return _Words(start, index, (index >= i * size) & (index < words))


def _logits(x: Array, w: Array, softcap: float | None) -> tuple[Array, Array | None]:
    """Return float32 logits, and the soft cap's derivative."""
    logits = _dot("ne,ve->nv", x, w)
    if softcap is None:
        return logits, None
    tanh = jnp.tanh(logits / softcap)
    return softcap * tanh, 1 - tanh * tanh


def _count(length: int, size: int) -> int:
    return max(1, -(-length // size))


def _in_tiles(tree: Any, n: int) -> Any:
    """Return arrays (n, ...) as (tiles, size, ...), the last tile filled with zeros."""
    tiles = _count(n, TILE[0])
    size = -(-n // tiles)

    def cut(x: Array) -> Array:
        x = jnp.pad(x, [(0, tiles * size - n)] + [(0, 0)] * (x.ndim - 1)) if tiles * size > n else x
        return x.reshape(tiles, size, *x.shape[1:])

    return jax.tree.map(cut, tree)


def _together(tree: Any, n: int) -> Any:
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:n], tree)


def _dot(subscripts: str, *arrays: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, *arrays, preferred_element_type=jnp.float32)


@dataclasses.dataclass(frozen=True)
class OfLogprobs:
    """Sums a function of the heads' log-probabilities of each word.

    Args:
      fn: float32 (n, m) of each head -> float32 (n, m), element by element; its value for -inf does not matter.
    """

    fn: Callable[..., Array]

    def of(self, logprobs: tuple[Array, ...], words: Array, tokens: Array | None) -> tuple[Array, ...]:
        """Return the sum, and for each head the sum of the derivatives by its log-probabilities."""
        real = logprobs[0] > -jnp.inf
        y, by = self._with_slopes(logprobs, real)
        return tuple(jnp.sum(jnp.where(real, a, 0), 1) for a in (y, *by))

    def slopes(
        self, logprobs: tuple[Array, ...], words: Array, tokens: Array | None, total: Any, slope: Any
    ) -> tuple[Array, ...]:
        """Return the derivatives: a logit changes its own log-probability, and all others through the log-sum-exp."""
        _, by = self._with_slopes(logprobs, logprobs[0] > -jnp.inf)
        d = slope[0][:, None]
        return tuple(d * (b - jnp.exp(lp) * t[:, None]) for b, lp, t in zip(by, logprobs, total[1:], strict=True))

    def _with_slopes(self, logprobs: tuple[Array, ...], real: Array) -> tuple[Array, tuple[Array, ...]]:
        finite = [jnp.where(real, lp, 0) for lp in logprobs]
        y, pull = jax.vjp(self.fn, *finite)
        return y, pull(jnp.ones_like(y))


@dataclasses.dataclass(frozen=True)
class Chosen:
    """Selects the log-probabilities of some words of each token, `tokens`: rows, int32 (n, k)."""

    def of(self, logprobs: tuple[Array, ...], words: Array, tokens: Array | None) -> tuple[Array, ...]:
        """Return the log-probability of each row that is in this tile, else 0."""
        here, at = self._place(logprobs[0], words, tokens)
        return (jnp.where(here, jnp.take_along_axis(logprobs[0], at, 1), 0),)

    def slopes(
        self, logprobs: tuple[Array, ...], words: Array, tokens: Array | None, total: Any, slope: Any
    ) -> tuple[Array, ...]:
        """Return the derivatives."""
        here, at = self._place(logprobs[0], words, tokens)
        d = slope[0]
        lines = jnp.arange(d.shape[0])[:, None]
        own = jnp.zeros(logprobs[0].shape, jnp.float32).at[lines, at].add(jnp.where(here, d, 0))
        return (own - jnp.exp(logprobs[0]) * d.sum(1, keepdims=True),)

    def _place(self, logprobs: Array, words: Array, rows: Array | None) -> tuple[Array, Array]:
        assert rows is not None
        at = rows - words[0]
        inside = (at >= 0) & (at < len(words))
        at = jnp.clip(at, 0, len(words) - 1)
        return inside & (jnp.take_along_axis(logprobs, at, 1) > -jnp.inf), at
