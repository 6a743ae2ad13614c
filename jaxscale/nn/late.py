"""Parameters of layers whose arrays are made when their layer runs."""

from __future__ import annotations

import abc
from typing import Any

import jax
from jaxtyping import Array, Float

Tree = Any


class Late(abc.ABC):
    """A value in place of a stack of layers' parameter, whose array is made for one layer when that layer runs.

    A subclass is a frozen dataclass registered as a pytree (`jax.tree_util.register_dataclass`), all of whose arrays
    have the leading dimension of the layers, so that a scan takes one layer of each.
    """

    @abc.abstractmethod
    def array(self) -> Float[Array, "..."]:
        """Return the parameter of one layer, on the device; the arrays have no dimension of layers here."""


def made(tree: Tree) -> Tree:
    """Return a tree with the array of each `Late`; other leaves stay.

    Args:
      tree: parameters or modules of one layer.
    """

    def is_late(x: object) -> bool:
        return isinstance(x, Late)

    return jax.tree.map(lambda x: x.array() if is_late(x) else x, tree, is_leaf=is_late)
