"""A round of speculative decoding on the device: proposals, and their verification by the large model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jaxscale.infer.drafters import ACCEPT, CORRECT, Drafter, RoundInputs, distribution, random_key
from jaxscale.infer.forward import forward, logits_at, one_per_batch_row, replicated
from jaxscale.infer.sampling import SamplingArrays
from jaxscale.layout import constrain
from jaxscale.layout.tensors import Tree
from jaxscale.models import LanguageModel

TOP = 20


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


Prefill = Callable[..., list[Tree]]
DraftAndVerify = Callable[..., tuple[RoundResult, list[Tree]]]


@functools.lru_cache(16)
def rounds_of(target: nnx.GraphDef[Any], drafter: Drafter, most: int) -> tuple[Prefill, DraftAndVerify]:
    """Return the compiled steps of a model and a drafter.

    Args:
      target: the large model.
      drafter: what proposes.
      most: proposals of a round.

    Returns:
      `prefill(params, states, tokens, starts, counts)`, which returns the new states of both, and
      `draft_and_verify(params, states, inputs)`, which returns a `RoundResult` and the new states.
    """

    @functools.partial(jax.jit, donate_argnums=1)
    def prefill(params: Tree, states: Sequence[Tree], tokens: Array, starts: Array, counts: Array) -> list[Tree]:
        width = tokens.shape[1] - drafter.lookahead
        step, large = one_per_batch_row(starts, counts, width), nnx.merge(target, params[0])
        hidden, cached = forward(large, tokens[:, :width], step, drafter.cache, states[0])
        return [cached, drafter.prefill(large, params[1], states[1], tokens, hidden, step)]

    @functools.partial(jax.jit, donate_argnums=1)
    def draft_and_verify(params: Tree, states: Sequence[Tree], inputs: RoundInputs) -> tuple[RoundResult, list[Tree]]:
        large, position, used = nnx.merge(target, params[0]), inputs.length, inputs.uncached > 0
        vocab = large.head_weight().shape[0]

        (proposed, q, seen), drafted = drafter.propose(large, params[1], states[1], inputs, most, vocab)
        last = jnp.take_along_axis(inputs.pending, jnp.maximum(inputs.uncached - 1, 0)[:, None], axis=1)
        step = one_per_batch_row(position - 1, jnp.where(used, inputs.proposals + 1, 0), most + 1)
        hidden, cached = forward(large, jnp.concatenate([last, proposed], axis=1), step, drafter.cache, states[0])
        logits = _logits(large, hidden, jnp.broadcast_to(jnp.arange(most + 1), (len(position), most + 1)))
        sampling = SamplingArrays(*(jnp.repeat(x, most + 1) for x in inputs.sampling))
        p = distribution(logits.reshape(-1, vocab), sampling, seen.reshape(-1, vocab)).reshape(logits.shape)
        accepted, token = verify(p, q, proposed, inputs.proposals, inputs.sampling.seed, position)
        drafted = drafter.verified(drafted, hidden, jnp.where(used, accepted + 1, 0))
        tokens = jnp.pad(proposed, ((0, 0), (0, 1)))
        tokens = jnp.where(jnp.arange(most + 1) == accepted[:, None], token[:, None], tokens)
        logprobs = jax.nn.log_softmax(logits, axis=-1)
        logprob = jnp.take_along_axis(logprobs, tokens[..., None], axis=-1)[..., 0]
        k = min(TOP, vocab)

        def nothing() -> list[Array]:
            return [jnp.zeros((*tokens.shape, k), jnp.float32), jnp.zeros((*tokens.shape, k), jnp.int32)]

        top_logprob, top = lax.cond(inputs.with_top, lambda: lax.top_k(logprobs, k), nothing)
        result = replicated(RoundResult(tokens, accepted, logprob, top, top_logprob))
        return result, [cached, drafted]

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

    draw = jax.vmap(lambda s, at: jax.random.uniform(random_key(s, at, ACCEPT)), in_axes=(None, 0))
    u = jax.vmap(draw)(seed, position[:, None] + jnp.arange(most))
    accept = (u * of_proposed(q) < of_proposed(p[:, :most])) & (jnp.arange(most) < proposals[:, None])
    accepted = jnp.sum(jnp.cumprod(accept.astype(jnp.int32), axis=1), axis=1)

    def after_accepted(x: Float[Array, "b n v"]) -> Float[Array, "b v"]:
        return jnp.take_along_axis(x, accepted[:, None, None], axis=1)[:, 0]

    p_next = after_accepted(p)
    q_next = jnp.where((accepted < proposals)[:, None], after_accepted(jnp.pad(q, ((0, 0), (0, 1), (0, 0)))), 0)
    excess = jnp.maximum(p_next - q_next, 0)
    excess = jnp.where(jnp.sum(excess, axis=-1, keepdims=True) > 0, excess, p_next)  # equal except for rounding
    keys = jax.vmap(functools.partial(random_key, role=CORRECT))(seed, position + accepted)
    token = jax.vmap(jax.random.categorical)(keys, jnp.log(excess))
    return accepted, token.astype(jnp.int32)


def _logits(model: LanguageModel, hidden: Float[Array, "b s e"], columns: Int[Array, "b n"]) -> Float[Array, "b n v"]:
    return constrain(logits_at(model, hidden, columns), "batch", None, None)
