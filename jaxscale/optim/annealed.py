"""`ConfidenceGuided`: late in training with rounded weights, only weights near a rounding threshold are updated."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.layout import TensorInfo
from jaxscale.nn.formats import Stored
from jaxscale.nn.formats.blocks import spread
from jaxscale.optim.adamw import AdamW
from jaxscale.optim.base import Optimizer, Schedule, Tree


@register
@dataclasses.dataclass(frozen=True)
class ConfidenceGuided:
    """Confidence-guided annealing (CGA) of OFQ (Liu et al. 2023) around another optimizer.

    From a step on, a weight whose value lies further than `boundary` from every rounding threshold is not updated, and
    the others settle on one side. All other parameters are updated as before. Use it with
    `Transformer.products = @Rounded(weights=...)` of the same format.

    Args:
      optimizer: the wrapped optimizer.
      weights: the format to which weights are rounded.
      after: the first step, from 0, that freezes weights.
      boundary: the distance, in steps between two integers.

    Raises:
      ConfigError: a format without scales for groups, or a number out of its range.
    """

    optimizer: Optimizer = AdamW()
    weights: Stored = Stored("int4")
    after: int = 0
    boundary: float = 0.005

    def __post_init__(self) -> None:
        if not isinstance(self.weights, Stored) or self.weights.centred:
            raise ConfigError(
                f"ConfidenceGuided.weights = {self.weights!r}: must be a Stored format without centred, such as @int4()"
            )
        if not isinstance(self.after, int) or isinstance(self.after, bool) or self.after < 0:
            raise ConfigError(f"ConfidenceGuided.after = {self.after!r}: must be a step, a whole number from 0")
        if not 0 < self.boundary <= 0.5:
            raise ConfigError(f"ConfidenceGuided.boundary = {self.boundary}: must be above 0 and at most 0.5")

    def make(self, learning_rate: Schedule, infos: Tree) -> optax.GradientTransformation:
        """Return the wrapped optimizer whose updates of confident weights become 0."""
        inner = self.optimizer.make(learning_rate, infos)

        def init(params: Tree) -> GuidedState:
            return GuidedState(jnp.zeros([], jnp.int32), inner.init(params))

        def update(grads: Tree, state: Any, params: Any = None) -> tuple[Tree, GuidedState]:
            updates, own = inner.update(grads, state.inner, params)

            def one(info: TensorInfo, u: Array, p: Array) -> Array:
                if info.contracted is None or not self.weights.covers(info):
                    return u
                free = (state.steps < self.after) | near_threshold(self.weights, p, info.contracted, self.boundary)
                return jnp.where(free, u, 0)

            updates = jax.tree.map(one, infos, updates, params)
            return updates, GuidedState(optax.safe_increment(state.steps), own)

        return optax.GradientTransformation(init, update)


class GuidedState(NamedTuple):
    """State of `ConfidenceGuided`.

    Args:
      steps: updates so far (int32 scalar).
      inner: state of the wrapped optimizer.
    """

    steps: jax.Array
    inner: Tree


def near_threshold(
    weights: Stored, kernel: Float[Array, "..."], contracted: tuple[int, ...], boundary: float
) -> Bool[Array, "..."]:
    """Return which weights round to another number if they are moved by `boundary` scales up or down.

    Args:
      weights: the format.
      kernel: the matrix.
      contracted: the dimensions that a product sums over, counted from the last as -1.
      boundary: the distance, in scales.
    """
    scale, zero = weights.scales(kernel, contracted)
    wide, move = kernel.astype(jnp.float32), boundary * spread(scale, kernel.shape)
    low, high = (weights.rounded(w, contracted, scale, zero).unpacked() for w in (wide - move, wide + move))
    return low != high
