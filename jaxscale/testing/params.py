"""Random parameters for checks: no scale is 1 and no bias 0, so that an omitted one changes results."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np

from jaxscale.layout import TensorInfo

Tree = Any


def random_params(infos: Tree, *, seed: int = 0) -> Tree:
    """Return a NumPy array per `TensorInfo`: scales around 1, biases around 0, weights that keep a vector's size.

    Args:
      infos: a tree of `TensorInfo`s.
      seed: seed of the random numbers.
    """
    random = np.random.default_rng(seed)

    def draw(info: TensorInfo) -> np.ndarray:
        x = random.normal(size=info.shape)
        kind = info.path.rsplit("/", 1)[-1]
        if kind in ("scale", "bias"):
            return (0.3 * x + (kind == "scale")).astype(info.dtype)
        shape = [n for n, axis in zip(info.shape, info.axes, strict=True) if axis != "layers"]
        return (x * math.prod(shape) ** -0.25).astype(info.dtype)

    return jax.tree.map(draw, infos)
