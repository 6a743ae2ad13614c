"""Greedy continuations of an imported folder on a layout, with a cache and without, for comparison with theirs."""

from __future__ import annotations

import contextlib
import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxscale.convert.pretrained import read_pretrained
from jaxscale.infer.cache import Contiguous, generating, init_cache
from jaxscale.infer.forward import forward, logits_at, one_row_a_lane
from jaxscale.interop import Pretrained
from jaxscale.layout import Layout
from jaxscale.step.state import describe_model


class Found(NamedTuple):
    """What ours says.

    Args:
      logits: of the whole text at once, (B, S, V).
      cached: ids that were chosen one by one with a cache, (B, new).
    """

    logits: np.ndarray
    cached: np.ndarray


def run(found: Pretrained, layout: Layout | None, text: np.ndarray, prompt: int) -> Found:
    """Logits of a text without a cache; and the ids that follow its first `prompt`, chosen with one.

    Args:
      found: the folder, opened with float32.
      layout: where it runs.
      text: ids (B, S).
      prompt: how many of them a generation is told.
    """
    found = dataclasses.replace(found, config=found.config.for_texts_of(text.shape[1]))
    graphdef, _ = describe_model(found.config)
    with layout or contextlib.nullcontext():
        params = read_pretrained(found, layout)
        logits = np.asarray(jax.jit(lambda p, t: nnx.merge(graphdef, p)(t))(params, text))
    there = generating(layout)
    with there or contextlib.nullcontext():
        params = read_pretrained(found, there)
        cached = np.asarray(_greedy(graphdef, params, jnp.asarray(text[:, :prompt]), text.shape[1]))
    return Found(logits, cached)


@partial(jax.jit, static_argnums=(0, 3))
def _greedy(graphdef: Any, params: Any, prompt: jax.Array, length: int) -> jax.Array:
    model, how = nnx.merge(graphdef, params), Contiguous()
    rows, told = prompt.shape

    def step(tokens: jax.Array, states: Any, start: Any) -> tuple[jax.Array, Any]:
        width = tokens.shape[1]
        starts, counts = jnp.full(rows, start, jnp.int32), jnp.full(rows, width, jnp.int32)
        hidden, states = forward(model, tokens, one_row_a_lane(starts, counts, width), how, states)
        last = logits_at(model, hidden, jnp.full((rows, 1), width - 1, jnp.int32))[:, 0]
        return jnp.argmax(last, axis=-1).astype(jnp.int32), states

    def one(carry: Any, start: jax.Array) -> Any:
        token, states = carry
        following, states = step(token[:, None], states, start)
        return (following, states), token

    first = step(prompt, init_cache(model, how, rows, 1, length), 0)
    return jnp.swapaxes(jax.lax.scan(one, first, jnp.arange(told, length))[1], 0, 1)
