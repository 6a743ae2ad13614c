"""Flash attention as an attention kernel of a model: `Transformer.attention = @flash_attention`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from jaxscale.config import register
from jaxscale.errors import LayoutError
from jaxscale.layout import current
from jaxscale.parallel.sharded import cut_over, sharded_op
from pallas_kernels.arguments import as_int32
from pallas_kernels.flash_attention import flash_attention as _flash_attention

_QUERIES = ("batch", "seq", "heads", "head_dim")
WHOLE = {
    "seq": ("needs whole sequences", "RingAttention() or dot_product_attention"),
    "kv_seq": ("needs whole sequences", "dot_product_attention"),
    "head_dim": ("needs whole heads", "dot_product_attention"),
}
"""Logical axis -> why `flash_attention` cannot have it sharded, and the attention that can."""


@register
def flash_attention(
    q: Float[Array, "b s h d"],
    k: Float[Array, "b t kv d"],
    v: Float[Array, "b t kv dv"],
    *,
    causal: bool = True,
    segment_ids: Int[Array, "b s"] | None = None,
    positions: Int[Array, "b s"] | None = None,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    implementation: str | None = None,
    dropout: float = 0.0,
    dropout_seeds: UInt32[Array, "b h 2"] | None = None,
    dropout_places: Int[Array, "b s"] | None = None,
) -> Any:
    """Softmax attention without the S x S scores; sharded over batch and heads under a layout.

    Args:
      q: queries; the number of query heads is a multiple of the number of key heads.
      k: keys.
      v: values.
      causal: a query attends to its own position and earlier ones only.
      segment_ids: attend within equal ids only; 0 is padding.
      positions: the order of tokens within a segment; `None` is the order of the columns.
      window: attend to this many latest positions only, the query's own included.
      softcap: scores become `softcap * tanh(scores / softcap)`.
      scale: factor on the scores; `1 / sqrt(D)` by default.
      return_lse: see `pallas_kernels.flash_attention.flash_attention`, as for the next two.
      deterministic: likewise.
      implementation: likewise.
      dropout: likewise.
      dropout_seeds: likewise.
      dropout_places: likewise.

    Raises:
      LayoutError: the layout shards the sequence or `head_dim`, or heads and key heads over different mesh axes.
      KernelError: arguments that the kernel does not support.
    """
    refuse_split("flash_attention", *WHOLE)

    def local(
        q: Array, k: Array, v: Array, segment_ids: Any, positions: Any, seeds: Any = None, places: Any = None
    ) -> Any:
        return _flash_attention(
            q,
            k,
            v,
            causal=causal,
            segment_ids=segment_ids,
            positions=positions,
            window=window,
            softcap=softcap,
            scale=scale,
            return_lse=return_lse,
            deterministic=deterministic,
            implementation=implementation,
            dropout=dropout,
            dropout_seeds=seeds,
            dropout_places=places,
        )

    tokens = segment_ids, positions
    drop = (dropout_seeds, dropout_places) if dropout else (None, None)
    return over_devices(
        local, q, k, v, *tokens, *drop, keys="kv_seq", name="flash_attention", return_lse=return_lse
    )  # fmt: skip


def over_devices(
    local: Callable[..., Any],
    q: Float[Array, "b s h d"],
    k: Float[Array, "b t kv d"],
    v: Float[Array, "b t kv dv"],
    segment_ids: Int[Array, "b s"] | None,
    positions: Int[Array, "b s"] | None,
    seeds: UInt32[Array, "b h 2"] | None = None,
    places: Int[Array, "b s"] | None = None,
    *,
    keys: str,
    name: str,
    return_lse: bool = False,
) -> Any:
    """Call `local(q, k, v, segment_ids, positions)` on every device's shards, under the layout in force.

    With seeds of dropout it is `local(q, k, v, segment_ids, positions, seeds, places)`.

    Args:
      local: attention on one device, which gets the key heads that its query heads read.
      q: global array.
      k: global array.
      v: global array.
      segment_ids: global array, or `None`.
      positions: global array, or `None`.
      seeds: global array, or `None` without dropout.
      places: global array, or `None`.
      keys: the logical axis of the keys' sequence.
      name: the attention's name, for errors.
      return_lse: `local` returns the output and its log-sum-exp.

    Raises:
      LayoutError: heads and key heads are sharded over different mesh axes.
      KernelError: ids or positions out of int32's range.
    """
    groups = q.shape[2] // k.shape[2]
    over, whole = heads_over(k.shape[2], name)
    # Checked here, because inside `shard_map` values out of int32's range would wrap around.
    named = {"segment_ids": segment_ids, "positions": positions, "dropout_places": places}
    tokens = [as_int32(name, n, x) for n, x in named.items() if x is not None]
    drops = [] if seeds is None else [seeds]

    def read(q: Array, k: Array, v: Array, *rest: Array) -> Any:
        remaining = iter(rest[: len(tokens)])
        if whole:
            k, v = (heads_read_by(x, q.shape[2], groups, lax.axis_index(over)) for x in (k, v))
        of_tokens = [None if x is None else next(remaining) for x in named.values()]
        return local(q, k, v, *of_tokens[:2], *([] if seeds is None else [rest[-1], of_tokens[2]]))

    of_keys = ("batch", keys, "kv_heads", "head_dim")
    axes = (_QUERIES, of_keys, of_keys, *[("batch", "seq")] * len(tokens), *[("batch", "heads", None)] * len(drops))
    out_axes = (_QUERIES, _QUERIES[:-1]) if return_lse else _QUERIES
    return sharded_op(read, q, k, v, *tokens, *drops, axes=axes, out_axes=out_axes, name=f"{name}'s operand")


def heads_over(kv_heads: int, name: str) -> tuple[tuple[str, ...], bool]:
    """Return the mesh axes that shard query heads, and whether a device has more key heads than its queries read.

    Args:
      kv_heads: the number of key heads.
      name: the attention's name, for errors.

    Raises:
      LayoutError: key heads are sharded over other mesh axes.
    """
    over, keys = cut_over("heads"), cut_over("kv_heads", size=kv_heads)
    if keys not in ((), over):
        raise LayoutError(
            f"{name}'s layout shards 'heads' over {over} and 'kv_heads' over {keys}; give both the same rule, or "
            "'kv_heads' none"
        )
    return over, over != keys and kv_heads > 1


def heads_read_by(x: Array, heads: int, groups: int, device: Array, *, axis: int = 2) -> Array:
    """Select the key heads that a device's query heads read.

    If a device's query heads are neither whole groups nor part of one group, a key head is repeated for each of them.

    Args:
      x: an array with all key heads along `axis`.
      heads: query heads per device.
      groups: query heads per key head.
      device: the device's index along the mesh axes that shard heads.
      axis: the dimension of key heads.
    """
    if heads % groups and groups % heads:
        return jnp.take(x, (device * heads + jnp.arange(heads)) // groups, axis=axis, mode="clip")
    return lax.dynamic_slice_in_dim(x, device * heads // groups, key_heads_read(heads, groups), axis=axis)


def key_heads_read(heads: int, groups: int) -> int:
    """Return the number of key heads that `heads_read_by` selects."""
    return heads if heads % groups and groups % heads else max(1, heads // groups)


def refuse_split(name: str, *axes: str, softmax: bool = True) -> None:
    """Check that the layout in force does not shard dimensions that an attention needs whole.

    Args:
      name: the attention's name, for errors.
      *axes: logical axes.
      softmax: another softmax attention could take its place.

    Raises:
      LayoutError: the layout shards one of them.
    """
    layout = current()
    for axis in axes:
        if cut := cut_over(axis):
            why, instead = WHOLE[axis]
            other = f", or attention={instead}" if softmax else ""
            raise LayoutError(
                f"{name} {why}, and the layout {layout} shards '{axis}' over {' and '.join(cut)}; use a mesh "
                f"without {' and '.join(cut)}{other}"
            )
