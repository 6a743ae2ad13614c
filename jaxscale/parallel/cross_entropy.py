"""Cross-entropy that never stores logits, over a vocabulary that the layout shards."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxscale.errors import LayoutError
from jaxscale.layout import constrain, current, filled_shape, in_use, unfill
from jaxscale.parallel.ends import axis_size, local_rows
from jaxscale.parallel.filled_rows import gradients_of_filled, parts_of_filled
from jaxscale.parallel.reductions import gather_together, sum_to
from jaxscale.parallel.sharded import cut_already, cut_over, sharded_op, where_gradients_go
from pallas_kernels.cut_cross_entropy import Logits, Merged, checked, merge

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
    return_entropy: bool = False,
    filter: float | None = None,
    implementation: str | None = None,
    vocab: int | None = None,
) -> Float[Array, "b s"] | tuple[Float[Array, "b s"], ...]:
    """Compute `pallas_kernels.cut_cross_entropy.linear_cross_entropy` of global arrays, sharded by the layout in force.

    Each device sums over its own rows of the vocabulary and its own tokens, and one `all_gather` over the mesh axes
    that shard the vocabulary (12 bytes per shard and token, 4 more with label smoothing and 4 with the entropy) merges
    the sums. In the backward pass, x's cotangent is summed over those axes in x's dtype, and w's over the axes that
    shard tokens in w's dtype, by a reduce-scatter if the rules for gradients shard it. A w that is sharded along
    `embed` (FSDP) is cast to x's dtype and then gathered, in both passes. A vocabulary that the layout does not divide
    is padded; padding does not count. Inside a `shard_map` that shards the vocabulary already, w is this device's rows,
    and x and the loss are replicated. Without a layout this is `linear_cross_entropy`.

    Args:
      x: final hidden states, logical axes ("batch", "seq", "embed").
      w: the stored weight of the output head, logical axes ("vocab", "embed"); products are computed in x's dtype.
      targets: ids, logical axes ("batch", "seq").
      softcap: see `linear_cross_entropy`, as for the arguments below.
      z_loss: weight of the squared log-sum-exp.
      label_smoothing: share of the target distribution that is uniform.
      ignore_index: a target id without a loss.
      weights: a factor for each token's loss.
      return_lse: also return the log-sum-exp.
      return_entropy: also return the entropy of each token's distribution, in nats.
      filter: see `linear_cross_entropy`.
      implementation: see `linear_cross_entropy`.
      vocab: the number of token ids, if w is padded already; by default all rows of all devices.

    Returns:
      float32 (B, S), or a tuple of that, the log-sum-exp and the entropy, as far as requested.

    Raises:
      LayoutError: a dimension that does not divide.
      KernelError: as `linear_cross_entropy`.
    """
    inputs = checked(
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
        entropy=return_entropy,
        w_layout="ve",
    )
    _check_sizes(inputs.x, inputs.w)
    vocab = inputs.w.shape[0] * axis_size(cut_already("vocab")) if vocab is None else vocab
    terms = dataclasses.replace(inputs.terms, vocabulary=vocab)
    merged = _reduce(inputs.x, inputs.w, terms.rows(inputs.targets), _Settings(inputs.logits, implementation, vocab))
    loss = terms.losses(merged, inputs.targets, inputs.weights)
    return merged.appended_to(loss, lse=return_lse, entropy=return_entropy)


def _check_sizes(x: Array, w: Array) -> None:
    """Check the three dimensions of the logits together, so that no two are sharded over one mesh axis."""
    layout = current()
    if over := cut_over("embed"):
        raise LayoutError(
            f"sharded_cross_entropy needs whole vectors, and the layout {layout} shards the activations' 'embed' over "
            f"{' and '.join(over)}; remove that rule, or use the materialised loss"
        )
    if layout is not None and not jax.sharding.get_abstract_mesh().manual_axes:
        names, shape = ("batch", "seq", "vocab"), (*x.shape[:2], filled_shape(_W, w.shape)[0])
        layout.spec(names, shape, kind="activations", name="the logits")


@dataclasses.dataclass(frozen=True)
class _Settings:
    """Static settings of the loss."""

    logits: Logits
    implementation: str | None
    vocab: int

    def spare(self, rows: int) -> int:
        """Return how many of a device's last rows can be padding."""
        return min(rows, rows * axis_size(_over()) - self.vocab)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _reduce(x: Array, w: Array, rows: Array, settings: _Settings) -> Merged:
    over, ours = _over(), cut_over("vocab")

    def local(x: Array, w: Array, rows: Array, tokens: Array) -> Merged:
        rows, tokens = (local_rows(a, w.shape[0], ours) for a in (rows, tokens))
        mine = parts_of_filled(x, w, rows, tokens, settings.spare(w.shape[0]), settings.logits, settings.implementation)
        return merge(gather_together(mine, over)) if over else mine.merged()

    names: Any = _TOKENS
    out = Merged(
        names, names, *(names if needed else None for needed in (settings.logits.summed, settings.logits.entropy))
    )
    return sharded_op(
        local,
        x,
        in_use(w, _W, x.dtype),
        *_from_ours(w, rows, settings),
        axes=(_X, _W, _TOKENS, ()),
        out_axes=out,
        name=_NAME,
    )


def _from_ours(w: Array, rows: Array, settings: _Settings) -> tuple[Array, Array]:
    """Return targets' rows and the number of token ids, counted from the first row inside an enclosing `shard_map`."""
    over = cut_already("vocab")
    return local_rows(rows, w.shape[0], over), local_rows(jnp.int32(settings.vocab), w.shape[0], over)


def _forward(x: Array, w: Array, rows: Array, settings: _Settings) -> tuple[Merged, tuple[Any, ...]]:
    out = _reduce(x, w, rows, settings).with_names()
    return out, (x, w, rows, out.lse, out.entropy)


def _backward(settings: _Settings, residuals: tuple[Any, ...], slopes: Merged) -> tuple[Array, Array, None]:
    x, w, rows, lse, entropy = residuals
    over, ours, token_axes = _over(), cut_over("vocab"), cut_over("batch", "seq")
    # dw is whole along `embed` on every device, so its sum can be a reduce-scatter along `embed`
    split = where_gradients_go(_W, token_axes)
    leaves, structure = jax.tree.flatten((lse, slopes, entropy))

    def local(x: Array, w: Array, rows: Array, tokens: Array, *leaves: Array) -> tuple[Array, Array]:
        lse, slopes, entropy = jax.tree.unflatten(structure, leaves)
        rows, tokens = (local_rows(a, w.shape[0], ours) for a in (rows, tokens))
        dx, dw = gradients_of_filled(
            x,
            w,
            rows,
            tokens,
            settings.spare(w.shape[0]),
            lse,
            slopes,
            settings.logits,
            settings.implementation,
            residuals[1].dtype,
            entropy,
        )
        return lax.psum(dx, over) if over else dx, sum_to(dw, token_axes, split, dim=1)

    dx, dw = sharded_op(
        local,
        x,
        in_use(w, _W, x.dtype),
        *_from_ours(w, rows, settings),
        *leaves,
        axes=(_X, _W, _TOKENS, (), *[_TOKENS] * len(leaves)),
        out_axes=(_X, _W),
        out_kinds=("activations", "grads" if split else "activations"),
        name=_NAME,
    )
    return dx, unfill(constrain(dw, *_W, kind="grads"), w.shape, *_W), None


_reduce.defvjp(_forward, _backward)
_NAME = "the loss's operand"


def _over() -> tuple[str, ...]:
    """Return the mesh axes that shard the vocabulary, those of an enclosing `shard_map` first (outermost)."""
    return (*cut_already("vocab"), *cut_over("vocab"))
