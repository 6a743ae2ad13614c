"""Fused dispatch: a device's experts are one kernel, which copies rows to its experts and adds up what they return."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.layout import say_once
from jaxscale.parallel.dispatch.base import Apply, Dispatcher, ExpertAxes, Rows, device_of, size
from jaxscale.parallel.dispatch.dropless import DroplessDispatch
from jaxscale.parallel.dispatch.exchange import Exchange, carry, move
from jaxscale.parallel.dispatch.routed import Choices, Slots


@register
@dataclasses.dataclass(frozen=True)
class FusedDispatch(Dispatcher):
    """Each device applies its experts in one kernel (`pallas_kernels.routed_experts`); drops no token.

    For the few tokens of generation, where starting operations takes most of the time (FlashMoE, Aimuyo et al. 2025).
    Rows are sorted by device only, and of them only those with an expert are sent (on TPUs; elsewhere as by
    `DroplessDispatch`). Experts with biases, in few bits, or sharded along the residual width are dispatched as by
    `DroplessDispatch`, which a warning says; where there is no kernel, and for more tokens, `routed_experts` sorts rows
    and multiplies by `grouped_matmul`.
    """

    def rows(self, sent: Mapping[str, int], top_k: int, local_experts: int) -> Rows:
        """See `Dispatcher`: as by `DroplessDispatch`."""
        return DroplessDispatch().rows(sent, top_k, local_experts)

    def __call__(
        self, x: Float[Array, "b s e"], routed: Choices | Slots, local_experts: int, apply: Apply, axes: ExpertAxes
    ) -> Float[Array, "b s e"]:
        """See `Dispatcher`; needs `Choices`."""
        assert isinstance(routed, Choices)
        why_not = getattr(apply, "why_not_fused", "the experts are a function")
        if why_not is not None:
            say_once(f"FusedDispatch() sends and multiplies as DroplessDispatch(): {why_not}")
            return DroplessDispatch()(x, routed, local_experts, apply, axes)
        fused: Callable[..., Array] = apply.fused  # type: ignore[attr-defined]  # of jaxscale.parallel.expert_products
        b, s, e = x.shape
        n, k = b * s, routed.ids.shape[2]
        devices = size(axes.sent)
        to = device_of(routed.ids.reshape(n, k), local_experts, axes)
        expert = jnp.where(to < devices, routed.ids.reshape(n, k) % local_experts, local_experts)
        weights = routed.weights.reshape(n, k)
        if not axes.sent:
            return fused(x.reshape(n, e), expert, weights).reshape(x.shape).astype(x.dtype)
        order = jnp.argsort(to.reshape(-1), stable=True)
        back = jnp.argsort(order)
        rows = move(jnp.broadcast_to(x.reshape(n, 1, e), (n, k, e)).reshape(n * k, e), order, back)
        # numbers of experts are sent as float32 beside the weights; 0 is none, which rows that nobody sent have
        numbers = jnp.where(expert < local_experts, expert + 1, 0).astype(jnp.float32).reshape(-1, 1)
        choices = move(jnp.concatenate([lax.stop_gradient(numbers), weights.reshape(-1, 1)], axis=1), order, back)
        sent = jnp.bincount(to.reshape(-1), length=devices)
        received = lax.all_to_all(sent, axes.sent, 0, 0, tiled=True)
        exchange = Exchange(axes.sent, devices, n * min(k, local_experts), n * k, True)
        rows = carry(rows, sent, received, exchange, True)
        # a TPU pads each number of a ragged exchange to a row of 128, so padded rows cost less for `choices`
        choices = carry(choices, sent, received, dataclasses.replace(exchange, ragged=False), True)
        numbers, scale = jnp.split(choices, 2, axis=1)
        out = fused(rows, lax.stop_gradient(numbers).astype(jnp.int32) - 1, scale)
        out = move(carry(out, sent, received, exchange, False), back, order).reshape(n, k, e).astype(jnp.float32)
        y = jnp.sum(jnp.where((to < devices)[..., None], out, 0.0), axis=1)
        return y.reshape(b, s, e).astype(x.dtype)
