"""Memory policies: which activations of a layer are saved, offloaded or recomputed for the backward pass."""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import checkpoint_policies as policies
from jax.extend import core
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.errors import ConfigError, near
from jaxscale.layout import DEVICE, HOST, constrain, current, host_memory_or_say
from jaxscale.layout.tensors import Tree
from jaxscale.nn.narrow import narrow_name, narrowing
from jaxscale.parallel.weight import ROUNDED
from pallas_kernels.grouped_matmul import NAMES as GROUPED

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
"""A layer's tensors and their names (`jax.ad_checkpoint.checkpoint_name`): the residual stream before a block
(`residual`) and between its sub-layers (`residual_mid`); the results of its norms; queries, keys and values after
rotation; the result of the attention kernel and `flash_attention`'s log-sum-exp (`lse`); the results of the
feed-forward layer's first matrices (`mlp_up`), and the input of its last matrix (`mlp_hidden`)."""

TILED = ("norm", "mlp_hidden")
"""The tensors that can be computed one tile of the sequence at a time, because positions are independent."""


NARROW = ("norm", "qkv", "mlp_up", "mlp_hidden")
"""The tensors that can be kept as 8-bit floats: inputs of products, and not the residual stream."""

_NARROW, _WIDER = 128, 16
"""A product with a summed dimension of at most `_NARROW` and an output at least `_WIDER` times as wide, such as an
adapter's second, is cheap to recompute."""


def _products_with_weights(primitive: core.Primitive, *args: Any, **params: Any) -> bool:
    if primitive.name == "name":
        return params["name"] in (ROUNDED, *GROUPED)
    if primitive.name == "dot_general":
        if args[0].dtype.itemsize == 1:  # its scaled result is saved, by name
            return False
        (left, right), _ = params["dimension_numbers"]
        summed = math.prod(args[0].shape[i] for i in left)
        outputs = math.prod(n for i, n in enumerate(args[1].shape) if i not in right)
        if summed <= _NARROW and outputs >= _WIDER * summed:
            return False
    return policies.dots_with_no_batch_dims_saveable(primitive, *args, **params)


REST: dict[str, Callable[..., Any]] = {
    "keep": policies.everything_saveable,
    "recompute": policies.nothing_saveable,
    "dots": _products_with_weights,
}
"""What happens to tensors that a policy does not name; "dots" saves products with weights (except those of experts with
slots, which are batched: name 'mlp_up' for those)."""


@register
@dataclasses.dataclass(frozen=True)
class MemoryPolicy:
    """Which activations are saved, offloaded or recomputed. Values and gradients are the same with all but `fp8`.

    Each tensor of `jaxscale.nn.TENSORS` is in at most one of the three lists; `rest` applies to all others. With
    recomputation, the input of each group of layers (`residual`) is saved in any case.

    Args:
      keep: tensors saved on the device.
      offload: tensors moved to host memory and back (Rajbhandari et al. 2021; MEMO, Zhao et al. 2024). On hardware
        without host memory they are saved on the device, with a warning.
      tile: tensors computed, and recomputed in the backward pass, one tile of the sequence at a time (ALST, Bekman et
        al. 2025): `mlp_hidden`, `norm`.
      fp8: tensors rounded to 8-bit floats and kept as such, in about half of bfloat16's bytes: `norm`, `qkv`, `mlp_up`,
        `mlp_hidden` (COAT, Xi et al. 2024), but not those of experts. Layers compute with the rounded numbers, so that
        values and gradients differ a little from those of other policies.
      rest: "recompute", "keep" or "dots" (save the products with weights).
      tile_size: positions of a tile, rounded down to a multiple of the devices that a sequence is sharded over.

    Raises:
      ConfigError: an unknown tensor, one in two lists, or one that cannot be tiled.
    """

    keep: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    tile: tuple[str, ...] = ()
    fp8: tuple[str, ...] = ()
    rest: str = "recompute"
    tile_size: int = 1024

    def __post_init__(self) -> None:
        seen: dict[str, str] = {}
        for fate in ("keep", "offload", "tile", "fp8"):
            tensors = getattr(self, fate)
            if isinstance(tensors, str) or not isinstance(tensors, tuple | list):
                raise ConfigError(f"MemoryPolicy.{fate} = {tensors!r}: give a tuple of tensors, such as ('attn_out',)")
            object.__setattr__(self, fate, tuple(tensors))
            for tensor in tensors:
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
                        f"MemoryPolicy.tile names '{tensor}', which cannot be computed in tiles of the sequence; only "
                        f"{' and '.join(TILED)} can"
                    )
                if fate == "fp8" and tensor not in NARROW:
                    raise ConfigError(
                        f"MemoryPolicy.fp8 names '{tensor}', which layers do not round; only {', '.join(NARROW)} can "
                        "be 8-bit floats"
                    )
                seen[tensor] = fate
        if self.fp8 and self.rest == "keep":
            raise ConfigError(
                "MemoryPolicy.fp8 has no effect with rest = 'keep', which saves what tensors are made of; set rest "
                "= 'recompute'"
            )
        if self.rest not in REST:
            raise ConfigError(f"MemoryPolicy.rest = '{self.rest}' does not exist{near(str(self.rest), REST)}")
        if not isinstance(self.tile_size, int) or self.tile_size < 1:
            raise ConfigError(f"MemoryPolicy.tile_size = {self.tile_size!r}: must be a whole number of at least 1")

    @classmethod
    def of(cls, policy: str | MemoryPolicy) -> MemoryPolicy:
        """Return the preset of that name; a policy is returned as it is.

        Args:
          policy: a name in `POLICIES`, or a policy.

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
        """Whether nothing is recomputed or offloaded, except in tiles."""
        return self.rest == "keep" and not self.offload

    def checkpoint(self, layer: Callable[..., Any], *, prevent_cse: bool = True) -> Callable[..., Any]:
        """Wrap a layer in `jax.checkpoint` with this policy.

        Args:
          layer: a function of arrays that names its tensors.
          prevent_cse: see `jax.checkpoint`; False in the body of a scan.
        """
        if self.keeps_all:
            return layer
        host = not self.offload or host_memory_or_say(
            ", ".join(f"'{t}'" for t in self.offload), "stays on the device, although the memory policy offloads it"
        )
        names = frozenset(n for t in self.fp8 for n in TENSORS[t])

        again = frozenset(TENSORS).difference(self.keep, self.offload) if self.rest == "recompute" else frozenset()

        def traced(*args: Any) -> Any:
            token = _RECOMPUTED.set(again)
            try:
                with narrowing(names):
                    return layer(*args)
            finally:
                _RECOMPUTED.reset(token)

        return jax.checkpoint(traced, policy=_jax_policy(self, host), prevent_cse=prevent_cse)

    def tiled(self, tensor: str, fn: Callable[[Array], Array]) -> Callable[[Array], Array]:
        """Return `fn`, computed in tiles of the sequence if the policy tiles a tensor.

        Args:
          tensor: the name of the tensor that `fn` computes, of `TILED`.
          fn: a function of activations that treats each position by itself.
        """
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
"""Policies by name.

- `none` saves everything.
- `full` saves only the input of each group of layers (Chen et al. 2016).
- `dots` also saves the products with weights, and `dots_and_attention` the output of attention as well.
- `attention_only` is `full`, and saves the output and log-sum-exp of attention, so that it does not run again.
- `offload_residual` is `full` with the inputs in host memory.
- `minimal` is `offload_residual` with norms and the feed-forward layer in tiles."""


_RECOMPUTED: contextvars.ContextVar[frozenset[str]] = contextvars.ContextVar("recomputed", default=frozenset())


def recomputed(tensor: str) -> bool:
    """Return whether the layer that is traced computes a tensor again in its backward pass.

    Args:
      tensor: one of `TENSORS`.
    """
    return tensor in _RECOMPUTED.get()


@functools.cache
def _jax_policy(policy: MemoryPolicy, host: bool) -> Callable[..., Any]:
    """Return a policy for `jax.checkpoint`; cached, because JAX traces again for each new function."""
    saved, offloaded = ([n for t in tensors for n in TENSORS[t]] for tensors in (policy.keep, policy.offload))
    saved += [narrow_name(n) for t in policy.fp8 for n in TENSORS[t]]
    if not host:
        saved, offloaded = saved + offloaded, []
    of_named = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=saved, names_which_can_be_offloaded=offloaded, offload_src=DEVICE, offload_dst=HOST
    )
    listed, rest = {*saved, *offloaded}, REST[policy.rest]

    def decide(primitive: core.Primitive, *args: Any, **params: Any) -> bool:
        named = primitive.name == "name" and params["name"] in listed
        return (of_named if named else rest)(primitive, *args, **params)

    return decide


def in_tiles(fn: Callable[..., Tree], x: Float[Array, "b s e"], *more: Array, size: int) -> Tree:
    """Compute `fn(x, *more)` one tile of the sequence after the other, forward and backward.

    The intermediate activations of `fn` exist for one tile at a time; the backward pass recomputes them. A tile is
    every n-th position, so that each device tiles its shard of the sequence and nothing is sent.

    Args:
      fn: a function that treats each position by itself; it may close over parameters.
      x: activations.
      *more: further arrays (b, s, ...).
      size: most positions of a tile; at least one per device that the sequence is sharded over. The rest of the
        sequence is one more tile.
    """
    s, layout = x.shape[1], current()
    pieces = 1 if layout is None else layout.split("residual_seq")
    size = max(size // pieces, 1) * pieces
    n = s // size
    if s <= size:
        return fn(x, *more)

    def tiles(a: Array) -> Array:
        a = rearrange(a[:, : n * size], "b (size n) ... -> n b size ...", n=n)
        return constrain(a, None, "batch", "residual_seq", *("embed",) * (a.ndim - 3))

    once = jax.checkpoint(lambda arrays: fn(*arrays), prevent_cse=False)
    ys = jax.lax.map(once, tuple(map(tiles, (x, *more))))
    ys = jax.tree.map(lambda y: rearrange(y, "n b size ... -> b (size n) ..."), ys)
    if n * size == s:
        return ys
    last = jax.checkpoint(fn)(*(a[:, n * size :] for a in (x, *more)))
    return jax.tree.map(lambda y, z: jnp.concatenate([y, z], axis=1), ys, last)
