"""8-bit optimizers: an elementwise rule of `pallas_kernels.blockwise` as an optax transformation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxscale.errors import ConfigError
from jaxscale.layout import TensorInfo, current
from jaxscale.layout.tensors import path_name
from jaxscale.optim.base import FusedTransformation, Tree
from jaxscale.optim.storage import EightBit, Moment, check_fits, is_quantized
from jaxscale.parallel import sharded_op
from pallas_kernels.blockwise import Quantized, Rule, update_blockwise

Scalars = dict[str, Any]
Finish = Callable[[TensorInfo, jax.Array, jax.Array, Scalars], jax.Array]
"""(parameter's info, parameter, update, scalars) -> the update to apply, for what is not elementwise (LAMB's ratio)."""


def blockwise(
    rule: Rule,
    scalars: Callable[[jax.Array], Scalars],
    make_state: Callable[..., Any],
    *,
    storage: EightBit,
    infos: Tree | None = None,
    decay_mask: Tree | None = None,
    initial: tuple[float, ...] | None = None,
    finish: Finish | None = None,
    implementation: str | None = None,
) -> FusedTransformation:
    """Make an optimizer from a rule of `pallas_kernels.blockwise`; its `update_and_apply` is one pass over memory.

    Args:
      rule: the elementwise update.
      scalars: number of earlier steps (int32) -> the numbers that the rule and `finish` need.
      make_state: `(count, *moments)` -> a NamedTuple of them; a moment is a tree like the parameters'.
      storage: which states are in 8 bits, and in which format.
      infos: a `TensorInfo` per parameter, whose logical axes show which dimension stacks layers and, under a layout,
        how each tensor is sharded. Without them a tensor is one layer, and on several devices the kernel is not used.
      decay_mask: a bool per parameter or subtree, whether weight decay applies, or a function from the parameters to
        that; `None` means to all.
      initial: initial value of each moment; zeros by default.
      finish: applied to the update before it is added.
      implementation: implementation of `update_blockwise`; `None` chooses by device.

    Raises:
      ConfigError: from `init` and `update`, parameters other than those of `infos`, or arrays that are not floats.
    """
    known = None if infos is None else {path_name(k): i for k, i in jax.tree_util.tree_leaves_with_path(infos)}
    begin = initial or (0.0,) * len(rule.states)

    def info_of(path: tuple[Any, ...], p: jax.Array) -> TensorInfo:
        name = path_name(path)
        if known is None:
            return TensorInfo(name, tuple(p.shape), p.dtype, (None,) * p.ndim)
        if name not in known or known[name].shape != tuple(p.shape):
            raise ConfigError(f"the optimizer was made for other parameters: it has no '{name}' of shape {p.shape}")
        return known[name]

    def init(params: Tree) -> Tree:
        def moment(value: float, signed: bool) -> Tree:
            def one(path: tuple[Any, ...], p: jax.Array) -> Moment:
                return storage.store(jnp.full(p.shape, value, jnp.float32), info_of(path, p), signed)

            return jax.tree_util.tree_map_with_path(one, params)

        return make_state(jnp.zeros([], jnp.int32), *(moment(v, s) for v, s in zip(begin, rule.states, strict=True)))

    def step(grads: Tree, state: Tree, params: Tree, apply: bool) -> tuple[Tree, Tree]:
        count, *moments = state
        numbers = scalars(count)
        structure: Any
        paths, structure = jax.tree_util.tree_flatten_with_path(params)
        decays = [_is_decayed(decay_mask, path, params) for path, _ in paths]
        gs = structure.flatten_up_to(grads)
        columns = [structure.flatten_up_to(m) for m in moments]
        out, news = [], []
        for (path, p), g, decay, *states in zip(paths, gs, decays, *columns, strict=True):
            info = info_of(path, p)
            for kind, x in (("parameter", p), ("gradient of", g)):
                if not jnp.issubdtype(x.dtype, jnp.floating):
                    raise ConfigError(f"the {kind} {info.path} is {x.dtype}, not a float; cast it to float32 first")
            if g.shape != p.shape:
                raise ConfigError(f"the gradient of {info.path} has shape {g.shape}, but the parameter has {p.shape}")
            own = numbers if decay else {**numbers, "weight_decay": jnp.zeros([], jnp.float32)}
            named = infos is not None
            u, new = _one(rule, own, info, p, g, tuple(states), apply and finish is None, named, implementation)
            if finish is not None:
                u = finish(info, p, u, own)
                u = (p.astype(jnp.float32) + u).astype(p.dtype) if apply else u
            out.append(u)
            news.append(new)
        new_moments = [jax.tree.unflatten(structure, list(m)) for m in zip(*news, strict=True)]
        if not news:
            new_moments = moments
        return jax.tree.unflatten(structure, out), make_state(optax.safe_increment(count), *new_moments)

    def update(grads: Tree, state: Tree, params: Tree | None = None) -> tuple[Tree, Tree]:
        if params is None:
            raise ValueError(f"{rule.name} needs the parameters: call update(grads, state, params)")
        return step(grads, state, params, False)

    def update_and_apply(grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        return step(grads, state, params, True)

    notes = storage.notes(infos) if infos is not None else ()
    return FusedTransformation(init, update, update_and_apply, notes)


def _is_decayed(mask: Tree | None, path: tuple[Any, ...], params: Tree) -> bool:
    """Return whether the parameter at `path` decays; a bool in the mask holds for all parameters below it."""
    mask = mask(params) if callable(mask) else mask
    if mask is None:
        return True
    entries = jax.tree_util.tree_leaves_with_path(mask, is_leaf=lambda m: m is None)
    matches = [bool(value) for prefix, value in entries if path[: len(prefix)] == prefix]
    if not matches:
        raise ConfigError(f"the weight-decay mask has no entry for '{path_name(path)}'; add a bool for it")
    return matches[0]


def _one(
    rule: Rule,
    numbers: Mapping[str, Any],
    info: TensorInfo,
    p: jax.Array,
    g: jax.Array,
    states: tuple[Moment, ...],
    apply: bool,
    named: bool,
    implementation: str | None,
) -> tuple[jax.Array, tuple[Moment, ...]]:
    """Update one parameter; return the new parameter (with `apply`) or the float32 update, and the new states."""
    own = {k: jnp.asarray(numbers[k], jnp.float32) for k in rule.scalars}
    if not is_quantized(states[0]):
        derived = rule.derive(own)
        exact = p.astype(jnp.float32)
        u, new = rule.step(exact, g.astype(jnp.float32), tuple(s.astype(jnp.float32) for s in states), derived)
        new = tuple(n.astype(s.dtype) for n, s in zip(new, states, strict=True))
        return ((exact + u).astype(p.dtype) if apply else u), new

    count = len(states)

    def local(packed: jax.Array, p: jax.Array, g: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        pieces = zip(arrays[:count], arrays[count:], states, strict=True)
        mine = tuple(Quantized(c, s, q.tile, q.format, q.signed, q.flat) for c, s, q in pieces)
        scalars = dict(zip(own, packed, strict=True))
        u, new = update_blockwise(rule, scalars, p, g, mine, apply=apply, implementation=implementation)
        return (u, *(q.codes for q in new), *(q.scales for q in new))

    arrays = (p, g, *(q.codes for q in states), *(q.scales for q in states))
    packed = jnp.stack(list(own.values()))
    if named:
        axes, layout = info.axes, current()
        if layout is not None:
            check_fits([(info, states[0].tile)], layout)
        u, *rest = sharded_op(
            local, packed, *arrays, axes=((None,), *(axes,) * len(arrays)), out_axes=(axes,) * (len(arrays) - 1),
            kind="opt_state", name=f"the 8-bit state of {info.path}",
        )  # fmt: skip
    else:
        u, *rest = local(packed, *arrays)
    news = zip(rest[:count], rest[count:], states, strict=True)
    return u, tuple(Quantized(c, s, q.tile, q.format, q.signed, q.flat) for c, s, q in news)
