"""The loss in tiles, as XLA computes it on any platform: for each chunk of the vocabulary, chunks of the tokens.

At most `TILE` logits exist at a time, 16 MiB of float32, whatever N and V are. The forward pass keeps a running maximum
and sum (Milakov & Gimelshein 2018). The backward pass computes each tile's logits again, and its probabilities from the
log-sum-exp. A word's gradient is summed over all tokens in float32 and written once; a token's is summed over all words
in a float32 array of x's shape. So a pass needs a few tiles besides its outputs, and the backward pass that array.

Where a size is no multiple of a tile, the last tile begins earlier and skips what the tile before has done: nothing is
padded, so nothing is copied. (On a CPU, a 16-bit gradient of w is rewritten whole for each chunk of the vocabulary,
since XLA widens such updates; it still takes no extra memory.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.arguments import varying
from pallas_kernels.cut_cross_entropy.inputs import Inputs, Logits, Merged, Parts, entropy_of
from pallas_kernels.softmax.pairs import pair

__all__ = ["FILTER_TILE", "TILE", "Cotangents", "backward", "forward", "skipped"]

TILE = (2048, 2048)
"""Most tokens and words of a tile."""

FILTER_TILE = (256, 512)
"""Tokens and words of a block that the filter may leave out: smaller, since one large entry keeps the whole block."""

Cotangents = Callable[[Inputs, jax.Array, Merged, jax.Array | None], jax.Array]
"""Returns the cotangents of a tile's products in x's dtype, (tokens, words) or (words, tokens).

Its arguments are the arrays of the tile, with w in x's dtype and rows counted from the tile's first word; the
log-sum-exp and the cotangents of its tokens; and the number of its first words that get 0, or `None` for none.
"""


def _start(tree: Any, inputs: Inputs, *others: Any) -> Any:
    """Return a loop's first values as arrays of a `shard_map` that differ between devices where those it reads do."""
    kinds = [jax.typeof(a) for a in jax.tree.leaves((inputs, others))]
    return jax.tree.map(lambda x: varying(x, *kinds), tree)


def _dot(subscripts: str, *arrays: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, *arrays, preferred_element_type=jnp.float32)


class _Running(NamedTuple):
    """State of each token: running maximum, sum of exponentials, target's logit, sum of logits, and of u exp(u).

    The exponentials are of u, the differences from the maximum.
    """

    top: jax.Array
    total: jax.Array
    hit: jax.Array
    summed: jax.Array | None
    weighted: jax.Array | None


def forward(inputs: Inputs, logits: Logits) -> Parts:
    """Return the parts of every token."""
    cut = _Cut.of(inputs, logits, TILE)

    def of_words(i: jax.Array, state: _Running) -> _Running:
        words = cut.words(i)

        def tile(j: jax.Array, state: _Running) -> _Running:
            tokens = cut.tokens(j)
            old = jax.tree.map(tokens.take, state)
            new = _add(old, *cut.logits_of(tokens, words)[:2], words.fresh)
            if (fresh := tokens.fresh) is not None:
                new = jax.tree.map(lambda a, b: jnp.where(fresh, a, b), new, old)
            return jax.tree.map(tokens.put, state, new)

        return lax.fori_loop(0, cut.token_tiles, tile, state)

    start = jnp.zeros(inputs.rows.shape, jnp.float32)
    more = (start if needed else None for needed in (logits.summed, logits.entropy))
    state = _start(_Running(start - jnp.inf, start, start, *more), inputs)
    state = lax.fori_loop(0, cut.word_tiles, of_words, state)
    entropy = None if state.weighted is None else entropy_of(state.total, state.weighted)
    return Parts(pair(_finite(state.top), state.total), state.hit, state.summed, entropy)


def _add(old: _Running, logits: jax.Array, hit: jax.Array, fresh: jax.Array | None) -> _Running:
    """Add one tile to the state."""
    seen = logits if fresh is None else jnp.where(fresh, logits, -jnp.inf)
    top = jnp.maximum(old.top, seen.max(1))
    zero = _finite(top)
    u, scale = seen - zero[:, None], jnp.exp(old.top - zero)
    total = old.total * scale + jnp.exp(u).sum(1)
    summed = weighted = None
    if old.summed is not None:
        summed = old.summed + (logits if fresh is None else jnp.where(fresh, logits, 0)).sum(1)
    if old.weighted is not None:
        weighted = scale * (old.weighted + (_finite(old.top) - zero) * old.total)
        weighted = weighted + (jnp.exp(u) * (u if fresh is None else jnp.where(fresh, u, 0))).sum(1)
    return _Running(top, total, old.hit + jnp.where(hit, logits, 0).sum(1), summed, weighted)


def _finite(top: jax.Array) -> jax.Array:
    return jnp.where(top == -jnp.inf, 0, top)


def backward(
    inputs: Inputs,
    lse: jax.Array,
    slopes: Merged,
    logits: Logits,
    dw_dtype: str,
    *,
    most: tuple[int, int] | None = None,
    cotangents: Cotangents | None = None,
    order: str = "nv",
) -> tuple[jax.Array, jax.Array]:
    """Return the cotangents of x and of w.

    Args:
      inputs: the op's arrays.
      lse: float32 (N,), the log-sum-exp over the whole vocabulary.
      slopes: float32 (N,), cotangents of the result, `folded`.
      logits: how logits are computed.
      dw_dtype: of w's cotangent.
      most: tokens and words of a tile; those of `TILE` or `FILTER_TILE` by default.
      cotangents: a kernel that computes those of a tile; XLA by default.
      order: "nv" where they are (tokens, words), "vn" where they are (words, tokens).
    """
    cut = _Cut.of(inputs, logits, most or (TILE if logits.filter is None else FILTER_TILE))
    axis = logits.words_axis

    def of_words(i: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        # The last chunk first: the words that it skips are overwritten by the chunk before.
        words = cut.words(cut.word_tiles - 1 - i)

        def tile(j: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            tokens, needed = cut.tokens(j), None
            if cotangents is None:
                slope, needed = cut.slope_of(tokens, words, lse, slopes)
                slope = slope.astype(inputs.x.dtype)
            else:
                slope = cotangents(*cut.of_tile(tokens, words, lse, slopes))

            def work(dx: jax.Array, dw: jax.Array) -> tuple[jax.Array, jax.Array]:
                dx = tokens.put(dx, tokens.take(dx) + _dot(f"{order},{logits.w_layout}->ne", slope, words.values))
                return dx, dw + _dot(f"{order},ne->{logits.w_layout}", slope, tokens.values)

            return work(*state) if needed is None else lax.cond(needed, work, lambda *same: same, *state)

        dx, dw = state
        dw_tile = _start(jnp.zeros(words.values.shape, jnp.float32), inputs, lse, slopes)
        dx, dw_tile = lax.fori_loop(0, cut.token_tiles, tile, (dx, dw_tile))
        return dx, words.put(dw, dw_tile.astype(dw.dtype), axis)

    start = jnp.zeros(inputs.x.shape, jnp.float32), jnp.zeros(inputs.w.shape, dw_dtype)
    dx, dw = lax.fori_loop(0, cut.word_tiles, of_words, _start(start, inputs, lse, slopes))
    return dx.astype(inputs.x.dtype), dw


def skipped(inputs: Inputs, lse: jax.Array, slopes: Merged, logits: Logits) -> jax.Array:
    """Return the share of blocks that `backward` leaves out, float32."""
    cut = _Cut.of(inputs, logits, FILTER_TILE)

    def of_words(i: jax.Array, count: jax.Array) -> jax.Array:
        words = cut.words(i)

        def tile(j: jax.Array, count: jax.Array) -> jax.Array:
            needed = cut.slope_of(cut.tokens(j), words, lse, slopes)[1]
            return count if needed is None else count + ~needed

        return lax.fori_loop(0, cut.token_tiles, tile, count)

    count = lax.fori_loop(0, cut.word_tiles, of_words, _start(jnp.zeros([], jnp.int32), inputs, lse, slopes))
    return count.astype(jnp.float32) / (cut.token_tiles * cut.word_tiles)


@dataclasses.dataclass(frozen=True)
class _Tile:
    """Some tokens or words.

    Args:
      start: the first one.
      size: number of them.
      values: their vectors, in x's dtype.
      fresh: boolean, which of them are in no earlier tile; `None` for all.
    """

    start: jax.Array
    size: int
    values: jax.Array
    fresh: jax.Array | None

    def take(self, x: jax.Array, axis: int = 0) -> jax.Array:
        return lax.dynamic_slice_in_dim(x, self.start, self.size, axis)

    def put(self, x: jax.Array, part: jax.Array, axis: int = 0) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(x, part, self.start, axis)


@dataclasses.dataclass(frozen=True)
class _Cut:
    """How tokens and words are cut into tiles.

    Args:
      inputs: the op's arrays.
      logits: how logits are computed.
      token_size: tokens of a tile.
      word_size: words of a tile.
      token_tiles: number of tiles of tokens.
      word_tiles: number of tiles of words.
    """

    inputs: Inputs
    logits: Logits
    token_size: int
    word_size: int
    token_tiles: int
    word_tiles: int

    @classmethod
    def of(cls, inputs: Inputs, logits: Logits, tile: tuple[int, int]) -> _Cut:
        lengths = inputs.x.shape[0], inputs.w.shape[logits.words_axis]
        sizes = [_size(length, most) for length, most in zip(lengths, tile, strict=True)]
        return cls(inputs, logits, *sizes, *(max(1, -(-n // max(1, s))) for n, s in zip(lengths, sizes, strict=True)))

    def tokens(self, j: jax.Array) -> _Tile:
        return self._tile(self.inputs.x, j, self.token_size, 0)

    def words(self, i: jax.Array) -> _Tile:
        return self._tile(self.inputs.w, i, self.word_size, self.logits.words_axis)

    def _tile(self, x: jax.Array, i: jax.Array, size: int, axis: int) -> _Tile:
        length = x.shape[axis]
        start = jnp.minimum(i * size, length - size)
        fresh = start + jnp.arange(size) >= i * size if length % max(1, size) else None
        values = _slice(x, start, size, axis).astype(self.inputs.x.dtype)
        return _Tile(start, size, values, fresh)

    def logits_of(self, tokens: _Tile, words: _Tile) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Return a tile's float32 logits, which of them are targets, and the derivative of the soft-cap or `None`."""
        logits, slope = _dot(f"ne,{self.logits.w_layout}->nv", tokens.values, words.values), None
        if (cap := self.logits.softcap) is not None:
            tanh = jnp.tanh(logits / cap)
            logits, slope = cap * tanh, 1 - tanh * tanh
        hit = tokens.take(self.inputs.rows)[:, None] == words.start + jnp.arange(words.size)
        return logits, hit if words.fresh is None else hit & words.fresh, slope

    def of_tile(
        self, tokens: _Tile, words: _Tile, lse: jax.Array, slopes: Merged
    ) -> tuple[Inputs, jax.Array, Merged, jax.Array | None]:
        """Return the arguments of `Cotangents`."""
        d = jax.tree.map(tokens.take, slopes)
        if (fresh := tokens.fresh) is not None:
            d = jax.tree.map(lambda a: jnp.where(fresh, a, 0), d)
        inputs = Inputs(tokens.values, words.values, tokens.take(self.inputs.rows) - words.start)
        return inputs, tokens.take(lse), d, None if words.fresh is None else jnp.sum(~words.fresh)

    def slope_of(
        self, tokens: _Tile, words: _Tile, lse: jax.Array, slopes: Merged
    ) -> tuple[jax.Array, jax.Array | None]:
        """Return the cotangent of a tile's products, 0 where skipped, and whether the filter keeps it or `None`."""
        logits, hit, cap = self.logits_of(tokens, words)
        d = jax.tree.map(tokens.take, slopes)
        slope = d.of_logits(logits - tokens.take(lse)[:, None], hit)
        if cap is not None:
            slope = slope * cap
        if words.fresh is not None:
            slope = jnp.where(words.fresh, slope, 0)
        if tokens.fresh is not None:
            slope = jnp.where(tokens.fresh[:, None], slope, 0)
        if self.logits.filter is None:
            return slope, None
        largest = jnp.stack([jnp.abs(x) for x in jax.tree.leaves(d)]).max(0)
        # Negated, so that NaN counts as large.
        return slope, ~jnp.all(jnp.abs(slope) <= self.logits.filter * largest[:, None])


def _slice(x: jax.Array, start: jax.Array, size: int, axis: int) -> jax.Array:
    """`lax.dynamic_slice_in_dim`, without XLA for CPUs converting all of a 16-bit x to float32 before the loop."""
    if x.dtype.itemsize == 2:
        x, start = lax.optimization_barrier((x, start))
    return lax.dynamic_slice_in_dim(x, start, size, axis)


def _size(length: int, most: int) -> int:
    """Return a tile's size: as few tiles as `most` allows, of one size; several are multiples of a vector register."""
    if length <= most:
        return length
    even = -(-length // -(-length // most))
    return min(most, -(-even // 128) * 128)
