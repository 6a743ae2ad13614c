"""The interface of optimizers: optax transformations, some of which also update the parameters in the same pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import jax
import optax

from jaxscale.layout import HOST, Layout, TensorInfo, host_memory_or_say, layers_in_host_memory, shardings_of
from jaxscale.optim.storage import check_fits, is_quantized

if TYPE_CHECKING:
    from pallas_kernels.blockwise import Quantized

Tree = Any
Schedule = Callable[[int | jax.Array], jax.Array]
"""Step -> learning rate."""


class FusedTransformation(optax.GradientTransformation):
    """A `GradientTransformation` that also has `update_and_apply(grads, state, params) -> (params, state)`.

    `update_and_apply` reads gradient, state and parameter and writes the new ones in one pass. With `update` and
    `optax.apply_updates` the updates are written to memory and read again. Both give the same parameters.

    Args:
      init: parameters -> state, as in optax.
      update: (gradients, state, parameters) -> (updates, state), as in optax.
      update_and_apply: (gradients, state, parameters) -> (new parameters, state).
      notes: sentences about where and in what precision the state is stored, for the user.
    """

    update_and_apply: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]
    notes: tuple[str, ...]

    def __new__(
        cls,
        init: Callable[[Tree], Tree],
        update: Callable[..., tuple[Tree, Tree]],
        update_and_apply: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]],
        notes: tuple[str, ...] = (),
    ) -> FusedTransformation:
        """Return the pair (init, update) with the two further attributes."""
        self = super().__new__(cls, init, update)
        self.update_and_apply = update_and_apply
        self.notes = notes
        return self


@runtime_checkable
class Optimizer(Protocol):
    """An optimizer in a config: makes the optax transformation once the schedule and the parameters are known.

    A class whose `width_rule` is "adam" or "sgd" can be used with µP and other parametrisations
    (`jaxscale.optim.mup.RULES`). One whose `by_layer` is True updates each layer of a stack as if it were
    alone, and a layer whose state and gradient are 0 by weight decay alone; uneven pipeline stages then hold their
    layers, with padding, from step to step.
    """

    def make(self, learning_rate: Schedule, infos: Tree) -> optax.GradientTransformation:
        """Return the optax transformation for these parameters.

        Args:
          learning_rate: step (int32 scalar) -> learning rate.
          infos: a `TensorInfo` per parameter, for what depends on a parameter's name or shape, such as weight decay.
        """


class HostState(NamedTuple):
    """Optimizer state in host memory; see `OnHost`.

    Args:
      inner: state of the wrapped optimizer.
      master: float32 master weights, of the parameters' shapes, or `None`.
    """

    inner: Tree
    master: Tree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NamedState:
    """Optimizer state whose shape differs from its parameter's, with the logical axes by which it is sharded.

    The axes are stored in the state itself, so that they are available whatever wraps the optimizer.

    Args:
      value: the state: an array, or in `state_infos` its `TensorInfo`.
      path: the state's name, such as "blocks/mlp/up/kernel/rows.gram".
      axes: a logical axis, or `None`, per dimension.
    """

    value: Any
    path: str = dataclasses.field(metadata={"static": True})
    axes: tuple[str | None, ...] = dataclasses.field(metadata={"static": True})


def is_named(x: object) -> bool:
    """Return whether `x` is a `NamedState`, for `is_leaf`.

    Args:
      x: any node of an optimizer's state.
    """
    return isinstance(x, NamedState)


def chain(*parts: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return `optax.chain` of transformations, with `update_and_apply` if the last one has it.

    Args:
      *parts: transformations, in the order in which they are applied.
    """
    if not isinstance(parts[-1], FusedTransformation):
        return optax.chain(*parts)
    *before, last = parts
    whole = optax.chain(*parts)

    def update_and_apply(grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        states = []
        for part, s in zip(before, state[:-1], strict=True):
            grads, s = part.update(grads, s, params)
            states.append(s)
        params, s = last.update_and_apply(grads, state[-1], params)
        return params, (*states, s)

    return FusedTransformation(whole.init, whole.update, update_and_apply, last.notes)


def apply_gradients(
    tx: optax.GradientTransformation, grads: Tree, state: Tree, params: Tree
) -> tuple[Tree, Tree]:  # fmt: skip
    """Return new parameters and state, in one pass where `tx` is a `FusedTransformation`.

    Args:
      tx: the optimizer.
      grads: gradients, of the parameters' structure and shapes.
      state: the optimizer's state.
      params: the parameters.
    """
    if isinstance(tx, FusedTransformation):
        return tx.update_and_apply(grads, state, params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def state_infos(tx: optax.GradientTransformation, infos: Tree) -> Tree:
    """Return a `TensorInfo` for every array of `tx`'s state.

    An array of its parameter's shape, and the codes and scales of an 8-bit one, have the parameter's logical axes; a
    `NamedState` has its own. All others (mostly step counts) have none and are replicated.

    Args:
      tx: the optimizer.
      infos: a `TensorInfo` per parameter.

    Returns:
      A tree of the state's structure.
    """
    params = jax.tree.map(lambda i: jax.ShapeDtypeStruct(i.shape, i.dtype), infos)
    state: Tree = jax.eval_shape(tx.init, params)
    by_path: dict[Any, TensorInfo] = dict(jax.tree_util.tree_leaves_with_path(infos))

    def info(path: tuple[Any, ...], leaf: Any) -> TensorInfo | NamedState | Quantized:
        if is_named(leaf):
            value = TensorInfo(leaf.path, leaf.value.shape, leaf.value.dtype, leaf.axes)
            return dataclasses.replace(leaf, value=value)
        # However optimizers are nested, the path of a parameter's state ends with the path of the parameter.
        param = next((by_path[path[i:]] for i in range(len(path) + 1) if path[i:] in by_path), None)
        if param is None:
            return TensorInfo("", leaf.shape, leaf.dtype, (None,) * len(leaf.shape))
        if is_quantized(leaf):

            def part(name: str, x: jax.Array) -> TensorInfo:
                return TensorInfo(f"{param.path}/{name}", x.shape, x.dtype, param.axes)

            return dataclasses.replace(leaf, codes=part("codes", leaf.codes), scales=part("scales", leaf.scales))
        axes = param.axes if leaf.shape == param.shape else (None,) * len(leaf.shape)
        return TensorInfo(param.path if leaf.shape == param.shape else "", leaf.shape, leaf.dtype, axes)

    return jax.tree_util.tree_map_with_path(info, state, is_leaf=lambda x: is_quantized(x) or is_named(x))


def check_state(tx: optax.GradientTransformation, infos: Tree, layout: Layout) -> None:
    """Check that no tile of 8-bit state is divided between devices.

    Args:
      tx: the optimizer.
      infos: a `TensorInfo` per parameter.
      layout: the layout whose rules for `opt_state` shard the state.

    Raises:
      LayoutError: a shard would hold part of a tile. The message names a storage that fits.
    """
    by_path = {i.path: i for i in jax.tree.leaves(infos)}
    eight_bit = filter(is_quantized, jax.tree.leaves(state_infos(tx, infos), is_leaf=is_quantized))
    check_fits([(by_path[q.codes.path.removesuffix("/codes")], q.tile) for q in eight_bit], layout)


def state_shardings(tx: optax.GradientTransformation, infos: Tree, layout: Layout | None) -> Tree:
    """Return a sharding for every array of `tx`'s state, by the layout's rules for `opt_state`.

    Args:
      tx: the optimizer.
      infos: a `TensorInfo` per parameter.
      layout: the layout; `None` returns `None`.

    Raises:
      LayoutError: a tensor that cannot be sharded, or a tile of 8-bit state that would be divided between devices.
    """
    if layout is None:
        return None
    check_state(tx, infos, layout)
    return place_state(state_infos(tx, infos), layout)


def place_state(infos: Tree, layout: Layout) -> Tree:
    """Return a sharding for every array of optimizer state.

    Args:
      infos: a `TensorInfo` per array of the state, from `state_infos`.
      layout: the layout whose rules for `opt_state` apply.

    Raises:
      LayoutError: a tensor that cannot be sharded; the message names it.
    """
    shardings = shardings_of(infos, layout, "opt_state")

    def place(shardings: Tree, infos: Tree) -> Tree:
        if not _on_host(infos) or not host_memory_or_say("optimizer state", "stays on the device", layout):
            return shardings
        return jax.tree.map(lambda s, i: s.with_memory_kind(HOST) if hosted(i) else s, shardings, infos)

    return jax.tree.map(place, shardings, infos, is_leaf=_on_host)


def hosted(info: TensorInfo) -> bool:
    """Return whether an array of a `HostState` is in host memory.

    Args:
      info: of the array.
    """
    stacked = bool(info.axes) and info.axes[0] == "layers"
    return bool(info.path) and (not stacked or layers_in_host_memory(info.shape, info.dtype))


def _on_host(state: object) -> bool:
    return isinstance(state, HostState)


def decay_mask(infos: Tree) -> Tree:
    """Return which parameters have weight decay: all but those named `scale` or `bias`.

    Args:
      infos: a `TensorInfo` per parameter.

    Returns:
      A bool per parameter.
    """
    return jax.tree.map(_decays, infos)


def _decays(info: TensorInfo) -> bool:
    return info.path.rsplit("/", 1)[-1] not in ("scale", "bias")
