"""Optimizer state in host memory, brought to the device and back one layer at a time while it is updated."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.layout import TensorInfo, current, host_memory_or_say, say_once
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
_UNSTACKED, _SCALAR = 0, -1  # groups, besides those of stacks, which are their number of layers


@register
@dataclasses.dataclass(frozen=True)
class OnHost:
    """Another optimizer with its state in host memory (ZeRO-Offload, Ren et al. 2021; Rajbhandari et al. 2021).

    The device holds the state of one layer at a time: a scan over each stack of layers brings a layer's, updates it and
    sends it back. The numbers are the optimizer's own. On hardware without host memory, and in a run without a layout,
    the state stays on the device, and a warning says so.

    Args:
      optimizer: one whose states have their parameters' shapes: all but Adafactor and SOAP.
      master: also keep float32 parameters there, and update those; the model's own, in bfloat16
        (`Transformer.param_dtype`), are rounded from them.

    Raises:
      ConfigError: from `make`, an optimizer with states of other shapes.
    """

    optimizer: Optimizer = AdamW()
    master: bool = False

    def make(self, learning_rate: Schedule, infos: Tree) -> optax.GradientTransformation:
        """The transformation, for these parameters."""
        return on_host(lambda infos: self.optimizer.make(learning_rate, infos), infos, master=self.master)


def on_host(
    make: Callable[[Tree], optax.GradientTransformation], infos: Tree, *, master: bool = False
) -> FusedTransformation:
    """`OnHost` for any transformation.

    Args:
      make: builds it from a `TensorInfo` per parameter; asked for one layer of a stack, whose parameters are one high
        and the others' places empty (`optax.MaskedNode`), too.
      infos: a `TensorInfo` per parameter.
      master: as for `OnHost`.

    Raises:
      ConfigError: an optimizer with states of other shapes.
    """
    if master:
        infos = jax.tree.map(lambda i: dataclasses.replace(i, dtype=jnp.dtype(jnp.float32)), infos)
    whole = make(infos)
    states = state_infos(whole, infos)
    for i in jax.tree.leaves(states, is_leaf=is_named):
        if is_named(i) or (not i.path and i.size > 1):
            shape = i.value.shape if is_named(i) else i.shape
            raise ConfigError(
                f"OnHost streams states of their parameters' shapes, and this optimizer has one of shape {shape}; "
                "give it AdamW, SGD or an 8-bit optimizer, as OnHost.optimizer = @AdamW()"
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
            """A group, or one layer of it, all on the device."""
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
            """A layer is a stack one high, so that names keep their places."""

            def layer(_: None, trees: Any) -> tuple[None, Any]:
                (grads, params), held = trees[:2], jax.tree.map(fetch, trees[2:])
                out, inner, wide = one(g, *jax.tree.map(lambda x: x[None], (grads, params, *held)))
                flat = lambda x: x[0]  # noqa: E731
                out, inner, wide = jax.tree.map(flat, out), _each(flat, of_state, inner), jax.tree.map(flat, wide)
                return None, (out, _each(store, of_state, inner), jax.tree.map(store, wide))

            _, (out, inner, wide) = jax.lax.scan(layer, None, trees)
            return out, jax.tree.map(lambda k, s: s[0] if k == _SCALAR else s, of_state, inner), wide

        found = []
        for g in groups:
            held = [_only(g, of_params, grads), _only(g, of_params, params), _only(g, of_state, state.inner)]
            held.append(_only(g, of_params, state.master) if master else None)
            found.append((at_once if g == _UNSTACKED else by_layer)(g, *held))
        outs, inners, wides = zip(*found, strict=True)
        pick = lambda k, *x: x[0 if k == _SCALAR else groups.index(k)]  # noqa: E731
        return (
            jax.tree.map(pick, of_params, *outs),
            HostState(jax.tree.map(pick, of_state, *inners), jax.tree.map(pick, of_params, *wides) if master else None),
        )

    def update(grads: Tree, state: HostState, params: Tree | None = None) -> tuple[Tree, HostState]:
        if params is None:
            raise ValueError("state on the host is streamed with the parameters: update(grads, state, params)")
        return run(grads, state, params, apply=False)

    notes = (*getattr(whole, "notes", ()), "optimizer state is in host memory, a layer of it at a time on the device")
    return FusedTransformation(init, update, lambda g, s, p: run(g, s, p, apply=True), notes)


def _group(info: TensorInfo) -> int:
    """Parameters and states that are streamed together: those of as many layers."""
    if not info.path:
        return _SCALAR
    return info.shape[0] if info.axes and info.axes[0] == "layers" else _UNSTACKED


def _one_high(info: TensorInfo) -> TensorInfo:
    return dataclasses.replace(info, shape=(1, *info.shape[1:])) if _group(info) > 0 else info


def _only(group: int, groups: Tree, tree: Tree) -> Tree:
    """The tree with nothing where another group stands."""
    return jax.tree.map(lambda g, x: x if g == group else _ABSENT, groups, tree)


def _each(fn: Callable[[jax.Array], jax.Array], groups: Tree, state: Tree) -> Tree:
    """`fn` of every array of a state but its scalars."""
    return jax.tree.map(lambda g, s: s if g == _SCALAR else jax.tree.map(fn, s), groups, state)


def _moves() -> tuple[Callable[[jax.Array], jax.Array], Callable[[jax.Array], jax.Array]]:
    """To the device, and back to the host; or nowhere."""
    stay = lambda x: x  # noqa: E731
    if current() is None:
        say_once("a run without a layout keeps optimizer state on the device; Layout('data=1') is one device")
        return stay, stay
    if not host_memory_or_say("optimizer state", "stays on the device"):
        return stay, stay
    return lambda x: jax.device_put(x, jax.memory.Space.Device), lambda x: jax.device_put(x, jax.memory.Space.Host)
