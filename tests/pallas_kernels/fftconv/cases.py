"""What the tests of long convolutions share: random arrays, float64 NumPy, and the plain sum over earlier tokens."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.fftconv import fftconv
from tests.pallas_kernels.comparison import Program, draws

TOKENS = 70
FEATURES = {"as long as the row": (TOKENS, False), "a short kernel": (9, False), "packed rows": (TOKENS, True)}
"""A row's name -> taps, and whether rows have several documents."""
DOCUMENTS = np.array([[1] * 30 + [2] * 25 + [0] * 15, [1] * TOKENS], np.int32)


def apart(taps: int, documents: np.ndarray | None) -> np.ndarray:
    """Return whether a token (third) is seen by another one (second), in each row (first): bool (B, S, S)."""
    lag = np.arange(TOKENS)[:, None] - np.arange(TOKENS)
    seen = np.broadcast_to((lag >= 0) & (lag < taps), (2, TOKENS, TOKENS))
    if documents is None:
        return seen
    return seen & (documents[:, :, None] == documents[:, None]) & (documents[:, :, None] > 0)


def plain(x: Any, kernel: Any, documents: np.ndarray | None, lib: Any = jnp) -> Any:
    """Return the convolution as a product with a matrix of each channel's taps, in the arrays' dtype.

    Args:
      x: (B, S, C).
      kernel: (W, C).
      documents: (B, S), or `None`.
      lib: `numpy` or `jax.numpy`.
    """
    lag = np.arange(TOKENS)[:, None] - np.arange(TOKENS)
    taps = kernel[lag.clip(0, len(kernel) - 1)]
    matrix = lib.where(apart(len(kernel), documents)[..., None], taps[None], lib.zeros_like(taps[:1, :1]))
    return lib.einsum("btsc,bsc->btc", matrix, x)


def gradients(f: Any, x: Any, kernel: Any, dy: Any) -> tuple[Any, ...]:
    """Return a convolution and the gradients of its product with `dy`."""
    y, back = jax.vjp(f, x, kernel)
    return y, *back(dy)


def truth(x: Any, kernel: Any, dy: Any, documents: np.ndarray | None) -> tuple[np.ndarray, ...]:
    """Return what `gradients` does, in float64."""
    x, kernel, dy = (np.asarray(a).astype(np.float64) for a in (x, kernel, dy))
    taps = len(kernel)
    seen = apart(taps, documents)
    lag = (np.arange(TOKENS)[:, None] - np.arange(TOKENS)).clip(0, taps - 1)
    dx = np.einsum("bts,tsc,btc->bsc", seen, kernel[lag], dy)
    pairs = np.einsum("bts,btc,bsc->tsc", seen, dy, x)
    dkernel = [np.trace(pairs, -lag) if lag < TOKENS else np.zeros(x.shape[2]) for lag in range(taps)]
    return plain(x, kernel, documents, np), dx, np.array(dkernel)


def program(taps: int, packed: bool, dtype: str, seed: int | None) -> Program:
    """Return the run of a row of the parity table."""
    random = np.random.default_rng(draws(0, seed))
    x, dy = (jnp.asarray(random.standard_normal((2, TOKENS, 3)), dtype) for _ in range(2))
    kernel = jnp.asarray(random.standard_normal((taps, 3)), dtype)
    documents = DOCUMENTS if packed else None

    def ours(implementation: str) -> Any:
        ids = None if documents is None else jnp.asarray(documents)
        f = lambda x, kernel: fftconv(x, kernel, ids, implementation=implementation)  # noqa: E731
        return lambda *arrays: gradients(f, *arrays)

    return Program(
        ours,
        (x, kernel, dy),
        tuple,
        lambda: jax.jit(lambda *a: gradients(lambda x, k: plain(x, k, documents), *a))(x, kernel, dy),
        lambda: truth(x, kernel, dy, documents),
    )
