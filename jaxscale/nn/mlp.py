"""Feed-forward layers, which all take the same arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.errors import check_whole
from jaxscale.layout import constrain
from jaxscale.nn.linear import Linear, into, out_of
from jaxscale.nn.narrow import saved_as

gelu_tanh = partial(jax.nn.gelu, approximate=True)


def relu_squared(x: Array) -> Array:
    """Return `max(x, 0) ** 2`.

    Args:
      x: an array.
    """
    return jnp.square(jax.nn.relu(x))


def quick_gelu(x: Array) -> Array:
    """Return `x * sigmoid(1.702 * x)`, an approximation of GELU (Hendrycks & Gimpel 2016).

    Args:
      x: an array.
    """
    return x * jax.nn.sigmoid(1.702 * x)


class FeedForward(nnx.Module):
    """`down(act(up(x)))`, or with a gate `down(act(gate(x)) * up(x))` (Shazeer 2020).

    Args:
      width: width of the residual stream.
      hidden: the hidden width.
      bias: add a bias after every matrix.
      out_scale: multiplies the initial standard deviation of `down` (models reduce it with depth).
      overlap: overlap matrix products with the collectives of a sequence sharded over `tensor` (see
        `jaxscale.nn.linear.into`).
      dtype: dtype of the computation.
      param_dtype: dtype of the parameters.
      rngs: random streams of the initial values.
    """

    gated: bool = False
    activation: Callable[[Array], Array] = staticmethod(gelu_tanh)

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        bias: bool = False,
        out_scale: float = 1.0,
        overlap: bool = False,
        dtype: jnp.dtype = jnp.float32,
        param_dtype: jnp.dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.overlap = overlap
        linear = partial(Linear, bias=bias, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.gate = linear({"embed": width}, {"mlp": hidden}) if self.gated else None
        self.up = linear({"embed": width}, {"mlp": hidden})
        self.down = linear({"mlp": hidden}, {"embed": width}, scale=out_scale)

    def __call__(self, x: Float[Array, "b s e"]) -> Float[Array, "b s e"]:
        """Apply the layer to every position."""
        act = type(self).activation
        with jax.named_scope("up"):
            if self.gate is None:
                (up,) = into(x, self.up, overlap=self.overlap)
                h = act(_named(up))
            else:
                gate, up = into(x, self.gate, self.up, overlap=self.overlap)
                h = type(self).combine(_named(gate), _named(up))
        with jax.named_scope("down"):
            return out_of(saved_as(h, "mlp_hidden"), self.down, overlap=self.overlap)

    @classmethod
    def combine(cls, gate: Array, up: Array) -> Array:
        """Return the hidden layer of a gated feed-forward: `act(gate) * up`.

        Args:
          gate: the gate's product.
          up: the other product, of the same shape.
        """
        return cls.activation(gate) * up


def _named(h: Array) -> Array:
    return saved_as(constrain(h, "batch", "seq", "mlp"), "mlp_up")


@register
class GELU(FeedForward):
    """Two matrices with a tanh-approximated GELU between (GPT-2)."""


@register
class SquaredReLU(FeedForward):
    """Two matrices with `max(x, 0) ** 2` between (So et al. 2021; Nemotron)."""

    activation = staticmethod(relu_squared)


@register
class SwiGLU(FeedForward):
    """Gated, with SiLU (Llama)."""

    gated = True
    activation = staticmethod(jax.nn.silu)


@register
class ReGLU(FeedForward):
    """Gated, with `max(gate, 0)`, so that most hidden features are zero (Shazeer 2020; SmallThinker)."""

    gated = True
    activation = staticmethod(jax.nn.relu)


@register
class GeGLU(FeedForward):
    """Gated, with a tanh-approximated GELU (Gemma)."""

    gated = True


@register
@dataclasses.dataclass(frozen=True)
class TimesWider:
    """A feed-forward layer whose hidden width is a multiple of the model's, for some of its layers (Gemma 3n and 4).

    Args:
      mlp: the layer.
      times: how many times wider its hidden width is.

    Raises:
      ConfigError: not a whole number of at least 1.
    """

    mlp: Callable[..., FeedForward] = SwiGLU
    times: int = 2

    def __post_init__(self) -> None:
        check_whole("TimesWider.times", self.times)

    @property
    def gated(self) -> bool:
        """Whether the layer has a gate."""
        return bool(getattr(self.mlp, "gated", False))

    def __call__(self, width: int, hidden: int, **options: Any) -> FeedForward:
        """Make the layer.

        Args:
          width: width of the residual stream.
          hidden: the model's hidden width.
          **options: see `FeedForward`.
        """
        return self.mlp(width, self.times * hidden, **options)


@register
class ClampedSwiGLU(FeedForward):
    """Gated, `(up + 1) * gate * sigmoid(1.702 * gate)`, the gate at most 7 and up between -7 and 7 (GPT-OSS)."""

    gated = True
    activation = staticmethod(quick_gelu)
    limit = 7.0

    @classmethod
    def combine(cls, gate: Array, up: Array) -> Array:
        """See `FeedForward`."""
        return cls.activation(jnp.minimum(gate, cls.limit)) * (jnp.clip(up, -cls.limit, cls.limit) + 1)
