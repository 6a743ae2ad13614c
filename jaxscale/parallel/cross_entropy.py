"""The loss that never holds its logits, over a vocabulary that the layout splits."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxscale.errors import LayoutError
from jaxscale.layout import constrain, current, filled_shape, in_use, unfill
from jaxscale.parallel.ends import axis_size, rows_from_ours
from jaxscale.parallel.filled_rows import gradients_of_filled, parts_of_filled
from jaxscale.parallel.reductions import gather_together, sum_to
from jaxscale.parallel.sharded import cut_already, cut_over, sharded_op, where_gradients_go
from pallas_kernels.cut_cross_entropy import NAMES, Logits, Merged, checked, merge

_X, _W, _TOKENS = ("batch", "seq", "embed"), ("vocab", "embed"), ("batch", "seq")


def sharded_cross_entropy(
    x: Float[Array, "b s e"],
    w: Float[Array, "v e"],
    targets: Int[Array, "b s"],
    *,
    softcap: float | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    ignore_index: int | None = None,
    weights: Float[Array, "b s"] | None = None,
    return_lse: bool = False,
    filter: float | None = None,
    implementation: str | None = None,
    vocab: int | None = None,
) -> Any:
    """`pallas_kernels.cut_cross_entropy.linear_cross_entropy` of global arrays, cut as the layout in force says.

    Each device sums over its own rows of the vocabulary and its own tokens, and one `all_gather` over the mesh axes
    that split the vocabulary (12 bytes of each shard per token, 16 with label smoothing) merges them. Backwards, x's
    cotangent is summed over those axes in x's type, and w's over the axes that split tokens in w's own, straight to
    where the rules for gradients say. A w split along `embed` (FSDP) is cast to x's type first and gathered second,
    forward and backward. A vocabulary that devices do not divide has rows of zeros behind it, which count for nothing.
    Inside a `shard_map` that cuts the vocabulary already, w is this device's rows; x and the loss are what all devices
    hold. Without a layout this is `linear_cross_entropy`.

    Args:
      x: final hidden states, named ("batch", "seq", "embed").
      w: the head's weight as the model keeps it, named ("vocab", "embed"); products are in x's type.
      targets: named ("batch", "seq").
      softcap, z_loss, label_smoothing, ignore_index, weights, return_lse, filter, implementation: those of
        `linear_cross_entropy`.
      vocab: the vocabulary's size, where w has rows of zeros behind it already; all rows of all devices by default.

    Returns:
      float32 (B, S), or that and the log-sum-exp.

    Raises:
      LayoutError: a dimension that does not divide.
      KernelError: as `linear_cross_entropy`.
    """
    given = checked(
        "sharded_cross_entropy",
        x,
        w,
        targets,
        softcap=softcap,
        z_loss=z_loss,
        label_smoothing=label_smoothing,
        ignore_index=ignore_index,
        weights=weights,
        filter=filter,
        w_layout="ve",
    )
    _check_sizes(given.x, given.w)
    vocab = given.w.shape[0] * axis_size(cut_already("vocab")) if vocab is None else vocab
    terms = dataclasses.replace(given.terms, vocabulary=vocab)
    merged = _reduce(given.x, given.w, terms.rows(given.targets), _How(given.logits, implementation, vocab))
    loss = terms.losses(merged, given.targets, given.weights)
    return (loss, merged.lse) if return_lse else loss


def _check_sizes(x: Array, w: Array) -> None:
    """All three dimensions at once, so that no two are on one mesh axis."""
    layout = current()
    if over := cut_over("embed"):
        raise LayoutError(
            f"sharded_cross_entropy sums whole vectors, and the layout {layout} splits the activations' 'embed' over "
            f"{' and '.join(over)}; take that rule out, or use the materialised loss"
        )
    if layout is not None and not jax.sharding.get_abstract_mesh().manual_axes:
        names, shape = ("batch", "seq", "vocab"), (*x.shape[:2], filled_shape(_W, w.shape)[0])
        layout.spec(names, shape, kind="activations", name="the logits, which are never held,")


@dataclasses.dataclass(frozen=True)
class _How:
    """All that is known before tracing besides shapes."""

    logits: Logits
    implementation: str | None
    vocab: int

    def spare(self, rows: int) -> int:
        """How many of a device's `rows`, the last ones, may be no words."""
        return min(rows, rows * axis_size(_over()) - self.vocab)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _reduce(x: Array, w: Array, rows: Array, how: _How) -> Merged:
    over, ours = _over(), cut_over("vocab")

    def local(x: Array, w: Array, rows: Array, words: Array) -> Merged:
        rows, words = (rows_from_ours(a, w.shape[0], ours) for a in (rows, words))
        mine = parts_of_filled(x, w, rows, words, how.spare(w.shape[0]), how.logits, how.implementation)
        return merge(gather_together(mine, over)) if over else mine.merged()

    names: Any = _TOKENS  # of each of the three
    out = Merged(names, names, names if how.logits.summed else None)
    return sharded_op(
        local,
        x,
        in_use(w, _W, x.dtype),
        *_from_ours(w, rows, how),
        axes=(_X, _W, _TOKENS, ()),
        out_axes=out,
        name=_NAME,
    )


def _from_ours(w: Array, rows: Array, how: _How) -> tuple[Array, Array]:
    """Targets' rows and the number of words, from the first row that a `shard_map` around us has left."""
    over = cut_already("vocab")
    return rows_from_ours(rows, w.shape[0], over), rows_from_ours(jnp.int32(how.vocab), w.shape[0], over)


def _forward(x: Array, w: Array, rows: Array, how: _How) -> tuple[Merged, tuple[Array, ...]]:
    out = _reduce(x, w, rows, how)
    out = out._replace(lse=checkpoint_name(out.lse, NAMES[0]))
    return out, (x, w, rows, out.lse)


def _backward(how: _How, kept: tuple[Array, ...], slopes: Merged) -> tuple[Array, Array, None]:
    x, w, rows, lse = kept
    over, ours, tokens = _over(), cut_over("vocab"), cut_over("batch", "seq")
    # dw is whole along `embed` on every device: what sums it may as well split it, if that is where it goes.
    split = where_gradients_go(_W, tokens)
    leaves, structure = jax.tree.flatten(slopes)

    def local(x: Array, w: Array, rows: Array, words: Array, lse: Array, *leaves: Array) -> tuple[Array, Array]:
        slopes = jax.tree.unflatten(structure, leaves)
        rows, words = (rows_from_ours(a, w.shape[0], ours) for a in (rows, words))
        dx, dw = gradients_of_filled(
            x, w, rows, words, how.spare(w.shape[0]), lse, slopes, how.logits, how.implementation, kept[1].dtype
        )
        return lax.psum(dx, over) if over else dx, sum_to(dw, tokens, split, dim=1)

    dx, dw = sharded_op(
        local,
        x,
        in_use(w, _W, x.dtype),
        *_from_ours(w, rows, how),
        lse,
        *leaves,
        axes=(_X, _W, _TOKENS, (), *[_TOKENS] * (1 + len(leaves))),
        out_axes=(_X, _W),
        out_kinds=("activations", "grads" if split else "activations"),
        name=_NAME,
    )
    return dx, unfill(constrain(dw, *_W, kind="grads"), w.shape, *_W), None


_reduce.defvjp(_forward, _backward)
_NAME = "the loss's operand"


def _over() -> tuple[str, ...]:
    """The mesh axes that cut the vocabulary, those of a `shard_map` around us first, which cut it first."""
    return (*cut_already("vocab"), *cut_over("vocab"))
