"""Where experts and tokens are, by which experts a token's id predicts (Speculative MoE, Li et al. 2025).

Recorded choices say for each token id how often it goes to each expert. Experts that the same tokens choose are put on
one device, which is an order of experts in the checkpoint, and a token is put on the device that has the most of its
predicted experts. Outputs do not depend on either: only fewer choices cross devices (arXiv:2503.04398).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxscale.convert.fewer_experts import each_layer, ordered
from jaxscale.errors import ConfigError
from jaxscale.layout.tensors import Tree
from jaxscale.models import TransformerConfig
from jaxscale.nn import MixtureOfExperts, Router
from jaxscale.step.state import describe_model

Table = Float[np.ndarray, "layers v x"]


@dataclasses.dataclass(frozen=True)
class _Noted:
    """A router that calls `note` with the experts of every token."""

    inner: Router
    note: Callable[[Any], None]

    @property
    def balanced(self) -> bool:
        return self.inner.balanced

    @property
    def needs_capacity(self) -> bool:
        return self.inner.needs_capacity

    def probabilities(self, scores: Float[Array, "b s x"]) -> Float[Array, "b s x"]:
        return self.inner.probabilities(scores)

    def __call__(self, scores: Array, bias: Array | None, *, top_k: int, capacity: Any, real: Array) -> Any:
        routed = self.inner(scores, bias, top_k=top_k, capacity=capacity, real=real)
        jax.debug.callback(self.note, routed.ids, ordered=True)  # type: ignore[union-attr]
        return routed


def recorded(model: TransformerConfig, params: Tree, tokens: Int[np.ndarray, "b s"]) -> Int[np.ndarray, "layers n k"]:
    """Return the experts that each token goes to, in the order of layers, on one device.

    Args:
      model: the model's config, whose experts are those of `Transformer.mlp` and whose tokens choose experts.
      params: its parameters.
      tokens: ids, rows without padding.

    Raises:
      ConfigError: another model.
    """
    mlp = model.mlp
    if not isinstance(mlp, MixtureOfExperts) or mlp.router.needs_capacity or model.blocks:
        raise ConfigError("choices are recorded of tokens that choose among experts which are Transformer.mlp")
    seen: list[np.ndarray] = []
    router = _Noted(mlp.router, lambda ids: seen.append(np.asarray(ids)))
    noted = dataclasses.replace(model, mlp=dataclasses.replace(mlp.on_any_mesh(), router=router), memory="none")
    graphdef, _ = describe_model(noted)
    jax.block_until_ready(jax.jit(lambda p, t: nnx.merge(graphdef, p).hidden(t))(params, tokens))
    jax.effects_barrier()
    return np.stack(seen).reshape(len(seen), tokens.size, mlp.top_k)


def counted(tokens: Int[np.ndarray, " n"], chosen: Int[np.ndarray, "layers n k"], vocab: int, experts: int) -> Table:
    """Return how often each token id went to each expert of each layer.

    Args:
      tokens: ids.
      chosen: the experts of each token.
      vocab: number of ids.
      experts: experts of a layer.
    """
    table = np.zeros((len(chosen), vocab, experts))
    for layer, own in enumerate(chosen):
        np.add.at(table[layer], (np.repeat(tokens, own.shape[1]), own.reshape(-1)), 1.0)
    return table


def predicted(table: Table, tokens: Int[np.ndarray, " n"], k: int) -> Int[np.ndarray, "layers n k"]:
    """Return the experts that a token's id went to most often; for ids that were never seen, those of all tokens.

    Args:
      table: of `counted`.
      tokens: ids.
      k: experts of a token.
    """
    whole = table.sum(1, keepdims=True)
    likely = table + whole / (1.0 + whole.sum(2, keepdims=True))  # less than one count, all together
    return np.argsort(-likely[:, tokens], axis=2, kind="stable")[..., :k]


def accuracy(guess: Int[np.ndarray, "layers n k"], chosen: Int[np.ndarray, "layers n k"]) -> float:
    """Return the share of the choices that were predicted.

    Args:
      guess: of `predicted`.
      chosen: the experts of each token.
    """
    return float(np.mean(np.any(chosen[..., :, None] == guess[..., None, :], axis=-1)))


def placement(table: Table, devices: int) -> Int[np.ndarray, "layers x"]:
    """Return an order of each layer's experts, in which each device has as many that the same tokens choose.

    Layers are placed one after the other, since a token has one device in all of them. Of the first layer each device
    begins with the most chosen expert that is left, and takes those that share most tokens with its own. Of later
    layers a pair of device and expert at a time is fixed, the one of the most tokens: those that are on the device by
    the layers before.

    Args:
      table: of `counted`.
      devices: number of devices, along the expert axis.

    Returns:
      by layer, which expert is where: the first ones are on the first device.

    Raises:
      ConfigError: the devices do not divide the experts.
    """
    layers, _, experts = table.shape
    if devices < 1 or experts % devices:
        fit = max(d for d in range(1, experts + 1) if experts % d == 0 and d <= max(1, devices))
        raise ConfigError(f"devices = {devices} do not divide {experts} experts; the nearest number that does is {fit}")
    own, homes = experts // devices, np.zeros((layers, experts), np.int64)
    homes[0] = _together(table[0], devices)
    for layer in range(1, layers):
        own_choices = _on(table[:layer], homes[:layer], devices)  # of each id, its choices on each device
        share = own_choices / np.maximum(own_choices.sum(1, keepdims=True), 1e-30)
        gain = share.T @ table[layer]  # (devices, experts)
        homes[layer], left = -1, np.full(devices, own)
        for at in np.argsort(-gain, axis=None, kind="stable"):
            device, expert = divmod(int(at), experts)
            if left[device] and homes[layer, expert] < 0:
                homes[layer, expert], left[device] = device, left[device] - 1
    return np.argsort(homes, axis=1, kind="stable")


def homes_of(order: Int[np.ndarray, "layers x"], devices: int) -> Int[np.ndarray, "layers x"]:
    """Return the device of each expert, by its number before it was placed.

    Args:
      order: of `placement`.
      devices: number of devices.
    """
    homes = np.empty_like(order)
    np.put_along_axis(homes, order, np.arange(order.shape[1])[None] // (order.shape[1] // devices), axis=1)
    return homes


def placed(model: TransformerConfig, params: Tree, order: Int[np.ndarray, "layers x"]) -> Tree:
    """Return parameters with each layer's experts in another order, columns of the router and biases included.

    Args:
      model: the model's config.
      params: its parameters, NumPy arrays.
      order: of `placement`, a line for each layer with experts, the first layer first.

    Raises:
      ConfigError: another number of layers has experts, or a router chooses among groups of consecutive experts.
    """
    limited = [n for n, m in enumerate(model.layer_mlps()) if getattr(getattr(m, "router", None), "limit", None)]
    if limited:
        raise ConfigError(
            f"the router of layer {limited[0]} has a GroupLimit, of consecutive experts; leave their order"
        )
    layers = [n for n, mlp in enumerate(model.layer_mlps()) if isinstance(mlp, MixtureOfExperts)]
    if len(layers) != len(order):
        raise ConfigError(f"order has {len(order)} layers, and {len(layers)} layers of the model have experts")
    return each_layer(model, params, lambda number, arrays, axes: ordered(arrays, axes, order[layers.index(number)]))


def devices_of(
    guess: Int[np.ndarray, "layers n k"], homes: Int[np.ndarray, "layers x"], devices: int, rows: int = 1
) -> Int[np.ndarray, " n"]:
    """Return a device for each token, so that all devices have as many (within one row).

    A row is put on the device that has most of its predicted experts, of all layers together; the rows that would gain
    most come first, while their device has room.

    Args:
      guess: the predicted experts of each token.
      homes: the device of each expert.
      devices: number of devices.
      rows: consecutive tokens that stay together: 1, or the tokens of a sequence.
    """
    local = np.stack([np.sum(np.take_along_axis(homes[:, None], guess, 2) == d, axis=(0, 2)) for d in range(devices)])
    gain = local.reshape(devices, -1, rows).sum(2)  # (devices, rows of tokens)
    space, result = np.full(devices, -(-gain.shape[1] // devices)), np.full(gain.shape[1], -1)
    for at in np.argsort(-gain, axis=None, kind="stable"):
        device, row = divmod(int(at), gain.shape[1])
        if space[device] and result[row] < 0:
            result[row], space[device] = device, space[device] - 1
    return np.repeat(result, rows)


def crossing(
    chosen: Int[np.ndarray, "layers n k"], homes: Int[np.ndarray, "layers x"], where: Int[np.ndarray, " n"]
) -> float:
    """Return the share of the choices whose expert is on another device than the token.

    Args:
      chosen: the experts of each token.
      homes: the device of each expert.
      where: the device of each token.
    """
    return float(np.mean(np.take_along_axis(homes[:, None], chosen, 2) != where[None, :, None]))


def _on(table: Table, homes: Int[np.ndarray, "layers x"], devices: int) -> Float[np.ndarray, "v d"]:
    """Of each token id, its choices on each device."""
    return np.stack([sum(t[:, h == d].sum(1) for t, h in zip(table, homes, strict=True)) for d in range(devices)], 1)


def _together(table: Float[np.ndarray, "v x"], devices: int) -> Int[np.ndarray, " x"]:
    """Return a device for each expert of a layer, as many of each, by the tokens that they share."""
    experts, size = table.shape[1], table.sum(1, keepdims=True)
    shared = (table / np.maximum(size, 1)).T @ table
    homes = np.full(experts, -1)
    for device in range(devices):
        for _ in range(experts // devices):
            mine = homes == device
            worth = shared[mine].sum(0) if mine.any() else table.sum(0)
            homes[np.argmax(np.where(homes < 0, worth, -1.0))] = device
    return homes
