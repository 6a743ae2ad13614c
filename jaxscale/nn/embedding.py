"""Embedding tables of tokens and learned positions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxscale.config import register
from jaxscale.layout import constrain, named
from jaxscale.nn.norms import LayerNorm
from jaxscale.parallel import as_weight, sharded_lookup


@register
class Embedding(nnx.Module):
    """A table of `rows` vectors, looked up by integer id.

    Args:
      rows: number of ids.
      width: size of a vector.
      axis: logical axis of the rows, "vocab" or "positions".
      scale: standard deviation of the initial values (normal).
      init: another initializer, in place of `scale`.
      dtype: dtype of the result.
      param_dtype: dtype of the table.
      rngs: random streams of the initial values.
    """

    def __init__(
        self,
        rows: int,
        width: int,
        *,
        axis: str = "vocab",
        scale: float = 0.02,
        init: jax.nn.initializers.Initializer | None = None,
        dtype: jnp.dtype = jnp.float32,
        param_dtype: jnp.dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.axis, self.dtype = axis, dtype
        contracted = (-1,) if axis == "vocab" else None  # as a tied output head; positions stay plain arrays
        values = named(init or jax.nn.initializers.normal(scale), axis, "embed", contracted=contracted)
        self.weight = nnx.Param(values(rngs.params(), (rows, width), param_dtype))

    def __call__(self, ids: Int[Array, "b s"]) -> Float[Array, "b s e"]:
        """Look up integer ids."""
        return sharded_lookup(as_weight(self.weight.get_value()).dense(), ids, self.axis, self.dtype)


@register
class StableEmbedding(Embedding):
    """An embedding that trains stably with 8-bit optimizers (Dettmers et al. 2022, section 2.3).

    Xavier-uniform initial values, and a layer norm on the embeddings before positions are added. Its optimizer state
    stays in 32 bits, as that of every embedding by default (`jaxscale.optim.EightBit.keep`).

    Args:
      rows: number of ids.
      width: size of a vector.
      axis: logical axis of the rows.
      scale: has no effect; Xavier's scale depends on the sizes only.
      dtype: dtype of the result.
      param_dtype: dtype of the parameters.
      rngs: random streams of the initial values.
    """

    def __init__(
        self,
        rows: int,
        width: int,
        *,
        axis: str = "vocab",
        scale: float = 0.0,
        dtype: jnp.dtype = jnp.float32,
        param_dtype: jnp.dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        xavier = jax.nn.initializers.glorot_uniform()
        super().__init__(rows, width, axis=axis, init=xavier, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.norm = LayerNorm(width, dtype=dtype, param_dtype=param_dtype)

    def __call__(self, ids: Int[Array, "b s"]) -> Float[Array, "b s e"]:
        """Look up integer ids and normalise the vectors."""
        return constrain(self.norm(super().__call__(ids)), "batch", "residual_seq", "embed")
