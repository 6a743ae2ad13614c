"""What becomes of a layer's activations between its forward and its backward pass, tensor by tensor."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import checkpoint_policies as policies
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.errors import ConfigError, near
from jaxscale.layout import DEVICE, HOST, constrain, current, host_memory_or_say

TENSORS: dict[str, tuple[str, ...]] = {
    "residual": ("residual",),
    "residual_mid": ("residual_mid",),
    "norm": ("norm",),
    "qkv": ("qkv",),
    "attn_out": ("attn_out", "flash_out"),
    "lse": ("flash_lse",),
    "mlp_up": ("mlp_up",),
    "mlp_hidden": ("mlp_hidden",),
}
"""A layer's tensors and the names (`jax.ad_checkpoint.checkpoint_name`) they go by: the residual stream that a block is
given, and between its sub-layers; what comes out of its norms; queries, keys and values, rotated; what attention mixes,
and `flash_attention`'s log-sum-exp; what the feed-forward layer's first matrices make, and the product or activation
that its last one takes."""

TILED = ("norm", "mlp_hidden")
"""What can be made one tile of the sequence at a time: each position on its own."""


_NARROW, _WIDER = 128, 16
"""A product of at most so many numbers for each that it makes, and that makes so many times more of them, such as an
adapter's second, is soon made again."""


def _products_with_weights(primitive: Any, *args: Any, **params: Any) -> bool:
    if primitive.name == "ragged_dot_general":  # experts'
        return True
    if primitive.name == "dot_general":
        (left, right), _ = params["dimension_numbers"]
        taken = math.prod(args[0].shape[i] for i in left)
        given = math.prod(n for i, n in enumerate(args[1].shape) if i not in right)
        if taken <= _NARROW and given >= _WIDER * taken:
            return False
    return policies.dots_with_no_batch_dims_saveable(primitive, *args, **params)


REST: dict[str, Callable[..., Any]] = {
    "keep": policies.everything_saveable,
    "recompute": policies.nothing_saveable,
    "dots": _products_with_weights,
}
"""What becomes of tensors that a policy does not name; "dots" keeps the products with weights (but not of
experts with slots, which are batched: name 'mlp_up' for those)."""


@register
@dataclasses.dataclass(frozen=True)
class MemoryPolicy:
    """What the backward pass finds, and where. Values and gradients are the same whatever it says.

    A tensor of `TENSORS` stands in at most one of the three lists; `rest` says what becomes of all others. Recomputing
    keeps each layer group's input, `residual`, whatever the lists say.

    Args:
      keep: kept on the device.
      offload: kept in host memory, moved there and back (Rajbhandari et al. 2021; MEMO, Zhao et al. 2024). On hardware
        without any it is kept on the device, and a warning says so.
      tile: made, and in the backward pass made again, one tile of the sequence at a time (ALST, Bekman et al. 2025):
        `mlp_hidden`, `norm`.
      rest: "recompute", "keep" or "dots" (keep the products with weights).
      tile_size: positions of a tile; a multiple of the devices that a sequence is split over, else the next below.

    Raises:
      ConfigError: an unknown tensor, one in two lists, or one that cannot be tiled.
    """

    keep: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    tile: tuple[str, ...] = ()
    rest: str = "recompute"
    tile_size: int = 1024

    def __post_init__(self) -> None:
        seen: dict[str, str] = {}
        for fate in ("keep", "offload", "tile"):
            given = getattr(self, fate)
            if isinstance(given, str) or not isinstance(given, tuple | list):
                raise ConfigError(f"MemoryPolicy.{fate} = {given!r}: give a tuple of tensors, as ('attn_out',)")
            object.__setattr__(self, fate, tuple(given))
            for tensor in given:
                if tensor not in TENSORS:
                    raise ConfigError(
                        f"MemoryPolicy.{fate} names '{tensor}', which no layer has{near(str(tensor), TENSORS)}"
                    )
                if tensor in seen:
                    raise ConfigError(
                        f"MemoryPolicy names '{tensor}' in {seen[tensor]} and in {fate}; leave it in one of them"
                    )
                if fate == "tile" and tensor not in TILED:
                    raise ConfigError(
                        f"MemoryPolicy.tile names '{tensor}', whose positions are not worked out one by one; it takes "
                        f"{' and '.join(TILED)}"
                    )
                seen[tensor] = fate
        if self.rest not in REST:
            raise ConfigError(f"MemoryPolicy.rest = '{self.rest}' does not exist{near(str(self.rest), REST)}")
        if not isinstance(self.tile_size, int) or self.tile_size < 1:
            raise ConfigError(f"MemoryPolicy.tile_size = {self.tile_size!r}: must be a whole number of at least 1")

    @classmethod
    def of(cls, policy: str | MemoryPolicy) -> MemoryPolicy:
        """A policy, or the preset of that name.

        Raises:
          ConfigError: there is no such preset.
        """
        if isinstance(policy, cls):
            return policy
        if policy not in POLICIES:
            raise ConfigError(f"there is no memory policy '{policy}'{near(str(policy), POLICIES)}")
        return POLICIES[policy]

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is recomputed or moved, tiles aside."""
        return self.rest == "keep" and not self.offload

    def checkpoint(self, layer: Callable[..., Any], *, prevent_cse: bool = True) -> Callable[..., Any]:
        """`layer`, differentiated as the policy says.

        Args:
          layer: a function of arrays that names its tensors.
          prevent_cse: as of `jax.checkpoint`; a scan's body does without.
        """
        if self.keeps_all:
            return layer
        host = not self.offload or host_memory_or_say(
            ", ".join(f"'{t}'" for t in self.offload), "stays on the device, though the memory policy offloads it"
        )
        return jax.checkpoint(layer, policy=_jax_policy(self, host), prevent_cse=prevent_cse)

    def tiled(self, tensor: str, fn: Callable[[Array], Array]) -> Callable[[Array], Array]:
        """`fn`, which makes `tensor`, in tiles of the sequence where the policy says so."""
        return functools.partial(in_tiles, fn, size=self.tile_size) if tensor in self.tile else fn


POLICIES: dict[str, MemoryPolicy] = {
    "none": MemoryPolicy(rest="keep"),
    "full": MemoryPolicy(),
    "dots": MemoryPolicy(rest="dots"),
    "dots_and_attention": MemoryPolicy(keep=("attn_out", "lse"), rest="dots"),
    "attention_only": MemoryPolicy(keep=("attn_out", "lse")),
    "offload_residual": MemoryPolicy(offload=("residual",)),
    "minimal": MemoryPolicy(offload=("residual",), tile=("norm", "mlp_hidden")),
}
"""Policies by name. `none` keeps everything; `full` only each group's input (Chen et al. 2016); `dots` the products
with weights as well, and `dots_and_attention` attention's output with them; `attention_only` what keeps attention from
running again; `offload_residual` is `full` with that input in host memory; `minimal` is that in tiles."""


@functools.cache
def _jax_policy(policy: MemoryPolicy, host: bool) -> Callable[..., Any]:
    """As `jax.checkpoint` wants it; cached, since a new function would be traced anew."""
    names = lambda tensors: [n for t in tensors for n in TENSORS[t]]  # noqa: E731
    kept, moved = names(policy.keep), names(policy.offload)
    if not host:
        kept, moved = kept + moved, []
    of_named = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=kept, names_which_can_be_offloaded=moved, offload_src=DEVICE, offload_dst=HOST
    )
    listed, rest = {*kept, *moved}, REST[policy.rest]

    def decide(primitive: Any, *args: Any, **params: Any) -> Any:
        named = primitive.name == "name" and params["name"] in listed
        return (of_named if named else rest)(primitive, *args, **params)

    return decide


def in_tiles(fn: Callable[[Array], Array], x: Float[Array, "b s e"], *, size: int) -> Float[Array, "b s f"]:
    """`fn(x)`, worked out one tile of the sequence after the other, forward and backward.

    What `fn` makes on its way exists for one tile at a time; the backward pass makes it again. A tile is every n-th
    position, so that a sequence split over devices is tiled on each and nothing moves.

    Args:
      fn: treats every position by itself; may close over parameters.
      x: activations.
      size: positions of a tile, at most, but one for each device that a sequence is split over; what remains of a
        sequence is a tile of its own.
    """
    s, layout = x.shape[1], current()
    pieces = 1 if layout is None else layout.split("residual_seq")
    size = max(size // pieces, 1) * pieces
    n = s // size
    if s <= size:
        return fn(x)
    tiles = rearrange(x[:, : n * size], "b (size n) e -> n b size e", n=n)
    tiles = constrain(tiles, None, "batch", "residual_seq", "embed")
    y = jax.lax.map(jax.checkpoint(fn, prevent_cse=False), tiles)
    y = rearrange(y, "n b size e -> b (size n) e")
    return y if n * size == s else jnp.concatenate([y, jax.checkpoint(fn)(x[:, n * size :])], axis=1)
