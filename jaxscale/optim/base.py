"""Optimizers are optax's, and may be more: one that also updates parameters in place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import optax

from jaxscale.layout import Layout, TensorInfo, shardings_of
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
    """What a run is configured with: makes the transformation once the schedule and the parameters are known."""

    def make(self, learning_rate: Schedule, infos: Tree) -> optax.GradientTransformation:
        """Builds it.

        Args:
          learning_rate: step (int32 scalar) -> learning rate.
          infos: a `TensorInfo` per parameter, for rules by name or shape.
        """


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
    """A `TensorInfo` for every array of `tx`'s state; those of a parameter's shape, and 8-bit ones, carry its names.

    Args:
      tx: the optimizer.
      infos: a `TensorInfo` per parameter.
    """
    params = jax.tree.map(lambda i: jax.ShapeDtypeStruct(i.shape, i.dtype), infos)
    state = jax.eval_shape(tx.init, params)

    def of_param(leaf: Any, info: TensorInfo) -> Any:
        if is_quantized(leaf):
            part = lambda what, x: TensorInfo(f"{info.path}/{what}", x.shape, x.dtype, info.axes)  # noqa: E731
            return dataclasses.replace(
                leaf, codes=part("codes", leaf.codes), scales=part("scales", leaf.scales)
            )  # fmt: skip
        axes = info.axes if leaf.shape == info.shape else (None,) * len(leaf.shape)
        return TensorInfo(info.path, leaf.shape, leaf.dtype, axes)

    def other(leaf: jax.ShapeDtypeStruct) -> TensorInfo:
        return TensorInfo("", leaf.shape, leaf.dtype, (None,) * len(leaf.shape))

    found: list[Tree] = []
    # optax runs `tx.init` on placeholders to tell the two apart; traced, it needs no device
    jax.eval_shape(
        lambda: found.append(
            optax.tree.map_params(tx, of_param, state, infos, transform_non_params=other, is_leaf=is_quantized)
        )
    )
    return found[0]


def state_shardings(tx: optax.GradientTransformation, infos: Tree, layout: Layout | None) -> Tree:
    """A sharding for every array of `tx`'s state: those of a parameter's shape by the rules for `opt_state`.

    Raises:
      LayoutError: naming the tensor that cannot be laid out, or a tile of 8-bit state that the layout would cut.
    """
    if layout is None:
        return None
    state = state_infos(tx, infos)
    by_path = {i.path: i for i in jax.tree.leaves(infos)}
    eight_bit = filter(is_quantized, jax.tree.leaves(state, is_leaf=is_quantized))
    check_fits([(by_path[q.codes.path.removesuffix("/codes")], q.tile) for q in eight_bit], layout)
    return shardings_of(state, layout, "opt_state")


def decay_mask(infos: Tree) -> Tree:
    """Which parameters weight decay shrinks: all but norms' scales and biases, told apart by name."""
    return jax.tree.map(lambda i: _decays(i), infos)


def _decays(info: TensorInfo) -> bool:
    return info.path.rsplit("/", 1)[-1] not in ("scale", "bias")
