"""Sampling by running the whole model for every token: no cache yet, any layout."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int

from jaxscale.errors import ConfigError
from jaxscale.layout import Layout

if TYPE_CHECKING:
    from jaxscale.train import Run, TrainConfig


def sample_text(
    run: Run, prompt: str, tokens: int = 200, *, temperature: float = 0.8, top_k: int | None = None, seed: int = 0
) -> str:
    """Continues a prompt with a run's model.

    Runs on the run's layout while its state is in memory, else with the newest checkpoint on one device.

    Args:
      run: the run.
      prompt: text; empty starts a new document.
      tokens: how many to add; the end of a document ends it earlier.
      temperature: divides the logits; 0 takes the likeliest token.
      top_k: sample among this many likeliest tokens only.
      seed: of the choice.

    Returns:
      prompt and continuation.

    Raises:
      ConfigError: settings out of range.
      CheckpointError, RunError: the run has no checkpoint.
    """
    from jaxscale.train import describe_model

    tokenizer = run.config.tokenizer
    start = prompt_ids(run.config, prompt)
    graphdef, _ = describe_model(run.config.model)
    layout = run.config.layout if run.state is not None else None
    ids = sample(
        graphdef,
        run.params(),
        start,
        tokens,
        window=run.config.seq_len,
        layout=layout,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
    )
    ends = np.flatnonzero(ids == tokenizer.eos_id)
    return prompt + tokenizer.decode(ids[: ends[0]] if len(ends) else ids)


def prompt_ids(config: TrainConfig, prompt: str) -> Int[np.ndarray, " n"]:
    """The ids that a prompt starts from: the end of the document before, and its text.

    Raises:
      ConfigError: the model does not know one of them.
      DataError: the text cannot be encoded.
    """
    ids = np.concatenate([[config.tokenizer.eos_id], config.tokenizer.encode(prompt)]).astype(np.int32)
    if ids.max() >= config.model.vocab:
        raise ConfigError(
            f"the prompt has token id {ids.max()} and the model knows ids below {config.model.vocab}; its corpus was "
            "not text, so it cannot continue one"
        )
    return ids


def sample(
    graphdef: nnx.GraphDef,
    params: Any,
    prompt: Int[np.ndarray, " n"],
    tokens: int,
    *,
    window: int,
    layout: Layout | None = None,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
) -> Int[np.ndarray, " tokens"]:
    """Draws tokens one by one, each from a forward pass over the last `window` of them.

    Args:
      graphdef, params: the model.
      prompt: ids, at least one.
      tokens: how many to draw.
      window: how many tokens the model sees; what it was trained on.
      layout: where the parameters live; the one row is repeated to fill the batch's devices.
      temperature, top_k, seed: as in `sample_text`.

    Raises:
      ConfigError: settings out of range.
    """
    if tokens < 1:
        raise ConfigError(f"tokens = {tokens}: ask for at least 1")
    if not temperature >= 0:
        raise ConfigError(f"temperature = {temperature}: must not be negative; 0 takes the likeliest token")
    if top_k is not None and top_k < 1:
        raise ConfigError(f"top_k = {top_k}: must be at least 1, or left out")
    if not 0 <= seed < 2**32:
        raise ConfigError(f"seed = {seed}: must be from 0 to 2**32 - 1")
    rows = 1 if layout is None else layout.split("batch")
    prompt = np.asarray(prompt, np.int32)[-window:]
    buffer = np.zeros((rows, window), np.int32)
    buffer[:, : len(prompt)] = prompt
    with layout if layout is not None else contextlib.nullcontext():
        key = jax.random.key(seed)
        out = _draw(graphdef, params, buffer, len(prompt), key, float(temperature), tokens=tokens, top_k=top_k)
        return np.asarray(out)


@functools.partial(jax.jit, static_argnums=0, static_argnames=("tokens", "top_k"))
def _draw(
    graphdef: nnx.GraphDef,
    params: Any,
    buffer: Int[Array, "b s"],
    length: Int[Array, ""],
    key: Array,
    temperature: Array,
    *,
    tokens: int,
    top_k: int | None,
) -> Int[Array, " tokens"]:
    model = nnx.merge(graphdef, params)
    window = buffer.shape[1]

    def one(carry: tuple[Array, Array], i: Array) -> tuple[tuple[Array, Array], Array]:
        buffer, length = carry
        logits = model(buffer)[0, length - 1]
        if top_k is not None:
            kth = jax.lax.top_k(logits, min(top_k, logits.size))[0][-1]
            logits = jnp.where(logits < kth, -jnp.inf, logits)
        drawn = jax.random.categorical(jax.random.fold_in(key, i), logits / jnp.maximum(temperature, 1e-6))
        token = jnp.where(temperature == 0, jnp.argmax(logits), drawn).astype(buffer.dtype)
        # once the window is full, its oldest token makes room
        full = length == window
        buffer = jnp.where(full, jnp.roll(buffer, -1, axis=1), buffer)
        length = jnp.where(full, length - 1, length)
        return (buffer.at[:, length].set(token), length + 1), token

    _, out = jax.lax.scan(one, (buffer, length), jnp.arange(tokens))
    return out
