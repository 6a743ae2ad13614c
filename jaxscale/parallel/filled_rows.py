"""The loss of a padded vocabulary, of which a device's last rows can be padding.

Kernels do not support padding. They get the rows that are tokens on every device; for the other rows, fewer than there
are devices, logits are stored and masked.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.cut_cross_entropy import Logits, Merged, Parts, gradients, joined, parts
from pallas_kernels.softmax.pairs import partial


def parts_of_filled(
    x: Float[Array, "... e"],
    w: Float[Array, "r e"],
    rows: Int[Array, "..."],
    tokens: Int[Array, ""],
    spare: int,
    logits: Logits,
    implementation: str | None,
) -> Parts:
    """Compute `pallas_kernels.cut_cross_entropy.parts` of rows that can include padding.

    Args:
      x: see `parts`.
      w: this device's rows of the head.
      rows: each target's row, counted from this device's first row.
      tokens: settings many of this device's rows are not padding; can be negative or more than its rows.
      spare: settings many of the last rows can be padding, on any device.
      logits: see `parts`.
      implementation: see `parts`.
    """
    if not spare:
        return parts(x, w, rows, logits, implementation)
    first = w.shape[0] - spare
    few = _Few.of(x, w[first:], rows - first, tokens - first, logits)
    total, hit = partial(few.logits, where=few.real), jnp.where(few.hit, few.logits, 0).sum(-1)
    summed = jnp.where(few.real, few.logits, 0).sum(-1) if logits.summed else None
    own = Parts(total, hit, summed, few.entropy() if logits.entropy else None)
    if not first:
        return own
    many = parts(x, w[:first], rows, logits, implementation)
    return joined(jax.tree.map(lambda *pieces: jnp.stack(pieces), many, own))


def gradients_of_filled(
    x: Float[Array, "... e"],
    w: Float[Array, "r e"],
    rows: Int[Array, "..."],
    tokens: Int[Array, ""],
    spare: int,
    lse: Float[Array, "..."],
    slopes: Merged,
    logits: Logits,
    implementation: str | None,
    dw_dtype: DTypeLike,
    entropy: Float[Array, "..."] | None = None,
) -> tuple[Array, Array]:
    """Compute `pallas_kernels.cut_cross_entropy.gradients` of rows that can include padding.

    Args:
      x: see `parts_of_filled`.
      w: see `parts_of_filled`.
      rows: see `parts_of_filled`.
      tokens: see `parts_of_filled`.
      spare: see `parts_of_filled`.
      lse: see `gradients`.
      slopes: see `gradients`.
      logits: see `gradients`.
      implementation: see `gradients`.
      dw_dtype: see `gradients`.
      entropy: see `gradients`.

    Returns:
      gradients of x and w; that of padding is exactly zero.
    """
    if not spare:
        return gradients(x, w, rows, lse, slopes, logits, implementation, dw_dtype=dw_dtype, entropy=entropy)
    first = w.shape[0] - spare
    few = _Few.of(x, w[first:], rows - first, tokens - first, logits)
    slope = slopes.folded(entropy).of_logits(few.logits - lse[..., None], few.hit)
    if few.slope is not None:
        slope = slope * few.slope
    slope = jnp.where(few.real, slope, 0).astype(x.dtype)
    dx = _product("...v,ve->...e", slope, w[first:].astype(x.dtype))
    dw = _product("...v,...e->ve", slope, x).astype(dw_dtype)
    if not first:
        return dx.astype(x.dtype), dw
    dx_many, dw_many = gradients(
        x, w[:first], rows, lse, slopes, logits, implementation, dw_dtype=dw_dtype, entropy=entropy
    )
    return (dx + dx_many).astype(x.dtype), jnp.concatenate([dw_many, dw])


class _Few(NamedTuple):
    """Logits of a few rows, float32; which rows are targets, which are not padding; and the soft cap's derivative."""

    logits: Float[Array, "... v"]
    hit: Bool[Array, "... v"]
    real: Bool[Array, " v"]
    slope: Float[Array, "... v"] | None

    @classmethod
    def of(cls, x: Array, w: Array, rows: Array, tokens: Array, settings: Logits) -> _Few:
        """Compute the logits of rows `w`, of which `tokens` are not padding."""
        index, slope = jnp.arange(w.shape[0]), None
        logits = _product("...e,ve->...v", x, w.astype(x.dtype))
        if settings.softcap is not None:
            tanh = jnp.tanh(logits / settings.softcap)
            logits, slope = settings.softcap * tanh, 1 - tanh * tanh
        return cls(logits, rows[..., None] == index, index < tokens, slope)

    def entropy(self) -> Float[Array, "..."]:
        """Return the entropy of the distribution over the rows that are not padding; 0 where all are."""
        logprobs = jax.nn.log_softmax(self.logits, where=self.real)
        return -jnp.where(self.real, jnp.exp(logprobs) * logprobs, 0).sum(-1)


def _product(subscripts: str, *arrays: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, *arrays, preferred_element_type=jnp.float32)
