"""Keys and values of past tokens: how they are kept is a value, and which of a step's tokens are whose is data.

A step's tokens stand in *lanes* (the batch dimension, cut over devices); a lane holds the tokens of one or many texts,
each of which has a *row* of the lane's cache. Decoding, chunks of prompts and mixtures of both are such steps, and none
has padding but what fills a lane up.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Protocol

from jaxtyping import Array, Float, Int

State = Any


class Group(NamedTuple):
    """Rows of a lane that attend side by side, with at most q tokens each.

    Args:
      columns: where in its lane each token stands, int32; past the lane's end where there is none.
      rows: the cache row of each, int32; `None` is every row in order.
    """

    columns: Int[Array, "b r q"]
    rows: Int[Array, "b r"] | None = None


class Packed(NamedTuple):
    """Whose the tokens of a step are.

    Args:
      rows: of the cache, within the lane, int32; -1 where a token is padding.
      positions: place of each token in its text, int32, -1 of padding. A row's earlier ones have been appended before.
      groups: every token that is no padding is in one of them.
      tables: the pages of each row, int32, for caches that have pages.
    """

    rows: Int[Array, "b s"]
    positions: Int[Array, "b s"]
    groups: tuple[Group, ...]
    tables: Int[Array, "b rows p"] | None = None


class Kept(NamedTuple):
    """What a layer keeps of a token.

    Args:
      kv_heads: key heads.
      key_dim, value_dim: widths of a key and a value.
      dtype: of both.
      shared: values are the first widths of keys, and kept once.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: Any
    shared: bool = False


class Cache(Protocol):
    """How keys and values are kept. A state is of a stack of like layers: arrays whose first dimension is `layers`."""

    def init(self, kept: Kept, layers: int, lanes: int, rows: int, length: int) -> State:
        """An empty one.

        Args:
          kept: of one token and layer.
          layers, lanes, rows: how many, the rows of each lane.
          length: the most tokens of a row.
        """

    def append(
        self,
        state: State,
        layer: Int[Array, ""],
        k: Float[Array, "b s kv d"],
        v: Float[Array, "b s kv dv"],
        step: Packed,
    ) -> State:
        """With a step's keys and values."""

    def attend(
        self,
        state: State,
        layer: Int[Array, ""],
        q: Float[Array, "b s h d"],
        step: Packed,
        *,
        value_dim: int,
        window: int | None = None,
        softcap: float | None = None,
        scale: float | None = None,
    ) -> tuple[Float[Array, "b s h dv"], Float[Array, "b s h"]]:
        """Causal attention of each token to its row, itself included: output in `q`'s dtype, log-sum-exp in float32.

        Args:
          value_dim: width of a value.
          window, softcap, scale: as in `jaxscale.nn.dot_product_attention`.
        """

    def bytes(self, kept: Kept, layers: int, lanes: int, rows: int, length: int) -> int:
        """What `init` of the same arguments takes, over all devices."""


@dataclasses.dataclass
class LayerCache:
    """A layer's cache while the layer is called; attention leaves the new state behind."""

    how: Cache
    step: Packed
    state: State
    layer: Int[Array, ""]

    def mix(self, q: Array, k: Array, v: Array, **mask: Any) -> Float[Array, "b s h dv"]:
        """Appends keys and values, and attends."""
        self.state = self.how.append(self.state, self.layer, k, v, self.step)
        return self.how.attend(self.state, self.layer, q, self.step, value_dim=v.shape[-1], **mask)[0]


@dataclasses.dataclass
class RunCache:
    """That of a run's layers: a state for each block of its group."""

    how: Cache
    step: Packed
    states: tuple[State, ...]

    def layer(self, states: tuple[State, ...], block: int, layer: Int[Array, ""]) -> LayerCache:
        """One layer's, of states on their way."""
        return LayerCache(self.how, self.step, states[block], layer)
