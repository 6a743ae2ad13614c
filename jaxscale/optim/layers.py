"""Optimizers that work on matrices: each layer's matrix in a stacked tensor, identified by logical axes."""

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

NOT_HIDDEN = ("vocab", "positions", "router", "outputs")
"""Axes of matrices that do not map hidden features to hidden features: lookups, the output head, routers."""


def view_of(info: TensorInfo) -> TensorInfo:
    """Return the shape in which an optimizer treats a parameter: stacked dimensions, then inputs and outputs.

    `head_dim` is merged with the heads before it, so that a projection of attention, (embed, heads, head_dim) or
    (heads, head_dim, embed), is the matrix that it multiplies by; the merged dimension has the heads' logical axis.
    Every other tensor has its own shape.

    Args:
      info: the parameter.

    Returns:
      A `TensorInfo` with the parameter's path and dtype and the shape and axes of the view, a plain reshape.

    Raises:
      ConfigError: a stacked dimension comes after one that is not stacked.
    """
    shape, axes = list[int](), list[str | None]()
    for n, axis in zip(info.shape, info.axes, strict=True):
        if axis == "head_dim" and axes and axes[-1] in ("heads", "kv_heads"):
            shape[-1] *= n
        else:
            shape.append(n)
            axes.append(axis)
    if any(a in STACKED for a in axes[stacks(info) :]):
        raise ConfigError(f"{info.path} {info.axes} is stacked along an inner dimension; put stacked dimensions first")
    return dataclasses.replace(info, shape=tuple(shape), axes=tuple(axes))


def stacks(info: TensorInfo) -> int:
    """Return how many of the first dimensions are stacks (layers, experts).

    Args:
      info: the parameter.
    """
    return next((i for i, a in enumerate(info.axes) if a not in STACKED), len(info.axes))


def is_hidden_matrix(info: TensorInfo, others: tuple[str, ...] = ()) -> bool:
    """Return whether each layer of a parameter is a matrix from hidden features to hidden features.

    Embedding, output head, learned positions, routers, norms and biases are not.

    Args:
      info: the parameter.
      others: path components; a parameter whose path has one of them does not count.

    Raises:
      ConfigError: a layer has more than two dimensions, and its axes do not show which are inputs and which outputs.
    """
    view = view_of(info)
    own = view.axes[stacks(view) :]
    if len(own) < 2 or any(a in NOT_HIDDEN for a in own) or any(p in others for p in info.path.split("/")):
        return False
    if len(own) > 2:
        raise ConfigError(
            f"{info.path} {info.axes} of shape {info.shape} is not one matrix per layer; let AdamW update it, with "
            f"others=('{info.path.split('/')[-1]}',)"
        )
    return True


def gather_matrices(x: jax.Array, *axes: str | None) -> jax.Array:
    """Reshard a stack of matrices so that each matrix is whole on a device.

    Mesh axes that shard the matrices shard the stack instead, as far as they divide it: a device then has the whole
    matrices of some layers, and each matrix is processed once. Along mesh axes that do not divide the stack, matrices
    are replicated and processed by every device. Without a layout nothing changes.

    Args:
      x: (stacks..., m, n), optimizer state or an array sharded like it.
      *axes: a logical axis or `None` per dimension.
    """
    for spec in _reshardings(x, axes):
        x = jax.lax.with_sharding_constraint(x, spec)
    return x


def scatter_matrices(x: jax.Array, *axes: str | None) -> jax.Array:
    """Reshard results from `gather_matrices` back to the sharding of optimizer state.

    Args:
      x: (stacks..., m, n).
      *axes: a logical axis or `None` per dimension.
    """
    for spec in reversed(_reshardings(x, axes)):
        x = jax.lax.with_sharding_constraint(x, spec)
    return x


def _reshardings(x: jax.Array, axes: tuple[str | None, ...]) -> list[PartitionSpec]:
    """Return the specs from sharded to whole matrices, one mesh axis at a time: each is one all-to-all or all-gather.

    In a single step, GSPMD would replicate everything on every device first.
    """
    layout = current()
    if layout is None:
        return []
    spec = layout.spec(axes, x.shape, kind="opt_state", name="the state of matrices")
    parts = [(p,) if isinstance(p, str) else tuple(p or ()) for p in spec]
    specs, stacked = [spec], [i for i, a in enumerate(axes) if a in STACKED]
    for dim in (i for i, a in enumerate(axes) if a not in STACKED):
        for m in reversed(parts[dim]):
            parts[dim] = parts[dim][:-1]
            to = (i for i in stacked if x.shape[i] % math.prod(layout.sizes[a] for a in (*parts[i], m)) == 0)
            if (i := next(to, None)) is not None:
                parts[i] = (*parts[i], m)
            specs.append(PartitionSpec(*(p or None for p in parts)))
    return specs


def per_layer(tx: optax.GradientTransformation, infos: Tree | None) -> optax.GradientTransformation:
    """Apply a transformation that is defined per tensor (a trust ratio, factored moments) to each layer by itself.

    `tx` runs under `vmap` over `layers` and `experts`, on one layer's parameter in the shape that `view_of` returns.
    Its counts are common to all layers; every other state is stacked like the layers and has logical axes
    (`NamedState`). If `tx` has no state, the result's is `optax.EmptyState`. `tx` must not combine several tensors.

    Args:
      tx: the transformation.
      infos: a `TensorInfo` per parameter; `None` treats every tensor as one layer, and returns `tx`.

    Raises:
      ConfigError: from `init` and `update`, parameters other than those of `infos`.
    """
    if infos is None:
        return tx
    views = {i.path: view_of(i) for i in jax.tree.leaves(infos)}

    def grouped(tree: Tree) -> dict[str, dict[str, jax.Array]]:
        """Return tensors by path, in groups that have the same stacked dimensions."""
        out: dict[str, dict[str, jax.Array]] = {}
        for path, x in jax.tree_util.tree_leaves_with_path(tree):
            name = path_name(path)
            if name not in views or math.prod(views[name].shape) != x.size:
                raise ConfigError(f"the optimizer was made for other parameters: it has no '{name}' of shape {x.shape}")
            out.setdefault(_group(views[name]), {})[name] = x.reshape(views[name].shape)
        return out

    def of_layer(group: dict[str, Any], sizes: Callable[[tuple[int, ...]], tuple[int, ...]] = tuple) -> Tree:
        """Return the shapes of the state of one layer."""

        def shape(name: str, x: jax.Array) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(sizes(x.shape[stacks(views[name]) :]), x.dtype)

        return jax.eval_shape(tx.init, {name: shape(name, x) for name, x in group.items()})

    def init(params: Tree) -> Tree:
        out = {}
        for key, group in grouped(params).items():
            one = of_layer(group)
            over = jax.tree.map(_vmap_axis, one)
            state = _over_stacks(tx.init, _depth(group, views), (0,), over)(group)
            distinct = of_layer(group, _distinct_sizes)
            out[key] = jax.tree_util.tree_map_with_path(lambda p, a, x: _named(p, a, x, views), distinct, state)
        return out if jax.tree.leaves(out) else optax.EmptyState()

    def update(updates: Tree, state: Tree, params: Tree | None = None) -> tuple[Tree, Tree]:
        params_by_group = grouped(params) if params is not None else {}
        new_updates, new_state = dict[str, jax.Array](), dict[str, Any]()
        for key, group in grouped(updates).items():
            one = of_layer(group)
            old = state[key] if jax.tree.leaves(one) else one
            bare = jax.tree.map(lambda s: s.value if is_named(s) else s, old, is_leaf=is_named)
            over = jax.tree.map(_vmap_axis, one)
            run = _over_stacks(tx.update, _depth(group, views), (0, over, 0), (0, over))
            new, after = run(group, bare, params_by_group.get(key))
            new_updates |= new
            new_state[key] = jax.tree.map(_with_value, old, after, is_leaf=is_named)
        out = jax.tree_util.tree_map_with_path(lambda p, u: new_updates[path_name(p)].reshape(u.shape), updates)
        return out, new_state if jax.tree.leaves(new_state) else state

    return optax.GradientTransformation(init, update)


def _group(view: TensorInfo) -> str:
    """Return a key for the stacked dimensions of a tensor; tensors with equal keys share a `vmap`."""
    n = stacks(view)
    return ",".join(f"{a}={size}" for a, size in zip(view.axes[:n], view.shape[:n], strict=True)) or "unstacked"


def _depth(group: dict[str, Any], views: dict[str, TensorInfo]) -> int:
    return stacks(views[next(iter(group))])


def _over_stacks(fn: Callable[..., Any], depth: int, ins: Tree, outs: Tree) -> Callable[..., Any]:
    for _ in range(depth):
        fn = jax.vmap(fn, in_axes=ins, out_axes=outs)
    return fn


def _vmap_axis(one: jax.ShapeDtypeStruct) -> int | None:
    """Return 0 for a state that each layer has, and `None` for a count, which is common to all layers."""
    return None if not one.shape and jax.numpy.issubdtype(one.dtype, jax.numpy.integer) else 0


def _distinct_sizes(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Perturb equal dimensions, so that the reduced axis of factored state can be identified by its size."""
    return tuple(n + shape[:i].count(n) for i, n in enumerate(shape))


def _named(
    path: tuple[Any, ...], one: jax.ShapeDtypeStruct, x: jax.Array, views: dict[str, TensorInfo]
) -> jax.Array | NamedState:
    """Return a state of a parameter's layers with the logical axes that it shares with the parameter's view.

    Args:
      path: the state's path in the whole state.
      one: shape and dtype of the state for one layer whose shape is from `_distinct_sizes`.
      x: the state.
      views: of the parameters, by path.
    """
    index = next((i for i, p in enumerate(path) if getattr(p, "key", None) in views), None)
    if index is None or _vmap_axis(one) is None:
        return x
    view = views[path[index].key]
    n = stacks(view)
    axes = _remaining_axes(_distinct_sizes(view.shape[n:]), view.axes[n:], one.shape)
    full = (*view.axes[:n], *axes) if axes is not None else (None,) * x.ndim
    return NamedState(x, f"{view.path}/{getattr(path[index - 1], 'name', 'state')}", full)


def _remaining_axes(
    shape: tuple[int, ...], axes: tuple[str | None, ...], of: tuple[int, ...]
) -> tuple[str | None, ...] | None:
    """Return the axes of a state with the tensor's shape, or with one dimension reduced; `None` for other shapes."""
    if of == shape:
        return axes
    for i in range(len(shape)):
        if of == shape[:i] + shape[i + 1 :] and of:
            return axes[:i] + axes[i + 1 :]
    return None


def _with_value(before: Tree, after: jax.Array) -> Tree:
    return dataclasses.replace(before, value=after) if is_named(before) else after


def hidden_matrices(infos: Tree, others: tuple[str, ...], optimizer: str) -> Tree:
    """Return `is_hidden_matrix` of each parameter.

    Args:
      infos: a `TensorInfo` per parameter. With `optax.MaskedNode` in some places it is a part of a model's, and then
        need not have a matrix.
      others: path components of parameters that do not count as matrices.
      optimizer: name of the optimizer's class, for errors.

    Raises:
      ConfigError: `others` is a string, or one of its components is in no path; or no parameter is a matrix.
    """
    if isinstance(others, str):
        raise ConfigError(f"{optimizer}.others = {others!r}: give a tuple of path components, as ('{others}',)")
    every = jax.tree.leaves(infos, is_leaf=lambda x: isinstance(x, optax.MaskedNode))
    partial = any(isinstance(x, optax.MaskedNode) for x in every)
    parts = {part for i in jax.tree.leaves(infos) for part in i.path.split("/")}
    for other in others:
        if other not in parts and not partial:
            raise ConfigError(f"{optimizer}.others names '{other}', which is in no path{near(other, sorted(parts))}")
    matrices = jax.tree.map(lambda i: is_hidden_matrix(i, others), infos)
    if not partial and not any(jax.tree.leaves(matrices)):
        raise ConfigError(f"{optimizer} finds no matrix between hidden features among the parameters; use AdamW")
    return matrices


def with_rest(
    make: Callable[[Tree], optax.GradientTransformation],
    rest: optax.GradientTransformation,
    chosen: Tree,
    infos: Tree,
) -> optax.GradientTransformation:
    """Combine one transformation for chosen parameters with another for the rest.

    Args:
      make: returns the first, for a `TensorInfo` per chosen parameter and `optax.MaskedNode` in place of the others.
      rest: the second.
      chosen: a bool per parameter.
      infos: a `TensorInfo` per parameter.
    """
    chosen_infos = jax.tree.map(lambda i, yes: i if yes else optax.MaskedNode(), infos, chosen)
    labels = jax.tree.map(lambda yes: "matrices" if yes else "rest", chosen)
    return optax.multi_transform({"matrices": make(chosen_infos), "rest": rest}, labels)
