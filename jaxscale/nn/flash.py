"""Flash attention as an attention kernel of a model: `Transformer.attention = @flash_attention`."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxscale.config import register
from jaxscale.errors import LayoutError
from jaxscale.layout import current
from jaxscale.parallel.sharded import cut_over, sharded_op
from pallas_kernels.arguments import as_int32
from pallas_kernels.flash_attention import flash_attention as _flash_attention

_QUERIES = ("batch", "seq", "heads", "head_dim")
_WHOLE = {
    "seq": ("sees whole sequences", "RingAttention() or dot_product_attention"),
    "kv_seq": ("sees whole sequences", "dot_product_attention"),
    "head_dim": ("multiplies whole heads", "dot_product_attention"),
}
"""What no device may have a part of, why, and which attention lets it."""


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
    deterministic: bool = False,
    implementation: str | None = None,
) -> Float[Array, "b s h dv"]:
    """What `dot_product_attention` computes, without the S x S scores; under a layout, over its batch and heads.

    Args:
      q, k, v, causal, segment_ids, positions, window, softcap, scale: those of `dot_product_attention`.
      deterministic, implementation: those of `pallas_kernels.flash_attention.flash_attention`.

    Raises:
      LayoutError: the layout splits the sequence or a head, or heads and key heads over different mesh axes.
      KernelError: what the kernel cannot do.
    """
    refuse_split("flash_attention", *_WHOLE)

    def local(q: Array, k: Array, v: Array, segment_ids: Array | None, positions: Array | None) -> Array:
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
            deterministic=deterministic,
            implementation=implementation,
        )

    return over_devices(local, q, k, v, segment_ids, positions, keys="kv_seq", name="flash_attention")


def over_devices(
    local: Callable[..., Array],
    q: Float[Array, "b s h d"],
    k: Float[Array, "b t kv d"],
    v: Float[Array, "b t kv dv"],
    segment_ids: Int[Array, "b s"] | None,
    positions: Int[Array, "b s"] | None,
    *,
    keys: str,
    name: str,
) -> Float[Array, "b s h dv"]:
    """`local(q, k, v, segment_ids, positions)` of every device's own part, under the layout in force.

    Args:
      local: attention; a device has the key heads that its query heads read.
      q, k, v, segment_ids, positions: global arrays.
      keys: the logical axis of the keys' sequence.
      name: of the attention, for errors.

    Raises:
      LayoutError: heads and key heads are split over different mesh axes.
      KernelError: ids or positions that int32 does not hold.
    """
    groups = q.shape[2] // k.shape[2]
    over, whole = heads_over(k.shape[2], name)
    # Here, since `shard_map` would wrap what int32 does not hold.
    named = {"segment_ids": segment_ids, "positions": positions}
    tokens = [as_int32(name, n, x) for n, x in named.items() if x is not None]

    def read(q: Array, k: Array, v: Array, *rest: Array) -> Array:
        given = iter(rest)
        if whole:
            k, v = (heads_read_by(x, q.shape[2], groups, lax.axis_index(over)) for x in (k, v))
        segments = None if segment_ids is None else next(given)
        return local(q, k, v, segments, None if positions is None else next(given))

    of_keys = ("batch", keys, "kv_heads", "head_dim")
    axes = (_QUERIES, of_keys, of_keys, *[("batch", "seq")] * len(tokens))
    return sharded_op(read, q, k, v, *tokens, axes=axes, out_axes=_QUERIES, name=f"{name}'s operand")


def heads_over(kv_heads: int, name: str) -> tuple[tuple[str, ...], bool]:
    """The mesh axes that cut query heads here, and whether a device has more key heads than its queries read.

    Raises:
      LayoutError: key heads are cut over other mesh axes; `name` is the attention's.
    """
    over, keys = cut_over("heads"), cut_over("kv_heads", size=kv_heads)
    if keys not in ((), over):
        raise LayoutError(
            f"{name}'s layout splits 'heads' over {over} and 'kv_heads' over {keys}; give both the same rule, or "
            "'kv_heads' none"
        )
    return over, over != keys and kv_heads > 1


def heads_read_by(x: Array, heads: int, groups: int, device: Array, *, axis: int = 2) -> Array:
    """Of all key heads, which stand along `axis`, those that a device's query heads read.

    Where a device's query heads are neither whole groups nor part of one, each gets a key head of its own.
    """
    if heads % groups and groups % heads:
        return jnp.take(x, (device * heads + jnp.arange(heads)) // groups, axis=axis, mode="clip")
    return lax.dynamic_slice_in_dim(x, device * heads // groups, key_heads_read(heads, groups), axis=axis)


def key_heads_read(heads: int, groups: int) -> int:
    """How many key heads a device has for its `heads` query heads, of which `groups` share one; see `heads_read_by`."""
    return heads if heads % groups and groups % heads else max(1, heads // groups)


def refuse_split(name: str, *axes: str) -> None:
    """Raises `LayoutError` when the layout in force splits one of these, of which an attention needs all."""
    layout = current()
    for axis in axes:
        if cut := cut_over(axis):
            why, instead = _WHOLE[axis]
            raise LayoutError(
                f"{name} {why}, and the layout {layout} splits '{axis}' over {' and '.join(cut)}; use a mesh "
                f"without {' and '.join(cut)}, or attention={instead}"
            )
