"""A round of speculative decoding on the device: a draft's proposals, and the large model's judgement of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt8

from jaxscale.infer.cache import Contiguous, ModelCache
from jaxscale.infer.forward import everywhere, forward, logits_at, one_row_a_lane
from jaxscale.infer.sampling import Choices, processed, seen_of
from jaxscale.layout import constrain

CACHE = Contiguous()
TOP = 20
_DRAWN, _ACCEPTED, _CORRECTED = 1, 2, 3  # three random numbers of each place in a text


class Told(NamedTuple):
    """A round, as the device is told of it.

    Args:
      pending: the last tokens that the draft has not kept, one or two.
      kept: how many tokens the draft has.
      behind: how many of `pending` there are; 0 where a lane has no text.
      proposals: how many tokens it shall propose.
      how: settings.
      seen: a bit for each id, see `seen_bits`: whether it is in the text; 0 where nothing is penalised.
      top: whether somebody wants the likeliest tokens.
    """

    pending: Int[Array, "b 2"]
    kept: Int[Array, " b"]
    behind: Int[Array, " b"]
    proposals: Int[Array, " b"]
    how: Choices
    seen: UInt8[Array, "b w"]
    top: Bool[Array, ""]


class Judged(NamedTuple):
    """What a round brought.

    Args:
      tokens: of each text, `accepted` proposals and one of the large model's own; then anything.
      accepted: how many.
      logprob: of each token by the large model itself.
      top, top_logprob: the likeliest ones in each place.
    """

    tokens: Int[Array, "b n"]
    accepted: Int[Array, " b"]
    logprob: Float[Array, "b n"]
    top: Int[Array, "b n t"]
    top_logprob: Float[Array, "b n t"]


Read = Callable[..., list[ModelCache]]
Round = Callable[..., tuple[Judged, list[ModelCache]]]


@functools.lru_cache(16)
def rounds_of(target: nnx.GraphDef[Any], draft: nnx.GraphDef[Any], most: int) -> tuple[Read, Round]:
    """Two models' compiled steps: `read(params, states, tokens, starts, counts)` and `judge(params, states, told)`.

    Args:
      target, draft: the models.
      most: proposals of a round.
    """
    graphdefs = (target, draft)

    @functools.partial(jax.jit, donate_argnums=1)
    def read(params: Any, states: Any, tokens: Array, starts: Array, counts: Array) -> Any:
        step = one_row_a_lane(starts, counts, tokens.shape[1])
        models = [nnx.merge(g, p) for g, p in zip(graphdefs, params, strict=True)]
        return [forward(m, _ids(m, tokens), step, CACHE, s)[1] for m, s in zip(models, states, strict=True)]

    @functools.partial(jax.jit, donate_argnums=1)
    def judge(params: Any, states: Any, told: Told) -> Any:
        large, small = (nnx.merge(g, p) for g, p in zip(graphdefs, params, strict=True))
        place, there = told.kept + told.behind, told.behind > 0  # of the first new token, and whether there is a text
        vocab = large.head_weight().shape[0]

        proposed, q, seen, kept = _propose(small, states[1], told, most, vocab)
        last = jnp.take_along_axis(told.pending, jnp.maximum(told.behind - 1, 0)[:, None], axis=1)
        step = one_row_a_lane(place - 1, jnp.where(there, told.proposals + 1, 0), most + 1)
        hidden, read = forward(large, jnp.concatenate([last, proposed], axis=1), step, CACHE, states[0])
        logits = _whole(large, hidden, jnp.broadcast_to(jnp.arange(most + 1), (len(place), most + 1)))
        flat = lambda x: x.reshape(-1, vocab)  # noqa: E731
        how = Choices(*(jnp.repeat(x, most + 1) for x in told.how))
        p = distribution(flat(logits), how, flat(seen)).reshape(logits.shape)
        accepted, token = verify(p, q, proposed, told.proposals, told.how.seed, place)
        tokens = jnp.pad(proposed, ((0, 0), (0, 1)))
        tokens = jnp.where(jnp.arange(most + 1) == accepted[:, None], token[:, None], tokens)
        own = jax.nn.log_softmax(logits, axis=-1)
        logprob = jnp.take_along_axis(own, tokens[..., None], axis=-1)[..., 0]
        k = min(TOP, vocab)
        nothing = lambda: [jnp.zeros((*tokens.shape, k), jnp.float32), jnp.zeros((*tokens.shape, k), jnp.int32)]  # noqa: E731
        top_logprob, top = lax.cond(told.top, lambda: lax.top_k(own, k), nothing)
        return everywhere(Judged(tokens, accepted, logprob, top, top_logprob)), [read, kept]

    return read, judge


def verify(
    p: Float[Array, "b n v"],
    q: Float[Array, "b m v"],
    proposed: Int[Array, "b m"],
    proposals: Int[Array, " b"],
    seed: Int[Array, " b"],
    place: Int[Array, " b"],
) -> tuple[Int[Array, " b"], Int[Array, " b"]]:
    """How many proposals stand, and the token after them; whatever `q` is, tokens come out distributed as `p`.

    A proposal x stands with probability min(1, p(x) / q(x)). The first that does not is replaced by a draw from what p
    has more than q; behind the last one, if all stand, comes a draw from p (Leviathan et al. 2023, algorithm 1).

    Args:
      p: the large model's distributions in the m + 1 places.
      q: the draft's, in m.
      proposed: drawn from them.
      proposals: how many of them count.
      seed, place: of each text, and of its first proposal in it: of them the randomness is a function.
    """
    most = proposed.shape[1]
    of = lambda x: jnp.take_along_axis(x, proposed[..., None], axis=-1)[..., 0]  # noqa: E731
    draw = jax.vmap(lambda s, at: jax.random.uniform(_key(s, at, _ACCEPTED)), in_axes=(None, 0))
    u = jax.vmap(draw)(seed, place[:, None] + jnp.arange(most))
    stands = (u * of(q) < of(p[:, :most])) & (jnp.arange(most) < proposals[:, None])
    accepted = jnp.sum(jnp.cumprod(stands.astype(jnp.int32), axis=1), axis=1)
    at = lambda x: jnp.take_along_axis(x, accepted[:, None, None], axis=1)[:, 0]  # noqa: E731
    there = at(p)
    less = jnp.where((accepted < proposals)[:, None], at(jnp.pad(q, ((0, 0), (0, 1), (0, 0)))), 0)
    more = jnp.maximum(there - less, 0)
    more = jnp.where(jnp.sum(more, axis=-1, keepdims=True) > 0, more, there)  # equal but for rounding
    keys = jax.vmap(functools.partial(_key, role=_CORRECTED))(seed, place + accepted)
    token = jax.vmap(jax.random.categorical)(keys, jnp.log(more))
    return accepted, token.astype(jnp.int32)


def distribution(logits: Float[Array, "n v"], how: Choices, seen: Bool[Array, "n v"] | None) -> Float[Array, "n v"]:
    """What the next token is drawn from; at temperature 0 all of it is on the likeliest one."""
    shaped = processed(logits, how, seen)
    likeliest = jax.nn.one_hot(jnp.argmax(shaped, axis=-1), shaped.shape[-1], dtype=shaped.dtype)
    return jnp.where((how.temperature == 0)[:, None], likeliest, jax.nn.softmax(shaped, axis=-1))


def _propose(
    draft: Any, states: ModelCache, told: Told, most: int, vocab: int
) -> tuple[Int[Array, "b m"], Float[Array, "b m v"], Bool[Array, "b n v"], ModelCache]:
    """Proposals, what they were drawn from, and for each place (and one more) what was in the text before it."""
    place = told.kept + told.behind
    step = one_row_a_lane(told.kept, told.behind, 2)
    hidden, states = forward(draft, _ids(draft, told.pending), step, CACHE, states)
    logits = _known(_whole(draft, hidden, jnp.maximum(told.behind - 1, 0)[:, None])[:, 0], vocab)
    tokens, of, seen = [], [], [seen_of(told.seen, vocab)]
    # Every proposal but the last is read, for the next one; there are a few, and each is a step of one token.
    for i in range(most):
        q = distribution(logits, told.how, seen[-1])
        keys = jax.vmap(functools.partial(_key, role=_DRAWN))(told.how.seed, place + i)
        token = jax.vmap(jax.random.categorical)(keys, jnp.log(q)).astype(jnp.int32)
        tokens.append(token)
        of.append(q)
        seen.append(seen[-1].at[jnp.arange(len(token)), token].set(True))
        if i + 1 < most:
            step = one_row_a_lane(place + i, (i + 1 < told.proposals).astype(jnp.int32), 1)
            hidden, states = forward(draft, _ids(draft, token[:, None]), step, CACHE, states)
            logits = _known(_whole(draft, hidden, jnp.zeros_like(token)[:, None])[:, 0], vocab)
    return jnp.stack(tokens, axis=1), jnp.stack(of, axis=1), jnp.stack(seen, axis=1), states


def _whole(model: Any, hidden: Float[Array, "b s e"], columns: Int[Array, "b n"]) -> Float[Array, "b n v"]:
    return constrain(logits_at(model, hidden, columns), "batch", None, None)


def _ids(model: Any, tokens: Int[Array, "b s"]) -> Int[Array, "b s"]:
    """Tokens that a model has; of the large one's others any will do for a draft, whose proposals are judged."""
    return jnp.minimum(tokens, model.head_weight().shape[0] - 1)


def _known(logits: Float[Array, "b v"], vocab: int) -> Float[Array, "b w"]:
    """Logits of the large model's ids: of those that the draft has not, no chance."""
    more = max(vocab - logits.shape[-1], 0)
    return jnp.pad(logits, ((0, 0), (0, more)), constant_values=-jnp.inf)[:, :vocab]


def _key(seed: Array, place: Array, role: int) -> Array:
    """The randomness of a place in a text; a place that is proposed again has shown nothing of it."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), place), role)
