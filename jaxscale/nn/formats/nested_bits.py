"""`NestedBits`: codes whose first bits alone are codes of fewer bits, so that a program reads as many as it needs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from jaxscale.config import register
from jaxscale.errors import ConfigError, check_whole
from jaxscale.layout import TensorInfo
from jaxscale.layout.tensors import Tree
from jaxscale.nn.formats.packing import pack, unit, unpack
from jaxscale.nn.formats.rebuilt import Axes, Rebuilt
from jaxscale.nn.formats.stored import sizes_of
from jaxscale.nn.weight_format import WeightFormat


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NestedCodes(Rebuilt):
    """A kernel of 8-bit integers, of which the first bits are loaded.

    Args:
      slices: uint8 `(*layers, bytes, *outputs)` each: the first bits of every code, then the next ones.
      scale: float32 `(*layers, groups, *outputs)`.
      least: float32, likewise: the value of code 0.
      inputs: sizes of the kernel's inputs.
      trailing: dimensions of `scale` that are not of stacked layers.
      widths: bits of each slice.
    """

    slices: tuple[UInt8[Array, "..."], ...]
    scale: Float[Array, "..."]
    least: Float[Array, "..."]
    inputs: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    trailing: int = dataclasses.field(metadata={"static": True})
    widths: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @property
    def _at(self) -> int:
        return self.scale.ndim - self.trailing

    @property
    def shape(self) -> tuple[int, ...]:
        """The kernel's shape."""
        return (*self.scale.shape[: self._at], *self.inputs, *self.scale.shape[self._at + 1 :])

    @property
    def bits(self) -> int:
        """Bits of a code that are loaded."""
        return sum(self.widths[: len(self.slices)])

    def names(self, part: str, shape: tuple[int, ...], axes: Axes) -> Axes:
        """See `Rebuilt`; bytes and groups have no axis."""
        return (*axes[: self._at], None, *axes[self._at + len(self.inputs) :])

    def codes(self) -> UInt8[Array, "..."]:
        """Return the codes as far as they are loaded, below 2^bits: `(*layers, n, *outputs)`."""
        codes = unpack(self.slices[0], self.widths[0], self._at)
        for more, width in zip(self.slices[1:], self.widths[1:], strict=False):
            codes = (codes << width) | unpack(more, width, self._at)
        return codes

    def dense(self, dtype: DTypeLike | None = None) -> Float[Array, "..."]:
        """See `Weight`: the middle of the values that codes with these first bits have; float32 by default."""
        rest = 8 - self.bits
        codes = self.codes().astype(jnp.float32) * 2**rest + (2**rest - 1) / 2
        at, groups = self._at, self.scale.shape[self._at]
        codes = codes.reshape(*codes.shape[:at], groups, -1, *codes.shape[at + 1 :])
        values = codes * jnp.expand_dims(self.scale, at + 1) + jnp.expand_dims(self.least, at + 1)
        return values.reshape(self.shape).astype(dtype or jnp.float32)


@register
@dataclasses.dataclass(frozen=True)
class NestedBits(WeightFormat):
    """8-bit integers in slices of bits: the first slices alone are a code of fewer bits (D²MoE, arXiv:2504.15299).

    The widths of experts that tokens need differ, and one copy serves all: of a run that is stored so,
    `--weights FewerBits --gin.FewerBits.bits=4` reads the first slice alone.

    Args:
      widths: bits of each slice, 8 together, the first bits first.
      group: consecutive inputs that share a scale and a least value; `None` is all.
      loaded: how many slices are read; `None` is all.

    Raises:
      ConfigError: a setting is out of its range.
    """

    widths: tuple[int, ...] = (4, 2, 2)
    group: int | None = 64
    loaded: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.widths, tuple | list):
            raise ConfigError(f"NestedBits.widths = {self.widths!r}: must be the bits of each slice, as (4, 2, 2)")
        object.__setattr__(self, "widths", tuple(self.widths))
        for width in self.widths:
            check_whole("NestedBits.widths", width, 1, 8)
        if sum(self.widths) != 8:
            raise ConfigError(f"NestedBits.widths = {self.widths}: must be 8 bits together, as (4, 2, 2)")
        if self.group is not None:
            check_whole("NestedBits.group", self.group)
        if self.loaded is not None:
            check_whole("NestedBits.loaded", self.loaded, 1, len(self.widths))

    def covers(self, info: TensorInfo) -> bool:
        """Return whether a matrix is of a layer.

        Raises:
          ConfigError: groups do not divide its inputs, or these do not fill whole bytes.
        """
        if not super().covers(info):
            return False
        n = math.prod(sizes_of(info.shape, info.contracted or ())[1])
        if self.group is not None and n % self.group:
            raise ConfigError(
                f"NestedBits.group = {self.group} does not divide the {n} inputs of {info.path}; the nearest that "
                f"does is {max(d for d in range(1, min(self.group, n) + 1) if n % d == 0)}"
            )
        per = max(unit(width)[0] for width in self.widths)
        if n % per:
            raise ConfigError(
                f"NestedBits.widths = {self.widths} need a multiple of {per} inputs, and {info.path} has {n}; leave it "
                "in another format, such as 'int8'"
            )
        return True

    def encode(self, kernel: Float[Array, "..."], contracted: tuple[int, ...]) -> NestedCodes:
        """See `WeightFormat`."""
        stack, ins, outs = sizes_of(kernel.shape, contracted)
        at, n = len(stack), math.prod(ins)
        groups = kernel.astype(jnp.float32).reshape(*stack, -1, self.group or n, *outs)
        least, most = jnp.min(groups, at + 1), jnp.max(groups, at + 1)
        scale = jnp.maximum((most - least) / 255, jnp.finfo(jnp.float32).tiny)
        codes = jnp.round((groups - jnp.expand_dims(least, at + 1)) / jnp.expand_dims(scale, at + 1))
        codes = jnp.clip(codes, 0, 255).astype(jnp.uint8).reshape(*stack, n, *outs)
        slices, left = [], 8
        for width in self.widths[: self.loaded]:
            left -= width
            slices.append(pack((codes >> left) & (2**width - 1), width, at))
        return NestedCodes(tuple(slices), scale, least, ins, 1 + len(outs), self.widths)


@register
@dataclasses.dataclass(frozen=True)
class FewerBits(WeightFormat):
    """The first bits of a run with `NestedBits`: only those slices are read.

    Args:
      bits: of each code; the sum of the widths of the first slices.

    Raises:
      ConfigError: `bits` is not from 1 to 8.
    """

    bits: int = 4

    def __post_init__(self) -> None:
        check_whole("FewerBits.bits", self.bits, 1, 8)

    def part_of(self, stored: WeightFormat, infos: Tree, read: Callable[[Tree], Tree]) -> WeightFormat | None:
        """See `WeightFormat`.

        Raises:
          ConfigError: no first slices have so many bits.
        """
        if not isinstance(stored, NestedBits):
            return None
        sums = [sum(stored.widths[: n + 1]) for n in range(len(stored.widths))]
        if self.bits not in sums:
            raise ConfigError(
                f"FewerBits.bits = {self.bits}: {', '.join(map(str, sums))} bits can be read of the run, which "
                f"has slices of {', '.join(map(str, stored.widths))}"
            )
        return dataclasses.replace(stored, loaded=sums.index(self.bits) + 1)

    def encode(self, kernel: Float[Array, "..."], contracted: tuple[int, ...]) -> NestedCodes:
        """Raise: slices are made by `jaxscale quantize`."""
        raise ConfigError(
            "FewerBits reads a run whose matrices are stored as NestedBits; make one with jaxscale quantize --recipe "
            "'@D2MoE()'"
        )
