"""Soft prompts: trained vectors before a row's tokens, in place of embeddings of a text."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxscale.errors import ConfigError, LayoutError
from jaxscale.models.transformer import Transformer


def prompted_hidden(
    model: Transformer,
    prompt: Float[Array, "p e"],
    tokens: Int[Array, "b s"],
    *,
    positions: Int[Array, "b s"] | None = None,
    segment_ids: Int[Array, "b s"] | None = None,
) -> Float[Array, "b s e"]:
    """Return the final hidden states of tokens that follow a soft prompt (Lester et al. 2021, arXiv:2104.08691).

    A prompt that is trained on a compressed model, whose weights are frozen, gives back some of what compression took
    (Xu et al. 2023, arXiv:2305.11186). The prompt is the beginning of the row's first document; later documents of a
    packed row do not see it. Prompts have no place in the cache of generation: `jaxscale sample` does not take them.

    Args:
      model: the model; its weights may be stored in few bits.
      prompt: vectors in place of token embeddings, after the factor `embed_scale` of models that have one.
      tokens: ids, integer.
      positions: of each token in its document; counted from the start of the row by default.
      segment_ids: the document of each token within the row; 0 is padding.

    Raises:
      ConfigError: the model adds learned positions, which the prompt would shift.
      LayoutError: the layout shards sequences in an order of their own.
    """
    if model.positions is not None:
        raise ConfigError(
            "a soft prompt shifts all tokens, and this model adds learned positions; use a model with rotary positions"
        )
    rows, seq = tokens.shape
    length = prompt.shape[0]
    if model.order(length + seq) is not None:
        raise LayoutError("a soft prompt needs columns in their order; use a mesh without the axis context")
    x = model.begin(tokens)
    before = jnp.broadcast_to(prompt.astype(x.dtype), (rows, *prompt.shape))
    at = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (rows, length))
    place = jnp.arange(seq, dtype=jnp.int32)[None] if positions is None else positions
    place = jnp.concatenate([at, jnp.broadcast_to(place, (rows, seq)) + length], axis=1)
    if segment_ids is not None:
        begins = jnp.argmax(segment_ids != 0, axis=1)[:, None]  # padding may come first
        first = jnp.take_along_axis(segment_ids, begins, axis=1)
        segment_ids = jnp.concatenate([jnp.broadcast_to(first, (rows, length)), segment_ids], axis=1)
    context = model.context(length + seq, positions=place, segment_ids=segment_ids)
    x, _ = model.layers(jnp.concatenate([before, x], axis=1), context)
    return model.finish(x)[:, length:]
