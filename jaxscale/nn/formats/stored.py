"""`Stored`: weights as packed numbers of few bits, with scales for blocks of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxscale.config import register
from jaxscale.errors import ConfigError, check_whole, near
from jaxscale.layout import TensorInfo
from jaxscale.layout.tensors import Tree
from jaxscale.nn.formats.blocks import block_of, cut, nearest_block, spread
from jaxscale.nn.formats.kmeans import codebook, nearest
from jaxscale.nn.formats.numbers import NumberType, numbers_of
from jaxscale.nn.formats.packing import pack, unit
from jaxscale.nn.formats.weight import StoredWeight
from jaxscale.nn.weight_format import WeightFormat
from jaxscale.parallel import Weight
from jaxscale.parallel.scaled import magnitudes

FLOATS = ("float32", "bfloat16", "float16")


NAMED: dict[str, Stored] = {}
"""Formats by the names that configs have for them; `presets` fills it."""


@register
@dataclasses.dataclass(frozen=True)
class Stored(WeightFormat):
    """Matrices as packed numbers of 1 to 8 bits, times scales.

    Args:
      numbers: the type of number, such as "int4", "nf4" or "e2m1" (see `jaxscale.nn.formats.numbers_of`), or "kmeans2"
        to "kmeans8": a table of 2^bits numbers for each matrix.
      group: consecutive inputs that share a scale, of the flattened dimensions that a product sums over; `None` is all.
      outputs: consecutive outputs that share a scale; `None` is all.
      scale: type of the scales: "float32", "bfloat16", "float16", a type of numbers such as "e8m0" (powers of two), or
        a `Stored` format for them, in which `group` is the most scales, of all dimensions, that share one of their own.
      zeros: whether each group has a zero point, an integer; the numbers are then "uint1" to "uint8".
      centred: whether the mean of a matrix is subtracted first, and stored as a float32 number; of matrices whose last
        dimension is summed, as an output head, the mean of each output.
      word: type of the words that the codes are packed in, "uint8" or "uint32".
      activations: bits to which a token's inputs of a group are rounded in products of integers, 2 to 8; `None`
        multiplies in the type of the computation. Experts and latent attention's absorbed projections always do.

    Raises:
      ConfigError: there is no such type of number, or a setting is out of its range.
    """

    numbers: str = "int4"
    group: int | None = None
    outputs: int | None = 1
    scale: str | Stored = "float32"
    zeros: bool = False
    centred: bool = False
    word: str = "uint8"
    activations: int | None = None

    def __post_init__(self) -> None:
        kind = self._kind
        for name in ("group", "outputs"):
            check_whole(f"Stored.{name}", getattr(self, name), optional=True)
        if self.zeros and not self.numbers.startswith("uint"):
            raise ConfigError(
                f"Stored.zeros = True with the numbers '{self.numbers}': zero points need 'uint{kind.bits}'"
            )
        if self.activations is not None:
            if self.activations not in range(2, 9):
                raise ConfigError(f"Stored.activations = {self.activations!r}: must be 2 to 8 bits, or None")
            if not self.numbers.startswith("int") or self.centred:
                raise ConfigError(
                    f"Stored.activations = {self.activations} needs products of integers: numbers 'int2' to 'int8' and "
                    f"centred = False, not '{self.numbers}'{' with a mean' if self.centred else ''}"
                )
        if self.word not in ("uint8", "uint32"):
            raise ConfigError(f"Stored.word = {self.word!r}: must be 'uint8' or 'uint32'")
        if isinstance(self.scale, str) and self.scale not in FLOATS:
            try:
                numbers_of(self.scale)
            except ConfigError as e:
                hint = near(self.scale, FLOATS) or f"; or use one of {', '.join(FLOATS)}"
                raise ConfigError(f"Stored.scale = '{self.scale}': {e}{hint}") from None
        if isinstance(self.scale, Stored) and (self.scale.zeros or self.scale.numbers.startswith("kmeans")):
            raise ConfigError(f"Stored.scale = {self.scale}: scales have no zero points and no tables of their own")

    @property
    def float_scales(self) -> bool:
        """Whether scales are plain arrays of floats."""
        return self.scale in FLOATS

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self._kind.bits

    @property
    def _kind(self) -> NumberType:
        if (bits := self.numbers.removeprefix("kmeans")) != self.numbers:
            if bits not in tuple("12345678"):
                raise ConfigError(f"Stored.numbers = '{self.numbers}': a table has 1 to 8 bits, as 'kmeans4'")
            return numbers_of(f"uint{bits}")
        return numbers_of(self.numbers)

    def check(self, infos: Tree) -> None:
        """See `WeightFormat`.

        Raises:
          ConfigError: a group does not divide a matrix; the message has the largest that divides those of all.
        """
        of_layers = super().covers
        self._check_blocks([i for i in jax.tree.leaves(infos) if i.contracted is not None and of_layers(i)])

    def _check_blocks(self, matrices: Sequence[TensorInfo]) -> None:
        for name, size, side in (("group", self.group, 1), ("outputs", self.outputs, 2)):
            every = [sizes_of(i.shape, i.contracted or ())[side] for i in matrices]
            wrong = [n for n, own in enumerate(every) if block_of(own, size) is None]
            if wrong:
                assert size is not None
                most = min(size, *map(math.prod, every))
                fit = next(n for n in range(most, 0, -1) if all(block_of(own, n) is not None for own in every))
                preset = self._called  # only `group` is a setting of presets
                own = name == "outputs" or preset == "Stored"
                setting = f"Stored.{name} = {size}" if own else f"{preset}.{name} = {size} (Stored.{name})"
                raise ConfigError(
                    f"{setting} does not divide the {math.prod(every[wrong[0]])} "
                    f"{'inputs' if side == 1 else 'outputs'} of {matrices[wrong[0]].path}; the nearest that does is "
                    f"{fit}{', which divides those of all matrices' if len(matrices) > 1 else ''}"
                )

    def covers(self, info: TensorInfo) -> bool:
        """Return whether a matrix is of a layer, and divides into groups and words.

        Raises:
          ConfigError: a group does not divide the inputs or outputs of a layer's matrix, or no dimension of it fills
            whole words.
        """
        if not super().covers(info):
            return False
        assert info.contracted is not None
        self._check_blocks([info])
        if self.axis(info.shape, info.contracted) is None:
            per = unit(self.bits, self._width)[0]
            wider = next(b for b in (*range(self.bits, 9), 8) if self._divides(info.shape, info.contracted, b))
            raise ConfigError(
                f"{self.numbers}: codes of {self.bits} bits are packed in units of {per}, which no dimension of "
                f"{info.path} {info.shape} divides into; the nearest width that does is {wider} bits"
            )
        return True

    def describe(self) -> str:
        """See `WeightFormat`: the name of the format, or of its numbers, and the group."""
        name = self.numbers if self._called == "Stored" else self._called
        return f"{name}, one scale for {f'{self.group} inputs' if self.group else 'all inputs of an output'}"

    @property
    def _called(self) -> str:
        """The name by which a config has this format, whatever its group."""
        alike = (name for name, made in NAMED.items() if dataclasses.replace(made, group=self.group) == self)
        return next(alike, "Stored")

    @property
    def _width(self) -> int:
        return 8 * np.dtype(self.word).itemsize

    def _divides(self, shape: tuple[int, ...], contracted: tuple[int, ...], bits: int) -> list[int]:
        _, inputs, outputs = dimensions(len(shape), contracted)
        per = unit(bits, self._width)[0]
        return [d - len(shape) for d in (*reversed(inputs), *reversed(outputs)) if shape[d] % per == 0]

    def axis(self, shape: tuple[int, ...], contracted: tuple[int, ...]) -> int | None:
        """Return the dimension that codes are packed along: the last summed one whose size is whole units of codes.

        Args:
          shape: of the kernel.
          contracted: see `encode`.

        Returns:
          counted from the last as -1; `None` if there is none.
        """
        return next(iter(self._divides(shape, contracted, self.bits)), None)

    def block(self, shape: tuple[int, ...], contracted: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a block of weights that share a scale.

        Args:
          shape: of the kernel.
          contracted: see `encode`.
        """
        lead, inputs, outputs = dimensions(len(shape), contracted)
        block = dict.fromkeys(lead, 1)
        for dims, size in ((inputs, self.group), (outputs, self.outputs)):
            part = block_of([shape[d] for d in dims], size)
            assert part is not None, "covers() checks this"
            block |= zip(dims, part, strict=True)
        return tuple(block[d] for d in range(len(shape)))

    def encode(self, kernel: Float[Array, "..."], contracted: tuple[int, ...]) -> StoredWeight:
        """See `WeightFormat`; a group of zeros has scale 1, and one with NaN or infinity a scale that is not finite.

        Scales in a type of numbers without infinity and NaN, such as "uint8", cannot be so; `encoded` refuses in any
        case.
        """
        offset = None
        if self.centred:
            _, inputs, outputs = dimensions(kernel.ndim, contracted)
            over = (*inputs, *(outputs if -1 not in contracted else ()))
            offset = jnp.mean(kernel.astype(jnp.float32), over, keepdims=True)
            kernel = kernel - offset
        return dataclasses.replace(self.rounded(kernel, contracted, *self.scales(kernel, contracted)), offset=offset)

    def scales(
        self, kernel: Float[Array, "..."], contracted: tuple[int, ...]
    ) -> tuple[Float[Array, "..."], Float[Array, "..."] | None]:
        """Return float32 scales, and zero points if there are any, before they are stored: one for each block.

        Args:
          kernel: the model's matrix.
          contracted: see `encode`.
        """
        blocks, entries = cut(kernel.astype(jnp.float32), self.block(kernel.shape, contracted))
        if self.zeros:
            low = -jnp.max(jnp.where(blocks > 0, 0.0, magnitudes(blocks)), entries)
            high = jnp.max(jnp.where(blocks < 0, 0.0, magnitudes(blocks)), entries)
            scale = above_zero((high - low) / (2**self.bits - 1))
            return scale, jnp.clip(jnp.round(-low / scale), 0, 2**self.bits - 1)
        largest = jnp.max(magnitudes(blocks), entries)
        if self.scale == "e8m0":
            return _power_of_two(largest, self._largest), None
        if self._kind.mean:
            return above_zero(jnp.mean(jnp.abs(blocks), entries)), None
        return above_zero(largest / self._largest), None

    def flaws(self, kernel: Float[Array, "..."], weight: Weight | Array) -> Bool[Array, " 2"]:
        """See `WeightFormat`; a scale of 0 for weights that are not is one as well."""
        flaws = super().flaws(kernel, weight)
        assert isinstance(weight, StoredWeight)
        scale = weight.scale.dense() if isinstance(weight.scale, StoredWeight) else weight.scale
        assert scale is not None
        lost = jnp.any((spread(scale, kernel.shape) == 0) & (kernel != 0))
        return flaws.at[1].set(flaws[1] | lost)

    @property
    def _largest(self) -> float:
        return 1.0 if self.numbers.startswith("kmeans") else self._kind.largest

    def rounded(
        self,
        kernel: Float[Array, "..."],
        contracted: tuple[int, ...],
        scale: Float[Array, "..."],
        zero: Float[Array, "..."] | None = None,
    ) -> StoredWeight:
        """Return the kernel in this format with some scales, each weight rounded to the nearest number.

        Args:
          kernel: the model's matrix.
          contracted: see `encode`.
          scale: float32, one for each block; stored first, so that weights are rounded with what is stored.
          zero: whole numbers, likewise.
        """
        few, each = self._stored_scale(scale, kernel.shape, contracted)
        x = kernel.astype(jnp.float32) / each
        zeros = None
        if zero is not None:
            zeros = StoredWeight.of(zero.astype(jnp.uint8), "uint8", -1)
            x = x + spread(zero, kernel.shape)
        axis = self.axis(kernel.shape, contracted)
        assert axis is not None, "covers() checks this"
        table = None
        if self.numbers.startswith("kmeans"):
            lead = len(dimensions(kernel.ndim, contracted)[0])
            table = codebook(x, lead, self.bits)
            codes = nearest(x, table, lead)
        else:
            codes = self._kind.encode(x)
        parts = dict(scale=few, zero=zeros, table=table, activations=self.activations)
        return StoredWeight.of(codes, self._kind.name, axis, self.word, **parts)

    def _stored_scale(self, scale: Array, shape: tuple[int, ...], contracted: tuple[int, ...]) -> tuple[Any, Array]:
        """Return scales as they are stored, and their float32 values for each weight."""
        if self.scale in FLOATS:
            floats = scale.astype(self.scale)
            return floats, spread(floats.astype(jnp.float32), shape)
        few = _few_bits(scale, self.scale, contracted)
        return few, spread(few.dense(), shape)


def _few_bits(scale: Array, inner: str | Stored, contracted: tuple[int, ...]) -> StoredWeight:
    """Return scales in a type of few bits; the smallest ones do not become 0."""
    if not isinstance(inner, Stored):
        kind = numbers_of(inner)
        return StoredWeight.of(kind.encode(jnp.maximum(scale, kind.smallest)), inner, -1)
    _, inputs, outputs = dimensions(scale.ndim, contracted)
    every = tuple(d - scale.ndim for d in sorted((*inputs, *outputs)))
    if inner.group is not None:
        inner = dataclasses.replace(inner, group=nearest_block([scale.shape[d] for d in every], inner.group))
    few = inner.encode(scale, every)
    if inner.centred:
        return few
    kind = numbers_of(inner.numbers)
    zero = dataclasses.replace(few, scale=None).dense() == 0
    codes = jnp.where(zero, kind.encode(jnp.float32(kind.smallest)), few.unpacked())
    return dataclasses.replace(few, codes=pack(codes, kind.bits, few.axis, inner.word))


def dimensions(rank: int, contracted: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return the dimensions of stacked layers and experts, of inputs, and of outputs.

    Args:
      rank: of the kernel.
      contracted: the dimensions that a product sums over, counted from the last as -1. If they are the last ones, as
        of an output head, there are no stacked layers.
    """
    inputs = tuple(sorted(d % rank for d in contracted))
    lead = () if inputs[-1] == rank - 1 else tuple(range(inputs[0]))
    return lead, inputs, tuple(d for d in range(rank) if d not in (*lead, *inputs))


def sizes_of(shape: Sequence[int], contracted: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the sizes of `dimensions`: of stacked layers and experts, of inputs, and of outputs.

    Args:
      shape: of the kernel.
      contracted: see `dimensions`.
    """
    lead, inputs, outputs = (tuple(shape[d] for d in dims) for dims in dimensions(len(shape), contracted))
    return lead, inputs, outputs


def above_zero(scale: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return scales with 1 in place of 0, for groups of zeros; NaN stays.

    Args:
      scale: at least 0.
    """
    return jnp.where(scale == 0, 1.0, scale)


def _power_of_two(largest: Array, top: float) -> Array:
    """Return the power of two of the OCP's MX formats: of the largest weight over that of the largest number.

    It is NaN for weights that are not finite.
    """
    exponent = jnp.frexp(largest)[1] - 1 - int(np.floor(np.log2(top)))
    exponent = jnp.where(largest > 0, jnp.clip(exponent, -126, 127), 0)
    return jnp.where(jnp.isfinite(largest), jnp.ldexp(jnp.float32(1.0), exponent), jnp.nan)
