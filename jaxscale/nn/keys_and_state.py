"""`KeysAndState`: what a layer stores that has both keys and values of tokens and a recurrent state."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxscale.errors import ConfigError
from jaxscale.layout import current
from jaxscale.nn.cache import Cache, KeyValues, LayerCache, RecurrentState, State
from jaxscale.nn.ring import is_ring, mix_in_ring


@dataclasses.dataclass(frozen=True)
class KeysAndState:
    """Keys and values of tokens beside a recurrent state; a `DecodeState`.

    Args:
      keys: what is stored of tokens.
      recurrent: the state, whose arrays have other names than a cache's ("k", "v", "k_scale", "v_scale").
      every: with a number, only the last one of each `every` tokens of a sequence is stored, and the recurrent state
        restarts after it. A paged cache then needs pages of a multiple of `every` tokens, and sequences that begin
        alike share their pages, since a page ends where the state restarts.
    """

    keys: KeyValues
    recurrent: RecurrentState
    every: int | None = None

    def reusable(self, cache: Cache) -> bool:
        """See `DecodeState`."""
        if self.every is not None:
            return cache.page is not None
        return self.recurrent.reusable(cache) and self.keys.reusable(cache)

    def init(self, cache: Cache, layers: int, batch: int, slots: int, length: int, back: int) -> State:
        """See `DecodeState`.

        Raises:
          ConfigError: the tokens of a page are not a multiple of `every`.
        """
        keys = self.keys.init(self.coarse(cache), layers, batch, slots, self._stored(cache, length), back)
        return {**keys, **self.recurrent.init(cache, layers, batch, slots, length, back)}

    def axes(self, cache: Cache, name: str) -> tuple[str | None, ...] | None:
        """See `DecodeState`."""
        return (self.recurrent if name in self._names else self.keys).axes(cache, name)

    def bytes(self, cache: Cache, layers: int, batch: int, slots: int, length: int, back: int) -> int:
        """See `DecodeState`."""
        keys = self.keys.bytes(self.coarse(cache), layers, batch, slots, self._stored(cache, length), back)
        return keys + self.recurrent.bytes(cache, layers, batch, slots, length, back)

    def coarse(self, cache: Cache) -> Cache:
        """Return the cache whose positions are those of stored tokens.

        Args:
          cache: the kind of KV cache.

        Raises:
          ConfigError: the tokens of a page are not a multiple of `every`.
        """
        if self.every is None or cache.page is None:
            return cache
        if cache.page % self.every:
            raise ConfigError(
                f"the layer stores one key for each {self.every} tokens, and a page of {cache.page} is not a multiple "
                f"of that; set PagedCache.page = {-(-cache.page // self.every) * self.every}"
            )
        coarse: Any = cache
        return dataclasses.replace(coarse, page=cache.page // self.every)

    def mix(
        self, layer: LayerCache, q: Array, k: Array, v: Array, **mask: Any
    ) -> tuple[Float[Array, "b s h dv"], Float[Array, "b s h"]]:
        """Store keys and values, and attend to the stored ones; with `every`, to those of finished groups of tokens.

        Args:
          layer: the layer's cache, whose state is replaced.
          q: queries (batch, columns, heads, key_dim).
          k: keys (batch, columns, kv_heads, key_dim).
          v: values (batch, columns, kv_heads, value_dim).
          **mask: `window`, `softcap` and `scale` of `Cache.attend`.

        Returns:
          outputs (batch, columns, heads, value_dim) in `q`'s dtype, and log-sum-exps (batch, columns, heads), float32;
          0 and -inf for a token that sees nothing.
        """
        cache, step = self.coarse(layer.cache), layer.step
        write = read = step
        if self.every is not None:
            places = step.positions // self.every
            last = (step.positions >= 0) & (step.positions % self.every == self.every - 1)
            write = step._replace(positions=jnp.where(last, places, -1), slots=jnp.where(last, step.slots, -1))
            read = step._replace(positions=jnp.where(step.positions >= 0, places - 1, -1))
        keys = {name: x for name, x in layer.state.items() if name not in self._names}
        if is_ring(keys):
            out, lse, keys = mix_in_ring(cache, keys, layer.layer, q, k, v, step, **mask)
            layer.state = {**layer.state, **keys}
            return out, lse
        keys = cache.append(keys, layer.layer, k, v, write)
        layer.state = {**layer.state, **keys}
        return cache.attend(keys, layer.layer, q, read, value_dim=v.shape[-1], **mask)

    @property
    def _names(self) -> set[str]:
        return {a.name for a in self.recurrent.arrays}

    def _stored(self, cache: Cache, length: int) -> int:
        """The most stored tokens of a sequence, which a layout must divide in a cache without pages."""
        if self.every is None:
            return length
        layout = current()
        pieces = 1 if layout is None or cache.page is not None else layout.split("cache_seq")
        return -(-length // (self.every * pieces)) * pieces
