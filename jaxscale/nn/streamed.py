"""Layers whose parameters are in host memory: a window of them is on the device, also in the backward pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxscale.errors import ConfigError
from jaxscale.layout import constrain, fetched, in_host_memory, stored_like
from jaxscale.layout.tensors import Tree
from jaxscale.nn.context import Context
from jaxscale.nn.late import Late

Group = Callable[[Tree, Tree, Context], tuple[Tree, Tree]]
"""`f(x, (parameters, part) of a repeat, context) -> (x, statistics)`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Streamed(Late):
    """A stack of layers' parameter in host memory.

    Args:
      stored: the stack, (layers, ...).
      axes: logical axes of a layer.
      window: the most layers on the device.
    """

    stored: Float[Array, "..."]
    axes: tuple[str | None, ...] = dataclasses.field(metadata={"static": True})
    window: int = dataclasses.field(metadata={"static": True})

    def array(self) -> Float[Array, "..."]:
        """Return the parameter of a layer, on the device."""
        return constrain(fetched(self.stored), *self.axes, kind="params")

    def layer(self, at: Array) -> Float[Array, "..."]:
        """Return the parameter of the layer of that number, on the device.

        Args:
          at: the number in the stack, int32.
        """
        one = lax.dynamic_index_in_dim(self.stored, at, keepdims=False)
        return dataclasses.replace(self, stored=one).array()

    def gradient(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return the gradient of a layer in the memory that the stack is in.

        Args:
          x: the gradient, on the device.
        """
        return stored_like(constrain(x.astype(self.stored.dtype), *self.axes, kind="grads"), self.stored)


def is_streamed(x: object) -> bool:
    """Return whether a node of a tree of parameters is `Streamed`."""
    return isinstance(x, Streamed)


def window_of(params: Tree) -> int | None:
    """Return the most layers of a run on the device, or `None` if its parameters are there.

    Args:
      params: the parameters of a run.
    """
    windows = [x.window for x in jax.tree.leaves(params, is_leaf=is_streamed) if is_streamed(x)]
    return max(windows, default=None)


def apply_streamed(
    group: Group, x: Tree, params: Tree, part: Tree, context: Context, *, offload: bool = False
) -> tuple[Tree, Tree]:
    """Apply all repeats of a group, whose parameters are in host memory.

    While a layer runs, the one that is `window - 1` further on is copied to the device, forward and backward. The
    backward pass reads every layer once more, computes it again from its input, and copies its gradient to the host
    (Superpipeline, Abbasi and Lim 2024). At the end of a pass the last layer is copied `window - 1` times more.

    Args:
      group: applies one repeat.
      x: the input of the run.
      params: its parameters, `Streamed` or stacks on the device.
      part: further inputs of each repeat, arrays with a leading dimension of repeats.
      context: the context of all layers; nothing in it is differentiated.
      offload: store the inputs of the layers in host memory until the backward pass.

    Returns:
      the output of the last repeat, and the statistics of each.

    Raises:
      ConfigError: the layers have inputs of their own.
    """
    if context.inputs is not None:
        raise ConfigError("StreamLayers does not copy layers that have inputs of their own; use Backprop()")
    leaves, tree = jax.tree.flatten(params, is_leaf=is_streamed)
    late = [n for n, leaf in enumerate(leaves) if is_streamed(leaf)]
    stacks: list[Streamed] = [leaves[n] for n in late]
    plain = [leaf for leaf in leaves if not is_streamed(leaf)]
    window, layers = max(s.window for s in stacks), stacks[0].stored.shape[0]

    def whole(streamed: list[Array], rest: list[Array]) -> Tree:
        streams, others = iter(streamed), iter(rest)
        return jax.tree.unflatten(tree, [next(streams) if n in late else next(others) for n in range(len(leaves))])

    def over(step: Callable[..., tuple[Tree, Tree]], carry: Tree, stored: list[Array], xs: Tree, back: bool) -> Any:
        of = [dataclasses.replace(s, stored=a) for s, a in zip(stacks, stored, strict=True)]
        return _over_layers(step, carry, of, xs, layers, window, back)

    def forward(x: Tree, stored: list[Array], rest: list[Array], part: Tree, arrays: Tree) -> tuple[Tree, Tree]:
        def layer(x: Tree, now: list[Array], of: Tree) -> tuple[Tree, Tree]:
            rest, part = of
            y, stats = group(x, (whole(now, rest), part), context.holding(arrays))
            return y, (stats, jax.tree.map(_to_host, x) if offload else x)

        y, (stats, inputs) = over(layer, x, stored, (rest, part), back=False)
        return (y, stats), (inputs, stored, rest, part, arrays)

    def backward(saved: Tree, cotangents: Tree) -> tuple[Tree, ...]:
        (inputs, stored, rest, part, arrays), (dy, dstats) = saved, cotangents

        def layer(dy: Tree, now: list[Array], of: Tree) -> tuple[Tree, Tree]:
            x, rest, part, dstats = of
            x = jax.tree.map(lambda a: fetched(a) if in_host_memory(a) else a, x)

            def applied(x: Tree, now: list[Array], rest: list[Array]) -> tuple[Tree, Tree]:
                return group(x, (whole(now, rest), part), context.holding(arrays))

            dx, grads, drest = jax.vjp(applied, x, now, rest)[1]((dy, dstats))
            return dx, ([s.gradient(g) for s, g in zip(stacks, grads, strict=True)], drest)

        dx, (grads, drest) = over(layer, dy, stored, (inputs, rest, part, dstats), back=True)
        return dx, grads, drest, None, None

    run = jax.custom_vjp(lambda *args: forward(*args)[0])
    run.defvjp(forward, backward)
    return run(x, [s.stored for s in stacks], plain, part, context.arrays())


def _over_layers(
    step: Callable[..., tuple[Tree, Tree]],
    carry: Tree,
    stacks: list[Streamed],
    xs: Tree,
    layers: int,
    window: int,
    back: bool,
) -> tuple[Tree, Tree]:
    """Return the scan of `step(carry, parameters of a layer, x of the layer)`; `back` is from the last to the first."""
    numbers = jnp.arange(layers)
    ahead = min(window, layers) - 1
    if not ahead:

        def alone(carry: Tree, of: Tree) -> tuple[Tree, Tree]:
            at, x = of
            return step(carry, [s.layer(at) for s in stacks], x)

        return lax.scan(alone, carry, (numbers, xs), reverse=back)
    # XLA would copy the first layers of the backward pass while the forward pass runs.
    carry, numbers = lax.optimization_barrier((carry, numbers))
    order = numbers[::-1] if back else numbers
    first = [jnp.stack(a) for a in zip(*([s.layer(order[j]) for s in stacks] for j in range(ahead)), strict=True)]
    later = jnp.concatenate([order[ahead:], jnp.broadcast_to(order[-1:], (ahead,))])
    slots = jnp.arange(layers) % ahead
    if back:
        later, slots = later[::-1], slots[::-1]

    def body(state: Tree, of: Tree) -> tuple[Tree, Tree]:
        (carry, ring), (later, slot, x) = state, of
        coming = [s.layer(later) for s in stacks]
        now = [lax.dynamic_index_in_dim(r, slot, keepdims=False) for r in ring]
        carry, y = step(carry, now, x)
        # So that the copy of the coming layer starts before this one's products and ends after them.
        carry, ring, coming = lax.optimization_barrier((carry, ring, coming))
        ring = [lax.dynamic_update_index_in_dim(r, a, slot, 0) for r, a in zip(ring, coming, strict=True)]
        return (carry, ring), y

    (carry, _), ys = lax.scan(body, (carry, first), (later, slots, xs), reverse=back)
    return carry, ys


def _to_host(x: Array) -> Array:
    return jax.device_put(x, jax.memory.Space.Host)
