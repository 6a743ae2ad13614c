"""`ChangedWeights`: softmax attention whose matrix of weights is changed before it multiplies the values."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
from jaxtyping import Array, Float, Int

from jaxscale.nn.attention import attention_mask, masked_scores, weighted_values


@dataclasses.dataclass(frozen=True)
class ChangedWeights:
    """An attention kernel that computes `change(softmax(scores)) · v`; the S x S weights are in memory."""

    softmax: ClassVar[bool] = False

    def change(self, weights: Float[Array, "... t"]) -> Float[Array, "... t"]:
        """Return other weights.

        Args:
          weights: of a softmax, float32; 0 for the keys that a query does not see.
        """
        raise NotImplementedError

    def __call__(
        self,
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
    ) -> Float[Array, "b s h dv"]:
        """Compute attention; see `jaxscale.nn.dot_product_attention` for the arguments."""
        mask = attention_mask(
            q.shape[1], k.shape[1], causal=causal, segment_ids=segment_ids, positions=positions, window=window
        )
        weights = jax.nn.softmax(masked_scores(q, k, mask, softcap=softcap, scale=scale), axis=-1)
        return weighted_values(self.change(weights), v)
