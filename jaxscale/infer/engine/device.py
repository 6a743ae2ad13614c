"""A step on the device: the tokens of many texts go through the model, and each text's next one is chosen."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jaxscale.infer.cache import ModelCache
from jaxscale.infer.engine.packing import Told
from jaxscale.infer.forward import everywhere, forward, hidden_at, logits_at
from jaxscale.infer.sampling import Choices, choose, seen_of
from jaxscale.layout import constrain
from jaxscale.nn import Cache, head_logits

TOP = 20
"""As many of the likeliest tokens are given where somebody wants some (`Sampling.logprobs` is at most this)."""
_PART = 32


class Found(NamedTuple):
    """What steps in a row chose.

    Args:
      token, logprob: of each text in each step; of one that had ended, anything.
      top, top_logprob: the likeliest tokens, where somebody wants them.
      steps: how many were done, int32.
    """

    token: Int[Array, "k b n"]
    logprob: Float[Array, "k b n"]
    top: Int[Array, "k b n t"]
    top_logprob: Float[Array, "k b n t"]
    steps: Int[Array, ""]


class Scored(NamedTuple):
    """What the model made of given tokens.

    Args:
      logprob: of each.
      top, top_logprob: the likeliest in its place.
    """

    logprob: Float[Array, "b s"]
    top: Int[Array, "b s t"]
    top_logprob: Float[Array, "b s t"]


Step = Callable[[Any, ModelCache, Told], tuple[Float[Array, "b n e"], Float[Array, "b s e"], ModelCache]]
Pick = Callable[[Any, Float[Array, "b n e"], Told], Found]
Scores = Callable[[Any, Float[Array, "b s e"], Int[Array, "b s"]], Scored]
Steps = Callable[[Any, ModelCache, Told, Any, Any], tuple[Found, ModelCache]]


@functools.lru_cache(16)
def steps_of(graphdef: nnx.GraphDef[Any], how: Cache, most: int) -> tuple[Step, Steps]:
    """A model's compiled steps: `one(params, states, told)`, and `ahead(params, states, told, steps, until_end)`.

    The first one gives the final hidden states of the texts' last tokens, for `pick_of`, and of all, for `score_of`:
    these two do not depend on a step's shape as the model does, and compile apart from it. The second goes on by
    itself: of every text, the token chosen is the next one computed, until it ends or `steps` are done, with
    `until_end` until one has ended.

    Args:
      graphdef: the model.
      how: its cache.
      most: the largest `steps`.
    """

    @functools.partial(jax.jit, donate_argnums=1)
    def one(params: Any, states: ModelCache, told: Told) -> tuple[Array, Array, ModelCache]:
        hidden, states = forward(nnx.merge(graphdef, params), told.tokens, told.step, how, states)
        return hidden_at(hidden, told.columns), hidden, states

    @functools.partial(jax.jit, donate_argnums=1)
    def ahead(params: Any, states: ModelCache, told: Told, steps: Any, until_end: Any) -> tuple[Found, ModelCache]:
        model = nnx.merge(graphdef, params)
        shape = (most, *told.columns.shape)
        likeliest = (*shape, min(TOP, model.head_weight().shape[0]))
        kinds = ((shape, jnp.int32), (shape, jnp.float32), (likeliest, jnp.int32), (likeliest, jnp.float32))
        found = tuple(jnp.zeros(shape, dtype) for shape, dtype in kinds)

        def going(carry: Any) -> Array:
            i, told, _, _ = carry
            ended = jnp.any((told.left == 0) & (first_left > 0))
            return (i < steps) & jnp.any(told.left > 0) & ~(until_end & ended)

        def go(carry: Any) -> Any:
            i, told, states, found = carry
            hidden, states = forward(model, told.tokens, told.step, how, states)
            new = next_tokens(model, hidden_at(hidden, told.columns), told)
            found = tuple(lax.dynamic_update_index_in_dim(a, b, i, 0) for a, b in zip(found, new, strict=True))
            return i + 1, _on(told, new[0]), states, found

        first_left = told.left
        i, _, states, found = lax.while_loop(going, go, (jnp.int32(0), told, states, found))
        token, logprob, top, top_logprob = found
        return everywhere(Found(token, logprob, top, top_logprob, i)), states

    return one, ahead


@functools.lru_cache(16)
def pick_of(graphdef: nnx.GraphDef[Any]) -> Pick:
    """A model's compiled `pick(params, last, told)`: what follows each text, of `told` what `how_to_pick` leaves."""

    @jax.jit
    def pick(params: Any, last: Float[Array, "b n e"], told: Told) -> Found:
        token, logprob, top, top_logprob = (x[None] for x in next_tokens(nnx.merge(graphdef, params), last, told))
        return everywhere(Found(token, logprob, top, top_logprob, jnp.int32(1)))

    return pick


@functools.lru_cache(16)
def score_of(graphdef: nnx.GraphDef[Any]) -> Scores:
    """A model's compiled `score(params, hidden, targets)`, see `given_tokens`."""
    return jax.jit(lambda params, hidden, targets: given_tokens(nnx.merge(graphdef, params), hidden, targets))


def given_tokens(model: Any, hidden: Float[Array, "b s e"], targets: Int[Array, "b s"]) -> Scored:
    """What the model makes of the token that follows each; the logits of `_PART` columns are there at a time."""
    b, s = targets.shape
    k = min(TOP, model.head_weight().shape[0])

    def part(columns: Int[Array, " n"]) -> tuple[Array, Array, Array]:
        at = jnp.broadcast_to(columns, (b, *columns.shape))
        logits = constrain(logits_at(model, hidden, at), "batch", None, None)
        every = jax.nn.log_softmax(logits, axis=-1)
        own = jnp.take_along_axis(every, jnp.take_along_axis(targets, at, axis=1)[..., None], axis=-1)[..., 0]
        values, ids = lax.top_k(every, k)
        return own, ids.astype(jnp.int32), values

    n = min(_PART, s)
    parts = jnp.minimum(jnp.arange(-(-s // n) * n), s - 1).reshape(-1, n)
    found = [jnp.moveaxis(x, 0, 1) for x in lax.map(part, parts)]
    return everywhere(Scored(*(x.reshape(b, -1, *x.shape[3:])[:, :s] for x in found)))


def next_tokens(model: Any, last: Float[Array, "b n e"], told: Told) -> tuple[Array, Array, Array, Array]:
    """Each text's next token, its log-probability, and the likeliest ones; `last` is of its last token."""
    logits = constrain(head_logits(last, model.head_weight(), softcap=model.logit_softcap), "batch", None, None)
    b, n, vocab = logits.shape
    flat = lambda x: x.reshape(b * n, *x.shape[2:])  # noqa: E731
    seen = seen_of(flat(told.seen), vocab)
    chosen = choose(flat(logits), Choices(*(flat(x) for x in told.choices)), flat(told.at), seen)
    k = min(TOP, vocab)

    def likeliest() -> tuple[Array, Array]:
        values, ids = lax.top_k(jax.nn.log_softmax(logits, axis=-1), k)
        return ids.astype(jnp.int32), values

    nothing = lambda: (jnp.zeros((b, n, k), jnp.int32), jnp.zeros((b, n, k), jnp.float32))  # noqa: E731
    top, top_logprob = lax.cond(told.top, likeliest, nothing)
    return chosen.token.reshape(b, n), chosen.logprob.reshape(b, n), top, top_logprob


def _on(told: Told, token: Int[Array, "b n"]) -> Told:
    """What the step after is told, where each text stands in its own column."""
    ends = jnp.any(token[..., None] == told.ends, axis=-1) & ~told.on
    left = jnp.where(ends, 0, jnp.maximum(told.left - 1, 0))
    there = left > 0
    step = told.step._replace(
        rows=jnp.where(there, told.step.rows, -1), positions=jnp.where(there, told.step.positions + 1, -1)
    )
    lanes, places = (jnp.arange(n) for n in token.shape)
    byte = (lanes[:, None], places, token // 8)
    seen = told.seen.at[byte].set(told.seen[byte] | jnp.uint8(128) >> (token % 8).astype(jnp.uint8))
    return told._replace(tokens=token, step=step, left=left, at=told.at + 1, seen=seen)
