"""A step on the device: tokens of many sequences pass through the model, and each sequence's next one is chosen."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxscale.infer.cache import ModelCache
from jaxscale.infer.engine.packing import StepInputs
from jaxscale.infer.forward import forward, hidden_at, logits_at, replicated
from jaxscale.infer.sampling import SamplingArrays, choose, seen_of
from jaxscale.layout import constrain
from jaxscale.layout.tensors import Tree
from jaxscale.models import LanguageModel
from jaxscale.nn import Cache, head_logits

TOP = 20
"""How many of the likeliest tokens a step returns if any sequence wants some (`Sampling.logprobs` is at most this)."""
_SCORED_COLUMNS = 32


class ChosenTokens(NamedTuple):
    """The tokens chosen by k successive steps, for n entries of each of b shards.

    Args:
      token: ids, int32 (k, b, n); undefined after a sequence has ended.
      logprob: their log-probabilities by the model, float32 (k, b, n).
      top: the likeliest ids, int32 (k, b, n, t), where some sequence wants them.
      top_logprob: their log-probabilities, float32 (k, b, n, t).
      steps: how many steps were taken, int32 scalar.
    """

    token: Int[Array, "k b n"]
    logprob: Float[Array, "k b n"]
    top: Int[Array, "k b n t"]
    top_logprob: Float[Array, "k b n t"]
    steps: Int[Array, ""]


class Scored(NamedTuple):
    """The model's predictions for tokens of prompts.

    Args:
      logprob: log-probability of each token, float32 (b, columns).
      top: the likeliest ids in its place, int32 (b, columns, t).
      top_logprob: their log-probabilities, float32 (b, columns, t).
    """

    logprob: Float[Array, "b s"]
    top: Int[Array, "b s t"]
    top_logprob: Float[Array, "b s t"]


Step = Callable[[Any, ModelCache, StepInputs], tuple[Float[Array, "b n e"], Float[Array, "b s e"], ModelCache]]
Pick = Callable[[Any, Float[Array, "b n e"], StepInputs], ChosenTokens]
Scores = Callable[[Any, Float[Array, "b s e"], Int[Array, "b s"]], Scored]
Steps = Callable[[Any, ModelCache, StepInputs, Any, Any], tuple[ChosenTokens, ModelCache]]


@functools.lru_cache(16)
def steps_of(graphdef: nnx.GraphDef[Any], cache: Cache, most: int) -> tuple[Step, Steps]:
    """Return a model's compiled steps `one` and `ahead`.

    `one(params, states, inputs)` returns the final hidden states of the sequences' last tokens, for `pick_of`, and of
    all tokens, for `score_of`: these two do not depend on the shape of the step, and compile separately.
    `ahead(params, states, inputs, steps, until_end)` takes several steps in a loop on the device: the chosen token of
    each sequence is the next one's input, until all have ended, `steps` are done, or, with `until_end`, one has ended.

    Args:
      graphdef: the model.
      cache: the kind of KV cache.
      most: the largest `steps`.
    """

    @functools.partial(jax.jit, donate_argnums=1)
    def one(params: Tree, states: ModelCache, inputs: StepInputs) -> tuple[Array, Array, ModelCache]:
        hidden, states = forward(nnx.merge(graphdef, params), inputs.tokens, inputs.step, cache, states)
        return hidden_at(hidden, inputs.columns), hidden, states

    @functools.partial(jax.jit, donate_argnums=1)
    def ahead(
        params: Tree, states: ModelCache, inputs: StepInputs, steps: Int[Array, ""], until_end: Bool[Array, ""]
    ) -> tuple[ChosenTokens, ModelCache]:
        model = nnx.merge(graphdef, params)
        shape = (most, *inputs.columns.shape)
        likeliest = (*shape, min(TOP, model.head_weight().shape[0]))
        kinds = ((shape, jnp.int32), (shape, jnp.float32), (likeliest, jnp.int32), (likeliest, jnp.float32))
        chosen = tuple(jnp.zeros(shape, dtype) for shape, dtype in kinds)
        remaining_at_first = inputs.remaining

        def going(carry: tuple[Any, ...]) -> Array:
            i, inputs, _, _ = carry
            ended = jnp.any((inputs.remaining == 0) & (remaining_at_first > 0))
            return (i < steps) & jnp.any(inputs.remaining > 0) & ~(until_end & ended)

        def go(carry: tuple[Any, ...]) -> tuple[Any, ...]:
            i, inputs, states, chosen = carry
            hidden, states = forward(model, inputs.tokens, inputs.step, cache, states)
            new = next_tokens(model, hidden_at(hidden, inputs.columns), inputs)
            chosen = tuple(lax.dynamic_update_index_in_dim(a, b, i, 0) for a, b in zip(chosen, new, strict=True))
            return i + 1, _next_inputs(inputs, new[0]), states, chosen

        i, _, states, chosen = lax.while_loop(going, go, (jnp.int32(0), inputs, states, chosen))
        token, logprob, top, top_logprob = chosen
        return replicated(ChosenTokens(token, logprob, top, top_logprob, i)), states

    return one, ahead


@functools.lru_cache(16)
def pick_of(graphdef: nnx.GraphDef[Any]) -> Pick:
    """Return a model's compiled `pick(params, last, inputs)`: the next token of each sequence.

    `last` are the final hidden states of the sequences' last tokens, and `inputs` are those of `sampling_inputs`.

    Args:
      graphdef: the model.
    """

    @jax.jit
    def pick(params: Tree, last: Float[Array, "b n e"], inputs: StepInputs) -> ChosenTokens:
        token, logprob, top, top_logprob = (x[None] for x in next_tokens(nnx.merge(graphdef, params), last, inputs))
        return replicated(ChosenTokens(token, logprob, top, top_logprob, jnp.int32(1)))

    return pick


@functools.lru_cache(16)
def score_of(graphdef: nnx.GraphDef[Any]) -> Scores:
    """Return a model's compiled `score(params, hidden, targets)`, see `score_tokens`.

    Args:
      graphdef: the model.
    """
    return jax.jit(lambda params, hidden, targets: score_tokens(nnx.merge(graphdef, params), hidden, targets))


def score_tokens(model: LanguageModel, hidden: Float[Array, "b s e"], targets: Int[Array, "b s"]) -> Scored:
    """Return the model's predictions for the token after each; logits of `_SCORED_COLUMNS` columns live at a time.

    Args:
      model: the model.
      hidden: final hidden states (b, columns, embed).
      targets: the token after each, int32 (b, columns).
    """
    b, s = targets.shape
    k = min(TOP, model.head_weight().shape[0])

    def part(columns: Int[Array, " n"]) -> tuple[Array, Array, Array]:
        at = jnp.broadcast_to(columns, (b, *columns.shape))
        logits = constrain(logits_at(model, hidden, at), "batch", None, None)
        logprobs = jax.nn.log_softmax(logits, axis=-1)
        own = jnp.take_along_axis(logprobs, jnp.take_along_axis(targets, at, axis=1)[..., None], axis=-1)[..., 0]
        values, ids = lax.top_k(logprobs, k)
        return own, ids.astype(jnp.int32), values

    n = min(_SCORED_COLUMNS, s)
    parts = jnp.minimum(jnp.arange(-(-s // n) * n), s - 1).reshape(-1, n)
    results = [jnp.moveaxis(x, 0, 1) for x in lax.map(part, parts)]
    return replicated(Scored(*(x.reshape(b, -1, *x.shape[3:])[:, :s] for x in results)))


def next_tokens(
    model: LanguageModel, last: Float[Array, "b n e"], inputs: StepInputs
) -> tuple[Int[Array, "b n"], Float[Array, "b n"], Int[Array, "b n t"], Float[Array, "b n t"]]:
    """Choose each sequence's next token.

    Args:
      model: the model.
      last: final hidden states of the sequences' last tokens.
      inputs: of the step; `sampling_inputs` are enough.

    Returns:
      the tokens, their log-probabilities, the likeliest tokens, and theirs.
    """
    logits = constrain(head_logits(last, model.head_weight(), softcap=model.logit_softcap), "batch", None, None)
    b, n, vocab = logits.shape

    def flat(x: Array) -> Array:
        return x.reshape(b * n, *x.shape[2:])

    seen = seen_of(flat(inputs.seen), vocab)
    chosen = choose(flat(logits), SamplingArrays(*map(flat, inputs.sampling)), flat(inputs.at), seen)
    k = min(TOP, vocab)

    def likeliest() -> tuple[Array, Array]:
        values, ids = lax.top_k(jax.nn.log_softmax(logits, axis=-1), k)
        return ids.astype(jnp.int32), values

    def nothing() -> tuple[Array, Array]:
        return jnp.zeros((b, n, k), jnp.int32), jnp.zeros((b, n, k), jnp.float32)

    top, top_logprob = lax.cond(inputs.with_top, likeliest, nothing)
    return chosen.token.reshape(b, n), chosen.logprob.reshape(b, n), top, top_logprob


def _next_inputs(inputs: StepInputs, token: Int[Array, "b n"]) -> StepInputs:
    """The inputs of the next step, where every sequence has one token, in the same column."""
    ends = jnp.any(token[..., None] == inputs.ends, axis=-1) & ~inputs.ignore_end
    remaining = jnp.where(ends, 0, jnp.maximum(inputs.remaining - 1, 0))
    running = remaining > 0
    step = inputs.step._replace(
        slots=jnp.where(running, inputs.step.slots, -1),
        positions=jnp.where(running, inputs.step.positions + 1, -1),
    )
    shards, places = (jnp.arange(n) for n in token.shape)
    byte = (shards[:, None], places, token // 8)
    seen = inputs.seen.at[byte].set(inputs.seen[byte] | jnp.uint8(128) >> (token % 8).astype(jnp.uint8))
    return inputs._replace(tokens=token, step=step, remaining=remaining, at=inputs.at + 1, seen=seen)
