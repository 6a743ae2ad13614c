"""`Rounded`: training with weights, and activations, rounded to few bits (quantisation-aware training)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.layout import TensorInfo
from jaxscale.nn.formats.blocks import block_of
from jaxscale.nn.formats.numbers import numbers_of
from jaxscale.nn.formats.presets import FORMATS, named
from jaxscale.nn.formats.stored import Stored, dimensions
from jaxscale.nn.products.base import Products
from jaxscale.nn.weight_format import WeightFormat
from jaxscale.parallel import Arithmetic, Cast, as_weight
from jaxscale.parallel.arithmetic import Cut, Dims, Numbers, Operand, cut_along


@register
@dataclasses.dataclass(frozen=True)
class Rounded(Products):
    """Products with weights rounded to a weight format, and activations to few bits: quantisation-aware training.

    Parameters stay in the model's `param_dtype`. Products, and their gradients, are those of the rounded numbers, and a
    gradient passes straight through the rounding (straight-through estimator, Bengio et al. 2013; for integers Jacob et
    al. 2018; Abdolrashidi et al. 2021). `jaxscale quantize RUN OUT --recipe '@RoundToNearest(weights=@int4())'`
    afterwards stores the function that was trained. Weights that a run stores in few bits already are not rounded
    again.

    Args:
      weights: a weight format, such as `@int4()` or `@StatsQ()`, or the name of one, such as "int4"; `None` does not
        round weights.
      activations: the type of numbers to which a product's inputs are rounded, such as "int8" or "e4m3", with the
        largest magnitude of each token as their scale; `None` does not round them.

    Raises:
      ConfigError: there is no such format or type, or nothing to round.
    """

    weights: str | WeightFormat | None = "int4"
    activations: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.weights, str):
            object.__setattr__(self, "weights", named(self.weights, "Rounded.weights"))
        if not isinstance(self.weights, str | WeightFormat | None):
            raise ConfigError(f"Rounded.weights = {self.weights!r}: must be a weight format, such as @int4(), or None")
        if self.activations is not None:
            kind = numbers_of(self.activations)
            if kind.mean or min(kind.values) >= 0:
                raise ConfigError(f"Rounded.activations = '{kind.name}': must have numbers of both signs, as 'int8'")
        if self.weights is None and self.activations is None:
            raise ConfigError("Rounded rounds nothing: set weights or activations, or Transformer.products = None")

    @property
    def format(self) -> WeightFormat | None:
        """The weight format."""
        return FORMATS[self.weights][0] if isinstance(self.weights, str) else self.weights

    def arithmetic(self, dtype: DTypeLike) -> Arithmetic:
        """See `Products`."""
        plain = Arithmetic.cast(dtype)
        return dataclasses.replace(
            plain,
            forward=Nearest(plain.dtype, self.format, self.activations),
            input_gradient=Nearest(plain.dtype, self.format, None, backward=True),
            kernel_gradient=Nearest(plain.dtype, None, self.activations, backward=True),
        )


@dataclasses.dataclass(frozen=True)
class Nearest(Numbers):
    """Operands rounded to the nearest number of a format, and multiplied in one dtype.

    Args:
      dtype: the dtype of products.
      weights: the format of right operands, which are kernels; `None` only casts them.
      activations: the type of numbers of left operands, see `jaxscale.nn.formats.numbers_of`; `None` only casts them.
      backward: this is a product of the backward pass, which sums over other dimensions of kernel or activations than
        the forward pass, along whose sums numbers share a scale.
    """

    dtype: DTypeLike
    weights: WeightFormat | None = None
    activations: str | None = None
    backward: bool = False

    def left(self, a: Float[Array, "..."], dims: Sequence[int], batch: Sequence[int] = (), cut: Cut = ()) -> Operand:
        """See `Numbers`."""
        if self.activations is None:
            return a.astype(self.dtype)
        kind, over = numbers_of(self.activations), self._summed(a, dims, batch)
        x = a.astype(jnp.float32)
        largest = jnp.max(jnp.abs(x), over, keepdims=True)
        if axes := cut_along(over, cut):
            largest = lax.pmax(largest, axes)
        scale = jnp.where(largest > 0, largest / kind.largest, 1.0)
        return jnp.where(jnp.isfinite(x), kind.decode(kind.encode(x / scale)) * scale, jnp.nan).astype(self.dtype)

    def right(self, a: Float[Array, "..."], dims: Sequence[int], batch: Sequence[int] = (), cut: Cut = ()) -> Operand:
        """See `Numbers`.

        Raises:
          ConfigError: groups or words of the format do not divide the kernel.
        """
        if self.weights is None:
            return a.astype(self.dtype)
        contracted = tuple(d - a.ndim for d in self._summed(a, dims, batch))
        across = _across(self.weights, a.shape, contracted, cut) if any(cut) else ()
        whole = a
        for d in across:
            whole = lax.all_gather(whole, cut[d], axis=d, tiled=True)
        self.weights.covers(TensorInfo("a layer's matrix", whole.shape, a.dtype, (None,) * a.ndim, contracted))
        rounded = as_weight(self.weights.encode(whole, contracted)).dense(self.dtype)
        for d in across:
            rounded = lax.dynamic_slice_in_dim(rounded, lax.axis_index(cut[d]) * a.shape[d], a.shape[d], d)
        return jnp.where(jnp.isfinite(a), rounded, jnp.nan)  # formats have no code for what is not finite

    def dot(
        self, left: Operand, right: Operand, dims: Dims, out_dtype: DTypeLike, parts: Sequence[int] = ()
    ) -> Float[Array, "..."]:
        """See `Numbers`."""
        return Cast(self.dtype).dot(left, right, dims, out_dtype, parts)

    def ragged_dot(
        self,
        rows: Operand,
        matrices: Operand,
        sizes: Int[Array, " x"],
        transposed: bool = False,
        bias: Float[Array, "x o"] | None = None,
    ) -> Float[Array, "n o"]:
        """See `Numbers`."""
        return Cast(self.dtype).ragged_dot(rows, matrices, sizes, transposed, bias)

    def ragged_outer(
        self, rows: Operand, other: Operand, sizes: Int[Array, " x"], out_dtype: DTypeLike
    ) -> Float[Array, "x i o"]:
        """See `Numbers`."""
        return Cast(self.dtype).ragged_outer(rows, other, sizes, out_dtype)

    def for_stored(self) -> Numbers:
        """See `Numbers`: kernels are only cast."""
        return Cast(self.dtype) if self.activations is None else dataclasses.replace(self, weights=None)

    def _summed(self, a: Array, dims: Sequence[int], batch: Sequence[int]) -> tuple[int, ...]:
        """Return the dimensions that the forward pass sums over."""
        if not self.backward:
            return tuple(sorted(dims))
        return tuple(d for d in range(a.ndim) if d not in (*dims, *batch))


def _across(weights: WeightFormat, shape: tuple[int, ...], contracted: tuple[int, ...], cut: Cut) -> tuple[int, ...]:
    """Return the dimensions, cut inside a `shard_map`, of which a group of weights may have entries of several devices.

    They are gathered before the weights are rounded; formats with groups of inputs and scales of their own need none.
    """
    lead, inputs, outputs = dimensions(len(shape), contracted)
    within: set[int] = set()
    if isinstance(weights, Stored) and isinstance(weights.scale, str) and weights.axis(shape, contracted) is not None:
        if not weights.centred and not weights.numbers.startswith("kmeans"):
            within |= {*outputs} if weights.outputs == 1 else set()
            grouped = weights.group is not None and block_of([shape[d] for d in inputs], weights.group) is not None
            within |= {inputs[0]} if grouped else set()
    return tuple(d for d in (*inputs, *outputs) if cut[d] and d not in within)
