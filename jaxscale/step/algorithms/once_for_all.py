"""`OnceForAll`: each step trains adapters of a random choice of formats, so that one run serves all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxscale.config import register
from jaxscale.errors import ConfigError, LayoutError
from jaxscale.optim.base import Schedule
from jaxscale.step.algorithm import NEXT_TOKEN, Algorithm, Metrics, Step
from jaxscale.step.backprop import make_loss_and_grads, make_step
from jaxscale.step.bit_adapters import BitLayers
from jaxscale.step.guards import Guard
from jaxscale.step.objective import Batch, Objective
from jaxscale.step.state import Blueprint, TrainState

if TYPE_CHECKING:
    from jaxscale.step.config import TrainConfig

_STREAM = 0x0FA
_TARGETS = 256


@register
@dataclasses.dataclass(frozen=True)
class OnceForAll(Algorithm):
    """Trains `BitAdapters` in a random format for each layer and step (LLM-QFA, Yi et al. 2024).

    Formats that are drawn independently nearly always have their middle as a mean, so that steps are spent there. A
    balanced sampler first draws the mean of a step, uniformly from the first format to the last, and then formats with
    that mean. The paper's sampler has the same aim, by a schedule of several normal distributions of the mean. The
    metric `format` is the mean of the step, counted from 0.

    Args:
      balanced: draw the mean first; else formats are drawn independently and uniformly.
    """

    balanced: bool = True

    def check(self, config: TrainConfig, blueprint: Blueprint) -> None:
        """See `Algorithm`.

        Raises:
          ConfigError: `train.adapters` is not `BitAdapters`.
          LayoutError: the layout has pipeline stages.
        """
        if not isinstance(blueprint.adaptation, BitLayers):
            raise ConfigError(
                "OnceForAll draws formats of a run with adapters for each; set train.adapters = @BitAdapters(), or "
                "train.algorithm = @Backprop()"
            )
        if blueprint.layout is not None and blueprint.layout.stages > 1:
            raise LayoutError(
                "OnceForAll draws the formats of all layers in each step, which pipeline stages do not pass on; use a "
                "mesh without pipeline"
            )

    def step(
        self,
        blueprint: Blueprint,
        objective: Objective = NEXT_TOKEN,
        *,
        accumulate: int = 1,
        schedule: Schedule | None = None,
        guards: Sequence[Guard] = (),
    ) -> Step:
        """Return a step of backpropagation at a drawn choice of formats."""
        loss_and_grads = make_loss_and_grads(blueprint, objective=objective, accumulate=accumulate)
        inner = make_step(loss_and_grads, blueprint.tx, schedule, guards)
        layers = blueprint.adaptation
        assert isinstance(layers, BitLayers), "check() refuses others"

        def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
            key = jax.random.fold_in(jax.random.fold_in(state.rng, state.step), _STREAM)
            choice = draw(key, layers.depth, len(layers.formats), balanced=self.balanced)
            own = layers.chosen(blueprint.own(state.frozen), choice)
            frozen = own if blueprint.teacher is None else {**state.frozen, "own": own}
            after, metrics = inner(state.replace(frozen=frozen), batch)
            return after.replace(frozen=state.frozen), {**metrics, "format": jnp.mean(choice, dtype=jnp.float32)}

        return step


def draw(key: Array, depth: int, formats: int, *, balanced: bool = True) -> Int[Array, " depth"]:
    """Return a random format of each layer.

    Args:
      key: random key.
      depth: number of layers.
      formats: number of formats.
      balanced: whether the mean is uniform; else formats are.
    """
    target, each = jax.random.split(key)
    if not balanced:
        return jax.random.randint(each, (depth,), 0, formats)
    logits = jnp.asarray(_with_mean(formats))[jax.random.randint(target, (), 0, _TARGETS)]
    return jax.random.categorical(each, logits, shape=(depth,))


def _with_mean(formats: int) -> Float[np.ndarray, "targets formats"]:
    """Return log-probabilities of formats, those of largest entropy for each of evenly spaced means."""
    n, tilts = np.arange(formats), np.linspace(-40, 40, 20001)
    logits = tilts[:, None] * n
    logits -= logits.max(1, keepdims=True)
    p = np.exp(logits)
    p /= p.sum(1, keepdims=True)
    targets = (np.arange(_TARGETS) + 0.5) / _TARGETS * (formats - 1)
    return np.log(np.maximum(p[np.searchsorted(p @ n, targets).clip(0, len(tilts) - 1)], 1e-30)).astype(np.float32)
