"""Soft prompts: trained vectors before a row's tokens, in place of embeddings of a text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jaxtyping import Array, Int

if TYPE_CHECKING:
    from jaxscale.models.transformer_config import TransformerConfig


def with_prompt(
    config: TransformerConfig,
    tokens: Int[Array, "b s"],
    positions: Int[Array, "b s"] | None = None,
    segment_ids: Int[Array, "b s"] | None = None,
) -> tuple[Int[Array, "b t"], Int[Array, "b t"] | None, Int[Array, "b t"] | None]:
    """Return tokens, positions and documents of rows that begin with a soft prompt (Lester et al. 2021).

    The prompt is the beginning of the row's first document; later documents of a packed row do not see it. Its vectors
    are the ids from the vocabulary's size on.

    Args:
      config: the model's config; without a soft prompt everything is returned as it is.
      tokens: ids, integer.
      positions: of each token in its document; counted from the start of the row by default.
      segment_ids: the document of each token within the row; 0 is padding.
    """
    if not config.soft_prompt:
        return tokens, positions, segment_ids
    (rows, seq), length = tokens.shape, config.soft_prompt
    at = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (rows, length))
    place = jnp.arange(seq, dtype=jnp.int32)[None] if positions is None else positions
    place = jnp.concatenate([at, jnp.broadcast_to(place, (rows, seq)) + length], axis=1)
    if segment_ids is not None:
        begins = jnp.argmax(segment_ids != 0, axis=1)[:, None]  # padding may come first
        first = jnp.take_along_axis(segment_ids, begins, axis=1)
        segment_ids = jnp.concatenate([jnp.broadcast_to(first, (rows, length)), segment_ids], axis=1)
    return jnp.concatenate([at.astype(tokens.dtype) + config.vocab, tokens], axis=1), place, segment_ids
