"""Dropless dispatch: tokens are sorted by expert, and only rows that have an expert are sent where possible."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxscale.config import register
from jaxscale.parallel.dispatch.base import Apply, Dispatcher, ExpertAxes, Rows, device_of, size
from jaxscale.parallel.dispatch.exchange import Exchange, carry, move
from jaxscale.parallel.dispatch.payload import check_payload
from jaxscale.parallel.dispatch.routed import Choices, Slots
from jaxscale.parallel.wires import CodedWire


@register
@dataclasses.dataclass(frozen=True)
class DroplessDispatch(Dispatcher):
    """Tokens are sorted by expert, for products over ragged groups; none is dropped (Gale et al. 2023).

    The size of the exchange depends on the data: TPUs send only the rows that are needed (`ragged_all_to_all`); other
    platforms pad to the worst case, see `wire_rows`. The default without `MixtureOfExperts.capacity`.

    Args:
      payload: the codes in which rows are sent to experts, and the cotangents of their outputs; `None` sends them as
        they are. Experts' outputs, and the cotangents of their inputs, are always sent as they are.

    Raises:
      ConfigError: a payload that keeps rounding errors.
    """

    payload: CodedWire | None = None

    def __post_init__(self) -> None:
        check_payload(self, self.payload)

    def rows(self, sent: Mapping[str, int], top_k: int, local_experts: int) -> Rows:
        """See `Dispatcher`: a device has room for every token of every device that sends to it."""
        if not sent:
            return Rows(0, 1, 0)
        return Rows(0, 1, math.prod(sent.values()) * min(top_k, local_experts) / top_k)

    def __call__(
        self, x: Float[Array, "b s e"], routed: Choices | Slots, local_experts: int, apply: Apply, axes: ExpertAxes
    ) -> Float[Array, "b s e"]:
        """See `Dispatcher`; needs `Choices`."""
        assert isinstance(routed, Choices)
        b, s, e = x.shape
        k = routed.ids.shape[2]
        n = b * s
        devices = size(axes.sent)
        place = _place(routed.ids.reshape(-1), local_experts, axes)
        order = jnp.argsort(place, stable=True)
        back = jnp.argsort(order)
        rows = jnp.broadcast_to(x.reshape(n, 1, e), (n, k, e)).reshape(n * k, e)
        rows, scale = move(rows, order, back), move(routed.weights.reshape(n * k, 1), order, back)
        # rows without an expert are out of range, and not counted
        counts = jnp.bincount(place, length=devices * local_experts).reshape(devices, local_experts)
        if not axes.sent:
            out = apply(rows, scale, counts[0])
        else:
            exchange = Exchange(axes.sent, devices, n * min(k, local_experts), n * k, True, self.payload)
            # a TPU pads each number of a ragged exchange to a row of 128, so padded rows cost less for `scale`
            exchange_scale = dataclasses.replace(exchange, ragged=False, payload=None)
            theirs = lax.all_to_all(counts, axes.sent, 0, 0, tiled=True)
            sizes = counts.sum(1), theirs.sum(1)
            # each sender's rows are sorted by expert; the rows of all senders are sorted once more
            ends = jnp.cumsum(theirs, axis=1)
            expert = jnp.sum(jnp.arange(exchange.max_rows)[None, :, None] >= ends[:, None, :], axis=-1).reshape(-1)
            by_expert = jnp.argsort(expert, stable=True)
            by_sender = jnp.argsort(by_expert)
            rows = move(carry(rows, *sizes, exchange, True), by_expert, by_sender)
            scale = move(carry(scale, *sizes, exchange_scale, True), by_expert, by_sender)
            out = apply(rows, scale, theirs.sum(0))
            out = carry(move(out, by_sender, by_expert), *sizes, exchange, False)
        out = move(out, back, order).reshape(n, k, e).astype(jnp.float32)
        # rows without an expert contribute 0, whatever values they have
        y = jnp.sum(jnp.where((place < devices * local_experts).reshape(n, k, 1), out, 0.0), axis=1)
        return y.reshape(b, s, e).astype(x.dtype)


def wire_rows(ids: Int[Any, "d n k"], experts: int) -> dict[str, int]:
    """Count the rows that devices send each other in a dropless dispatch (as many return in the combine).

    Args:
      ids: the experts chosen by the tokens of each of D devices; device d holds the d-th `experts / D` experts.
      experts: the number of experts.

    Returns:
      "useful": rows that some token needs, which a ragged exchange sends; "padded": rows that an exchange of fixed size
      sends, which must have space for all rows of a device going to another.
    """
    devices, tokens, k = ids.shape
    local_experts = experts // devices
    going = jnp.asarray(ids) // local_experts != jnp.arange(devices)[:, None, None]
    return {"useful": int(jnp.sum(going)), "padded": devices * (devices - 1) * tokens * min(k, local_experts)}


def _place(ids: Array, local_experts: int, axes: ExpertAxes) -> Array:
    """Return the sort key of each row's expert: the device it is sent to, then its number there; no expert is last."""
    device = device_of(ids, local_experts, axes)
    last = size(axes.sent)
    return jnp.where(device < last, device * local_experts + ids % local_experts, last * local_experts)
