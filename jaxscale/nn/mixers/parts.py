"""What mixers with a state of fixed size have in common."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxscale.errors import ConfigError
from jaxscale.layout import constrain, named
from jaxscale.nn.cache import RecurrentState, StateArray
from jaxscale.nn.context import Context
from jaxscale.nn.mixer import Mixer, chosen
from jaxscale.nn.recurrent import convolution
from pallas_kernels.chunked_recurrence import CHUNK
from pallas_kernels.chunked_recurrence.inputs import PRODUCTS

HEADS = ("batch", "seq", "heads", "head_dim")


@dataclasses.dataclass(frozen=True)
class MatrixMixer(Mixer):
    """A mixer whose state is a matrix for each head; see `jaxscale.nn.matrix_recurrence`.

    Args:
      product_dtype: "float32" or "bfloat16", to which operands of the recurrence's products are rounded; sums, decays
        and states are float32. `None` is bfloat16 in a model that computes in bfloat16, else float32.

    Raises:
      ConfigError: another `product_dtype`.
    """

    any_order: ClassVar[bool] = True
    gives: ClassVar[tuple[str, ...]] = ("memory",)

    product_dtype: str | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.product_dtype not in (None, *PRODUCTS):
            raise ConfigError(
                f"{type(self).__name__}.product_dtype = {self.product_dtype!r}: must be None, 'float32' or 'bfloat16'"
            )

    def options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments of the mixer's layer.

        Args:
          options: those that the mixer is called with.
        """
        dtype = self.product_dtype or ("bfloat16" if options["dtype"] == jnp.bfloat16 else "float32")
        return chosen(options, "norm_eps") | {"product_dtype": dtype}


class ShortConvolution(nnx.Module):
    """A causal convolution by channels over the last tokens of a document, then SiLU; computed in float32.

    Args:
      name: of its array of the layer's `decode_state`.
      taps: tokens that it sees, the current one included.
      heads: number of heads.
      width: channels of a head.
      axis: the logical axis of heads: "kv_heads" if several heads share these, so that few of them can be replicated.
      bias: add a bias.
      dtype: dtype of the result.
      param_dtype: dtype of the parameters.
      rngs: random streams of the initial values.
    """

    def __init__(
        self,
        name: str,
        taps: int,
        heads: int,
        width: int,
        *,
        axis: str = "heads",
        bias: bool = False,
        dtype: jnp.dtype,
        param_dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        self.name, self.axis, self.dtype = name, axis, dtype
        bound = 1 / math.sqrt(taps)
        init = named(partial(jax.random.uniform, minval=-bound, maxval=bound), None, axis, "head_dim")
        self.kernel = nnx.Param(init(rngs.params(), (taps, heads, width), param_dtype))
        zeros = named(jax.nn.initializers.zeros, axis, "head_dim")
        self.bias = nnx.Param(zeros(rngs.params(), (heads, width), param_dtype)) if bias else None

    @property
    def stored(self) -> StateArray:
        """The last inputs, which generation stores."""
        taps, heads, width = self.kernel.get_value().shape
        return StateArray(self.name, (taps - 1, heads * width), (None, self.axis), self.dtype)

    def __call__(
        self, x: Float[Array, "b s h d"], context: Context, decode_state: RecurrentState
    ) -> Float[Array, "b s h d"]:
        """Convolve heads' channels, within documents."""
        kernel = self.kernel.get_value()
        merged = constrain(x.reshape(*x.shape[:2], -1), "batch", "seq", self.axis)
        y = convolution(merged, kernel.reshape(kernel.shape[0], -1), context, decode_state, self.name, self.axis)
        y = y.reshape(x.shape)
        if self.bias is not None:
            y = y + self.bias.get_value()
        return constrain(jax.nn.silu(y).astype(self.dtype), "batch", "seq", self.axis, "head_dim")


def unit(x: Float[Array, "... d"]) -> Float[Array, "... d"]:
    """Scale vectors to length 1, in float32.

    Args:
      x: vectors.
    """
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def step_size_bias(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], dtype: Any) -> nnx.Param[Any]:
    """Make the bias of a step size `softplus(x + bias)` that begins log-uniform from 0.001 to 0.1 (Gu & Dao 2023).

    Args:
      rngs: random streams.
      shape: of the bias.
      axes: logical axis of each dimension.
      dtype: of the parameter.
    """

    def init(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        size = jnp.exp(jax.random.uniform(key, shape, jnp.float32, math.log(1e-3), math.log(0.1)))
        return (size + jnp.log(-jnp.expm1(-size))).astype(dtype)  # the inverse of softplus

    return nnx.Param(named(init, *axes)(rngs.params(), shape, dtype))


def rate_logarithm(rngs: nnx.Rngs, heads: int, dtype: Any) -> nnx.Param[Any]:
    """Make the logarithm of each head's rate of decay, which begins uniform from 1 to 16 (Dao & Gu 2024).

    Args:
      rngs: random streams.
      heads: number of heads.
      dtype: of the parameter.
    """

    def init(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        return jnp.log(jax.random.uniform(key, shape, jnp.float32, 1.0, 16.0)).astype(dtype)

    return nnx.Param(named(init, "heads")(rngs.params(), (heads,), dtype))


def recurrence_flops(tokens: int, heads: int, key: int, value: int, *, delta: bool, chunk: int = CHUNK) -> int:
    """Return the FLOPs of `matrix_recurrence`'s products in the forward pass.

    Args:
      tokens: tokens of all rows.
      heads: number of heads.
      key: width of a key.
      value: width of a value.
      delta: it has the delta rule.
      chunk: tokens in a chunk.
    """
    scores, states = chunk * (key + value), 2 * key * value
    if delta:
        scores, states = scores + chunk * (2 * key + value), states + key * value
    return 2 * tokens * heads * (scores + states)
