"""Matrix multiplication over named dimensions."""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxscale.layout import constrain, current, named, say_once
from jaxscale.parallel import (
    Arithmetic,
    Dense,
    Weight,
    as_weight,
    chosen_sums,
    gather_matmul,
    matmul_scatter,
    summed_matmul,
    why_no_overlap,
)
from jaxscale.parallel.deferred import Deferred


def project(
    x: Float[Array, "..."],
    kernel: Float[Array, "..."] | Weight,
    axes: tuple[str, ...],
    contracted: tuple[int, ...],
    arithmetic: Arithmetic,
) -> Float[Array, "..."]:
    """Compute `x · kernel`, summed over the last dimensions of `x` and the `contracted` ones of `kernel`.

    Its custom derivative makes sure that, under any layout, a weight sharded along `embed` (FSDP) is rounded before it
    is all-gathered, in the smaller type; that it is gathered again in the backward pass instead of saved; and that its
    gradient is computed in the parameter's dtype, in which it is summed over devices, and sharded by the rules for
    gradients (by a reduce-scatter if they shard it).

    Args:
      x: activations.
      kernel: the stored parameter, or a `Weight`, whose `matmul` is called.
      axes: logical axis per dimension of `kernel`.
      contracted: dimensions of `kernel` that are summed over, all leading or all trailing.
      arithmetic: the numbers of the product and its gradients, and the dtype of the result.

    Returns:
      the remaining dimensions of `x`, then those of `kernel`; a vocabulary that the layout does not divide is padded.
    """
    return as_weight(kernel).matmul(x, axes, contracted, arithmetic)


_TRUNCATED_STD = 0.87962566103423978  # the standard deviation of a unit normal truncated at -2 and 2


def truncated_std(fan_in: int, scale: float = 1.0) -> float:
    """Return the parameter of a truncated normal by which a weight has the standard deviation `scale / sqrt(fan_in)`.

    Args:
      fan_in: number of inputs of the product.
      scale: standard deviation of the product with unit inputs.
    """
    return scale / math.sqrt(fan_in) / _TRUNCATED_STD


class Linear(nnx.Module):
    """`y = x · kernel + bias`, contracting the last dimensions of `x` with the first of `kernel`.

    Args:
      inputs: size by logical axis of the contracted dimensions, in order, such as `{"embed": 128}`.
      outputs: size by logical axis of the new dimensions, such as `{"heads": 4, "head_dim": 32}`.
      bias: add a bias.
      scale: multiplies the initial standard deviation `1 / sqrt(fan_in)` (truncated normal).
      dtype: dtype of the computation (the backend accumulates bfloat16 in float32 or wider).
      param_dtype: dtype of the parameters.
      rngs: random streams of the initial values.
    """

    def __init__(
        self,
        inputs: Mapping[str, int],
        outputs: Mapping[str, int],
        *,
        bias: bool = False,
        scale: float = 1.0,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.axes = (*inputs, *outputs)
        self.contracted = tuple(range(len(inputs)))
        self.dtype = dtype
        self.arithmetic = Arithmetic.cast(dtype)
        std = truncated_std(math.prod(inputs.values()), scale)
        from_last = tuple(range(-len(self.axes), -len(outputs)))
        init = named(jax.nn.initializers.truncated_normal(std), *self.axes, contracted=from_last)
        self.kernel = nnx.Param(init(rngs.params(), (*inputs.values(), *outputs.values()), param_dtype))
        # FSDP does not shard the small bias of the residual stream: its axis is "norm", not "embed".
        zeros = named(jax.nn.initializers.zeros, *("norm" if a == "embed" else a for a in outputs))
        self.bias = nnx.Param(zeros(rngs.params(), tuple(outputs.values()), param_dtype)) if bias else None

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Multiply `x` by the kernel and add the bias."""
        return self.biased(project(x, self.kernel.get_value(), self.axes, self.contracted, self.arithmetic))

    @property
    def weight(self) -> Weight:
        """The kernel as a weight."""
        return as_weight(self.kernel.get_value())

    def matrix(self) -> Float[Array, "..."]:
        """Return the kernel that is multiplied, as one array."""
        return by_column(*self.weight.matrix(self.arithmetic))

    def biased(self, y: Float[Array, "..."]) -> Float[Array, "..."]:
        """Add the bias, if there is one.

        Args:
          y: the product.
        """
        if self.bias is not None:
            # in float32, so that its gradient is summed in float32
            y = (y.astype(jnp.float32) + self.bias.get_value()).astype(self.dtype)
        return y


def into(x: Float[Array, "b s e"], *linears: Linear, overlap: bool = False) -> list[Float[Array, "b s ..."]]:
    """Apply linear layers to the residual stream.

    Args:
      x: the residual stream, whole along its sequence; with `overlap` sharded as it is between blocks.
      *linears: layers from ("embed",) to dimensions that are sharded over `tensor`.
      overlap: overlap the all-gather of x's sequence with the products (see `jaxscale.parallel.gather_matmul`), if the
        layout shards it over `tensor`.

    Returns:
      the result of each layer.

    Raises:
      LayoutError: with `overlap`, the layout has a `tensor` axis and does not shard as the overlap needs.
    """
    if overlap and why_no_overlap(*_hidden(linears)) != "":
        bases = [m.weight.base() for m in linears]
        numbers = [w.arithmetic(m.arithmetic) for w, m in zip(bases, linears, strict=True)]
        matrices, factors = zip(*(w.matrix(m.arithmetic) for w, m in zip(bases, linears, strict=True)), strict=True)
        products: dict[int, Array] = {}
        for own in dict.fromkeys(numbers):  # one ring for those in the same numbers
            of = [n for n, other in enumerate(numbers) if other == own]
            kernels, axes = tuple(matrices[n] for n in of), tuple(linears[n].axes for n in of)
            products |= zip(of, gather_matmul(x, kernels, axes, own), strict=True)
        return [m.biased(_with_added(m, x, by_column(products[n], factors[n]))) for n, m in enumerate(linears)]
    x = constrain(x, "batch", "seq", "embed")
    return [m(x) for m in linears]


def out_of(h: Float[Array, "b s ..."], linear: Linear, *, overlap: bool = False) -> Float[Array, "b s e"]:
    """Apply a linear layer from a hidden activation back to the residual stream.

    Its sum over devices is an all-reduce, or what `Layout.sums` chooses.

    Args:
      h: the hidden activation.
      linear: a layer from dimensions that are sharded over `tensor` to ("embed",).
      overlap: overlap the reduce-scatter over x's sequence with the product; see `into`.

    Raises:
      LayoutError: see `into`.
    """
    scatter, layout = overlap and why_no_overlap(*_hidden((linear,))) != "", current()
    base, sums = linear.weight.base(), None
    if layout is not None and layout.sums is not None:
        sums = chosen_sums(linear.axes, base.shape)
        if sums is not None and not isinstance(base, Dense):
            if not isinstance(base, Deferred):  # of a backward pass, whose sums are all-reduces
                say_once(f"Layout.sums = {sums}: sums of products with {type(base).__name__} weights are all-reduces")
            sums = None
    if not scatter and sums is None:
        return linear(h)
    matrix, factors = base.matrix(linear.arithmetic)
    arithmetic = base.arithmetic(linear.arithmetic)
    if sums is None:
        y = matmul_scatter(h, matrix, linear.axes, arithmetic)
    else:
        y = summed_matmul(h, matrix, linear.axes, arithmetic, sums)
    return linear.biased(_with_added(linear, h, by_column(y, factors)))


def _with_added(linear: Linear, x: Float[Array, "..."], y: Float[Array, "..."]) -> Float[Array, "..."]:
    """Add what a weight adds to the product with its base, such as an adapter's product, which no ring computes."""
    more = linear.weight.added(x, linear.axes, linear.contracted, linear.arithmetic)
    return y if more is None else y + more


def by_column(y: Float[Array, "..."], factors: Float[Array, "..."] | None) -> Float[Array, "..."]:
    """Multiply the last dimensions of an array by factors, in float32.

    Args:
      y: a matrix, or a product with it.
      factors: of its columns; `None` is 1.
    """
    return y if factors is None else (y.astype(jnp.float32) * factors).astype(y.dtype)


def _hidden(linears: tuple[Linear, ...]) -> list[str]:
    return sorted({a for m in linears for a in m.axes if a not in ("embed", "head_dim")})
