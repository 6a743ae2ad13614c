"""Parts of a model's parameters by groups of layers, which are exchanged at different times."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jaxscale.layout import TensorInfo

Tree = Any
Parts = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Fragment:
    """One part of a tree of parameters: of each stack some consecutive layers, and some other arrays whole.

    Args:
      slices: by path, the dimension of the layers, the first layer, and the layer after the last; `None` is the whole
        array.
    """

    slices: dict[str, tuple[int, int, int] | None]

    def infos(self, infos: Tree) -> dict[str, TensorInfo]:
        """Return the infos of the part, by path.

        Args:
          infos: a `TensorInfo` per parameter.
        """

        def part(i: TensorInfo) -> TensorInfo:
            if (cut := self.slices[i.path]) is None:
                return i
            d, first, end = cut
            return dataclasses.replace(i, shape=(*i.shape[:d], end - first, *i.shape[d + 1 :]))

        return {i.path: part(i) for i in jax.tree.leaves(infos) if i.path in self.slices}

    def take(self, tree: Tree, infos: Tree, lead: int = 0) -> Parts:
        """Return the part's arrays by path.

        Args:
          tree: arrays of all parameters.
          infos: a `TensorInfo` per parameter.
          lead: dimensions before those of the parameter.
        """

        def part(x: jax.Array, path: str) -> jax.Array:
            if (cut := self.slices[path]) is None:
                return x
            return jax.lax.slice_in_dim(x, cut[1], cut[2], axis=cut[0] + lead)

        pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(infos), strict=True)
        return {i.path: part(x, i.path) for x, i in pairs if i.path in self.slices}

    def put(self, tree: Tree, parts: Parts, infos: Tree, lead: int = 0) -> Tree:
        """Return the tree with the part's arrays replaced.

        Args:
          tree: arrays of all parameters.
          parts: new arrays by path.
          infos: a `TensorInfo` per parameter.
          lead: dimensions before those of the parameter.
        """

        def new(x: jax.Array, i: TensorInfo) -> jax.Array:
            if i.path not in self.slices:
                return x
            part = parts[i.path].astype(x.dtype)
            if (cut := self.slices[i.path]) is None:
                return part
            return jax.lax.dynamic_update_slice_in_dim(x, part, cut[1], axis=cut[0] + lead)

        return jax.tree.map(new, tree, infos)


def fragments_of(infos: Tree, count: int) -> tuple[Fragment, ...]:
    """Return parts that together are all parameters.

    Each stack of layers is divided into `count` groups of consecutive layers, as equal as can be. Other arrays go to
    one fragment each, in turn.

    Args:
      infos: a `TensorInfo` per parameter.
      count: the number of fragments; a stack with fewer layers is not in every one.

    Returns:
      `count` fragments, of which some are empty if there are fewer layers and other arrays.
    """
    slices: list[dict[str, tuple[int, int, int] | None]] = [{} for _ in range(count)]
    others = 0
    for i in jax.tree.leaves(infos):
        if "layers" not in i.axes or count == 1:
            slices[others % count][i.path] = None
            others += 1
            continue
        d = i.axes.index("layers")
        bounds = [p * i.shape[d] // count for p in range(count + 1)]
        for p, (first, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
            if end > first:
                slices[p][i.path] = (d, first, end)
    return tuple(map(Fragment, slices))
