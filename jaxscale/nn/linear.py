"""Matrix multiplication over named dimensions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxscale.layout import constrain, named
from jaxscale.parallel import Weight, as_weight, gather_matmul, matmul_scatter, why_no_overlap


def project(
    x: Float[Array, "..."],
    kernel: Float[Array, "..."] | Weight,
    axes: tuple[str, ...],
    contracted: tuple[int, ...],
    dtype: Any,
    out_dtype: Any,
) -> Float[Array, "..."]:
    """`x · kernel`, over the last dimensions of `x` and the `contracted` ones of `kernel`.

    Written with its derivative so that three things hold under any layout: a weight split along `embed` (FSDP) is cast
    first and gathered second, in the smaller type; it is gathered again for the backward pass rather than kept; and
    its gradient leaves the matrix multiplication in the parameter's own type, so that the sum over devices is taken
    there, and lands where the rules for gradients say (a reduce-scatter when they split it).

    Args:
      x: activations.
      kernel: the parameter, in the type it is kept in, or a `Weight` in its place, whose `matmul` is called.
      axes: logical axis per dimension of `kernel`.
      contracted: dimensions of `kernel` that are summed over, all leading or all trailing.
      dtype: of the multiplication's inputs.
      out_dtype: of the result.

    Returns:
      the remaining dimensions of `x`, then those of `kernel`; a vocabulary that devices do not divide has zeros behind.
    """
    return as_weight(kernel).matmul(x, axes, contracted, dtype, out_dtype)


_CUT_STD = 0.87962566103423978  # of a unit normal cut off at -2 and 2


def truncated_std(fan_in: int, scale: float = 1.0) -> float:
    """What to give a truncated normal, so that a sum of `fan_in` unit numbers has a standard deviation of `scale`."""
    return scale / math.sqrt(fan_in) / _CUT_STD


class Linear(nnx.Module):
    """`y = x · kernel + bias`, contracting the last dimensions of `x` with the first of `kernel`.

    Args:
      inputs: size by logical axis of the contracted dimensions, in order, as `{"embed": 128}`.
      outputs: size by logical axis of the new dimensions, as `{"heads": 4, "head_dim": 32}`.
      bias: whether to add one.
      scale: multiplies the initial standard deviation `1 / sqrt(fan_in)` (truncated normal).
      dtype: what the product is computed in (accumulation is the backend's, float32 or wider for bfloat16).
      param_dtype: what the parameters are kept in.
    """

    def __init__(
        self,
        inputs: Mapping[str, int],
        outputs: Mapping[str, int],
        *,
        bias: bool = False,
        scale: float = 1.0,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.axes = (*inputs, *outputs)
        self.contracted = tuple(range(len(inputs)))
        self.dtype = dtype
        std = truncated_std(math.prod(inputs.values()), scale)
        from_last = tuple(range(-len(self.axes), -len(outputs)))
        init = named(jax.nn.initializers.truncated_normal(std), *self.axes, contracted=from_last)
        self.kernel = nnx.Param(init(rngs.params(), (*inputs.values(), *outputs.values()), param_dtype))
        # A bias along the residual stream is too small to be worth FSDP's gather: "norm", not "embed".
        zeros = named(jax.nn.initializers.zeros, *("norm" if a == "embed" else a for a in outputs))
        self.bias = nnx.Param(zeros(rngs.params(), tuple(outputs.values()), param_dtype)) if bias else None

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        return self.biased(project(x, self.kernel.get_value(), self.axes, self.contracted, self.dtype, self.dtype))

    def biased(self, y: Float[Array, "..."]) -> Float[Array, "..."]:
        """`y` and the bias, if there is one."""
        if self.bias is not None:
            # added in float32, so that its gradient is summed in float32
            y = (y.astype(jnp.float32) + self.bias.get_value()).astype(self.dtype)
        return y


def into(x: Float[Array, "b s e"], *linears: Linear, overlap: bool = False) -> list[Float[Array, "b s ..."]]:
    """What each of `linears` makes of the residual stream.

    Args:
      x: whole along its sequence; with `overlap` as it is between blocks.
      *linears: from ("embed",) to dimensions that `tensor` cuts.
      overlap: gather x's sequence while it is multiplied (see `jaxscale.parallel.gather_matmul`), where a layout cuts
        it over `tensor`.

    Raises:
      LayoutError: `overlap`, and the layout cuts `tensor` but not so that there is a ring.
    """
    if overlap and why_no_overlap(*_hidden(linears)) != "":
        kernels, axes = tuple(map(_whole, linears)), tuple(m.axes for m in linears)
        return [m.biased(y) for m, y in zip(linears, gather_matmul(x, kernels, axes, linears[0].dtype), strict=True)]
    x = constrain(x, "batch", "seq", "embed")
    return [m(x) for m in linears]


def out_of(h: Float[Array, "b s ..."], linear: Linear, *, overlap: bool = False) -> Float[Array, "b s e"]:
    """What `linear` makes of a hidden activation for the residual stream; arguments as `into`."""
    if overlap and why_no_overlap(*_hidden((linear,))) != "":
        return linear.biased(matmul_scatter(h, _whole(linear), linear.axes, linear.dtype))
    return linear(h)


def _whole(linear: Linear) -> Array:
    """The kernel as one array, for products that are not `project`'s."""
    return as_weight(linear.kernel.get_value()).dense()


def _hidden(linears: tuple[Linear, ...]) -> list[str]:
    return sorted({a for m in linears for a in m.axes if a not in ("embed", "head_dim")})
