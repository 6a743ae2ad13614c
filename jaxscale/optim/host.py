"""Optimizer state in host memory, copied to the device and back one layer at a time while it is updated."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.layout import (
    TensorInfo,
    current,
    fetched,
    host_memory_or_say,
    in_host_memory,
    layers_in_host_memory,
    say_once,
    stored_like,
)
from jaxscale.optim.adamw import AdamW
from jaxscale.optim.base import (
    FusedTransformation,
    HostState,
    Optimizer,
    Schedule,
    Tree,
    apply_gradients,
    is_named,
    state_infos,
)
from jaxscale.optim.storage import is_quantized

_ABSENT = optax.MaskedNode()
_UNSTACKED, _SCALAR = 0, -1  # two groups; the group of a stack of layers is its number of layers


@register
@dataclasses.dataclass(frozen=True)
class OnHost:
    """Another optimizer with its state in host memory (ZeRO-Offload, Ren et al. 2021; Rajbhandari et al. 2021).

    The device holds the state of one layer at a time: a scan over each stack of layers copies a layer's state to the
    device, updates it and copies it back. Results are those of the wrapped optimizer. On hardware without host memory,
    and in a run without a layout, the state stays on the device, with a warning.

    Args:
      optimizer: the wrapped optimizer; its states must have their parameters' shapes, so not Adafactor or SOAP.
      master: also store float32 master weights in host memory and update those; the model's parameters, in bfloat16
        (`Transformer.param_dtype`), are rounded from them.

    Raises:
      ConfigError: from `make`, the optimizer has states of other shapes.
    """

    optimizer: Optimizer = AdamW()
    master: bool = False

    def make(self, learning_rate: Schedule, infos: Tree) -> optax.GradientTransformation:
        """Return `on_host` of the wrapped optimizer for these parameters."""
        return on_host(lambda infos: self.optimizer.make(learning_rate, infos), infos, master=self.master)


def on_host(
    make: Callable[[Tree], optax.GradientTransformation], infos: Tree, *, master: bool = False
) -> FusedTransformation:
    """Return any optax transformation with its state in host memory; see `OnHost`.

    Args:
      make: returns the transformation for a `TensorInfo` per parameter. It is also called for a single layer of each
        stack: then the stack's parameters have a first dimension of 1, and `optax.MaskedNode` replaces the others.
      infos: a `TensorInfo` per parameter.
      master: whether to store float32 master weights in host memory, as for `OnHost`.

    Raises:
      ConfigError: the transformation has states of other shapes than their parameters'.
    """
    if master:
        infos = jax.tree.map(lambda i: dataclasses.replace(i, dtype=jnp.dtype(jnp.float32)), infos)
    whole = make(infos)
    states = state_infos(whole, infos)
    for i in jax.tree.leaves(states, is_leaf=is_named):
        if is_named(i) or (not i.path and i.size > 1):
            shape = i.value.shape if is_named(i) else i.shape
            raise ConfigError(
                f"OnHost needs states of their parameters' shapes, but this optimizer has one of shape {shape}; use "
                "AdamW, SGD or an 8-bit optimizer instead, as OnHost.optimizer = @AdamW()"
            )
    of_params = jax.tree.map(_group, infos)
    of_state = jax.tree.map(lambda q: _group(jax.tree.leaves(q)[0]), states, is_leaf=is_quantized)
    groups = sorted({*jax.tree.leaves(of_params)})
    parts = {g: make(_only(g, of_params, jax.tree.map(_one_high, infos))) for g in groups}

    def init(params: Tree) -> HostState:
        wide = jax.tree.map(lambda p: p.astype(jnp.float32), params) if master else None
        return HostState(whole.init(params if wide is None else wide), wide)

    def run(grads: Tree, state: HostState, params: Tree, apply: bool) -> tuple[Tree, HostState]:
        fetch, store = _moves()

        def one(g: int, grads: Tree, params: Tree, inner: Tree, wide: Tree) -> tuple[Tree, Tree, Tree]:
            """Update a group, or one layer of it, with everything on the device."""
            inner = jax.tree.map(lambda k, s, scalar: scalar if k == _SCALAR else s, of_state, inner, state.inner)
            base = wide if master else params
            grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, base)
            if not (apply or master):
                out, inner = parts[g].update(grads, inner, base)
                return out, inner, wide
            new, inner = apply_gradients(parts[g], grads, inner, base)
            if not master:
                return new, inner, wide
            return jax.tree.map(lambda w, p: w.astype(p.dtype) if apply else w - p, new, params), inner, new

        def at_once(g: int, grads: Tree, params: Tree, *held: Tree) -> tuple[Tree, Tree, Tree]:
            out, inner, wide = one(g, grads, params, *jax.tree.map(fetch, held))
            return out, _each(store, of_state, inner), jax.tree.map(store, wide)

        def by_layer(g: int, *trees: Tree) -> tuple[Tree, Tree, Tree]:
            """Update a group by a scan; each layer is a stack of one, so that logical axes still match dimensions."""

            def store_layer(x: jax.Array) -> jax.Array:
                return store(x) if layers_in_host_memory((1, *x.shape), x.dtype) else x

            def layer(_: None, trees: Tree) -> tuple[None, Tree]:
                like, held = trees[1], jax.tree.map(fetch, trees[2:])
                grads, params = jax.tree.map(lambda x: fetched(x) if in_host_memory(x) else x, trees[:2])
                out, inner, wide = one(g, *jax.tree.map(lambda x: x[None], (grads, params, *held)))

                def flat(x: jax.Array) -> jax.Array:
                    return x[0]

                out, inner, wide = jax.tree.map(flat, out), _each(flat, of_state, inner), jax.tree.map(flat, wide)
                out = jax.tree.map(lambda x, p: stored_like(x, p) if in_host_memory(p) else x, out, like)
                return None, (out, _each(store_layer, of_state, inner), jax.tree.map(store_layer, wide))

            _, (out, inner, wide) = jax.lax.scan(layer, None, trees)
            return out, jax.tree.map(lambda k, s: s[0] if k == _SCALAR else s, of_state, inner), wide

        results = []
        for g in groups:
            held = [_only(g, of_params, grads), _only(g, of_params, params), _only(g, of_state, state.inner)]
            held.append(_only(g, of_params, state.master) if master else None)
            results.append((at_once if g == _UNSTACKED else by_layer)(g, *held))
        outs, inners, wides = zip(*results, strict=True)

        def pick(k: int, *x: Tree) -> Tree:
            return x[0 if k == _SCALAR else groups.index(k)]

        return (
            jax.tree.map(pick, of_params, *outs),
            HostState(jax.tree.map(pick, of_state, *inners), jax.tree.map(pick, of_params, *wides) if master else None),
        )

    def update(grads: Tree, state: HostState, params: Tree | None = None) -> tuple[Tree, HostState]:
        if params is None:
            raise ValueError("OnHost needs the parameters: call update(grads, state, params)")
        return run(grads, state, params, apply=False)

    notes = (*getattr(whole, "notes", ()), "optimizer state is in host memory, a layer of it at a time on the device")
    return FusedTransformation(init, update, lambda g, s, p: run(g, s, p, apply=True), notes)


def _group(info: TensorInfo) -> int:
    """Return the group that an array is updated with: arrays with equally many layers are in one scan."""
    if not info.path:
        return _SCALAR
    return info.shape[0] if info.axes and info.axes[0] == "layers" else _UNSTACKED


def _one_high(info: TensorInfo) -> TensorInfo:
    return dataclasses.replace(info, shape=(1, *info.shape[1:])) if _group(info) > 0 else info


def _only(group: int, groups: Tree, tree: Tree) -> Tree:
    """Return the tree with `MaskedNode` in place of what is in another group."""
    return jax.tree.map(lambda g, x: x if g == group else _ABSENT, groups, tree)


def _each(fn: Callable[[jax.Array], jax.Array], groups: Tree, state: Tree) -> Tree:
    """Apply `fn` to every array of a state except scalars."""
    return jax.tree.map(lambda g, s: s if g == _SCALAR else jax.tree.map(fn, s), groups, state)


def _moves() -> tuple[Callable[[jax.Array], jax.Array], Callable[[jax.Array], jax.Array]]:
    """Return the functions that copy an array to the device and back to the host; identities if all stays there."""

    def stay(x: jax.Array) -> jax.Array:
        return x

    if current() is None:
        say_once("a run without a layout keeps optimizer state on the device; Layout('data=1') is one device")
        return stay, stay
    if not host_memory_or_say("optimizer state", "stays on the device"):
        return stay, stay
    return lambda x: jax.device_put(x, jax.memory.Space.Device), lambda x: jax.device_put(x, jax.memory.Space.Host)
