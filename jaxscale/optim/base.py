"""Optimizers are optax's, and may be more: one that also updates parameters in place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import optax

from jaxscale.layout import HOST, Layout, TensorInfo, host_memory_or_say, shardings_of
from jaxscale.optim.storage import check_fits, is_quantized

Tree = Any
Schedule = Callable[[jax.Array], jax.Array]


class FusedTransformation(optax.GradientTransformation):
    """A `GradientTransformation` with `update_and_apply(grads, state, params) -> (params, state)` besides.

    One pass reads gradient, state and parameter and writes the new ones; through `update` and `optax.apply_updates`
    the updates are written and read again. Both forms give the same parameters.
    """

    update_and_apply: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]
    notes: tuple[str, ...]
    """What a person should know of how its state is kept, a sentence each."""

    def __new__(
        cls,
        init: Callable[[Tree], Tree],
        update: Callable[..., tuple[Tree, Tree]],
        update_and_apply: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]],
        notes: tuple[str, ...] = (),
    ) -> FusedTransformation:
        self = super().__new__(cls, init, update)
        self.update_and_apply = update_and_apply
        self.notes = notes
        return self


@runtime_checkable
class Optimizer(Protocol):
    """What a run is configured with: makes the transformation once the schedule and the parameters are known.

    A class whose `width_rule` is "adam" or "sgd" goes with parametrisations of the width (`jaxscale.optim.mup.RULES`).
    """

    def make(self, learning_rate: Schedule, infos: Tree) -> optax.GradientTransformation:
        """Builds it.

        Args:
          learning_rate: step (int32 scalar) -> learning rate.
          infos: a `TensorInfo` per parameter, for rules by name or shape.
        """


class HostState(NamedTuple):
    """State that lives in host memory: an optimizer's, and float32 parameters (or `None`); see `OnHost`."""

    inner: Tree
    master: Tree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NamedState:
    """State of another shape than its parameter's, with a logical axis per dimension, by which it is laid out.

    The names are in the state itself, so that they are found whatever wraps the optimizer.
    """

    value: Any
    path: str = dataclasses.field(metadata={"static": True})
    axes: tuple[str | None, ...] = dataclasses.field(metadata={"static": True})


def is_named(x: Any) -> bool:
    """For `is_leaf`: state that says itself what its dimensions are."""
    return isinstance(x, NamedState)


def chain(*parts: optax.GradientTransformation) -> optax.GradientTransformation:
    """`optax.chain`, keeping `update_and_apply` when the last part has it (then nothing follows it)."""
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
    """New parameters and state, in place where `tx` offers it."""
    if isinstance(tx, FusedTransformation):
        return tx.update_and_apply(grads, state, params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def state_infos(tx: optax.GradientTransformation, infos: Tree) -> Tree:
    """A `TensorInfo` for every array of `tx`'s state.

    Those of a parameter's shape, and 8-bit ones, carry its names, and a `NamedState` its own; what is left (counts,
    mostly) has none and is whole on every device.

    Args:
      tx: the optimizer.
      infos: a `TensorInfo` per parameter.
    """
    params = jax.tree.map(lambda i: jax.ShapeDtypeStruct(i.shape, i.dtype), infos)
    state: Tree = jax.eval_shape(tx.init, params)
    by_path: dict[Any, TensorInfo] = dict(jax.tree_util.tree_leaves_with_path(infos))

    def info(path: tuple[Any, ...], leaf: Any) -> Any:
        if is_named(leaf):
            value = TensorInfo(leaf.path, leaf.value.shape, leaf.value.dtype, leaf.axes)
            return dataclasses.replace(leaf, value=value)
        # whatever wraps an optimizer, the state of a parameter ends with the parameter's own path
        found = next((by_path[path[i:]] for i in range(len(path) + 1) if path[i:] in by_path), None)
        if found is None:
            return TensorInfo("", leaf.shape, leaf.dtype, (None,) * len(leaf.shape))
        if is_quantized(leaf):
            part = lambda what, x: TensorInfo(f"{found.path}/{what}", x.shape, x.dtype, found.axes)  # noqa: E731
            return dataclasses.replace(leaf, codes=part("codes", leaf.codes), scales=part("scales", leaf.scales))
        axes = found.axes if leaf.shape == found.shape else (None,) * len(leaf.shape)
        return TensorInfo(found.path if leaf.shape == found.shape else "", leaf.shape, leaf.dtype, axes)

    return jax.tree_util.tree_map_with_path(info, state, is_leaf=lambda x: is_quantized(x) or is_named(x))


def check_state(tx: optax.GradientTransformation, infos: Tree, layout: Layout) -> None:
    """Raises unless a layout leaves the tiles of 8-bit state whole.

    Raises:
      LayoutError: naming a storage that fits.
    """
    by_path = {i.path: i for i in jax.tree.leaves(infos)}
    eight_bit = filter(is_quantized, jax.tree.leaves(state_infos(tx, infos), is_leaf=is_quantized))
    check_fits([(by_path[q.codes.path.removesuffix("/codes")], q.tile) for q in eight_bit], layout)


def state_shardings(tx: optax.GradientTransformation, infos: Tree, layout: Layout | None) -> Tree:
    """A sharding for every array of `tx`'s state: those of a parameter's shape by the rules for `opt_state`.

    Raises:
      LayoutError: naming the tensor that cannot be laid out, or a tile of 8-bit state that the layout would cut.
    """
    if layout is None:
        return None
    check_state(tx, infos, layout)
    return place_state(state_infos(tx, infos), layout)


def place_state(infos: Tree, layout: Layout) -> Tree:
    """A sharding for every array of optimizer state.

    Args:
      infos: from `state_infos`.
      layout: where it goes.

    Raises:
      LayoutError: naming the tensor that cannot be laid out.
    """
    shardings = shardings_of(infos, layout, "opt_state")

    def place(shardings: Any, infos: Any) -> Any:
        if not _on_host(infos) or not host_memory_or_say("optimizer state", "stays on the device", layout):
            return shardings
        return jax.tree.map(lambda s, i: s.with_memory_kind(HOST) if i.path else s, shardings, infos)

    return jax.tree.map(place, shardings, infos, is_leaf=_on_host)


def _on_host(state: Any) -> bool:
    return isinstance(state, HostState)


def decay_mask(infos: Tree) -> Tree:
    """Which parameters weight decay shrinks: all but norms' scales and biases, told apart by name."""
    return jax.tree.map(lambda i: _decays(i), infos)


def _decays(info: TensorInfo) -> bool:
    return info.path.rsplit("/", 1)[-1] not in ("scale", "bias")
