"""Causal convolutions over a few tokens of a document, along a sequence that can be sharded."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxscale.errors import LayoutError
from jaxscale.parallel.linear_scan import parts_before
from jaxscale.parallel.sharded import cut_over, sharded_op


def short_convolution(
    x: Float[Array, "b s c"],
    kernel: Float[Array, "w c"],
    starts: Bool[Array, "#b s"] | None = None,
    order: Int[Array, "s"] | None = None,
    *,
    axis: str = "mlp",
) -> Float[Array, "b s c"]:
    """Compute `y[t] = sum over i of kernel[W - 1 - i] * x[t - i]`, by channels, within each document.

    If the layout shards the sequence, a device gets the last W - 1 tokens of the shard before its own.

    Args:
      x: activations.
      kernel: one weight for each of W tokens and each channel; the last one is the current token's.
      starts: tokens before which nothing is seen, (B, S) or (1, S); `None` is the first of each row.
      order: position of each column in the sequence, if columns are in the order of
        `jaxscale.parallel.context.zigzag`.
      axis: the logical axis of channels.

    Returns:
      (B, S, C) in float32.

    Raises:
      LayoutError: a dimension that the layout does not divide, or shards of the sequence shorter than W - 1 tokens.
    """
    over = cut_over("seq")
    parts = 1 if order is None else 2
    back = kernel.shape[0] - 1
    if starts is None:
        starts = ((jnp.arange(x.shape[1]) if order is None else order) == 0)[None]
    starts = jnp.broadcast_to(starts, x.shape[:2])

    def local(x: Array, kernel: Array, starts: Array) -> Array:
        b, n, channels = x.shape
        if (over or parts > 1) and n // parts < back:
            raise LayoutError(
                f"a convolution over {back + 1} tokens needs at least {back} in each shard of the sequence, and these "
                f"have {n // parts}; use longer sequences or fewer devices along it"
            )
        x = x.reshape(b, parts, n // parts, channels)
        documents = jnp.cumsum(starts.reshape(b, parts, n // parts), axis=2)
        before = jnp.zeros((b, parts, back, channels), x.dtype)
        if back and (over or parts > 1):
            mine = documents[:, :, -back:] == documents[:, :, -1:]
            tail = jnp.where(mine[..., None], x[:, :, -back:], 0)
            before = parts_before(tail, lambda _, later: later, over, parts)
        whole = jnp.concatenate([before, x], axis=2)
        documents = jnp.pad(documents, ((0, 0), (0, 0), (back, 0)))
        return convolve(whole, kernel, documents).reshape(b, n, channels)

    tokens = ("batch", "seq")
    return sharded_op(
        local,
        x,
        kernel,
        starts,
        axes=((*tokens, axis), (None, axis), tokens),
        out_axes=(*tokens, axis),
        name="an operand of a short convolution",
    )


def convolve(
    x: Float[Array, "... s c"], kernel: Float[Array, "w c"], documents: Int[Array, "... s"] | None = None
) -> Float[Array, "... n c"]:
    """Convolve all tokens that have W - 1 before them; what is of another document counts as zero.

    Args:
      x: activations, not sharded along the tokens.
      kernel: as in `short_convolution`.
      documents: number of each token's document; `None` is one document.

    Returns:
      (..., S - W + 1, C) in float32.
    """
    width = kernel.shape[0]
    count = x.shape[-2] - width + 1
    total = jnp.zeros((*x.shape[:-2], count, x.shape[-1]), jnp.float32)
    for i in range(width):
        part = x[..., i : i + count, :].astype(jnp.float32) * kernel[i].astype(jnp.float32)
        if documents is not None:
            same = documents[..., i : i + count] == documents[..., width - 1 :]
            part = jnp.where(same[..., None], part, 0)
        total = total + part
    return total
