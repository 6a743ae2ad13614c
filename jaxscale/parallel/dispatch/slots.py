"""Dispatch with a capacity: each expert has slots, which travel by an ordinary all-to-all."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.parallel.dispatch.base import Apply, Dispatcher, ExpertAxes, Rows, size
from jaxscale.parallel.dispatch.payload import check_payload
from jaxscale.parallel.dispatch.routed import Choices, Slots
from jaxscale.parallel.dispatch.whole_exchange import send, send_back
from jaxscale.parallel.wires import CodedWire


@register
@dataclasses.dataclass(frozen=True)
class SlotDispatch(Dispatcher):
    """Each expert takes a fixed number of tokens of each group and drops the others (Lepikhin et al. 2021).

    The default with `MixtureOfExperts.capacity`, which it needs. All slots are exchanged, also empty ones.

    Args:
      payload: the codes in which rows are sent to experts, and the cotangents of their outputs; `None` sends them as
        they are. Experts' outputs, and the cotangents of their inputs, are always sent as they are.

    Raises:
      ConfigError: a payload that keeps rounding errors.
    """

    payload: CodedWire | None = None

    needs_capacity: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_payload(self, self.payload)

    def rows(self, sent: Mapping[str, int], top_k: int, local_experts: int) -> Rows:
        """See `Dispatcher`: slots are as many after the exchange as before it."""
        return Rows(0, 1, 1 if sent else 0)

    def __call__(
        self, x: Float[Array, "b s e"], routed: Choices | Slots, local_experts: int, apply: Apply, axes: ExpertAxes
    ) -> Float[Array, "b s e"]:
        """See `Dispatcher`; needs `Slots`."""
        assert isinstance(routed, Slots)
        b, s, e = x.shape
        n, c = routed.token.shape[1], routed.token.shape[3]
        groups = x.reshape(b * n, s // n, e)
        token, weight = (_mine(a.reshape(b * n, -1, c), axes) for a in routed)
        rows = jax.vmap(lambda rows, at: jnp.take(rows, at, axis=0, mode="fill", fill_value=0))(groups, token)
        if axes.sent:
            weight = lax.all_to_all(weight, axes.sent, 1, 0, tiled=True)
            rows = send(rows, axes.sent, self.payload)
        out = apply(rows, weight[..., None])
        out = send_back(out, axes.sent, self.payload) if axes.sent else out
        empty = jnp.zeros((s // n, e), jnp.float32)
        y = jax.vmap(lambda token, out: empty.at[token].add(out.astype(jnp.float32), mode="drop"))(token, out)
        return y.reshape(b, s, e).astype(x.dtype)


def _mine(a: Array, axes: ExpertAxes) -> Array:
    """Select, in arrays (groups, x, slots), the experts that this device's copy of the tokens is sent to."""
    if axes.sent == axes.experts:
        return a
    shape = a.shape
    a = a.reshape(shape[0], *(size((m,)) for m in axes.experts), -1, shape[2])
    for dim in reversed(range(len(axes.experts))):
        if axes.experts[dim] not in axes.sent:
            a = lax.dynamic_index_in_dim(a, lax.axis_index(axes.experts[dim]), dim + 1, keepdims=False)
    return a.reshape(shape[0], -1, shape[2])
