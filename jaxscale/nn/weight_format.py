"""Forms in which weights that are not trained are kept, such as quantised ones."""

from __future__ import annotations

import abc
from functools import partial
from typing import Any

import jax
from jaxtyping import Array, Float

from jaxscale.layout import Layout, TensorInfo, shardings_of
from jaxscale.parallel import Weight, as_weight

Tree = Any


class WeightFormat(abc.ABC):
    """Turns a model's matrices into weights of another form; `LoRA.base` and `generate(weights=...)` take one.

    A subclass is a frozen dataclass with `encode`. The arrays of the weights it makes are what is laid out, counted and
    streamed, by the names and sizes that `Weight.infos` gives.
    """

    @abc.abstractmethod
    def encode(self, kernel: Float[Array, "..."], contracted: tuple[int, ...]) -> Weight | Array:
        """A matrix in this form.

        Args:
          kernel: as the model has it; a stack of layers, and of experts, may come before its dimensions. Every array of
            the weight begins with the same stack, since scans and streamed layers take one layer's part of each.
          contracted: the dimensions that a product sums over, counted from the last as -1.
        """

    def covers(self, info: TensorInfo) -> bool:
        """Whether a parameter is kept in this form.

        By default every matrix of the layers and experts, and not the tables of the vocabulary (embedding and head).

        Args:
          info: the parameter's; `contracted` is set.
        """
        return "vocab" not in info.axes

    def infos(self, infos: Tree) -> Tree:
        """A model's tree of `TensorInfo` with those of the weights' arrays in place of the matrices'."""
        return jax.tree.map(lambda i: self._infos(i) if self._takes(i) else i, infos)

    def encoded(self, params: Tree, infos: Tree, layout: Layout | None) -> Tree:
        """A model's parameters with weights in place of the matrices, one after the other.

        Args:
          params: laid out by `layout`; an array nobody else holds is freed as soon as it is encoded.
          infos: the model's, a `TensorInfo` for each parameter.
          layout: onto whose devices the weights' arrays go, each its shards.

        Raises:
          LayoutError: naming an array that cannot be laid out.
        """
        leaves, structure = jax.tree.flatten(params)
        del params
        compiled: dict[Any, Any] = {}
        for n, info in enumerate(jax.tree.leaves(infos)):
            if not self._takes(info):
                continue
            alike = (info.shape, info.axes, info.contracted, leaves[n].dtype)
            if alike not in compiled:
                encode = partial(self.encode, contracted=info.contracted)
                compiled[alike] = jax.jit(encode, out_shardings=shardings_of(self._infos(info), layout))
            leaves[n] = compiled[alike](leaves[n])
        return jax.tree.unflatten(structure, leaves)

    def _takes(self, info: TensorInfo) -> bool:
        return info.contracted is not None and self.covers(info)

    def _infos(self, info: TensorInfo) -> Any:
        kernel = jax.ShapeDtypeStruct(info.shape, info.dtype)
        assert info.contracted is not None
        return as_weight(jax.eval_shape(partial(self.encode, contracted=info.contracted), kernel)).infos(info)
