"""One step of generation: the model on the new tokens alone, past tokens in a cache."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxscale.infer.cache import ModelCache, run_caches
from jaxscale.infer.stages import is_staged, staged_layers
from jaxscale.layout import constrain, current
from jaxscale.models import LanguageModel
from jaxscale.nn import Cache, Group, Packed, head_logits

T = TypeVar("T")


def forward(
    model: Any, tokens: Int[Array, "b s"], step: Packed, cache: Cache, states: ModelCache
) -> tuple[Float[Array, "b s e"], ModelCache]:
    """Return the final hidden states of a step's tokens, and the new states of the cache.

    With pipeline stages, parameters must come from `jaxscale.infer.on_stages`, and batch rows pass in micro-batches.

    Args:
      model: the model.
      tokens: ids, int32 (batch, columns).
      step: slot and position of each token.
      cache: the kind of KV cache.
      states: the states of the model's layers (`init_cache`).
    """
    if is_staged(current()):
        x = model.begin(tokens, step.positions, packed=True)
        x, states = staged_layers(model, tokens, x, step, cache, states)
        return model.finish(x), states
    caches = run_caches(cache, states, step)
    hidden, _ = model.hidden_and_stats(tokens, positions=step.positions, segment_ids=step.slots + 1, cache=caches)
    return hidden, tuple(c.states for c in caches)


def logits_at(model: LanguageModel, hidden: Float[Array, "b s e"], columns: Int[Array, "b n"]) -> Float[Array, "b n v"]:
    """Return the logits, float32, at some of a step's columns.

    Args:
      model: the model.
      hidden: final hidden states from `forward`.
      columns: int32 (batch, n).
    """
    return head_logits(hidden_at(hidden, columns), model.head_weight(), softcap=model.logit_softcap)


def hidden_at(hidden: Float[Array, "b s e"], columns: Int[Array, "b n"]) -> Float[Array, "b n e"]:
    """Return the final hidden states at some of a step's columns.

    Args:
      hidden: final hidden states from `forward`.
      columns: int32 (batch, n).
    """
    return jnp.take_along_axis(hidden, columns[..., None], axis=1)


def one_per_batch_row(
    starts: Int[Array, " b"], counts: Int[Array, " b"], width: int, tables: Int[Array, "b p"] | None = None
) -> Packed:
    """Return a step in which each batch row holds one sequence.

    Args:
      starts: position of the first new token of each sequence, int32 (batch,).
      counts: new tokens of each, int32 (batch,); at most `width`.
      width: columns of the step.
      tables: pages of each sequence, int32 (batch, pages), for a paged cache.
    """
    column = jnp.arange(width, dtype=jnp.int32)[None]
    used = column < counts[:, None]
    return Packed(
        slots=jnp.where(used, 0, -1),
        positions=jnp.where(used, starts[:, None] + column, -1),
        groups=(Group(jnp.broadcast_to(column, used.shape)[:, None]),),
        tables=None if tables is None else tables[:, None],
    )


def replicated(arrays: T) -> T:
    """Return a tree of small arrays replicated on all devices, so that every process can read them.

    Args:
      arrays: the tree.
    """
    return jax.tree.map(lambda x: constrain(x, *[None] * x.ndim), arrays)
