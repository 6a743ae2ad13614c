"""`Recipe`: how the matrices of a model are rounded to a weight format, as pure functions of one matrix."""

from __future__ import annotations

import abc
import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from jaxscale.errors import ConfigError, check_whole
from jaxscale.layout import TensorInfo
from jaxscale.layout.tensors import Tree
from jaxscale.nn.formats import Stored, StoredWeight, numbers_of
from jaxscale.nn.formats.blocks import spread


class Inputs(NamedTuple):
    """Statistics of the inputs of a matrix over all calibration tokens.

    Args:
      second: mean of x xᵀ, float32 (n, n).
      mean: mean of |x|, float32 (n,).
      largest: largest |x|, float32 (n,).
      sample: inputs of some tokens, float32 (t, n), or `None`.
    """

    second: Float[Array, "n n"]
    mean: Float[Array, " n"]
    largest: Float[Array, " n"]
    sample: Float[Array, "t n"] | None = None

    def each(self, kernel: Float[Array, "..."]) -> list[tuple[Float[Array, "..."], Inputs | None]]:
        """Return a kernel's matrices with the statistics of their inputs: one, or those of all experts.

        The statistics of an expert that no calibration token has are `None`.

        Args:
          kernel: the kernel, of all experts if these are statistics of experts.
        """
        if self.second.ndim == 2:
            return [(kernel, self)]
        own = [jax.tree.map(lambda x, e=e: x[e], self) for e in range(len(self.second))]
        return [(k, i if float(i.largest.max()) > 0 else None) for k, i in zip(kernel, own, strict=True)]

    def scaled(self, by: Float[Array, " n"]) -> Inputs:
        """Return the statistics of the inputs times a factor for each.

        Args:
          by: the factors, above 0.
        """
        sample = None if self.sample is None else self.sample * by
        return Inputs(self.second * by[:, None] * by[None, :], self.mean * by, self.largest * by, sample)

    def reordered(self, order: Int[Array, " n"]) -> Inputs:
        """Return the statistics of the inputs in another order.

        Args:
          order: the old place of each input.
        """
        sample = None if self.sample is None else self.sample[:, order]
        return Inputs(self.second[order][:, order], self.mean[order], self.largest[order], sample)


class Cost(NamedTuple):
    """What rounding a matrix loses, over all layers of a stack.

    Args:
      loss: the sum of `Recipe.cost`.
      size: weights.
    """

    loss: float
    size: int


@dataclasses.dataclass(frozen=True)
class Recipe(abc.ABC):
    """Rounds a model's matrices; a value of `jaxscale quantize --recipe`. A subclass is a frozen dataclass.

    Args:
      bits: of a number: integers with a zero point for each group ("uint4" for 4).
      group: consecutive inputs that share a scale; `None` is all.
      weights: another format, in place of both.
    """

    reads_inputs: ClassVar[bool] = False
    bits: int = 4
    group: int | None = 128
    weights: Stored | None = None

    def __post_init__(self) -> None:
        check_whole(f"{type(self).__name__}.bits", self.bits, 1, 8)
        if self.weights is not None and not isinstance(self.weights, Stored):
            raise ConfigError(
                f"{type(self).__name__}.weights must be a Stored format such as @nf4(), not {self.weights!r}"
            )
        _ = self.format

    @property
    def format(self) -> Stored:
        """The format of the rounded matrices."""
        return self.weights or Stored(f"uint{self.bits}", group=self.group, zeros=True)

    @property
    def grouping(self) -> Recipe:
        """The recipe whose `group` matrices are rounded in: this one, or one that it calls."""
        return self

    def infos(self, infos: Tree) -> Tree:
        """Describe a model in the recipe's format.

        Args:
          infos: the model's tree of `TensorInfo`.

        Raises:
          ConfigError: a matrix that the format does not fit; the message names the setting of the recipe.
        """
        try:
            return self.format.infos(infos)
        except ConfigError as e:
            own, message = self.grouping, re.fullmatch(r"\w+\.(group|outputs|bits|widths)( .*)", str(e))
            if own.weights is not None or message is None:
                raise
            setting = message[1] if hasattr(own, message[1]) else "group"  # blocks may have as many outputs as inputs
            raise ConfigError(f"{type(own).__name__}.{setting}{message[2]}") from None

    def model(self, config: Any) -> Any:
        """Return the config of the quantised run's model: by default that of the run, whose parameters it must have.

        Args:
          config: the model of the run that is quantised.
        """
        return config

    def settled(self, costs: Callable[[], Mapping[str, Cost]]) -> Recipe:
        """Return the recipe with everything decided that depends on all matrices together.

        Args:
          costs: computes the cost of each matrix by its path, in a pass over the calibration tokens.
        """
        return self

    def cost(self, kernel: Float[Array, "..."], info: TensorInfo, inputs: Inputs) -> float:
        """Return what a matrix of a layer would lose, for `settled`.

        Args:
          kernel: the matrix.
          info: of all layers of a stack.
          inputs: statistics of its inputs.
        """
        raise NotImplementedError(f"{type(self).__name__} does not weigh matrices")

    def of(self, info: TensorInfo) -> Recipe:
        """Return the recipe of a matrix: by default this one for all.

        Args:
          info: the matrix, of all layers of a stack.
        """
        return self

    @abc.abstractmethod
    def quantize(
        self, kernel: Float[Array, "..."], contracted: tuple[int, ...], inputs: Inputs | None = None
    ) -> StoredWeight:
        """Round a matrix; not called under `jit`.

        Args:
          kernel: the matrix; without `inputs` dimensions of stacked layers and experts may come first.
          contracted: the dimensions that a product sums over, counted from the last as -1.
          inputs: statistics of its inputs, the summed dimensions flattened; `None` if there are none.
        """


@dataclasses.dataclass(frozen=True)
class Folding(Recipe):
    """A recipe that first multiplies inputs by factors, which the layer before is divided by."""

    reads_inputs: ClassVar[bool] = True
    only_norms: ClassVar[bool] = False
    """Whether factors are only for inputs that a norm makes, and not for those that a projection makes."""

    @abc.abstractmethod
    def factors(
        self, kernels: Sequence[Float[Array, "n o"]], inputs: Inputs, repeats: int = 1, width: int = 1
    ) -> Float[Array, " n"]:
        """Return the factors, above 0.

        Args:
          kernels: float32, the matrices with these inputs.
          inputs: statistics of the inputs.
          repeats: consecutive heads that must have the same factors; see `shared`.
          width: of a head.
        """


def refuse_numbers(recipe: Recipe, instead: str, used: Sequence[str] = ()) -> None:
    """Check that a recipe without numbers of its own has its `bits`, `group` and `weights` as they come.

    Args:
      recipe: the recipe.
      instead: what to set, with `{name}` for the setting.
      used: settings among them that the recipe has.

    Raises:
      ConfigError: one of them is set.
    """
    own = {f.name: f.default for f in dataclasses.fields(Recipe)}
    changed = [name for name, value in own.items() if name not in used and getattr(recipe, name) != value]
    if changed:
        raise ConfigError(f"{type(recipe).__name__}.{changed[0]} has no effect; {instead.format(name=changed[0])}")


def shared(factors: Float[Array, " n"], repeats: int, width: int) -> Float[Array, " n"]:
    """Return the geometric mean of factors over heads that share keys and values, for each of these heads.

    Args:
      factors: above 0, (heads x width).
      repeats: heads that share keys and values.
      width: of a head.
    """
    if repeats == 1:
        return factors
    by_head = jnp.log(factors).reshape(-1, repeats, width)
    return jnp.exp(jnp.broadcast_to(by_head.mean(1, keepdims=True), by_head.shape)).reshape(-1)


@dataclasses.dataclass(frozen=True)
class Grid:
    """A format's numbers for a matrix (inputs, outputs): codes and values by scales.

    Args:
      format: the format; its numbers are not a table of the matrix's own.
    """

    format: Stored

    def __post_init__(self) -> None:
        if self.format.numbers.startswith("kmeans") or self.format.centred:
            raise ConfigError(
                f"{self.format!r} has a table or mean of the whole matrix, which column-wise rounding cannot use; use "
                "numbers such as 'int4' or 'nf4'"
            )

    def scales(self, matrix: Float[Array, "n o"]) -> tuple[Array, Array]:
        """Return float scales as they will be stored, and zero points, both float32 and of the matrix's shape.

        Args:
          matrix: the weights, whole groups of inputs.
        """
        scale, zero = self.format.scales(matrix, (-2,))
        zero = jnp.zeros([], jnp.float32) if zero is None else zero
        return _spread(scale.astype(str(self.format.scale)), matrix.shape), _spread(zero, matrix.shape)

    def scales_of(self, kernel: Float[Array, "..."], contracted: tuple[int, ...]) -> tuple[Array, Array]:
        """Return the scales and zero points of a kernel rounded to nearest, as `scales`; scales need not be floats.

        Args:
          kernel: the kernel.
          contracted: see `Recipe.quantize`.
        """
        stored = self.format.encode(kernel, contracted)
        zero = jnp.zeros([], jnp.float32) if stored.zero is None else stored.zero
        assert stored.scale is not None
        wide = (_spread(x, kernel.shape) for x in (stored.scale, zero))
        scale, zero = (as_matrix(x, contracted) for x in wide)
        return scale, zero

    def codes(
        self, x: Float[Array, "..."], scale: Float[Array, "..."], zero: Float[Array, "..."]
    ) -> UInt8[Array, "..."]:
        """Return the codes of the nearest numbers."""
        return numbers_of(self.format.numbers).encode(x / scale + zero)

    def values(
        self, codes: UInt8[Array, "..."], scale: Float[Array, "..."], zero: Float[Array, "..."]
    ) -> Float[Array, "..."]:
        """Return what codes stand for."""
        return (numbers_of(self.format.numbers).decode(codes) - zero) * scale

    def nearest(self, matrix: Float[Array, "n o"]) -> Float[Array, "n o"]:
        """Return the values of a matrix rounded to nearest."""
        return self.format.encode(matrix, (-2,)).dense()

    def stored(
        self,
        codes: UInt8[Array, "n o"],
        scale: Float[Array, "n o"],
        zero: Float[Array, "n o"],
        kernel: Float[Array, "..."],
        contracted: tuple[int, ...],
    ) -> StoredWeight:
        """Return the weight of a kernel.

        Args:
          codes: from `codes`.
          scale: from `scales`; from `scales_of` if scales are no floats.
          zero: likewise.
          kernel: the kernel.
          contracted: see `Recipe.quantize`.
        """
        like = self.format.encode(kernel, contracted)
        if self.format.float_scales:
            places = tuple(slice(None, None, b) for b in self.format.block(kernel.shape, contracted))
            scale, zero = (x.reshape(kernel.shape)[places] for x in (scale, zero))
            like = self.format.rounded(kernel, contracted, scale, zero if self.format.zeros else None)
        packed = StoredWeight.of(codes.reshape(kernel.shape), like.numbers, like.axis, self.format.word)
        return dataclasses.replace(like, codes=packed.codes)


def _spread(x: Array | StoredWeight, shape: tuple[int, ...]) -> Array:
    values = x.dense() if isinstance(x, StoredWeight) else x.astype(jnp.float32)
    return jnp.broadcast_to(values if values.ndim == 0 else spread(values, shape), shape)


def as_matrix(kernel: Float[Array, "..."], contracted: tuple[int, ...]) -> Float[Array, "n o"]:
    """Return a kernel as float32 (inputs, outputs).

    Args:
      kernel: `(*inputs, *outputs)`.
      contracted: the inputs, counted from the last as -1.
    """
    inputs = kernel.shape[: len(contracted)]
    return kernel.astype(jnp.float32).reshape(math.prod(inputs), -1)


def output_error(change: Float[Array, "n o"], inputs: Inputs) -> Float[Array, ""]:
    """Return the mean over tokens of |x · change|².

    Args:
      change: a matrix minus its rounded values.
      inputs: statistics of x.
    """
    return jnp.sum(change * jnp.matmul(inputs.second, change, precision=jax.lax.Precision.HIGHEST))
