"""Hierarchical dispatch: a token is sent once to each host that has some of its experts, and from there to devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.errors import ConfigError, LayoutError
from jaxscale.parallel.dispatch.base import Apply, Dispatcher, ExpertAxes, Rows, device_of, size
from jaxscale.parallel.dispatch.dropless import DroplessDispatch
from jaxscale.parallel.dispatch.exchange import Exchange, carry, move
from jaxscale.parallel.dispatch.payload import check_payload
from jaxscale.parallel.dispatch.routed import Choices, Slots
from jaxscale.parallel.wires import CodedWire


@register
@dataclasses.dataclass(frozen=True)
class HierarchicalDispatch(Dispatcher):
    """Tokens are sent across a slow mesh axis first, once for each of its positions, then within; drops no token.

    A token with several experts along the other axes (on one host) is sent there once, to the device with the sender's
    place on its own host, and its experts' outputs are summed there before they are returned (DeepSeek-AI 2024, 3.2.2).
    On G hosts a token with k experts crosses at most min(k, G) times each way in place of k.

    Args:
      across: the slow mesh axis; by default the outermost of those that shard both experts and tokens.
      within: how tokens are sent along the others.
      payload: the codes in which rows are sent across, and the cotangents of their outputs; `None` sends them as they
        are. Outputs, and the cotangents of tokens, are always sent as they are.

    Raises:
      ConfigError: a payload that keeps rounding errors, or a `within` that drops tokens or is hierarchical.
    """

    across: str | None = None
    within: Dispatcher = DroplessDispatch()
    payload: CodedWire | None = None

    def __post_init__(self) -> None:
        check_payload(self, self.payload)
        flat = isinstance(self.within, Dispatcher) and not isinstance(self.within, HierarchicalDispatch)
        if not flat or self.within.needs_capacity:
            raise ConfigError(
                f"HierarchicalDispatch.within = {self.within!r}: must be DroplessDispatch() or AllGatherDispatch()"
            )

    def check(self, axes: ExpertAxes) -> None:
        """Raise `LayoutError` unless two mesh axes or more shard both experts and tokens."""
        if axes.sent and len(axes.sent) < 2:
            raise LayoutError(
                f"HierarchicalDispatch needs two mesh axes that shard both experts and tokens, and this layout has "
                f"{axes.sent[0]!r} alone; use DroplessDispatch(), or rules that place experts along more axes, such as "
                "Layout.rules = 'folded'"
            )
        if axes.sent and self.across not in (None, *axes.sent):
            raise LayoutError(
                f"HierarchicalDispatch.across = {self.across!r} does not shard both experts and tokens in this layout; "
                f"use one of {', '.join(map(repr, axes.sent))}"
            )

    def rows(self, sent: Mapping[str, int], top_k: int, local_experts: int) -> Rows:
        """See `Dispatcher`: room for every token of the devices of other hosts, which `within` then sends on."""
        if not sent:
            return self.within.rows(sent, top_k, local_experts)
        across = self.across or next(iter(sent))
        hosts = sent[across]
        inner = self.within.rows({m: n for m, n in sent.items() if m != across}, top_k, local_experts)
        return Rows(hosts * (1 / top_k + inner.tokens), hosts * inner.sorted, hosts * inner.received)

    def __call__(
        self, x: Float[Array, "b s e"], routed: Choices | Slots, local_experts: int, apply: Apply, axes: ExpertAxes
    ) -> Float[Array, "b s e"]:
        """See `Dispatcher`; needs `Choices`."""
        assert isinstance(routed, Choices)
        if not axes.sent:
            return self.within(x, routed, local_experts, apply, axes)
        across = self.across or axes.sent[0]
        hosts, experts = size((across,)), local_experts * size(axes.experts)
        e, k = x.shape[2], routed.ids.shape[2]
        n = x.shape[0] * x.shape[1]
        ids, weights = (a.reshape(n, k) for a in routed)
        to = _once(device_of(ids, local_experts, axes, (across,)), hosts)
        copies = to.shape[1]
        order = jnp.argsort(to.reshape(-1), stable=True)
        back = jnp.argsort(order)

        def sort(a: Array) -> Array:
            return move(jnp.broadcast_to(a[:, None], (n, copies, a.shape[1])).reshape(n * copies, -1), order, back)

        sent = jnp.bincount(to.reshape(-1), length=hosts)
        received = lax.all_to_all(sent, (across,), 0, 0, tiled=True)
        exchange = Exchange((across,), hosts, n, n * copies, True, self.payload)
        rows = carry(sort(x.reshape(n, e)), sent, received, exchange, True)
        # ids are sent as float32 beside the weights, and 0 is no expert, which rows that nobody sent have
        numbers = jnp.where(ids < experts, ids + 1, 0).astype(jnp.float32)
        choices = dataclasses.replace(exchange, ragged=False, payload=None)
        ids, weights = jnp.split(
            carry(sort(jnp.concatenate([numbers, weights], axis=1)), sent, received, choices, True), 2, axis=1
        )
        ids = lax.stop_gradient(ids).astype(jnp.int32)
        here = Choices(jnp.where(ids > 0, ids - 1, experts)[None], weights[None])
        inner = dataclasses.replace(axes, sent=tuple(m for m in axes.sent if m != across))
        y = self.within(rows[None], here, local_experts, apply, inner)[0]
        y = move(carry(y, sent, received, exchange, False), back, order).reshape(n, copies, e)
        return jnp.sum(y.astype(jnp.float32), axis=1).reshape(x.shape).astype(x.dtype)


def _once(host: Array, hosts: int) -> Array:
    """Return the hosts (n, c) that a token is sent to, each once, from those (n, k) of its experts; `hosts` is none."""
    if hosts <= host.shape[1]:
        every = jnp.arange(hosts)
        return jnp.where(jnp.any(host[:, :, None] == every, axis=1), every, hosts)
    earlier = jnp.tril(host[:, :, None] == host[:, None, :], -1)
    return jnp.where(jnp.any(earlier, axis=2), hosts, host)
