"""A step of generation: the model on the new tokens alone, the past in a cache."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxscale.infer.cache import ModelCache, run_caches
from jaxscale.infer.stages import is_staged, staged_layers
from jaxscale.layout import constrain, current
from jaxscale.nn import Cache, Group, Packed, head_logits


def forward(
    model: Any, tokens: Int[Array, "b s"], step: Packed, how: Cache, states: ModelCache
) -> tuple[Float[Array, "b s e"], ModelCache]:
    """Final hidden states of a step's tokens, and the cache with them.

    Args:
      model: the model.
      tokens: ids.
      step: whose they are.
      how, states: the cache.

    With pipeline stages, parameters are as `jaxscale.infer.on_stages` gives, and lanes go through in turns.
    """
    if is_staged(current()):
        x = model.begin(tokens, step.positions, packed=True)
        x, states = staged_layers(model, tokens, x, step, how, states)
        return model.finish(x), states
    caches = run_caches(how, states, step)
    hidden, _ = model.hidden_and_stats(tokens, positions=step.positions, segment_ids=step.rows + 1, cache=caches)
    return hidden, tuple(c.states for c in caches)


def logits_at(model: Any, hidden: Float[Array, "b s e"], columns: Int[Array, "b n"]) -> Float[Array, "b n v"]:
    """Logits, float32, of some of a step's tokens.

    Args:
      model: the model.
      hidden: what `forward` gave.
      columns: of which tokens, in each lane.
    """
    return head_logits(hidden_at(hidden, columns), model.head_weight(), softcap=model.logit_softcap)


def hidden_at(hidden: Float[Array, "b s e"], columns: Int[Array, "b n"]) -> Float[Array, "b n e"]:
    """Final hidden states of some of a step's tokens, arguments as `logits_at`'s."""
    return jnp.take_along_axis(hidden, columns[..., None], axis=1)


def one_row_a_lane(
    starts: Int[Array, " b"], counts: Int[Array, " b"], width: int, tables: Int[Array, "b p"] | None = None
) -> Packed:
    """Lanes of one text each, which go on from `starts` with `counts` tokens, at most `width`.

    Args:
      starts: tokens of each that are kept already.
      counts: of its new ones.
      width: columns of the step.
      tables: pages of each.
    """
    column = jnp.arange(width, dtype=jnp.int32)[None]
    there = column < counts[:, None]
    return Packed(
        rows=jnp.where(there, 0, -1),
        positions=jnp.where(there, starts[:, None] + column, -1),
        groups=(Group(jnp.broadcast_to(column, there.shape)[:, None]),),
        tables=None if tables is None else tables[:, None],
    )


def everywhere(found: Any) -> Any:
    """Small arrays whole on every device, so that every process can read them."""
    return jax.tree.map(lambda x: constrain(x, *[None] * x.ndim), found)
