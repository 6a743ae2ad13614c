"""A round of speculative decoding on the device: the draft's proposals, and their verification by the large model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt8

from jaxscale.infer.cache import Contiguous, ModelCache
from jaxscale.infer.forward import forward, logits_at, one_per_batch_row, replicated
from jaxscale.infer.sampling import SamplingArrays, processed, seen_of
from jaxscale.layout import constrain
from jaxscale.layout.tensors import Tree
from jaxscale.models import LanguageModel

CACHE = Contiguous()
TOP = 20
_PROPOSE, _ACCEPT, _CORRECT = 1, 2, 3  # the three random numbers of a position in a sequence


class RoundInputs(NamedTuple):
    """The inputs of a round, for b sequences.

    Args:
      pending: the last tokens, which the draft has not cached: one or two, int32 (b, 2).
      cached: how many tokens the draft has cached, int32 (b,).
      uncached: how many of `pending` there are, int32 (b,); 0 in a batch row without a sequence.
      proposals: how many tokens the draft shall propose, int32 (b,).
      sampling: settings of each sequence.
      seen: which token ids each sequence contains (`seen_bits`), uint8 (b, bytes).
      with_top: whether any sequence wants the likeliest tokens, bool scalar.
    """

    pending: Int[Array, "b 2"]
    cached: Int[Array, " b"]
    uncached: Int[Array, " b"]
    proposals: Int[Array, " b"]
    sampling: SamplingArrays
    seen: UInt8[Array, "b w"]
    with_top: Bool[Array, ""]


class RoundResult(NamedTuple):
    """The result of a round, for b sequences.

    Args:
      tokens: `accepted` proposals and one token of the large model, int32 (b, n); undefined after those.
      accepted: how many proposals were accepted, int32 (b,).
      logprob: log-probability of each token by the large model, float32 (b, n).
      top: the likeliest ids in each place, int32 (b, n, t).
      top_logprob: their log-probabilities, float32 (b, n, t).
    """

    tokens: Int[Array, "b n"]
    accepted: Int[Array, " b"]
    logprob: Float[Array, "b n"]
    top: Int[Array, "b n t"]
    top_logprob: Float[Array, "b n t"]


Prefill = Callable[..., list[ModelCache]]
DraftAndVerify = Callable[..., tuple[RoundResult, list[ModelCache]]]


@functools.lru_cache(16)
def rounds_of(target: nnx.GraphDef[Any], draft: nnx.GraphDef[Any], most: int) -> tuple[Prefill, DraftAndVerify]:
    """Return two models' compiled steps.

    Args:
      target: the large model.
      draft: the small model.
      most: proposals of a round.

    Returns:
      `prefill(params, states, tokens, starts, counts)`, which returns the new states of both models, and
      `draft_and_verify(params, states, inputs)`, which returns a `RoundResult` and the new states.
    """
    graphdefs = (target, draft)

    @functools.partial(jax.jit, donate_argnums=1)
    def prefill(
        params: Tree, states: Sequence[ModelCache], tokens: Array, starts: Array, counts: Array
    ) -> list[ModelCache]:
        step = one_per_batch_row(starts, counts, tokens.shape[1])
        models = [nnx.merge(g, p) for g, p in zip(graphdefs, params, strict=True)]
        return [forward(m, _ids(m, tokens), step, CACHE, s)[1] for m, s in zip(models, states, strict=True)]

    @functools.partial(jax.jit, donate_argnums=1)
    def draft_and_verify(
        params: Tree, states: Sequence[ModelCache], inputs: RoundInputs
    ) -> tuple[RoundResult, list[ModelCache]]:
        large, small = (nnx.merge(g, p) for g, p in zip(graphdefs, params, strict=True))
        position, used = inputs.cached + inputs.uncached, inputs.uncached > 0  # position of the first new token
        vocab = large.head_weight().shape[0]

        proposed, q, seen, draft_states = _propose(small, states[1], inputs, most, vocab)
        last = jnp.take_along_axis(inputs.pending, jnp.maximum(inputs.uncached - 1, 0)[:, None], axis=1)
        step = one_per_batch_row(position - 1, jnp.where(used, inputs.proposals + 1, 0), most + 1)
        hidden, target_states = forward(large, jnp.concatenate([last, proposed], axis=1), step, CACHE, states[0])
        logits = _logits(large, hidden, jnp.broadcast_to(jnp.arange(most + 1), (len(position), most + 1)))
        sampling = SamplingArrays(*(jnp.repeat(x, most + 1) for x in inputs.sampling))
        p = distribution(logits.reshape(-1, vocab), sampling, seen.reshape(-1, vocab)).reshape(logits.shape)
        accepted, token = verify(p, q, proposed, inputs.proposals, inputs.sampling.seed, position)
        tokens = jnp.pad(proposed, ((0, 0), (0, 1)))
        tokens = jnp.where(jnp.arange(most + 1) == accepted[:, None], token[:, None], tokens)
        logprobs = jax.nn.log_softmax(logits, axis=-1)
        logprob = jnp.take_along_axis(logprobs, tokens[..., None], axis=-1)[..., 0]
        k = min(TOP, vocab)

        def nothing() -> list[Array]:
            return [jnp.zeros((*tokens.shape, k), jnp.float32), jnp.zeros((*tokens.shape, k), jnp.int32)]

        top_logprob, top = lax.cond(inputs.with_top, lambda: lax.top_k(logprobs, k), nothing)
        result = replicated(RoundResult(tokens, accepted, logprob, top, top_logprob))
        return result, [target_states, draft_states]

    return prefill, draft_and_verify


def verify(
    p: Float[Array, "b n v"],
    q: Float[Array, "b m v"],
    proposed: Int[Array, "b m"],
    proposals: Int[Array, " b"],
    seed: Int[Array, " b"],
    position: Int[Array, " b"],
) -> tuple[Int[Array, " b"], Int[Array, " b"]]:
    """Accept or reject proposals so that tokens are distributed as `p`, whatever `q` is.

    A proposal x is accepted with probability min(1, p(x) / q(x)). The first rejected one is replaced by a draw from
    max(p - q, 0), normalised; if all are accepted, a draw from p follows (Leviathan et al. 2023, algorithm 1).

    Args:
      p: the large model's distributions in the m + 1 places, float32 (b, m + 1, vocab).
      q: the draft's, float32 (b, m, vocab).
      proposed: ids drawn from `q`, int32 (b, m).
      proposals: how many of them count, int32 (b,).
      seed: of each sequence, uint32 (b,); random numbers depend on it and the position alone.
      position: of the first proposal in its sequence, int32 (b,).

    Returns:
      the number of accepted proposals, and the token after them, int32 (b,) each.
    """
    most = proposed.shape[1]

    def of_proposed(x: Float[Array, "b m v"]) -> Float[Array, "b m"]:
        return jnp.take_along_axis(x, proposed[..., None], axis=-1)[..., 0]

    draw = jax.vmap(lambda s, at: jax.random.uniform(_key(s, at, _ACCEPT)), in_axes=(None, 0))
    u = jax.vmap(draw)(seed, position[:, None] + jnp.arange(most))
    accept = (u * of_proposed(q) < of_proposed(p[:, :most])) & (jnp.arange(most) < proposals[:, None])
    accepted = jnp.sum(jnp.cumprod(accept.astype(jnp.int32), axis=1), axis=1)

    def after_accepted(x: Float[Array, "b n v"]) -> Float[Array, "b v"]:
        return jnp.take_along_axis(x, accepted[:, None, None], axis=1)[:, 0]

    p_next = after_accepted(p)
    q_next = jnp.where((accepted < proposals)[:, None], after_accepted(jnp.pad(q, ((0, 0), (0, 1), (0, 0)))), 0)
    excess = jnp.maximum(p_next - q_next, 0)
    excess = jnp.where(jnp.sum(excess, axis=-1, keepdims=True) > 0, excess, p_next)  # equal except for rounding
    keys = jax.vmap(functools.partial(_key, role=_CORRECT))(seed, position + accepted)
    token = jax.vmap(jax.random.categorical)(keys, jnp.log(excess))
    return accepted, token.astype(jnp.int32)


def distribution(
    logits: Float[Array, "n v"], sampling: SamplingArrays, seen: Bool[Array, "n v"] | None
) -> Float[Array, "n v"]:
    """Return the distribution of the next token; at temperature 0 the likeliest token has probability 1.

    Args:
      logits: the model's, float32 (n, vocab).
      sampling: settings of each sequence.
      seen: which tokens each sequence contains, bool (n, vocab); `None` when nothing is penalised.
    """
    shaped = processed(logits, sampling, seen)
    likeliest = jax.nn.one_hot(jnp.argmax(shaped, axis=-1), shaped.shape[-1], dtype=shaped.dtype)
    return jnp.where((sampling.temperature == 0)[:, None], likeliest, jax.nn.softmax(shaped, axis=-1))


def _propose(
    draft: LanguageModel, states: ModelCache, inputs: RoundInputs, most: int, vocab: int
) -> tuple[Int[Array, "b m"], Float[Array, "b m v"], Bool[Array, "b n v"], ModelCache]:
    """Proposals, their distributions, which ids precede each place (and the one after the last), and the new states."""
    position = inputs.cached + inputs.uncached
    step = one_per_batch_row(inputs.cached, inputs.uncached, 2)
    hidden, states = forward(draft, _ids(draft, inputs.pending), step, CACHE, states)
    logits = _resized(_logits(draft, hidden, jnp.maximum(inputs.uncached - 1, 0)[:, None])[:, 0], vocab)
    tokens, distributions, seen = [], [], [seen_of(inputs.seen, vocab)]
    # Each proposal but the last is the draft's next input. There are few, so the loop is unrolled.
    for i in range(most):
        q = distribution(logits, inputs.sampling, seen[-1])
        keys = jax.vmap(functools.partial(_key, role=_PROPOSE))(inputs.sampling.seed, position + i)
        token = jax.vmap(jax.random.categorical)(keys, jnp.log(q)).astype(jnp.int32)
        tokens.append(token)
        distributions.append(q)
        seen.append(seen[-1].at[jnp.arange(len(token)), token].set(True))
        if i + 1 < most:
            step = one_per_batch_row(position + i, (i + 1 < inputs.proposals).astype(jnp.int32), 1)
            hidden, states = forward(draft, _ids(draft, token[:, None]), step, CACHE, states)
            logits = _resized(_logits(draft, hidden, jnp.zeros_like(token)[:, None])[:, 0], vocab)
    return jnp.stack(tokens, axis=1), jnp.stack(distributions, axis=1), jnp.stack(seen, axis=1), states


def _logits(model: LanguageModel, hidden: Float[Array, "b s e"], columns: Int[Array, "b n"]) -> Float[Array, "b n v"]:
    return constrain(logits_at(model, hidden, columns), "batch", None, None)


def _ids(model: LanguageModel, tokens: Int[Array, "b s"]) -> Int[Array, "b s"]:
    """Clip ids to the model's vocabulary: what a draft makes of an id that it does not have is verified anyway."""
    return jnp.minimum(tokens, model.head_weight().shape[0] - 1)


def _resized(logits: Float[Array, "b v"], vocab: int) -> Float[Array, "b w"]:
    """The draft's logits for the large model's vocabulary: -inf for ids that the draft does not have."""
    more = max(vocab - logits.shape[-1], 0)
    return jnp.pad(logits, ((0, 0), (0, more)), constant_values=-jnp.inf)[:, :vocab]


def _key(seed: Array, position: Array, role: int) -> Array:
    """The random key of a position and role.

    Positions after a rejected proposal are proposed again with the same keys; that is sound, since their first draws
    influenced no token of the output.
    """
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), position), role)
