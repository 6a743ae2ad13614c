"""`MixedBlocks`: products of integers whose activations have 8 bits in the blocks of large inputs, and 4 in others."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.layout import TensorInfo
from jaxscale.layout.tensors import Tree
from jaxscale.nn.formats.packing import unit
from jaxscale.nn.formats.stored import Stored, sizes_of
from jaxscale.nn.formats.weight import StoredWeight
from jaxscale.nn.weight_format import WeightFormat
from jaxscale.parallel import Arithmetic, Weight


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MixedWeight(Weight):
    """A kernel whose inputs are in another order, and whose products round some of them to more bits than others.

    Args:
      order: int32 `(*layers, n)`: the place of each input in the flattened inputs of the kernel.
      parts: the kernel's rows in this order, `(*layers, rows, *outputs)` each.
      inputs: sizes of the kernel's inputs.
    """

    order: Int[Array, "..."]
    parts: tuple[StoredWeight, ...]
    inputs: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The kernel's shape."""
        lead = self.order.ndim - 1
        shape = self.parts[0].shape
        return (*shape[:lead], *self.inputs, *shape[lead + 1 :])

    def dense(self, dtype: DTypeLike | None = None) -> Float[Array, "..."]:
        """See `Weight`: the kernel that activations are multiplied with, in float32 by default."""
        lead = self.order.ndim - 1
        rows = jnp.concatenate([p.dense() for p in self.parts], axis=lead)
        back = jnp.argsort(self.order, axis=-1).reshape(*self.order.shape, *(1,) * (rows.ndim - lead - 1))
        return jnp.take_along_axis(rows, back, axis=lead).reshape(self.shape).astype(dtype or jnp.float32)

    def matmul(
        self, x: Float[Array, "..."], axes: tuple[str, ...], contracted: tuple[int, ...], arithmetic: Arithmetic
    ) -> Float[Array, "..."]:
        """See `Weight`: the sum of the products of both parts, in float32 until it is added."""
        n = len(self.inputs)
        ordered = jnp.take(x.reshape(*x.shape[: x.ndim - n], -1), self.order, axis=-1)
        own = dataclasses.replace(arithmetic, out_dtype=jnp.float32)
        total, at = jnp.float32(0), 0
        for part in self.parts:
            rows = part.shape[0]
            total = total + part.matmul(ordered[..., at : at + rows], (None, *axes[n:]), (0,), own)  # type: ignore[arg-type]
            at += rows
        return total.astype(arithmetic.out_dtype)

    def infos(self, info: TensorInfo) -> Tree:
        """See `Weight`; the inputs, which are in an order of their own, have no axis."""
        lead, n = self.order.ndim - 1, len(self.inputs)
        axes = (*info.axes[:lead], None, *info.axes[lead + n :])

        def part(number: int, own: StoredWeight) -> Tree:
            path, shape = f"{info.path}/parts/{number}", tuple(own.shape)
            return own.infos(dataclasses.replace(info, path=path, shape=shape, axes=axes))

        order = TensorInfo(f"{info.path}/order", tuple(self.order.shape), self.order.dtype, (*info.axes[:lead], None))
        return MixedWeight(order, tuple(part(k, p) for k, p in enumerate(self.parts)), self.inputs)  # type: ignore[arg-type]


@register
@dataclasses.dataclass(frozen=True)
class MixedBlocks(WeightFormat):
    """4-bit weights times activations of 4 bits, and of 8 in a share of the blocks (COMET, arXiv:2410.12168).

    Args:
      weights: integers with a group, whose activations have the fewer bits. A block is a group of inputs.
      share: of the blocks of a matrix whose activations have 8 bits, 0 to 1, rounded up.

    Raises:
      ConfigError: a setting is out of its range.
    """

    weights: Stored = Stored("int4", group=128, scale="bfloat16", activations=4)
    share: float = 0.125

    def __post_init__(self) -> None:
        own = self.weights
        if not isinstance(own, Stored) or own.activations is None or own.group is None or not own.float_scales:
            raise ConfigError(
                "MixedBlocks.weights must be integers with a group, scales of floats and activations of few bits, such "
                f"as @w4a4(), not {own!r}"
            )
        if own.group % (per := unit(own.bits, 8 * jnp.dtype(own.word).itemsize)[0]):
            raise ConfigError(
                f"MixedBlocks.weights has groups of {own.group}, and {own.bits}-bit codes are packed in units of "
                f"{per}; use a multiple of {per}"
            )
        if not 0 <= self.share <= 1:
            raise ConfigError(f"MixedBlocks.share = {self.share}: must be from 0 to 1")

    def check(self, infos: Tree) -> None:
        """See `WeightFormat`: by the format of the matrix."""
        self.weights.check(infos)

    def covers(self, info: TensorInfo) -> bool:
        """Return whether the format of the weights covers a matrix.

        Raises:
          ConfigError: a group does not divide it.
        """
        return self.weights.covers(info)

    def rows(self, n: int) -> int:
        """Return how many inputs of a matrix have activations of 8 bits.

        Args:
          n: inputs.
        """
        assert self.weights.group is not None
        return math.ceil(self.share * (n // self.weights.group) - 1e-9) * self.weights.group

    def encode(self, kernel: Float[Array, "..."], contracted: tuple[int, ...]) -> MixedWeight:
        """See `WeightFormat`; inputs stay in their order, which only calibration changes."""
        stack, ins, outs = sizes_of(kernel.shape, contracted)
        n = math.prod(ins)
        order = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), (*stack, n))
        flat = kernel.reshape(*stack, n, *outs)
        return self.split(self.weights.encode(flat, (-1 - len(outs),)), order, ins)

    def split(self, weight: StoredWeight, order: Int[Array, "..."], inputs: tuple[int, ...]) -> MixedWeight:
        """Return a weight of rounded rows, the first of which get activations of 8 bits.

        Args:
          weight: `(*layers, n, *outputs)`, in the format of the weights, its inputs in order.
          order: see `MixedWeight`.
          inputs: likewise.
        """
        axis, n = order.ndim - 1, order.shape[-1]
        cut = self.rows(n)

        def part(begin: int, end: int, bits: int | None) -> StoredWeight:
            def sliced(x: Array) -> Array:
                size = x.shape[axis]
                return jax.lax.slice_in_dim(x, begin * size // n, end * size // n, axis=axis)

            return dataclasses.replace(jax.tree.map(sliced, weight), activations=bits)

        every = (part(0, cut, 8), part(cut, n, self.weights.activations))
        return MixedWeight(order, tuple(p for p in every if p.codes.size), inputs)
