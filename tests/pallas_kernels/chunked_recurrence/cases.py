"""What the tests of the recurrence share: random arrays, and float64 NumPy, token by token, forwards and backwards."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.chunked_recurrence import chunked_recurrence
from pallas_kernels.chunked_recurrence.inputs import Inputs
from pallas_kernels.chunked_recurrence.reference import tokens
from tests.pallas_kernels.comparison import Program, draws

FEATURES = {
    "no decay": ("none", False),
    "decay by heads": ("heads", False),
    "delta rule": ("heads", True),
    "decay by channels": ("channels", False),
    "delta rule by channels": ("channels", True),
}
"""A row's name -> decay, and whether it is the delta rule."""
WIDE = {name + ", width 64": feature for name, feature in FEATURES.items()}
"""The same for rows of a width that Hopper's kernels take."""
CHUNK = 32
"""Two blocks of rows."""


def make(
    decay: str, delta: bool, dtype: str, seed: Any = 0, rate: float = 0.3, size: tuple[int, ...] = (2, 40, 1, 16, 8)
) -> tuple[Inputs, tuple[Any, Any]]:
    """Return arrays that restart at some tokens and go on from a state in a row, and cotangents.

    Args:
      decay: "none", "heads" or "channels".
      delta: with the delta rule.
      dtype: of q, k and v.
      seed: of a `numpy.random.Generator`.
      rate: mean of the decays' logarithm.
      size: (B, S, H, K, V); chunks of `CHUNK` do not divide S.
    """
    random = np.random.default_rng(seed)
    b, s, h, key, value = size
    q, k = random.standard_normal((2, b, s, h, key))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v, initial = random.standard_normal((b, s, h, value)), random.standard_normal((b, h, key, value))
    shape = {"none": None, "heads": (b, s, h), "channels": (b, s, h, key)}[decay]
    starts = np.zeros((b, s), bool)
    starts[0, [3, 4, 20, 34]] = starts[1, 33] = True
    inputs = Inputs(
        *(jnp.asarray(x, dtype) for x in (q, k, v)),
        None if shape is None else jnp.asarray(-np.minimum(random.exponential(rate, shape), 19), jnp.float32),
        jnp.asarray(random.random((b, s, h)), jnp.float32) if delta else None,
        jnp.asarray(starts),
        jnp.asarray(initial, jnp.float32),
    )
    return inputs, (jnp.asarray(random.standard_normal(v.shape), dtype), jnp.ones(initial.shape, jnp.float32))


def truth(inputs: Inputs, cotangents: tuple[Any, Any]) -> tuple[np.ndarray, ...]:
    """Return outputs, last state and the arguments' cotangents (of log_decay and beta if any), in float64."""
    q, k, v, log_decay, beta, _, state = (None if x is None else np.asarray(x).astype(np.float64) for x in inputs)
    assert q is not None and k is not None and v is not None and state is not None
    dout, dstate = (np.asarray(x).astype(np.float64) for x in cotangents)
    starts = np.asarray(inputs.starts)
    decay = np.ones((*q.shape[:3], 1)) if log_decay is None else np.exp(log_decay.reshape(*q.shape[:3], -1))
    rate = np.ones(q.shape[:3]) if beta is None else beta
    out, steps = np.zeros_like(v), []
    for t in range(q.shape[1]):
        decayed = np.where(starts[:, t, None, None, None], 0, decay[:, t, ..., None] * state)
        seen = 0 if beta is None else np.einsum("bhkv,bhk->bhv", decayed, k[:, t])
        new = rate[:, t, :, None] * (v[:, t] - seen)
        state = decayed + k[:, t, ..., None] * new[..., None, :]
        out[:, t] = np.einsum("bhkv,bhk->bhv", state, q[:, t])
        steps.append((decayed, new, state))
    last, (dq, dk, dv) = state, (np.zeros_like(x) for x in (q, k, v))
    ddecay, dbeta = np.zeros_like(decay), np.zeros_like(rate)
    for t in reversed(range(q.shape[1])):
        decayed, new, state = steps[t]
        dq[:, t] = np.einsum("bhkv,bhv->bhk", state, dout[:, t])
        dstate = dstate + q[:, t, ..., None] * dout[:, t, :, None]
        dnew = np.einsum("bhkv,bhk->bhv", dstate, k[:, t])
        dk[:, t] = np.einsum("bhkv,bhv->bhk", dstate, new)
        dv[:, t] = dseen = rate[:, t, :, None] * dnew
        if beta is not None:
            seen = np.einsum("bhkv,bhk->bhv", decayed, k[:, t])
            dbeta[:, t] = np.sum(dnew * (v[:, t] - seen), -1)
            dk[:, t] -= np.einsum("bhkv,bhv->bhk", decayed, dseen)
            dstate = dstate - k[:, t, ..., None] * dseen[..., None, :]
        dstate = np.where(starts[:, t, None, None, None], 0, dstate)
        by_channel = np.sum(dstate * decayed, -1)
        ddecay[:, t] = by_channel if decay.shape[-1] > 1 else by_channel.sum(-1, keepdims=True)
        dstate = dstate * decay[:, t, ..., None]
    decays = () if log_decay is None else (ddecay.reshape(log_decay.shape),)
    return out, last, dq, dk, dv, *decays, *(() if beta is None else (dbeta,)), dstate


def everything(f: Any, inputs: Inputs, cotangents: tuple[Any, Any]) -> tuple[Any, ...]:
    """Return what `truth` does, of a function of `Inputs`."""
    result, back = jax.vjp(lambda x: f(x._replace(starts=inputs.starts)), inputs._replace(starts=None))
    return *result, *(x for x in back(cotangents)[0] if x is not None)


def program(decay: str, delta: bool, dtype: str, seed: int | None, wide: bool = False) -> Program:
    """Return the run of a row of the parity table; `wide`, of heads of 64 and chunks of that many tokens."""
    size = {"size": (2, 72, 1, 64, 64)} if wide else {}
    arrays = make(decay, delta, dtype, draws(0, seed), **size)

    def ours(implementation: str) -> Any:
        f = lambda x: chunked_recurrence(*x, chunk=64 if wide else CHUNK, implementation=implementation)  # noqa: E731
        return lambda *a: everything(f, *a)

    plain = lambda: tuple(jax.jit(lambda *a: everything(tokens, *a))(*arrays))  # noqa: E731
    return Program(ours, arrays, tuple, plain, lambda: truth(*arrays))


def without_log_decay(made: Program, decay: str) -> Program:
    """Leave out the gradient by `log_decay`, the sixth of a program's parts.

    In every form in chunks it is a small difference of larger sums, so that even an exact sum of float32 products has
    more than twice the error of the recurrence token by token.
    """
    less = lambda parts: tuple(x for i, x in enumerate(parts) if i != 5 or decay == "none")  # noqa: E731
    return Program(made.ours, made.arrays, less, lambda: less(made.plain()), lambda: less(made.truth()))
