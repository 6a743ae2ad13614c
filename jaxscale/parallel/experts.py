"""Expert parallelism: dispatch tokens to their experts by all-to-all, multiply grouped by expert, and combine."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jaxscale.errors import LayoutError
from jaxscale.layout import TensorInfo, constrain, current
from jaxscale.layout.rules import Kind
from jaxscale.parallel.arithmetic import Arithmetic
from jaxscale.parallel.dispatch import Capacity, Choices, Dispatcher, DroplessDispatch, ExpertAxes, SlotDispatch, Slots
from jaxscale.parallel.dispatch.base import size
from jaxscale.parallel.dispatch.routed import fill
from jaxscale.parallel.expert_products import DOWN, UP, Biases, ExpertsOf, ProductSettings, Weights
from jaxscale.parallel.seeds import mixed, next_seed
from jaxscale.parallel.sharded import cut_over, free_and_manual
from jaxscale.parallel.weight import Weight

TOKENS = ("expert_batch", "expert_seq", "embed")
"""Logical axes of the experts' input and output."""


def expert_mlp(
    x: Float[Array, "b s e"],
    routed: Choices | Slots,
    weights: Weights,
    *,
    act: Callable[[Array], Array],
    combine: Callable[[Array, Array], Array] | None = None,
    biases: Biases | None = None,
    arithmetic: Arithmetic,
    capacity: Capacity | None = None,
    dispatcher: Dispatcher | None = None,
    gathered: bool = False,
    saves: bool = True,
) -> Float[Array, "b s e"]:
    """Sum `weight * down(act(gate(x)) * up(x))` over each token's experts; without a gate `down(act(up(x)))`.

    Under a layout, every device sends each of its tokens to the devices that hold its experts, along the mesh axes of
    'experts' that also shard tokens. Along the other axes of 'experts' all devices have the same tokens, and each
    computes its own experts; the outputs are summed, as over the axes of 'expert_mlp'. Weights that are sharded along
    'expert_embed' (FSDP) are cast and then gathered; their gradients are computed in the parameters' dtype and
    reduce-scattered.

    With a capacity, an expert takes as many tokens of each group as it has slots, first choices before second ones,
    then earlier tokens first (Lepikhin et al. 2021), and drops the others.

    Args:
      x: activations.
      routed: the experts of each token, or the tokens of each expert.
      weights: float32 or bfloat16, with logical axes `UP` and `DOWN`; or, without a capacity, of `Weight.for_experts`.
      act: the activation function.
      combine: the hidden layer of `gate(x)` and `up(x)`; `None` is `act(gate) * up`.
      biases: added after each product, or `None`.
      arithmetic: the numbers of products; its dtype is that of what devices exchange.
      capacity: capacity for `Choices`; `None` drops nothing. It has no effect on `Slots`.
      dispatcher: how tokens are sent; by default `SlotDispatch` with a capacity and `DroplessDispatch` without.
      gathered: whether the weights are sharded as activations already (`Weight.gathered`).
      saves: see `ProductSettings`.

    Returns:
      an array of x's shape, in the arithmetic's dtype.

    Raises:
      LayoutError: a dimension that does not divide, a group of tokens that the layout would shard, or mesh axes that
        the dispatcher does not support.
    """
    if isinstance(routed, Slots):
        capacity = Capacity(routed.token.shape[3], x.shape[1] // routed.token.shape[1])
    if dispatcher is None:
        dispatcher = DroplessDispatch() if capacity is None else SlotDispatch()
    x, seed = x.astype(arithmetic.dtype), next_seed() if arithmetic.random else None
    layout, (free, manual) = current(), free_and_manual()
    if layout is None or not free:
        settings = ProductSettings(act, combine, arithmetic, saves=saves)
        return _local(x, routed, weights, weights, biases, seed, settings, capacity, dispatcher)
    axes = _axes()
    if gathered:
        axes = dataclasses.replace(axes, gathered=(), scattered=())
    settings = ProductSettings(act, combine, arithmetic, axes, saves)

    def local(x: Array, *arrays: Any) -> Array:
        routed, weights, taps, biases, seed = arrays
        return _local(x[0], routed, weights, taps, biases, seed, settings, capacity, dispatcher)[None]

    dispatcher.check(axes)
    if not manual:
        _check(x, weights, capacity)
    x = constrain(x, *TOKENS)
    # One copy per device that has the same tokens: the partitioner then sums over copies, forward and backward, and
    # reduce-scatters where the result is sharded.
    copies = math.prod(layout.sizes[m] for m in axes.summed)

    def spec(*dims: tuple[str, ...]) -> PartitionSpec:
        return PartitionSpec(*(over or None for over in dims))

    batch, seq = cut_over("expert_batch"), cut_over("expert_seq")
    tokens = spec(axes.summed, batch, seq, ())
    route = spec(batch, seq, (), ())

    def kernels(embed: tuple[str, ...]) -> Weights:
        over = {"experts": axes.experts, "expert_embed": embed, "expert_mlp": cut_over("expert_mlp"), None: ()}

        def of(w: Any, names: tuple[str, ...]) -> Any:
            if not isinstance(w, Weight):
                return None if w is None else spec(*(over[n] for n in names))
            infos = w.infos(TensorInfo("experts", w.shape, arithmetic.dtype, names))
            return jax.tree.map(lambda info: spec(*(over[n] for n in info.axes)), infos)

        return Weights._make(of(w, names) for w, names in zip(weights, (UP, UP, DOWN), strict=True))

    up_bias, down_bias = spec(axes.experts, cut_over("expert_mlp")), spec(axes.experts, ())
    of_biases = None if biases is None else Biases(None if biases.gate is None else up_bias, up_bias, down_bias)  # type: ignore[arg-type]
    # `taps` are sharded as gradients: only their cotangents are used, and of `weights` only the values.
    taps = weights
    if axes.scattered != axes.gathered:
        names = zip(weights, (UP, UP, DOWN), strict=True)
        taps = Weights._make(constrain(w, *a, kind="grads") if isinstance(w, jax.Array) else w for w, a in names)
    weights = jax.tree.map(lax.stop_gradient, weights)
    stack = lax.with_sharding_constraint(jnp.broadcast_to(x, (copies, *x.shape)), tokens)
    y = jax.shard_map(
        local,
        in_specs=(
            tokens,
            jax.tree.map(lambda r: PartitionSpec(*route[: r.ndim]), routed),
            kernels(axes.gathered),
            kernels(axes.scattered),
            of_biases,
            PartitionSpec(),
        ),
        out_specs=tokens,
        axis_names=free if manual else set(),
        check_vma=False,  # copies differ until they are summed
    )(stack, routed, weights, taps, biases, seed)
    # in y's dtype, and with a constant initial value, without which the derivative is computed slice by slice
    return constrain(lax.reduce(y, np.zeros([], y.dtype), lax.add, (0,)), *TOKENS)


def _axes() -> ExpertAxes:
    experts, mlp = cut_over("experts"), cut_over("expert_mlp")
    tokens = cut_over("expert_batch", "expert_seq")

    def embed(kind: Kind) -> tuple[str, ...]:  # () if the rules reshard weights for use, which also gathers them
        same = all(cut_over(a, kind=kind) == cut_over(a) for a in ("experts", "expert_mlp"))
        return cut_over("expert_embed", kind=kind) if same else ()

    sent = tuple(m for m in experts if m in tokens)
    summed = tuple(m for m in (*experts, *mlp) if m not in tokens)
    return ExpertAxes(experts, sent, summed, embed("params"), embed("grads"), mlp, tokens)


def _check(x: Array, weights: Weights, capacity: Capacity | None) -> None:
    layout = current()
    assert layout is not None
    if over := cut_over("embed"):
        raise LayoutError(
            f"experts need whole vectors, and the layout {layout} shards the activations' 'embed' over "
            f"{' and '.join(over)}; remove that rule"
        )
    layout.spec(UP, weights.up.shape, kind="activations", name="the experts' weights")
    layout.spec(UP, weights.up.shape, kind="params", name="the experts' weights")
    names = (*TOKENS[:2], "expert_mlp")
    layout.spec(names, (*x.shape[:2], weights.up.shape[2]), kind="activations", name="the experts' hidden layer")
    if capacity is not None:
        check_groups(x.shape[1], capacity)


def check_groups(seq: int, capacity: Capacity, *, dropless: bool = False) -> None:
    """Check that the layout in force does not shard a row inside of a group of tokens.

    Args:
      seq: tokens per row.
      capacity: the capacity, with the size of groups.
      dropless: the router works without a capacity, which the message then suggests.

    Raises:
      LayoutError: the layout shards a group.
    """
    layout = current()
    if layout is None or free_and_manual()[1]:  # inside another shard_map a row is local already
        return
    pieces = layout.split("expert_seq")
    if seq % pieces == 0 and seq // pieces % capacity.group:
        fit = math.gcd(capacity.group, seq // pieces)
        raise LayoutError(
            f"the layout {layout} shards rows of {seq} tokens over {pieces} devices, and an expert's slots are for "
            f"groups of {capacity.group} tokens; set MixtureOfExperts.group = {fit}"
            + (", or MixtureOfExperts.capacity = None" if dropless else "")
        )


def _local(
    x: Array,
    routed: Choices | Slots,
    weights: Weights,
    taps: Weights,
    biases: Biases | None,
    seed: Array | None,
    settings: ProductSettings,
    capacity: Capacity | None,
    dispatcher: Dispatcher,
) -> Array:
    """The layer on one device, with its tokens and its experts."""
    axes = settings.axes
    if seed is not None:  # places are counted on each device, which has random numbers of its own
        for m in dict.fromkeys((*axes.tokens, *axes.experts, *axes.mlp)):
            seed = mixed(seed + lax.axis_index(m).astype(jnp.uint32))
    apply = ExpertsOf(weights, taps, biases, seed, settings)
    local_experts = weights.up.shape[0]
    if capacity is not None and isinstance(routed, Choices):
        routed = fill(routed, local_experts * size(axes.experts), capacity)
    return dispatcher(x, routed, local_experts, apply, axes)
