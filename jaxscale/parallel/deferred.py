"""Weight gradients put off: a backward pass that leaves, in place of each, the two arrays it is the product of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array

Tree = Any


@dataclasses.dataclass(eq=False)
class Uses:
    """What a kernel was multiplied by, written down while the model around it is traced.

    Args:
      found: of each use, the input and output (anything with a shape and dtype), the names of their last dimensions,
        and the function of input and output cotangent that gives the gradient.
      at_once: there was a product whose own backward pass makes the gradient.
    """

    found: list[Use] = dataclasses.field(default_factory=list)
    at_once: bool = False


@dataclasses.dataclass(frozen=True)
class Use:
    """A product of a kernel."""

    x: Any
    y: Any
    x_axes: tuple[str, ...]
    y_axes: tuple[str, ...]
    gradient: Callable[[Array, Array], Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Deferred:
    """A kernel in a model whose backward pass makes no gradient of it.

    The product hands its input and its output's cotangent back as "cotangents" of `x` and `dy`: stacked by scans,
    recomputed by `jax.checkpoint` and passed on as any gradient is. Nobody reads the values of the two.

    Args:
      kernel: the parameter.
      x: of the shape of the product's input; `None` where another kernel of the same input keeps it.
      dy: of the shape of its output; `None` while products are written down.
      uses: where products are written down.
    """

    kernel: Array
    x: Array | None = None
    dy: Array | None = None
    uses: Uses | None = dataclasses.field(default=None, metadata={"static": True})


def at_once(kernel: Array | Deferred) -> Array:
    """The parameter itself, for a product whose backward pass makes its gradient."""
    if not isinstance(kernel, Deferred):
        return kernel
    assert kernel.uses is not None, "a kernel that is used so does not wait"
    kernel.uses.at_once = True
    return kernel.kernel
