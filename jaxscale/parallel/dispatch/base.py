"""`Dispatcher`: how tokens get to the devices of their experts, and outputs back."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

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


class Rows(NamedTuple):
    """Rows in a dispatcher's buffers on a device, for each row before dispatch; a token has one for each expert of it.

    Args:
      tokens: rows of tokens of several devices, not yet copied for each of their experts; 0 without such a buffer.
      sorted: rows that are sorted by expert before the last exchange, or for the products if there is none.
      received: rows after the last exchange; 0 without one.
    """

    tokens: float
    sorted: float
    received: float

    @property
    def multiplied(self) -> float:
        """Rows of the experts' products."""
        return self.received or self.sorted


class Dispatcher(abc.ABC):
    """How tokens get to the devices of their experts, and the outputs back; a frozen dataclass.

    It is called on each device, within a `shard_map`, and on one device without any mesh axes.
    """

    needs_capacity: ClassVar[bool] = False
    """Whether it sends `Slots`; the others send `Choices`, and drop no token."""

    @property
    def sends_codes(self) -> bool:
        """Whether it sends codes in place of rows, itself or a dispatcher that it uses."""
        parts = (getattr(self, "payload", None), getattr(self, "within", None))
        return parts[0] is not None or (isinstance(parts[1], Dispatcher) and parts[1].sends_codes)

    def check(self, axes: ExpertAxes) -> None:  # noqa: B027  # most support all
        """Check the mesh axes.

        Args:
          axes: the mesh axes.

        Raises:
          LayoutError: mesh axes that this way of sending does not support.
        """

    @abc.abstractmethod
    def rows(self, sent: Mapping[str, int], top_k: int, local_experts: int) -> Rows:
        """Return the rows of its buffers, whose sizes do not depend on the routing.

        Args:
          sent: the mesh axes that tokens are sent along and their sizes, the outermost first.
          top_k: experts of a token.
          local_experts: experts of a device.
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


def device_of(
    ids: Int[Array, "*n"], local_experts: int, axes: ExpertAxes, along: tuple[str, ...] | None = None
) -> Int[Array, "*n"]:
    """Return the number, along mesh axes, of the device that an expert's rows are sent to.

    Args:
      ids: experts.
      local_experts: experts of a device.
      axes: the mesh axes of experts.
      along: some of `axes.sent`; by default all.

    Returns:
      the number of devices along the mesh axes for no expert, and for one whose rows another device sends: a device
      with the same tokens.
    """
    along, left = axes.sent if along is None else along, size(axes.experts)
    device, mine = jnp.zeros_like(ids), ids < left * local_experts
    for m in axes.experts:
        left //= size((m,))
        at = ids // (local_experts * left) % size((m,))
        if m in along:
            device = device * size((m,)) + at
        elif m not in axes.sent:
            mine &= at == lax.axis_index(m)
    return jnp.where(mine, device, size(along))
