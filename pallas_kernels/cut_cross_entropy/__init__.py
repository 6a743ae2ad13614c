"""Cross-entropy of a linear head that never stores its logits (Wijmans et al. 2024, "Cut Your Losses").

    from pallas_kernels.cut_cross_entropy import linear_cross_entropy
    loss = linear_cross_entropy(x, w, targets)                    # float32, one per token
    loss, lse, entropy = linear_cross_entropy(x, w, targets, return_lse=True, return_entropy=True)

Differentiable in x, w and weights; in forward mode and twice with "xla" and "dense". Under `jax.checkpoint`, a policy
that saves the names of `NAMES` keeps the backward pass from running the forward pass again.

For a vocabulary in shards, for example on several devices: call `parts` on each shard, merge them (`merge`), apply
`Terms.losses`, and call `gradients` on each shard with the merged log-sum-exp.
`jaxscale.parallel.sharded_cross_entropy` does this.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from pallas_kernels.cut_cross_entropy import gpu, reference, tpu, xla
from pallas_kernels.cut_cross_entropy.inputs import (
    NAMES,
    Arguments,
    Inputs,
    Logits,
    Merged,
    Parts,
    Terms,
    checked,
    joined,
)
from pallas_kernels.derivatives import custom_vjp
from pallas_kernels.dispatch import Implementation, Target, dispatch

__all__ = [
    "BF16_FILTER",
    "IMPLEMENTATIONS",
    "NAMES",
    "Arguments",
    "Logits",
    "Merged",
    "Parts",
    "Terms",
    "checked",
    "filtered_share",
    "gradients",
    "joined",
    "linear_cross_entropy",
    "merge",
    "parts",
]

BF16_FILTER = 2.0**-12
"""The paper's threshold: adding a smaller number to 1 in bfloat16 changes nothing."""


def linear_cross_entropy(
    x: ArrayLike,
    w: ArrayLike,
    targets: ArrayLike,
    *,
    softcap: float | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    ignore_index: int | None = None,
    weights: ArrayLike | None = None,
    return_lse: bool = False,
    return_entropy: bool = False,
    filter: float | None = None,
    w_layout: str | None = None,
    implementation: str | None = None,
) -> Any:
    """Return every token's cross-entropy under softmax(x w), in nats, without storing the N x V logits.

    The caller takes the mean: divide the sum by the tokens' total weight. Logits and all sums are float32; matrix
    products multiply in x's dtype. Gradients are exact unless `filter` is set.

    Args:
      x: (N, E) or (B, S, E) in float32, bfloat16 or float16.
      w: (V, E) or (E, V) in one of these dtypes, x's or another; its gradient has its own dtype.
      targets: integers of x's leading shape, 0 to V - 1. A target out of range raises when its value is known before
        tracing; in a traced program its loss is NaN, and so are the gradients that depend on it.
      softcap: logits become `softcap * tanh(logits / softcap)` (Gemma 2).
      z_loss: add `z_loss * log-sum-exp ** 2` (PaLM, Chowdhery et al. 2022).
      label_smoothing: the part of the target's probability that is spread evenly over all V words.
      ignore_index: tokens with this target have loss 0 and gradient 0; it may be out of range.
      weights: floats of the targets' shape; each multiplies its token's loss, z-loss included.
      return_lse: also return the log-sum-exp of the logits, of ignored tokens too. It is differentiable.
      return_entropy: also return the entropy of each token's distribution in nats, of ignored tokens too, from the same
        pass. It is differentiable.
      filter: leave out of the gradient those blocks of tokens and words in which no entry of the logits' cotangent is
        above this share of its token's largest coefficient, such as `BF16_FILTER`; 0 leaves out exact zeros only. The
        block size depends on the implementation; `filtered_share` returns how much is left out.
      w_layout: "ve" or "ev", needed where V is E.
      implementation: "mosaic_tpu", "mosaic_gpu", "xla", or "dense" (which stores the logits), for the loss and its
        gradients; `None` chooses the best here, for each of both. Filtered gradients of a kernel are those of "xla".

    Returns:
      float32 of the targets' shape, or a tuple of that, the log-sum-exp and the entropy, as far as requested.

    Raises:
      KernelError: shapes do not fit, an option is out of range, or a named implementation does not support this here.
    """
    arguments = checked(
        "linear_cross_entropy",
        x,
        w,
        targets,
        softcap=softcap,
        z_loss=z_loss,
        label_smoothing=label_smoothing,
        ignore_index=ignore_index,
        weights=weights,
        filter=filter,
        entropy=return_entropy,
        w_layout=w_layout,
    )
    settings = _Settings(arguments.logits, implementation)
    merged = _reduce(arguments.x, arguments.w, arguments.terms.rows(arguments.targets), settings)
    loss = arguments.terms.losses(merged, arguments.targets, arguments.weights)
    return merged.appended_to(loss, lse=return_lse, entropy=return_entropy)


def filtered_share(
    x: ArrayLike, w: ArrayLike, targets: ArrayLike, *, filter: float, implementation: str | None = None, **options: Any
) -> jax.Array:
    """Return the share of blocks that the gradient of `linear_cross_entropy(...).sum()` leaves out, a float32 scalar.

    The code that decides is that of the backward pass.

    Args:
      x: as for `linear_cross_entropy`.
      w: as for `linear_cross_entropy`.
      targets: as for `linear_cross_entropy`.
      filter: the threshold, as for `linear_cross_entropy`.
      implementation: as for `linear_cross_entropy`.
      **options: other keyword arguments of `linear_cross_entropy`, but no `return_lse` and no `return_entropy`.

    Raises:
      KernelError: as `linear_cross_entropy`, or the implementation has no filter.
    """
    arguments = checked("filtered_share", x, w, targets, filter=filter, **options)
    rows = arguments.terms.rows(arguments.targets)
    merged = parts(arguments.x, arguments.w, rows, arguments.logits, implementation).merged()
    loss, pull = jax.vjp(lambda m: arguments.terms.losses(m, arguments.targets, arguments.weights), merged)
    (slopes,) = pull(jnp.ones_like(loss))
    return _run("skipped", arguments.logits, implementation, arguments.x, arguments.w, rows, merged.lse, slopes)


# ---- shards of a vocabulary


def parts(x: jax.Array, w: jax.Array, rows: jax.Array, logits: Logits, implementation: str | None = None) -> Parts:
    """Return what one shard of a vocabulary contributes to every token; its derivative is `gradients`.

    JAX cannot differentiate it.

    Args:
      x: (..., E).
      w: the shard, (V, E) or (E, V) with its own V.
      rows: (...) int32, the row of each token's target, counted from the first row of this shard; it may be out of
        range.
      logits: how logits are computed.
      implementation: as for `linear_cross_entropy`.
    """
    return _run("forward", logits, implementation, x, w, rows)


def merge(pieces: Parts) -> Merged:
    """Return what the whole vocabulary gives every token, from the parts of its shards.

    Args:
      pieces: `Parts` whose arrays are stacked along a leading axis, one entry per shard.
    """
    return joined(pieces).merged()


def gradients(
    x: jax.Array,
    w: jax.Array,
    rows: jax.Array,
    lse: jax.Array,
    slopes: Merged,
    logits: Logits,
    implementation: str | None = None,
    *,
    dw_dtype: DTypeLike | None = None,
    entropy: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return the cotangents of w's shard and of x, the latter as far as it depends on this shard.

    Args:
      x: as for `parts`.
      w: as for `parts`.
      rows: as for `parts`.
      lse: (...) float32, the log-sum-exp over the whole vocabulary.
      slopes: (...) cotangents of the result of `merge`.
      logits: as for `parts`.
      implementation: as for `parts`.
      dw_dtype: dtype of w's cotangent, which is summed in float32; w's dtype by default.
      entropy: (...) float32, over the whole vocabulary, where `logits.entropy`.

    Returns:
      the cotangents of x and of w.
    """
    dw_dtype = w.dtype if dw_dtype is None else jnp.dtype(dw_dtype)
    slopes = slopes.folded(entropy)
    return _run("backward", logits, implementation, x, w, rows, lse, slopes, dw_dtype=dw_dtype.name)


# ---- implementations


def _run_plain(
    module: Any, target: Target, *arrays: Any, direction: str, logits: Logits, dw_dtype: str | None, **_: Any
) -> Any:
    if direction == "forward":
        return module.forward(*arrays, logits)
    return module.backward(*arrays, logits, dw_dtype) if direction == "backward" else module.skipped(*arrays, logits)


def _anywhere(target: Target, **case: Any) -> str | None:
    return None


def _unfiltered(target: Target, *, logits: Logits, **case: Any) -> str | None:
    return None if logits.filter is None else "it stores all logits and has no filter; use 'xla', or filter=None"


IMPLEMENTATIONS = (
    Implementation("mosaic_tpu", ("tpu",), tpu.supported, tpu.run),
    Implementation("mosaic_gpu", ("cuda",), gpu.supported, gpu.run),
    Implementation("xla", (), _anywhere, functools.partial(_run_plain, xla)),
)
"""The implementations that `None` chooses from, best first."""


def _backward_is_xla(implementation: str | None, direction: str, logits: Logits) -> bool:
    """Whether a named kernel has no backward pass of its own: that of filtered gradients."""
    return direction != "forward" and logits.filter is not None and implementation in ("mosaic_tpu", "mosaic_gpu")


_BY_NAME = (Implementation("dense", (), _unfiltered, functools.partial(_run_plain, reference)),)
"""Implementations that are used only when they are named."""


def _run(
    direction: str,
    logits: Logits,
    implementation: str | None,
    x: jax.Array,
    w: jax.Array,
    *others: Any,
    dw_dtype: str | None = None,
) -> Any:
    *leading, width = x.shape

    def flat(a: jax.Array) -> jax.Array:
        return a.reshape(-1, *a.shape[len(leading) :])

    x, others = flat(x), jax.tree.map(flat, others)
    case = {
        "direction": direction,
        "logits": logits,
        "x": x.shape,
        "w": w.shape,
        "dtype": x.dtype.name,
        "w_dtype": w.dtype.name,
        "dw_dtype": dw_dtype,
    }
    if _backward_is_xla(implementation, direction, logits):
        implementation = "xla"
    implementations = IMPLEMENTATIONS if implementation is None else (*IMPLEMENTATIONS, *_BY_NAME)
    arrays = (Inputs(x, w, others[0]), *others[1:])
    out = dispatch("linear_cross_entropy", implementations, arrays, case, implementation)
    if direction == "forward":
        return jax.tree.map(lambda a: a.reshape(leading), out)
    return (out[0].reshape(*leading, width), out[1]) if direction == "backward" else out


# ---- gradients, with the same tree of residuals for every implementation


@dataclasses.dataclass(frozen=True)
class _Settings:
    """Everything besides shapes that is known before tracing."""

    logits: Logits
    implementation: str | None


@functools.partial(custom_vjp, nondiff_argnums=(3,))
def _reduce(x: jax.Array, w: jax.Array, rows: jax.Array, settings: _Settings) -> Merged:
    return parts(x, w, rows, settings.logits, settings.implementation).merged()


def _reduce_forward(x: jax.Array, w: jax.Array, rows: jax.Array, settings: _Settings) -> tuple[Merged, tuple[Any, ...]]:
    out = _reduce(x, w, rows, settings).with_names()
    return out, (x, w, rows, out.lse, out.entropy)


def _reduce_backward(
    settings: _Settings, residuals: tuple[Any, ...], slopes: Merged
) -> tuple[jax.Array, jax.Array, None]:
    x, w, rows, lse, entropy = residuals
    return *gradients(x, w, rows, lse, slopes, settings.logits, settings.implementation, entropy=entropy), None


_reduce.defvjp(_reduce_forward, _reduce_backward)


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        new = "; it is now 'Arguments'" if name == "Given" else ""
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'{new}")
