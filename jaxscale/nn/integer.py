"""Weights as integers with a scale for each group of inputs and output."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.layout import TensorInfo
from jaxscale.nn.weight_format import WeightFormat
from jaxscale.parallel import Weight


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IntegerWeight(Weight):
    """A kernel as integer codes times scales.

    Args:
      codes: the kernel's shape, int4 or int8.
      scale: float32, of the codes' rank: 1 for every summed dimension, but one scale per group along `axis`.
      axis: the dimension of the groups, counted from the last as -1.
    """

    codes: Int[Array, "..."]
    scale: Float[Array, "..."]
    axis: int = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The kernel's shape."""
        return self.codes.shape

    def dense(self, dtype: DTypeLike | None = None) -> Float[Array, "..."]:
        """See `Weight`."""
        size = self.codes.shape[self.axis] // self.scale.shape[self.axis]
        scale = jnp.repeat(self.scale, size, self.axis) if self.scale.shape[self.axis] > 1 else self.scale
        return (self.codes.astype(self.scale.dtype) * scale).astype(dtype or self.scale.dtype)


@register
@dataclasses.dataclass(frozen=True)
class GroupedIntegers(WeightFormat):
    """Matrices rounded to integers, symmetric around 0: a code of 2^(bits-1) - 1 is the largest number of its group.

    Args:
      bits: 4 or 8. (On a CPU, 4-bit codes take a byte each.)
      group: inputs that share a scale, along the last of the summed dimensions; `None` is one scale for all inputs of
        an output. It must divide that dimension.

    Raises:
      ConfigError: other bits, or a group that is not a whole number above 0.
    """

    of: ClassVar[dict[int, DTypeLike]] = {4: jnp.int4, 8: jnp.int8}
    bits: int = 4
    group: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.bits, int) or self.bits not in self.of:
            raise ConfigError(f"GroupedIntegers.bits = {self.bits!r}: must be 4 or 8")
        whole = isinstance(self.group, int) and not isinstance(self.group, bool) and self.group > 0
        if self.group is not None and not whole:
            raise ConfigError(f"GroupedIntegers.group = {self.group!r}: must be a whole number above 0, or None")

    def covers(self, info: TensorInfo) -> bool:
        """Return whether a matrix is of a layer, and its inputs divide into groups.

        Raises:
          ConfigError: the group does not divide the inputs of a layer's matrix.
        """
        if not super().covers(info):
            return False
        assert info.contracted is not None
        size = info.shape[info.contracted[-1]]
        if self.group is not None and size % self.group:
            fit = max(d for d in range(1, min(self.group, size) + 1) if size % d == 0)
            raise ConfigError(
                f"GroupedIntegers.group = {self.group} does not divide the {size} inputs of {info.path}; the nearest "
                f"that does is {fit}"
            )
        return True

    def encode(self, kernel: Float[Array, "..."], contracted: tuple[int, ...]) -> IntegerWeight:
        """Return the kernel as codes and scales; a group of zeros has scale 1."""
        axis = contracted[-1]
        x = jnp.asarray(kernel, jnp.float32)
        n = kernel.shape[axis]
        groups = 1 if self.group is None else n // self.group
        rest = tuple(d for d in contracted if d != axis)
        at = axis % kernel.ndim
        grouped = jnp.abs(x).reshape(*x.shape[:at], groups, n // groups, *x.shape[at + 1 :])
        largest = jnp.max(grouped, axis=at + 1)
        largest = jnp.max(largest, axis=rest, keepdims=True) if rest and self.group is None else largest
        scale = largest / (2 ** (self.bits - 1) - 1)
        scale = jnp.where(scale > 0, scale, 1.0)
        spread = jnp.repeat(scale, n // groups, axis)
        return IntegerWeight(jnp.round(x / spread).astype(self.of[self.bits]), scale, axis)
