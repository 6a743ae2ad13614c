"""Long causal convolutions by channels, with the Fourier transform as products of matrices.

    y = fftconv(x, kernel)

`y[t] = sum over j of kernel[j] * x[t - j]`, after FlashFFTConv (Fu et al. 2024). A kernel shorter than a row takes a
shorter transform (partial convolution); `keep` computes some frequencies only (frequency-sparse).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.derivatives import custom_vjp
from pallas_kernels.dispatch import Implementation, Target, dispatch
from pallas_kernels.errors import KernelError
from pallas_kernels.fftconv import tpu
from pallas_kernels.fftconv.monarch import Facts, Pair, factors, filtered, spectrum, transform

__all__ = ["IMPLEMENTATIONS", "checked", "fftconv"]


def fftconv(
    x: jax.Array,
    kernel: jax.Array,
    documents: jax.Array | None = None,
    *,
    keep: tuple[int, int] | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Return the causal convolution of each channel with its kernel, in float32, cast to `x`'s dtype.

    Differentiable in any mode and as often as wanted: the derivatives are convolutions and spectra of products, too.

    Args:
      x: activations (B, S, C), floats.
      kernel: weights (W, C), floats; the first one is the current token's. Those after the S-th have no effect.
      documents: number of each token's document, from 1, int32 (B, S); tokens of others have no effect on one, and 0
        is padding, whose results are 0. It takes as many convolutions as the largest number. `None` is one document.
      keep: of the transform's N1 x N2 frequencies `k = k1 + N1 k2`, those with `k1` and `k2` below these two; N1 N2
        is S + W - 1, rounded up to a power of two, and N1 is at most N2. The result is the convolution with the real
        part of what is left of the kernel, which is as long as the row and no longer causal. `None` keeps all.
      implementation: "mosaic_tpu", "xla", or `None` for the best.

    Returns:
      (B, S, C) in `x`'s dtype.

    Raises:
      KernelError: shapes or dtypes do not fit, or a named implementation is not supported here.
    """
    facts = checked(x, kernel, documents, keep)
    rows, n2 = facts.rows, facts.factors[1]
    a = _rows(x.swapaxes(1, 2), rows, n2)
    taps = kernel[: facts.width].T
    short = -(-facts.width // n2)
    of = transform(_rows(taps, short, n2), facts.tables(short))
    ids = None if documents is None else _rows(documents[:, None], rows, n2)
    y = _convolve(facts, implementation, a, of, ids)
    return y.reshape(*y.shape[:2], rows * n2)[..., : facts.seq].swapaxes(1, 2).astype(x.dtype)


def _rows(x: jax.Array, rows: int, n2: int) -> jax.Array:
    """(..., S) to (..., rows, N2), padded with zeros; floats to float32."""
    x = x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, rows * n2 - x.shape[-1])])
    return x.reshape(*x.shape[:-1], rows, n2)


def checked(
    x: jax.Array, kernel: jax.Array, documents: jax.Array | None = None, keep: tuple[int, int] | None = None
) -> Facts:
    """Return the facts of a convolution.

    Args:
      x: (B, S, C).
      kernel: (W, C).
      documents: (B, S), or `None`.
      keep: kept frequencies, or `None`.

    Raises:
      KernelError: shapes or dtypes do not fit.
    """
    if x.ndim != 3 or kernel.ndim != 2 or kernel.shape[1] != x.shape[2] or kernel.shape[0] < 1:
        raise KernelError(f"x is (B, S, C) and kernel (W, C), not {tuple(x.shape)} and {tuple(kernel.shape)}")
    for name, array in (("x", x), ("kernel", kernel)):
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise KernelError(f"{name} is a float array, not {array.dtype}; cast it first")
    if documents is not None and (documents.shape != x.shape[:2] or not jnp.issubdtype(documents.dtype, jnp.integer)):
        raise KernelError(f"documents is integer {tuple(x.shape[:2])}, not {documents.dtype}{tuple(documents.shape)}")
    batch, seq, channels = x.shape
    width = min(kernel.shape[0], seq)
    n1, n2 = factors(seq + width - 1)
    a, b = keep or (n1, n2)
    if not (1 <= a <= n1 and 1 <= b <= n2):
        raise KernelError(f"keep = {keep}: this transform has {n1} x {n2} frequencies; keep 1 to {n1} and 1 to {n2}")
    return Facts(batch, seq, channels, width, str(x.dtype), (n1, n2), (a, b))


def _always(target: Target, **case: Any) -> str | None:
    return None


def _run_xla(target: Target, x: jax.Array, *others: jax.Array, facts: Facts, direction: str) -> Any:
    if direction == "convolve":
        return filtered(x, (others[0], others[1]), facts.tables())
    made = spectrum(x, others[0], facts.tables(), facts.factors[0] * facts.factors[1])
    return tuple(jnp.sum(part, 0) for part in made)


IMPLEMENTATIONS = (
    Implementation("mosaic_tpu", ("tpu",), tpu.supported, tpu.run),
    Implementation("xla", (), _always, _run_xla),
)
"""Best first."""


def _by_documents(ids: jax.Array | None, x: jax.Array, add: Callable[[Callable[..., Any]], Any]) -> Any:
    """Sum `add(mask)` over documents, where `mask` leaves a document's numbers of an array like `x`."""
    if ids is None:
        return add(lambda y: y)
    zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(lambda: add(lambda y: y)))

    def body(i: Any, total: Any) -> Any:
        one = add(lambda y: jnp.where(ids == i, y, 0))
        return jax.tree.map(jnp.add, total, one)

    return jax.lax.fori_loop(1, jnp.max(ids) + 1, body, zero)


def _all(facts: Facts, implementation: str | None, x: jax.Array, kernel: Pair, ids: jax.Array | None) -> jax.Array:
    case = {"facts": facts, "direction": "convolve"}
    run = partial(dispatch, "fftconv", IMPLEMENTATIONS, case=case, implementation=implementation)
    result: jax.Array = _by_documents(ids, x, lambda mask: mask(run((mask(x), *kernel))))
    return result


@partial(custom_vjp, nondiff_argnums=(0, 1))
def _convolve(facts: Facts, implementation: str | None, x: jax.Array, kernel: Pair, ids: jax.Array | None) -> jax.Array:
    return _all(facts, implementation, x, kernel, ids)


def _convolve_forward(facts: Facts, implementation: str | None, x: jax.Array, kernel: Pair, ids: Any) -> Any:
    return _convolve(facts, implementation, x, kernel, ids), (x, kernel, ids)


def _convolve_backward(facts: Facts, implementation: str | None, saved: Any, dy: jax.Array) -> Any:
    x, (re, im), ids = saved
    dx = _convolve(facts, implementation, dy, (re, -im), ids)
    return dx, _spectrum(facts, implementation, x, dy, ids), _none(ids)


_convolve.defvjp(_convolve_forward, _convolve_backward)


@partial(custom_vjp, nondiff_argnums=(0, 1))
def _spectrum(facts: Facts, implementation: str | None, x: jax.Array, dy: jax.Array, ids: jax.Array | None) -> Pair:
    """Return the cotangent of the kernel's transform."""
    case = {"facts": facts, "direction": "spectrum"}
    run = partial(dispatch, "fftconv", IMPLEMENTATIONS, case=case, implementation=implementation)
    result: Pair = _by_documents(ids, x, lambda mask: run((mask(x), mask(dy))))
    return result


def _spectrum_forward(facts: Facts, implementation: str | None, x: jax.Array, dy: jax.Array, ids: Any) -> Any:
    return _spectrum(facts, implementation, x, dy, ids), (x, dy, ids)


def _spectrum_backward(facts: Facts, implementation: str | None, saved: Any, ct: Pair) -> Any:
    x, dy, ids = saved
    dx = _convolve(facts, implementation, dy, (ct[0], -ct[1]), ids)
    return dx, _convolve(facts, implementation, x, ct, ids), _none(ids)


_spectrum.defvjp(_spectrum_forward, _spectrum_backward)


def _none(ids: jax.Array | None) -> Any:
    return None if ids is None else np.zeros(ids.shape, jax.dtypes.float0)
