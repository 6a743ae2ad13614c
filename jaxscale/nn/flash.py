"""Flash attention as an attention kernel of a model: `Transformer.attention = @flash_attention`."""

from __future__ import annotations

from jax import lax
from jaxtyping import Array, Float, Int

from jaxscale.config import register
from jaxscale.errors import LayoutError
from jaxscale.layout import current
from jaxscale.parallel.sharded import cut_over, sharded_op
from pallas_kernels.flash_attention import flash_attention as _flash_attention

_QUERIES = ("batch", "seq", "heads", "head_dim")
_KEYS = ("batch", "kv_seq", "kv_heads", "head_dim")
_WHOLE = {
    "seq": "sees whole sequences",
    "kv_seq": "sees whole sequences",
    "head_dim": "multiplies whole heads",
}
"""What no device may have a part of, and why."""


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
      LayoutError: the layout splits the sequence or a head, or heads so that a device's read no whole key heads.
      KernelError: what the kernel cannot do.
    """
    _refuse_split()
    groups = q.shape[2] // k.shape[2]
    over = cut_over("heads")
    same = over == cut_over("kv_heads") or k.shape[2] == 1
    if not same and cut_over("kv_heads"):
        raise LayoutError(
            f"flash_attention's layout splits 'heads' over {over} and 'kv_heads' over {cut_over('kv_heads')}; "
            "give both the same rule, or 'kv_heads' none"
        )
    tokens = [x for x in (segment_ids, positions) if x is not None]

    def local(q: Array, k: Array, v: Array, *rest: Array) -> Array:
        given = iter(rest)
        if not same:
            k, v = (_read_by(x, q.shape[2], groups, lax.axis_index(over)) for x in (k, v))
        return _flash_attention(
            q,
            k,
            v,
            causal=causal,
            segment_ids=None if segment_ids is None else next(given),
            positions=None if positions is None else next(given),
            window=window,
            softcap=softcap,
            scale=scale,
            deterministic=deterministic,
            implementation=implementation,
        )

    axes = (_QUERIES, _KEYS, _KEYS, *[("batch", "seq")] * len(tokens))
    return sharded_op(local, q, k, v, *tokens, axes=axes, out_axes=_QUERIES, name="flash attention's operand")


def _read_by(x: Array, heads: int, groups: int, device: Array) -> Array:
    """Of all key heads, those that a device's query heads read."""
    if heads % groups and groups % heads:
        raise LayoutError(
            f"flash_attention: a device has {heads} query heads, and {groups} share a key head; split 'heads' so that "
            "one is a multiple of the other"
        )
    return lax.dynamic_slice_in_dim(x, device * heads // groups, max(1, heads // groups), axis=2)


def _refuse_split() -> None:
    layout = current()
    for axis, why in _WHOLE.items():
        if cut := cut_over(axis):
            raise LayoutError(
                f"flash_attention {why}, and the layout {layout} splits '{axis}' over {' and '.join(cut)}; use a mesh "
                f"without {' and '.join(cut)}, or attention=dot_product_attention"
            )
