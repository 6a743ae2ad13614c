"""`SignBlocks`: a matrix as a sum of blocks of about one bit, of which a program may load any number."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.errors import ConfigError, check_whole
from jaxscale.layout import TensorInfo, path_name
from jaxscale.layout.tensors import Tree
from jaxscale.nn.adapted import product_of_factors
from jaxscale.nn.formats.by_name import ByName
from jaxscale.nn.formats.low_rank import check_factors, factors, refuse_rank
from jaxscale.nn.formats.rebuilt import Axes, Rebuilt
from jaxscale.nn.formats.stored import Stored, sizes_of
from jaxscale.nn.formats.weight import StoredWeight
from jaxscale.nn.weight_format import WeightFormat

_SIGNS = Stored("binary")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SignBlock:
    """One term of a `SignStack`: signs times the product of two factors.

    Args:
      signs: of the kernel's shape, without scales.
      left: `(*layers, *inputs, rank)`.
      right: `(*layers, rank, *outputs)`.
      error: float32 `(*layers,)`: the squared error that is left with this and the blocks before it, as a share of the
        matrix's square, both weighted as the blocks were made.
    """

    signs: StoredWeight
    left: Float[Array, "..."]
    right: Float[Array, "..."]
    error: Float[Array, "..."]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SignStack(Rebuilt):
    """A kernel `sum of signs · (left right)` over blocks, each of which takes what those before it leave.

    Args:
      blocks: the blocks, the most important one first.
    """

    blocks: tuple[SignBlock, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The kernel's shape."""
        return self.blocks[0].signs.shape

    def names(self, part: str, shape: tuple[int, ...], axes: Axes) -> Axes:
        """See `Rebuilt`; factors have the kernel's inputs or outputs."""
        lead = self.blocks[0].error.ndim
        inputs = self.blocks[0].left.ndim - 1
        if part.endswith("left"):
            return (*axes[:inputs], None)
        if part.endswith("right"):
            return (*axes[:lead], None, *axes[inputs:])
        return axes[:lead] if part.endswith("error") else super().names(part, shape, axes)

    def dense(self, dtype: DTypeLike | None = None) -> Float[Array, "..."]:
        """See `Weight`; computed in float32, which is the default dtype."""
        total: Array | float = 0.0
        for block in self.blocks:
            total = total + block.signs.dense() * product_of_factors(block.left, block.right, block.error.ndim)
        return jnp.asarray(total).astype(dtype or jnp.float32)


@register
@dataclasses.dataclass(frozen=True)
class SignBlocks(WeightFormat):
    """Matrices as sums of blocks, each the signs of what is left times a low-rank product (BitStack, arXiv:2410.23918).

    The magnitudes of what the blocks before leave are replaced by the nearest matrix of a rank, from their largest
    singular values, so that no block makes the error larger. A block has 1 bit for each weight and the two factors.

    Args:
      blocks: of each matrix.
      rank: of the product.
      dtype: of its factors: "float32", "bfloat16" or "float16".

    Raises:
      ConfigError: a setting is out of its range.
    """

    blocks: int = 4
    rank: int = 1
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        check_whole("SignBlocks.blocks", self.blocks)
        check_factors("SignBlocks", self.rank, self.dtype)

    def covers(self, info: TensorInfo) -> bool:
        """Return whether a matrix is of a layer.

        Raises:
          ConfigError: its signs do not fill whole bytes, or its rank is below `rank`.
        """
        return _SIGNS.covers(info) and refuse_rank("SignBlocks", self.rank, info)

    def encode(
        self,
        kernel: Float[Array, "..."],
        contracted: tuple[int, ...],
        weights: Float[Array, " n"] | None = None,
    ) -> SignStack:
        """See `WeightFormat`.

        Args:
          kernel: the model's matrix.
          contracted: see `WeightFormat`.
          weights: factors on the error of each input, above 0; `None` is equal ones.
        """
        stack, ins, outs = sizes_of(kernel.shape, contracted)
        by = jnp.ones((1, 1)) if weights is None else weights[:, None]
        left_over = kernel.astype(jnp.float32).reshape(*stack, math.prod(ins), -1) * by
        square = jnp.maximum(jnp.sum(left_over**2, (-2, -1)), jnp.finfo(jnp.float32).tiny)
        axis = _SIGNS.axis(kernel.shape, contracted)
        assert axis is not None, "covers() checks this"
        blocks = []
        for _ in range(self.blocks):
            signs = (left_over >= 0).reshape(kernel.shape).astype(jnp.uint8)
            left, right = factors(jnp.abs(left_over), self.rank)
            left, right = (left / by).astype(self.dtype), right.astype(self.dtype)
            size = jnp.matmul(left.astype(jnp.float32) * by, right.astype(jnp.float32), precision="highest")
            left_over = left_over - jnp.where(left_over >= 0, size, -size)
            blocks.append(
                SignBlock(
                    StoredWeight.of(signs, "binary", axis),
                    left.reshape(*stack, *ins, self.rank),
                    right.reshape(*stack, self.rank, *outs),
                    jnp.sum(left_over**2, (-2, -1)) / square,
                )
            )
        return SignStack(tuple(blocks))


@register
@dataclasses.dataclass(frozen=True)
class FewerBlocks(WeightFormat):
    """As many blocks of a run with `SignBlocks` as fit into a number of bytes: only those are read.

    Of the next block of every matrix the one that takes most of the error, for its bytes, is read next. Each matrix
    has its first block.

    Args:
      bytes: of all parameters, embedding and output head included.

    Raises:
      ConfigError: `bytes` is no whole number above 0.
    """

    bytes: int = 2**30

    def __post_init__(self) -> None:
        check_whole("FewerBlocks.bytes", self.bytes)

    def part_of(self, stored: WeightFormat, infos: Tree, read: Callable[[Tree], Tree]) -> WeightFormat | None:
        """See `WeightFormat`.

        Raises:
          ConfigError: the first blocks do not fit.
        """
        if not isinstance(stored, SignBlocks):
            return None
        every = stored.infos(infos)
        marks = read(jax.tree.map(lambda i: i if i.path.endswith("/error") else None, every))
        errors = {path_name(p): np.asarray(x, np.float64).sum() for p, x in jax.tree_util.tree_leaves_with_path(marks)}
        paths = [i.path for i in jax.tree.leaves(infos) if i.contracted is not None and stored.covers(i)]
        left = [[errors[f"{path}/blocks/{b}/error"] for b in range(stored.blocks)] for path in paths]
        one = dataclasses.replace(stored, blocks=1)
        sizes = [_bytes(one.infos(i)) for i in jax.tree.leaves(infos) if i.path in set(paths)]
        counts = chosen(left, sizes, self.bytes - (_bytes(every) - stored.blocks * sum(sizes)))
        if counts is None:
            least = _bytes(every) - (stored.blocks - 1) * sum(sizes)
            raise ConfigError(
                f"FewerBlocks.bytes = {self.bytes}: one block of each matrix takes {least} bytes with the rest"
            )
        kinds = sorted(set(counts))
        groups = tuple(tuple(p for p, n in zip(paths, counts, strict=True) if n == kind) for kind in kinds)
        return ByName(tuple(dataclasses.replace(stored, blocks=n) for n in kinds), groups)

    def encode(self, kernel: Float[Array, "..."], contracted: tuple[int, ...]) -> Any:
        """Raise: blocks are made by `jaxscale quantize`."""
        raise ConfigError(
            "FewerBlocks reads a run whose matrices are stored as SignBlocks; make one with jaxscale quantize --recipe "
            "'@BitStack()'"
        )


def chosen(left: Sequence[Sequence[float]], sizes: Sequence[int], budget: int) -> list[int] | None:
    """Return how many blocks of each matrix to read, at least 1; `None` if these do not fit.

    Args:
      left: of each matrix, the error that is left after each of its blocks.
      sizes: bytes of a block of each matrix.
      budget: bytes.
    """
    counts, budget = [1] * len(left), budget - sum(sizes)
    if budget < 0:
        return None
    while True:
        gains = [
            ((own[n - 1] - own[n]) / size, m)
            for m, (own, n, size) in enumerate(zip(left, counts, sizes, strict=True))
            if n < len(own) and size <= budget
        ]
        if not gains:
            return counts
        best = max(gains)[1]
        counts[best], budget = counts[best] + 1, budget - sizes[best]


def _bytes(infos: Tree) -> int:
    return sum(i.nbytes for i in jax.tree.leaves(infos))
