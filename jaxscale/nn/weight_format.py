"""Storage formats of weights that are not trained, such as quantised ones."""

from __future__ import annotations

import abc
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxscale.errors import CheckpointError
from jaxscale.layout import Layout, TensorInfo, shardings_of
from jaxscale.parallel import Weight, as_weight

Tree = Any


class WeightFormat(abc.ABC):
    """Converts a model's matrices to another storage format; a value of `LoRA.base` and `generate(weights=...)`.

    A subclass is a frozen dataclass with a method `encode`. The arrays of the weights that it makes are sharded,
    counted and streamed by the names and sizes of `Weight.infos`.
    """

    @abc.abstractmethod
    def encode(self, kernel: Float[Array, "..."], contracted: tuple[int, ...]) -> Weight | Array:
        """Convert a matrix to this format.

        Args:
          kernel: the model's matrix; dimensions of stacked layers and experts may come first. Every array of the
            returned weight must have the same leading dimensions, since scans and streaming take one layer of each.
          contracted: the dimensions that a product sums over, counted from the last as -1.
        """

    def describe(self) -> str:
        """Return the format in a few words, for a line to the user."""
        return repr(self)

    def flaws(self, kernel: Float[Array, "..."], weight: Weight | Array) -> Bool[Array, " 2"]:
        """Return whether a matrix has numbers that are not finite, and whether its converted weight has.

        Args:
          kernel: the model's matrix.
          weight: from `encode`.
        """
        dense = as_weight(weight).dense()
        return ~jnp.stack([jnp.all(jnp.isfinite(kernel)), jnp.all(jnp.isfinite(dense))])

    def checked(self, kernel: Float[Array, "..."], contracted: tuple[int, ...]) -> tuple[Weight | Array, Array]:
        """Return `encode` and `flaws`, for `refuse_flaws`.

        Args:
          kernel: the model's matrix.
          contracted: see `encode`.
        """
        weight = self.encode(kernel, contracted)
        return weight, self.flaws(kernel, weight)

    def of(self, info: TensorInfo) -> WeightFormat:
        """Return the format of a parameter: by default this one for all.

        Args:
          info: the parameter.
        """
        return self

    def part_of(self, stored: WeightFormat, infos: Tree, read: Callable[[Tree], Tree]) -> WeightFormat | None:
        """Return a format whose arrays are some of those of a stored run, to read only these; by default there is none.

        Args:
          stored: the format of the run.
          infos: the model's tree of `TensorInfo`.
          read: reads some arrays of the run, from a tree with a `TensorInfo` for each and `None` for the others.
        """
        return None

    def check(self, infos: Tree) -> None:  # noqa: B027
        """Check that a model's matrices can be stored in this format, all together; by default nothing.

        Args:
          infos: the model's tree of `TensorInfo`.
        """

    def covers(self, info: TensorInfo) -> bool:
        """Return whether a parameter is converted to this format.

        By default all matrices of layers and experts are, and the embedding and output head are not.

        Args:
          info: the parameter; `contracted` is set.
        """
        return "vocab" not in info.axes

    def infos(self, infos: Tree) -> Tree:
        """Describe a model in this format: the arrays of converted weights in place of the matrices.

        Args:
          infos: the model's tree of `TensorInfo`.
        """
        self.check(infos)
        return jax.tree.map(lambda i: self._infos(i) if self._takes(i) else i, infos)

    def encoded(self, params: Tree, infos: Tree, layout: Layout | None) -> Tree:
        """Convert a model's parameters to this format, one matrix after the other.

        Args:
          params: the parameters, sharded by `layout`; an array without other references is freed once it is converted,
            and a `Weight` is left as it is.
          infos: the model's tree of `TensorInfo`.
          layout: the layout by which the converted arrays are sharded, or `None`.

        Raises:
          LayoutError: an array that the layout cannot shard; the message names it.
          CheckpointError: a matrix, or what it becomes, has NaN or infinity; the message names it.
        """
        self.check(infos)
        leaves, structure = jax.tree.flatten(params, is_leaf=lambda x: isinstance(x, Weight))
        del params
        compiled: dict[Any, Any] = {}
        for n, info in enumerate(jax.tree.leaves(infos)):
            if not self._takes(info) or isinstance(leaves[n], Weight):
                continue
            own = self.of(info)
            alike = (id(own), info.shape, info.axes, info.contracted, leaves[n].dtype)
            if alike not in compiled:
                encode = partial(own.checked, contracted=info.contracted)
                shardings = shardings_of(self._infos(info), layout)
                out = None if layout is None else (shardings, layout.replicated)
                compiled[alike] = jax.jit(encode, out_shardings=out)
            leaves[n], flaws = compiled[alike](leaves[n])
            refuse_flaws(own, info, flaws)
        return jax.tree.unflatten(structure, leaves)

    def _takes(self, info: TensorInfo) -> bool:
        return info.contracted is not None and self.covers(info)

    def _infos(self, info: TensorInfo) -> Tree:
        kernel = jax.ShapeDtypeStruct(info.shape, info.dtype)
        assert info.contracted is not None
        encode = partial(self.of(info).encode, contracted=info.contracted)
        return as_weight(jax.eval_shape(encode, kernel)).infos(info)


def refuse_flaws(weights: WeightFormat, info: TensorInfo, flaws: Bool[Array, " 2"]) -> None:
    """Raise an error about a matrix that a format cannot hold.

    Args:
      weights: the format.
      info: the matrix.
      flaws: see `WeightFormat.flaws`.

    Raises:
      CheckpointError: there is a flaw.
    """
    before, after = (bool(x) for x in flaws)
    if before:
        raise CheckpointError(
            f"{info.path} has NaN or infinite numbers, which {weights.describe()} "
            "cannot hold; use an earlier checkpoint "
            "(--step)"
        )
    if after:
        raise CheckpointError(
            f"{info.path}: {weights.describe()} "
            "has no scale for its largest or smallest numbers, which became infinite or 0; "
            "use scales of float32"
        )
