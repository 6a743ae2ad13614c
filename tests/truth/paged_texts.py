"""A text in pieces through a cache with pages on several devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxscale as js
from jaxscale.infer.cache import Paged, generating, init_cache
from jaxscale.infer.forward import forward, one_per_batch_row


def in_sharded_pages(model: Any, tokens: np.ndarray, numbers: str | None) -> np.ndarray:
    """Return the hidden states of 12 tokens (1, 12) in four pieces, on `tensor=2,context=2` with pages of 4 tokens.

    Args:
      model: a model.
      tokens: the text.
      numbers: `Paged.numbers`.
    """
    cache, got = Paged(page=4, numbers=numbers), []
    run = jax.jit(lambda tokens, step, states: forward(model, tokens, step, cache, states))
    with generating(js.Layout("tensor=2,context=2")):
        states = init_cache(model, cache, 1, 1, 16)
        tables = np.array([[0, 2, 1, 3]], np.int32)  # entry i is a page of device i modulo 2, which has two
        for first, n in ((0, 5), (5, 1), (6, 1), (7, 5)):
            step = one_per_batch_row(jnp.array([first]), jnp.array([n]), n, jnp.asarray(tables))
            hidden, states = run(tokens[:, first : first + n], step, states)
            got.append(hidden)
    return np.concatenate(got, 1)
