"""`Sparse`: the weights, or blocks of weights, that are not zero, and a bit for each place that says where they are."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from jaxscale.config import register
from jaxscale.errors import ConfigError, check_whole
from jaxscale.layout import TensorInfo
from jaxscale.layout.tensors import Tree
from jaxscale.nn.formats.packing import pack, unpack
from jaxscale.nn.formats.rebuilt import Axes, Rebuilt
from jaxscale.nn.formats.stored import FLOATS, sizes_of
from jaxscale.nn.weight_format import WeightFormat


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SparseWeight(Rebuilt):
    """A kernel with as many blocks that are not zero in every column of blocks.

    Args:
      values: `(*layers, rows, *outputs)`: the rows of the blocks that are not zero, of each column of blocks in order.
      mask: uint8 `(*layers, bytes, *outputs)`, a bit for each block; where blocks have several outputs, the outputs are
        one dimension, of blocks.
      inputs: sizes of the kernel's inputs.
      trailing: dimensions of `values` that are not of stacked layers.
      group: inputs of a block.
    """

    values: Float[Array, "..."]
    mask: UInt8[Array, "..."]
    inputs: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    trailing: int = dataclasses.field(metadata={"static": True})
    group: int = dataclasses.field(default=1, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The kernel's shape."""
        at = self._at
        return (*self.values.shape[:at], *self.inputs, *self.values.shape[at + 1 :])

    @property
    def _at(self) -> int:
        """The dimension of rows: scans take the leading ones away."""
        return self.values.ndim - self.trailing

    def names(self, part: str, shape: tuple[int, ...], axes: Axes) -> Axes:
        """See `Rebuilt`; rows and places have no axis, and outputs the kernel's."""
        at = self._at
        outputs = axes[at + len(self.inputs) :]
        same = len(shape) == self.values.ndim and tuple(shape[at + 1 :]) == tuple(self.values.shape[at + 1 :])
        return (*axes[:at], None, *(outputs if same else (None,) * (len(shape) - at - 1)))

    def dense(self, dtype: DTypeLike | None = None) -> Float[Array, "..."]:
        """See `Weight`: values are loaded as they are stored, and spread over zeros; float32 by default."""
        at, n = self._at, math.prod(self.inputs)
        blocks, stack = n // self.group, self.values.shape[: self._at]
        mask = unpack(self.mask.reshape(*self.mask.shape[: at + 1], -1), 1, at)
        mask = jax.lax.slice_in_dim(mask, 0, blocks, axis=at).astype(bool)  # (*layers, blocks, columns)
        columns = mask.shape[-1]
        place = jnp.maximum(jnp.cumsum(mask.astype(jnp.int32), axis=at) - 1, 0)
        values = self.values.reshape(
            *stack, -1, self.group, columns, math.prod(self.shape[at + len(self.inputs) :]) // columns
        )
        spread = jnp.take_along_axis(values, place[..., None, :, None], axis=at)
        kernel = jnp.where(mask[..., None, :, None], spread, 0)
        return kernel.reshape(self.shape).astype(dtype or jnp.float32)


@register
@dataclasses.dataclass(frozen=True)
class Sparse(WeightFormat):
    """A share of the weights is zero and not stored: "load sparse, compute dense" (Flash-LLM, arXiv:2309.10285).

    Values are stored in a float type, and their places as one bit for each weight, or for each block of weights. Every
    output, or column of blocks, has as many that are not zero: those of the largest sum of squares. A product makes the
    dense kernel first; XLA does this, and there is no kernel that does it in a chip's fast memory.

    Args:
      share: of the blocks that are zero, from 0 to below 1; rounded down to whole blocks.
      group: consecutive inputs of a block.
      outputs: consecutive outputs of a block.
      dtype: "float32", "bfloat16" or "float16".

    Raises:
      ConfigError: a setting is out of its range.
    """

    share: float = 0.5
    group: int = 1
    outputs: int = 1
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1:
            raise ConfigError(f"Sparse.share = {self.share}: must be from 0 to below 1")
        for name in ("group", "outputs"):
            check_whole(f"Sparse.{name}", getattr(self, name))
        if self.dtype not in FLOATS:
            raise ConfigError(f"Sparse.dtype = {self.dtype!r}: must be one of {', '.join(FLOATS)}")

    def check(self, infos: Tree) -> None:
        """See `WeightFormat`.

        Raises:
          ConfigError: blocks do not divide a matrix; the message has the largest that divide all.
        """
        of_layers = super().covers
        self._check_blocks([i for i in jax.tree.leaves(infos) if i.contracted is not None and of_layers(i)])

    def covers(self, info: TensorInfo) -> bool:
        """Return whether a matrix is of a layer.

        Raises:
          ConfigError: blocks do not divide it.
        """
        if not super().covers(info):
            return False
        self._check_blocks([info])
        return True

    def _check_blocks(self, matrices: Sequence[TensorInfo]) -> None:
        for name, own, side in (("group", self.group, 1), ("outputs", self.outputs, 2)):
            sizes = [math.prod(sizes_of(i.shape, i.contracted or ())[side]) for i in matrices]
            wrong = next((n for n, size in enumerate(sizes) if size % own), None)
            if wrong is not None:
                what = "inputs" if side == 1 else "outputs"
                common = math.gcd(*sizes)
                raise ConfigError(
                    f"Sparse.{name} = {own} does not divide the {sizes[wrong]} {what} of {matrices[wrong].path}; the "
                    f"nearest that does is {max(d for d in range(1, own) if common % d == 0)}"
                    f"{', which divides those of all matrices' if len(matrices) > 1 else ''}"
                )

    def encode(
        self, kernel: Float[Array, "..."], contracted: tuple[int, ...], scores: Float[Array, "..."] | None = None
    ) -> SparseWeight:
        """See `WeightFormat`.

        Args:
          kernel: the model's matrix.
          contracted: see `WeightFormat`.
          scores: `(*layers, blocks of inputs, blocks of outputs)`: those of the largest scores are stored.
        """
        stack, ins, outs = sizes_of(kernel.shape, contracted)
        at, n, columns = len(stack), math.prod(ins), math.prod(outs) // self.outputs
        blocks = kernel.reshape(*stack, n // self.group, self.group, columns, self.outputs)
        if scores is None:
            scores = jnp.sum(blocks.astype(jnp.float32) ** 2, (-3, -1))
        scores = jnp.where(jnp.isnan(scores), jnp.inf, scores)  # stored first, so that NaN does not vanish
        rows = n // self.group - int(self.share * (n // self.group) + 1e-9)
        best = jnp.sort(jnp.argsort(-scores, axis=at)[(slice(None),) * at + (slice(rows),)], axis=at)
        values = jnp.take_along_axis(blocks, best[..., None, :, None], axis=at).astype(self.dtype)
        places = jnp.arange(-(-(n // self.group) // 8) * 8).reshape(-1, *(1,) * 2)
        mask = jnp.any(places == jnp.expand_dims(best, at), axis=at + 1).astype(jnp.uint8)
        packed = pack(mask, 1, at)
        packed = packed.reshape(*packed.shape[: at + 1], *outs) if self.outputs == 1 else packed
        values = values.reshape(*stack, rows * self.group, *outs)
        return SparseWeight(values, packed, ins, 1 + len(outs), self.group)
