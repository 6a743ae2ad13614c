"""Flash attention as an attention kernel of a model: `Transformer.attention = @flash_attention`."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from jaxscale.config import register
from jaxscale.errors import LayoutError
from jaxscale.layout import current
from jaxscale.parallel import sharded_op
from pallas_kernels.flash_attention import flash_attention as _flash_attention

_QUERIES = ("batch", "seq", "heads", "head_dim")
_KEYS = ("batch", "kv_seq", "kv_heads", "head_dim")


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
      LayoutError: the layout splits the sequence.
      KernelError: what the kernel cannot do.
    """
    _refuse_split_sequences()
    tokens = [x for x in (segment_ids, positions) if x is not None]

    def local(q: Array, k: Array, v: Array, *rest: Array) -> Array:
        given = iter(rest)
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


def _refuse_split_sequences() -> None:
    layout = current()
    if layout is None:
        return
    for axis in ("seq", "kv_seq"):
        cut = [a for a in layout.resolved_rules.target("activations", axis) if layout.sizes[a] > 1]
        if cut:
            raise LayoutError(
                f"flash_attention sees whole sequences, and the layout {layout} splits '{axis}' over "
                f"{' and '.join(cut)}; use a mesh without {' and '.join(cut)}, or attention=dot_product_attention"
            )
