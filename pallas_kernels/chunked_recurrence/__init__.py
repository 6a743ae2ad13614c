"""Linear recurrences of matrices in chunks: linear attention with decay, state-space duality, the gated delta rule.

    out, state = chunked_recurrence(q, k, v, log_decay, beta, starts)

`S[t] = decay[t] * S[t - 1] + k[t] v[t]^T` and `out[t] = S[t]^T q[t]`; with `beta`, `S[t] = (I - beta k k^T) (decay *
S[t - 1]) + beta k v^T`. It is RetNet's (Sun et al. 2023), Mamba-2's (Dao & Gu 2024), GLA's (Yang et al. 2024), Gated
DeltaNet's (Yang, Kautz & Hatamizadeh 2025) and Kimi Delta Attention's (Kimi Team 2025).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.chunked_recurrence import gpu, tpu, xla
from pallas_kernels.chunked_recurrence.inputs import CHUNK, LEAST, Facts, Inputs, checked
from pallas_kernels.derivatives import custom_vjp
from pallas_kernels.dispatch import Implementation, Target, device, dispatch

__all__ = ["CHUNK", "IMPLEMENTATIONS", "chunked_recurrence"]


def chunked_recurrence(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array | None = None,
    beta: jax.Array | None = None,
    starts: jax.Array | None = None,
    initial: jax.Array | None = None,
    *,
    chunk: int | None = None,
    product_dtype: str | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return a linear recurrence's outputs and its last state.

    It is computed in float32, unless `product_dtype` is bfloat16: then operands are rounded to it before products,
    which are summed in float32; the state and the inverse of the delta rule's triangular system stay float32. A kernel
    keeps nothing for its gradient but the arguments: the states between chunks are computed again.

    Args:
      q: queries (B, S, H, K), floats; scale them beforehand.
      k: keys (B, S, H, K); the delta rule wants them of length 1.
      v: values (B, S, H, V).
      log_decay: logarithm of the decay, at most 0, for each head (B, S, H) or each channel of keys (B, S, H, K); below
        -20 it counts as -20 (a decay of 2e-9). `None` is no decay.
      beta: the delta rule's rate, from 0 to 1, (B, S, H); `None` adds without it.
      starts: tokens at which the state restarts from zero, bool (B, S); `None` is none.
      initial: the state before the first token, (B, H, K, V); `None` is zero.
      chunk: tokens in a chunk, rounded up to a multiple of 16; by default a kernel's is from its table of tiles, and
        XLA's is 64.
      product_dtype: "float32" or "bfloat16"; `None` is bfloat16 if q, k and v are all of it.
      implementation: "mosaic_tpu", "mosaic_gpu", "xla", or `None` for the best.

    Returns:
      outputs (B, S, H, V) in `v`'s dtype, and the state after the last token (B, H, K, V), float32.

    Raises:
      KernelError: shapes or dtypes do not fit, or a named implementation is not supported here.
    """
    if log_decay is not None:
        log_decay = jnp.maximum(jnp.asarray(log_decay, jnp.float32), LEAST)
    if initial is not None:
        initial = jnp.asarray(initial, jnp.float32)
    inputs = Inputs(q, k, v, log_decay, beta, starts, initial)
    facts = checked(inputs, chunk, product_dtype)
    if implementation == "xla" or (implementation is None and not _has_kernel(facts)):
        return _forward(facts, implementation, inputs)  # XLA's form has a derivative without this one's recomputation
    return _recur(facts, implementation, inputs)


def _always(target: Target, **case: Any) -> str | None:
    return None


def _has_kernel(facts: Facts) -> bool:
    """Return whether a kernel serves the device in scope."""
    here, case = device(), {"facts": facts, "direction": "forward"}
    kernels = [one for one in IMPLEMENTATIONS if here.platform in one.platforms]
    return any(one.supported(here, **case) is None for one in kernels)


def _run_xla(target: Target, inputs: Inputs, *cotangents: jax.Array, facts: Facts, direction: str) -> Any:
    if direction == "forward":
        return xla.run(target, inputs, facts=facts)
    others = inputs._replace(starts=None)
    run = lambda x: xla.run(target, x._replace(starts=inputs.starts), facts=facts)  # noqa: E731
    return jax.vjp(run, others)[1](cotangents)[0]


IMPLEMENTATIONS = (
    Implementation("mosaic_tpu", ("tpu",), tpu.supported, tpu.run),
    Implementation("mosaic_gpu", ("cuda",), gpu.supported, gpu.run),
    Implementation("xla", (), _always, _run_xla),
)
"""Best first."""


def _forward(facts: Facts, implementation: str | None, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    case = {"facts": facts, "direction": "forward"}
    return dispatch("chunked_recurrence", IMPLEMENTATIONS, (inputs,), case, implementation)


@partial(custom_vjp, nondiff_argnums=(0, 1))
def _recur(facts: Facts, implementation: str | None, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    return _forward(facts, implementation, inputs)


def _recur_forward(facts: Facts, implementation: str | None, inputs: Inputs) -> Any:
    return _forward(facts, implementation, inputs), inputs


def _recur_backward(facts: Facts, implementation: str | None, inputs: Inputs, cotangents: Any) -> tuple[Inputs]:
    case = {"facts": facts, "direction": "backward"}
    d = dispatch("chunked_recurrence", IMPLEMENTATIONS, (inputs, *cotangents), case, implementation)
    starts = inputs.starts
    return (d._replace(starts=None if starts is None else np.zeros(starts.shape, jax.dtypes.float0)),)


_recur.defvjp(_recur_forward, _recur_backward)
