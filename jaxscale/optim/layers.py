"""What an optimizer defines per tensor, taken per layer: stacks told from dimensions, and matrices found, by names."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec

from jaxscale.errors import ConfigError, near
from jaxscale.layout import STACKED, TensorInfo, current, path_name
from jaxscale.optim.base import NamedState, Tree, is_named

NOT_HIDDEN = ("vocab", "positions", "router")
"""A matrix with one of these axes looks things up or scores them, and is no map between hidden features."""


def view_of(info: TensorInfo) -> TensorInfo:
    """How an optimizer looks at a parameter: stacks first, then one dimension for inputs and one for outputs.

    `head_dim` is joined to the heads before it, so that a projection of attention, (embed, heads, head_dim) or (heads,
    head_dim, embed), is the matrix it multiplies by; the joined dimension goes by the heads' name. Every other tensor
    is seen as it is.

    Returns:
      the parameter's path and dtype with the shape and names of the view; the same numbers in the same order.

    Raises:
      ConfigError: a stack that is not the first dimension.
    """
    shape, axes = list[int](), list[str | None]()
    for n, axis in zip(info.shape, info.axes, strict=True):
        if axis == "head_dim" and axes and axes[-1] in ("heads", "kv_heads"):
            shape[-1] *= n
        else:
            shape.append(n)
            axes.append(axis)
    if any(a in STACKED for a in axes[stacks(info) :]):
        raise ConfigError(f"{info.path} {info.axes} is stacked along an inner dimension; put the stacks first")
    return dataclasses.replace(info, shape=tuple(shape), axes=tuple(axes))


def stacks(info: TensorInfo) -> int:
    """How many of the first dimensions stack like tensors (layers, experts)."""
    return next((i for i, a in enumerate(info.axes) if a not in STACKED), len(info.axes))


def is_hidden_matrix(info: TensorInfo, others: tuple[str, ...] = ()) -> bool:
    """Whether each layer of a parameter is a matrix between hidden features.

    Embedding, head, learned positions and routers are not, nor norms and biases.

    Args:
      info: the parameter.
      others: components of paths whose parameters are to count as none.

    Raises:
      ConfigError: more than two dimensions, of which names do not say what is input and what output.
    """
    view = view_of(info)
    own = view.axes[stacks(view) :]
    if len(own) < 2 or any(a in NOT_HIDDEN for a in own) or any(p in others for p in info.path.split("/")):
        return False
    if len(own) > 2:
        raise ConfigError(
            f"{info.path} {info.axes} of shape {info.shape} is no matrix per layer; leave it to AdamW with "
            f"others=('{info.path.split('/')[-1]}',)"
        )
    return True


def dealt(x: jax.Array, *axes: str | None) -> jax.Array:
    """Whole matrices, dealt out over the devices that hold pieces of them.

    The mesh axes that cut a matrix cut its stack instead, as far as they divide it: a device then has all of some
    layers' matrices, and each is worked on once. Axes that do not divide the stack hold copies, and repeat the work.
    A no-op outside of a layout.

    Args:
      x: (stacks..., m, n), optimizer state or something laid out as it is.
      *axes: a logical axis or `None` per dimension.
    """
    for spec in _way(x, axes):
        x = jax.lax.with_sharding_constraint(x, spec)
    return x


def returned(x: jax.Array, *axes: str | None) -> jax.Array:
    """What was made of `dealt` matrices, laid out as optimizer state again. Arguments as there."""
    for spec in reversed(_way(x, axes)):
        x = jax.lax.with_sharding_constraint(x, spec)
    return x


def _way(x: jax.Array, axes: tuple[str | None, ...]) -> list[PartitionSpec]:
    """From pieces to whole matrices, a mesh axis at a time: each step is one exchange, or one gather.

    (Asked for at once, the partitioner goes by way of a copy of everything on every device.)
    """
    layout = current()
    if layout is None:
        return []
    spec = layout.spec(axes, x.shape, kind="opt_state", name="the state of matrices")
    parts = [(p,) if isinstance(p, str) else tuple(p or ()) for p in spec]
    way, stacked = [spec], [i for i, a in enumerate(axes) if a in STACKED]
    for dim in (i for i, a in enumerate(axes) if a not in STACKED):
        for m in reversed(parts[dim]):
            parts[dim] = parts[dim][:-1]
            to = (i for i in stacked if x.shape[i] % math.prod(layout.sizes[a] for a in (*parts[i], m)) == 0)
            if (i := next(to, None)) is not None:
                parts[i] = (*parts[i], m)
            way.append(PartitionSpec(*(p or None for p in parts)))
    return way


def per_layer(tx: optax.GradientTransformation, infos: Tree | None) -> optax.GradientTransformation:
    """A transformation that is defined per tensor (a trust ratio, factored moments), applied to each layer by itself.

    It sees one layer's parameter as `view_of` shows it, under `vmap` over `layers` and `experts`; its counts are
    common to all layers, and every other state is one per layer and laid out by names (`NamedState`); where it has
    none, the state is `optax.EmptyState`, whatever the parameters. It must not look across tensors.

    Args:
      tx: the transformation.
      infos: a `TensorInfo` per parameter; `None` leaves every tensor one layer.
    """
    if infos is None:
        return tx
    views = {i.path: view_of(i) for i in jax.tree.leaves(infos)}

    def grouped(tree: Tree) -> dict[str, dict[str, jax.Array]]:
        """Tensors by path, together with those of the same stacks."""
        out: dict[str, dict[str, jax.Array]] = {}
        for path, x in jax.tree_util.tree_leaves_with_path(tree):
            name = path_name(path)
            if name not in views or math.prod(views[name].shape) != x.size:
                raise ConfigError(f"the optimizer was made for other parameters: '{name}' of shape {x.shape} is not "
                                  "theirs")  # fmt: skip
            out.setdefault(_group(views[name]), {})[name] = x.reshape(views[name].shape)
        return out

    def of_layer(group: dict[str, Any], sizes: Callable[[tuple[int, ...]], tuple[int, ...]] = tuple) -> Any:
        """Shapes of the state of one layer."""
        shape = lambda name, x: jax.ShapeDtypeStruct(sizes(x.shape[stacks(views[name]) :]), x.dtype)  # noqa: E731
        return jax.eval_shape(tx.init, {name: shape(name, x) for name, x in group.items()})

    def init(params: Tree) -> Tree:
        out = {}
        for key, group in grouped(params).items():
            one = of_layer(group)
            over = jax.tree.map(_mapped, one)
            state = _over_stacks(tx.init, _depth(group, views), (0,), over)(group)
            told = of_layer(group, _told_apart)
            out[key] = jax.tree_util.tree_map_with_path(lambda p, a, x: _named(p, a, x, views), told, state)
        return out if jax.tree.leaves(out) else optax.EmptyState()

    def update(updates: Tree, state: Tree, params: Tree | None = None) -> tuple[Tree, Tree]:
        held = grouped(params) if params is not None else {}
        found, kept = dict[str, jax.Array](), dict[str, Any]()
        for key, group in grouped(updates).items():
            one = of_layer(group)
            held_state = state[key] if jax.tree.leaves(one) else one
            bare = jax.tree.map(lambda s: s.value if is_named(s) else s, held_state, is_leaf=is_named)
            over = jax.tree.map(_mapped, one)
            run = _over_stacks(tx.update, _depth(group, views), (0, over, 0), (0, over))
            new, after = run(group, bare, held.get(key))
            found |= new
            kept[key] = jax.tree.map(_renamed, held_state, after, is_leaf=is_named)
        out = jax.tree_util.tree_map_with_path(lambda p, u: found[path_name(p)].reshape(u.shape), updates)
        return out, kept if jax.tree.leaves(kept) else state

    return optax.GradientTransformation(init, update)


def _group(view: TensorInfo) -> str:
    """Tensors are mapped over together when their stacks are as high."""
    n = stacks(view)
    return ",".join(f"{a}={size}" for a, size in zip(view.axes[:n], view.shape[:n], strict=True)) or "unstacked"


def _depth(group: dict[str, Any], views: dict[str, TensorInfo]) -> int:
    return stacks(views[next(iter(group))])


def _over_stacks(fn: Any, depth: int, ins: Any, outs: Any) -> Any:
    for _ in range(depth):
        fn = jax.vmap(fn, in_axes=ins, out_axes=outs)
    return fn


def _mapped(one: jax.ShapeDtypeStruct) -> int | None:
    """Whether a state is one per layer; counts are not."""
    return None if not one.shape and jax.numpy.issubdtype(one.dtype, jax.numpy.integer) else 0


def _told_apart(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape whose dimensions show by their sizes which of them a state has: a square's last is one more."""
    return tuple(n + shape[:i].count(n) for i, n in enumerate(shape))


def _named(path: tuple[Any, ...], one: jax.ShapeDtypeStruct, x: jax.Array, views: dict[str, TensorInfo]) -> Any:
    """A state of a parameter's layers with names: those of the view, or of what is left of it.

    Args:
      path: where it is in the state.
      one: shape and dtype it would have of one layer of the shape `_told_apart`.
      x: the state.
      views: of the parameters, by path.
    """
    at = next((i for i, p in enumerate(path) if getattr(p, "key", None) in views), None)
    if at is None or _mapped(one) is None:
        return x
    view = views[path[at].key]
    n = stacks(view)
    axes = _left(_told_apart(view.shape[n:]), view.axes[n:], one.shape)
    full = (*view.axes[:n], *axes) if axes is not None else (None,) * x.ndim
    return NamedState(x, f"{view.path}/{getattr(path[at - 1], 'name', 'state')}", full)


def _left(shape: tuple[int, ...], axes: tuple[str | None, ...], of: tuple[int, ...]) -> tuple[str | None, ...] | None:
    """The names of a state of the tensor's shape, or of that with one dimension summed away; else `None`."""
    if of == shape:
        return axes
    for i in range(len(shape)):
        if of == shape[:i] + shape[i + 1 :] and of:
            return axes[:i] + axes[i + 1 :]
    return None


def _renamed(before: Any, after: jax.Array) -> Any:
    return dataclasses.replace(before, value=after) if is_named(before) else after


def hidden_matrices(infos: Tree, others: tuple[str, ...], optimizer: str) -> Tree:
    """A bool per parameter: `is_hidden_matrix`.

    Of some of the parameters, with the others' places empty (`optax.MaskedNode`), all may be none.

    Raises:
      ConfigError: `others` is no tuple, or one of them no part of any path; nothing is a matrix.
    """
    if isinstance(others, str):
        raise ConfigError(f"{optimizer}.others = {others!r}: give a tuple of path components, as ('{others}',)")
    every = jax.tree.leaves(infos, is_leaf=lambda x: isinstance(x, optax.MaskedNode))
    some = any(isinstance(x, optax.MaskedNode) for x in every)
    parts = {part for i in jax.tree.leaves(infos) for part in i.path.split("/")}
    for other in others:
        if other not in parts and not some:
            raise ConfigError(f"{optimizer}.others names '{other}', which is in no path{near(other, sorted(parts))}")
    found = jax.tree.map(lambda i: is_hidden_matrix(i, others), infos)
    if not some and not any(jax.tree.leaves(found)):
        raise ConfigError(f"{optimizer} finds no matrix between hidden features among the parameters; use AdamW")
    return found


def with_rest(
    make: Callable[[Tree], optax.GradientTransformation],
    rest: optax.GradientTransformation,
    chosen: Tree,
    infos: Tree,
) -> optax.GradientTransformation:
    """One transformation for chosen parameters and another for the rest.

    Args:
      make: builds the first from the `TensorInfo`s of what it is for, with the others' places empty.
      rest: the second.
      chosen: a bool per parameter.
      infos: a `TensorInfo` per parameter.
    """
    mine = jax.tree.map(lambda i, yes: i if yes else optax.MaskedNode(), infos, chosen)
    labels = jax.tree.map(lambda yes: "matrices" if yes else "rest", chosen)
    return optax.multi_transform({"matrices": make(mine), "rest": rest}, labels)
