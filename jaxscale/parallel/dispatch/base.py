"""`Dispatcher`: how tokens get to the devices of their experts, and outputs back."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable

from jax import lax
from jaxtyping import Array, Float

from jaxscale.parallel.dispatch.routed import Choices, Slots


@dataclasses.dataclass(frozen=True)
class ExpertAxes:
    """The mesh axes of a layer of experts, by use.

    Args:
      experts: all mesh axes that shard experts, of which the first is the outermost.
      sent: those of them along which tokens are sent.
      summed: the axes over which outputs are summed.
      gathered: the axes over which weights are sharded and gathered.
      scattered: the axes over which weights' gradients are reduce-scattered.
      mlp: the axes that shard the hidden layer.
      tokens: the axes that shard tokens before the exchange.
    """

    experts: tuple[str, ...] = ()
    sent: tuple[str, ...] = ()
    summed: tuple[str, ...] = ()
    gathered: tuple[str, ...] = ()
    scattered: tuple[str, ...] = ()
    mlp: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()


Apply = Callable[..., Array]
"""Applies a device's experts to rows: (groups, x, slots, e) with scales (groups, x, slots, 1), or (rows, e) sorted by
expert with scales (rows, 1) and the number of rows of each expert; returns the scaled outputs, of the rows' shape."""


class Dispatcher(abc.ABC):
    """How tokens get to the devices of their experts, and the outputs back; a frozen dataclass.

    It is called on each device, within a `shard_map`, and on one device without any mesh axes.
    """

    @abc.abstractmethod
    def __call__(
        self, x: Float[Array, "b s e"], routed: Choices | Slots, local_experts: int, apply: Apply, axes: ExpertAxes
    ) -> Float[Array, "b s e"]:
        """Return the sum of each token's experts' outputs, of those experts that tokens of this device are sent to.

        Args:
          x: this device's tokens.
          routed: their experts, or the tokens of each expert of all devices.
          local_experts: the number of experts of this device.
          apply: applies them.
          axes: the mesh axes.
        """


def size(axes: tuple[str, ...]) -> int:
    """Return the number of devices along mesh axes, within a `shard_map`.

    Args:
      axes: the mesh axes.
    """
    return math.prod(lax.axis_size(m) for m in axes)
