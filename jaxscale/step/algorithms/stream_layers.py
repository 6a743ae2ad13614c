"""Backpropagation with the layers in host memory; a window of them is on the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax

from jaxscale.config import register
from jaxscale.errors import ConfigError, check_whole
from jaxscale.layout import on_device
from jaxscale.nn import Run
from jaxscale.nn.streamed import Streamed, is_streamed
from jaxscale.optim import OnHost
from jaxscale.optim.base import Schedule
from jaxscale.step.algorithm import NEXT_TOKEN, Algorithm, Metrics, Step, Tree
from jaxscale.step.algorithms.perturbations import is_stack, stays
from jaxscale.step.backprop import make_loss_and_grads, make_step
from jaxscale.step.guards import Guard
from jaxscale.step.objective import Batch, Objective
from jaxscale.step.state import Blueprint, TrainState

if TYPE_CHECKING:
    from jaxscale.layout import TensorInfo
    from jaxscale.step.config import TrainConfig


@register
@dataclasses.dataclass(frozen=True)
class StreamLayers(Algorithm):
    """`Backprop` for models larger than the device's memory (Superpipeline, Abbasi and Lim 2024, arXiv:2410.08791).

    Parameters, gradients and optimizer state (`train.optimizer = @OnHost()`) of all layers are in host memory. The
    forward pass copies one layer after the other to the device; the backward pass copies them in reverse, computes each
    again from its input, and copies its gradient to the host. Vectors of layers, the embedding and the output head stay
    on the device. Steps are those of `Backprop`. Evaluation, sampling and export need the whole model on the device. On
    hardware without host memory everything stays on the device, with a warning.

    Args:
      window: the most layers on the device. With 1, a layer waits for its copy. From 2 on, a layer is copied while the
        one that is `window - 1` before it runs. On TPUs more than 2 hide no more of the copies, and take memory.

    Raises:
      ConfigError: the window is not a whole number above 0.
    """

    window: int = 2

    def __post_init__(self) -> None:
        check_whole("StreamLayers.window", self.window)

    def infos(self, blueprint: Blueprint) -> dict[str, Tree]:
        """See `Algorithm`; the parameters of layers are in host memory."""
        placed = jax.tree.map(lambda i: dataclasses.replace(i, host=_is_streamed(i)), blueprint.infos)
        return super().infos(blueprint) | {"params": placed}

    def step(
        self,
        blueprint: Blueprint,
        objective: Objective = NEXT_TOKEN,
        *,
        accumulate: int = 1,
        schedule: Schedule | None = None,
        guards: Sequence[Guard] = (),
    ) -> Step:
        """See `Algorithm`."""

        def streamed(tree: Tree) -> Tree:
            def one(i: TensorInfo, x: jax.Array) -> Streamed | jax.Array:
                return Streamed(x, i.axes[1:], self.window) if _is_streamed(i) else x

            return jax.tree.map(one, blueprint.infos, tree)

        over = dataclasses.replace(blueprint, infos=streamed(blueprint.infos))
        of_streamed = make_loss_and_grads(over, objective=objective, accumulate=accumulate)

        def loss_and_grads(params: Tree, batch: Batch, key: jax.Array, frozen: Tree) -> tuple[Metrics, Tree]:
            metrics, grads = of_streamed(streamed(params), batch, key, frozen)
            return metrics, jax.tree.map(lambda g: g.stored if is_streamed(g) else g, grads, is_leaf=is_streamed)

        return make_step(loss_and_grads, blueprint.tx, schedule, guards)

    def weights(self, state: TrainState) -> Tree:
        """Return the parameters on the device."""
        return on_device(super().weights(state))

    def check(self, config: TrainConfig, blueprint: Blueprint) -> None:
        """Check that the model has layers that can be copied one by one, and that nothing else needs all of them."""
        layout, model, name = config.layout, config.model, "StreamLayers"
        if config.algorithm is not self:
            raise ConfigError(
                f"{type(config.algorithm).__name__} computes with all parameters, but those of {name} are in host "
                "memory; use Backprop() in it"
            )
        if layout is None:
            raise ConfigError(f"{name} needs a layout; set train.layout = Layout('data=1'), which is one device")
        if layout.stages > 1 or layout.sizes["replica"] > 1:
            raise ConfigError(
                f"{name} does not work with {layout}; use a mesh without pipeline and replica, or Backprop()"
            )
        if not isinstance(config.optimizer, OnHost):
            raise ConfigError(
                f"{name} updates layers in host memory, which {type(config.optimizer).__name__} does not; set "
                "train.optimizer = @OnHost()"
            )
        if config.accumulate > 1:
            raise ConfigError(
                f"{name} does not add gradients of micro-batches; set train.accumulate = 1 instead of "
                f"{config.accumulate}"
            )
        if config.adapters is not None:
            raise ConfigError(
                f"{name} copies trained layers, but {type(config.adapters).__name__} freezes them on the device; use "
                "Backprop()"
            )
        if config.histograms is not None:
            raise ConfigError(f"{name} counts no values of layers in host memory; remove train.histograms")
        if (inputs := getattr(model, "per_layer", None)) is not None and inputs.width is not None:
            raise ConfigError(
                f"{name} copies layers that have no inputs of their own; set PerLayer.width = None or use Backprop()"
            )
        stacks = any(map(_is_streamed, jax.tree.leaves(blueprint.infos)))
        if getattr(model, "stack", None) is not Run or not stacks:
            raise ConfigError(
                f"{name} copies the layers of stacks (Transformer.stack = @Run), which {type(model).__name__} has none "
                "of here; use Backprop()"
            )


def longest_stack(infos: Tree) -> int:
    """Return the repeats of the longest stack that `StreamLayers` has in host memory.

    Args:
      infos: a `TensorInfo` for each parameter.
    """
    return max((i.shape[0] for i in jax.tree.leaves(infos) if _is_streamed(i)), default=0)


def _is_streamed(info: TensorInfo) -> bool:
    return is_stack(info) and not stays(info) and len(info.shape) > 2
