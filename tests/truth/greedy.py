"""Logits and greedy completions of an imported checkpoint on a layout, to compare with the original's."""

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
from jaxscale.infer.forward import forward, logits_at, one_per_batch_row
from jaxscale.interop import Pretrained
from jaxscale.layout import Layout
from jaxscale.step.state import describe_model


class Greedy(NamedTuple):
    """Our results.

    Args:
      logits: of a pass over the whole sequence, (B, S, V).
      cached: greedy ids, decoded with a cache, (B, new).
    """

    logits: np.ndarray
    cached: np.ndarray


def run(pretrained: Pretrained, layout: Layout | None, text: np.ndarray, prompt: int) -> Greedy:
    """Compute the logits of sequences without a cache, and their greedy completions with one.

    Args:
      pretrained: the checkpoint, opened with float32.
      layout: where it runs.
      text: ids (B, S).
      prompt: how many of them are the prompt.
    """
    pretrained = dataclasses.replace(pretrained, config=pretrained.config.for_length(text.shape[1]))
    graphdef, _ = describe_model(pretrained.config)
    with layout or contextlib.nullcontext():
        params = read_pretrained(pretrained, layout)
        logits = np.asarray(jax.jit(lambda p, t: nnx.merge(graphdef, p)(t))(params, text))
    layout_of_steps = generating(layout)
    with layout_of_steps or contextlib.nullcontext():
        params = read_pretrained(pretrained, layout_of_steps)
        cached = np.asarray(_greedy(graphdef, params, jnp.asarray(text[:, :prompt]), text.shape[1]))
    return Greedy(logits, cached)


@partial(jax.jit, static_argnums=(0, 3))
def _greedy(graphdef: Any, params: Any, prompt: jax.Array, length: int) -> jax.Array:
    model, cache = nnx.merge(graphdef, params), Contiguous()
    rows, prompt_length = prompt.shape

    def step(tokens: jax.Array, states: Any, start: Any) -> tuple[jax.Array, Any]:
        width = tokens.shape[1]
        starts, counts = jnp.full(rows, start, jnp.int32), jnp.full(rows, width, jnp.int32)
        hidden, states = forward(model, tokens, one_per_batch_row(starts, counts, width), cache, states)
        last = logits_at(model, hidden, jnp.full((rows, 1), width - 1, jnp.int32))[:, 0]
        return jnp.argmax(last, axis=-1).astype(jnp.int32), states

    def one(carry: Any, start: jax.Array) -> Any:
        token, states = carry
        following, states = step(token[:, None], states, start)
        return (following, states), token

    first = step(prompt, init_cache(model, cache, rows, 1, length), 0)
    return jnp.swapaxes(jax.lax.scan(one, first, jnp.arange(prompt_length, length))[1], 0, 1)
