"""Cross-entropy of a linear head that never holds its logits (Wijmans et al. 2024, "Cut Your Losses").

    from pallas_kernels.cut_cross_entropy import linear_cross_entropy
    loss = linear_cross_entropy(x, w, targets)                    # float32, one a token
    loss, lse = linear_cross_entropy(x, w, targets, return_lse=True)

First-order differentiable in reverse mode in x, w and weights. Under `jax.checkpoint`, a policy that saves the name
"cut_lse" keeps the backward pass from running the forward again.

A vocabulary in pieces, on several devices say: `parts` of each piece, one merge (`merge`), `Terms.losses`; and
`gradients` of each from the merged log-sum-exp. `jaxscale.parallel.sharded_cross_entropy` is made of these.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.cut_cross_entropy import gpu, reference, tpu, xla
from pallas_kernels.cut_cross_entropy.inputs import Given, Inputs, Logits, Merged, Parts, Terms, checked
from pallas_kernels.dispatch import Implementation, Target, dispatch
from pallas_kernels.softmax.pairs import combine_all

__all__ = [
    "BF16_FILTER",
    "IMPLEMENTATIONS",
    "NAMES",
    "Given",
    "Logits",
    "Merged",
    "Parts",
    "Terms",
    "checked",
    "filtered_share",
    "gradients",
    "linear_cross_entropy",
    "merge",
    "parts",
]

NAMES = ("cut_lse",)
"""What the residual of the backward pass is called, for a `jax.checkpoint` policy."""

BF16_FILTER = 2.0**-12
"""The paper's threshold: what is below it vanishes when it is added to 1 in bfloat16."""


def linear_cross_entropy(
    x: Any,
    w: Any,
    targets: Any,
    *,
    softcap: float | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    ignore_index: int | None = None,
    weights: Any = None,
    return_lse: bool = False,
    filter: float | None = None,
    w_layout: str | None = None,
    implementation: str | None = None,
) -> Any:
    """Every token's cross-entropy under softmax(x w), in nats, without the N x V logits, forward or backward.

    A mean is the caller's: divide the sum by whatever the tokens weigh in all. Logits and all sums are float32;
    products take x's dtype. Gradients are exact unless `filter` says otherwise.

    Args:
      x: (N, E) or (B, S, E), float32, bfloat16 or float16.
      w: (V, E) or (E, V) of such a type, x's or another; its gradient has its own type.
      targets: integers of x's leading shape, 0 to V - 1. Another is refused with its place when it is known before
        tracing; in a traced program its loss is NaN, and so are the gradients it would be in.
      softcap: logits become `softcap * tanh(logits / softcap)` (Gemma 2).
      z_loss: adds `z_loss * log-sum-exp ** 2` (PaLM, Chowdhery et al. 2022).
      label_smoothing: of the target's probability, this much is spread over all V words.
      ignore_index: tokens of this target have loss 0 and gradient 0; it need not be a row.
      weights: floating, of the targets' shape; each multiplies its token's loss, z-loss included.
      return_lse: also return the log-sum-exp of the logits, whose cotangent is taken; of ignored tokens too.
      filter: leave out of the gradient those blocks of tokens and words in which no entry of the logits' cotangent is
        above this share of its token's largest coefficient, such as `BF16_FILTER`; 0 leaves out exact zeros only. How
        large blocks are is the implementation's; `filtered_share` tells what was left out.
      w_layout: "ve" or "ev", where V is E and the shapes do not tell.
      implementation: "mosaic_tpu" or "mosaic_gpu" (whose gradient is that of "xla"), "xla", or "dense" (which holds the
        logits); `None` is the best here. Either of the last two is also the one that the gradient uses.

    Returns:
      float32 of the targets' shape, or that and the log-sum-exp.

    Raises:
      KernelError: shapes that do not fit, an option out of range, or a named implementation that cannot do this here.
    """
    given = checked(
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
        w_layout=w_layout,
    )
    how = _How(given.logits, implementation)
    merged = _reduce(given.x, given.w, given.terms.rows(given.targets), how)
    loss = given.terms.losses(merged, given.targets, given.weights)
    return (loss, merged.lse) if return_lse else loss


def filtered_share(
    x: Any, w: Any, targets: Any, *, filter: float, implementation: str | None = None, **options: Any
) -> jax.Array:
    """The share of blocks that the gradient of `linear_cross_entropy(...).sum()` leaves out, a float32 scalar.

    Decided by the code that the backward pass decides with.

    Args:
      x, w, targets, filter, implementation, **options: those of `linear_cross_entropy`.

    Raises:
      KernelError: as there, or an implementation that filters nothing.
    """
    given = checked("filtered_share", x, w, targets, filter=filter, **options)
    rows = given.terms.rows(given.targets)
    merged = parts(given.x, given.w, rows, given.logits, implementation).merged()
    loss, pull = jax.vjp(lambda m: given.terms.losses(m, given.targets, given.weights), merged)
    (slopes,) = pull(jnp.ones_like(loss))
    return _run("skipped", given.logits, implementation, given.x, given.w, rows, merged.lse, slopes)


# ---- pieces of a vocabulary


def parts(x: jax.Array, w: jax.Array, rows: jax.Array, logits: Logits, implementation: str | None = None) -> Parts:
    """What one piece of a vocabulary gives every token. Has no derivative; `gradients` is one.

    Args:
      x: (..., E).
      w: the piece.
      rows: (...) int32, each token's target less the number of rows before this piece; it may be in another.
      logits: how they are made.
      implementation: that of `linear_cross_entropy`.
    """
    return _run("forward", logits, implementation, x, w, rows)


def merge(pieces: Parts) -> Merged:
    """From pieces stacked along a leading axis, what the whole vocabulary gives."""
    summed = None if pieces.summed is None else pieces.summed.sum(0)
    return Parts(combine_all(pieces.total), pieces.hit.sum(0), summed).merged()


def gradients(
    x: jax.Array,
    w: jax.Array,
    rows: jax.Array,
    lse: jax.Array,
    slopes: Merged,
    logits: Logits,
    implementation: str | None = None,
    *,
    dw_dtype: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Cotangents of x, this piece's share of it, and of the piece itself.

    Args:
      x, w, rows, logits, implementation: those of `parts`.
      lse: (...) float32 log-sum-exp over the whole vocabulary.
      slopes: (...) cotangents of what `merge` gave.
      dw_dtype: type of w's cotangent, which is summed in float32; w's by default.
    """
    dw_dtype = w.dtype if dw_dtype is None else jnp.dtype(dw_dtype)
    return _run("backward", logits, implementation, x, w, rows, lse, slopes, dw_dtype=dw_dtype.name)


# ---- implementations


def _run_plain(
    room: Any, target: Target, *arrays: Any, direction: str, logits: Logits, dw_dtype: str | None, **_: Any
) -> Any:
    if direction == "forward":
        return room.forward(*arrays, logits)
    return room.backward(*arrays, logits, dw_dtype) if direction == "backward" else room.skipped(*arrays, logits)


def _anywhere(target: Target, **case: Any) -> str | None:
    return None


def _unfiltered(target: Target, *, logits: Logits, **case: Any) -> str | None:
    return None if logits.filter is None else "it holds all logits and leaves nothing out; use 'xla', or filter=None"


IMPLEMENTATIONS = (
    Implementation("mosaic_tpu", ("tpu",), tpu.supported, tpu.run),
    Implementation("mosaic_gpu", ("cuda",), gpu.supported, gpu.run),
    Implementation("xla", (), _anywhere, functools.partial(_run_plain, xla)),
)
"""What is chosen from, best first."""

_FORWARD_ONLY = ("mosaic_tpu", "mosaic_gpu")
"""Kernels whose backward pass is XLA's, in pieces of the vocabulary."""

_BY_NAME = (Implementation("dense", (), _unfiltered, functools.partial(_run_plain, reference)),)
"""What has to be asked for."""


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
    flat = lambda a: a.reshape(-1, *a.shape[len(leading) :])  # noqa: E731
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
    if direction != "forward" and implementation in _FORWARD_ONLY:
        implementation = "xla"
    ways = IMPLEMENTATIONS if implementation is None else (*IMPLEMENTATIONS, *_BY_NAME)
    arrays = (Inputs(x, w, others[0]), *others[1:])
    out = dispatch("linear_cross_entropy", ways, arrays, case, implementation)
    if direction == "forward":
        return jax.tree.map(lambda a: a.reshape(leading), out)
    return (out[0].reshape(*leading, width), out[1]) if direction == "backward" else out


# ---- gradients: one tree of residuals, whatever the implementation


@dataclasses.dataclass(frozen=True)
class _How:
    """All that is known before tracing besides shapes."""

    logits: Logits
    implementation: str | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _reduce(x: jax.Array, w: jax.Array, rows: jax.Array, how: _How) -> Merged:
    return parts(x, w, rows, how.logits, how.implementation).merged()


def _reduce_forward(x: jax.Array, w: jax.Array, rows: jax.Array, how: _How) -> tuple[Merged, tuple[jax.Array, ...]]:
    out = _reduce(x, w, rows, how)
    out = out._replace(lse=checkpoint_name(out.lse, NAMES[0]))
    return out, (x, w, rows, out.lse)


def _reduce_backward(how: _How, kept: tuple[jax.Array, ...], slopes: Merged) -> tuple[jax.Array, jax.Array, None]:
    x, w, rows, lse = kept
    return *gradients(x, w, rows, lse, slopes, how.logits, how.implementation), None


_reduce.defvjp(_reduce_forward, _reduce_backward)
