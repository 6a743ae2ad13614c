"""Tables that are looked up: token embeddings and learned positions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxscale.layout import constrain, named
from jaxscale.nn.linear import in_use


class Embedding(nnx.Module):
    """A table of `rows` vectors, looked up by integer id.

    Args:
      rows: number of ids.
      width: size of a vector.
      axis: logical name of the rows, "vocab" or "positions".
      scale: standard deviation of the initial values (normal).
      dtype: what a lookup gives.
      param_dtype: what the table is kept in.
    """

    def __init__(
        self,
        rows: int,
        width: int,
        *,
        axis: str = "vocab",
        scale: float = 0.02,
        dtype: jnp.dtype = jnp.float32,
        param_dtype: jnp.dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.axis, self.dtype = axis, dtype
        init = named(jax.nn.initializers.normal(scale), axis, "embed")
        self.weight = nnx.Param(init(rngs.params(), (rows, width), param_dtype))

    def __call__(self, ids: Int[Array, "b s"]) -> Float[Array, "b s e"]:
        # Gathering from a table still split along `embed` would make the partitioner rematerialise the result, since
        # the batch wants the same devices: gather that dimension first. In float32, so that gradients of an id that
        # occurs often are summed in float32.
        weight = self.weight.get_value()
        x = in_use(weight, (self.axis, "embed"), weight.dtype)[ids].astype(self.dtype)
        return constrain(x, "batch", "residual_seq", "embed")
