"""Load-balancing biases of experts: parameters that follow each expert's load and not the loss."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxscale.layout import sum_by_layer
from jaxscale.optim.base import FusedTransformation, Tree, apply_gradients

NAME = "load_bias"
"""Name of such a parameter. Its gradient is how far each expert's load lies above the mean."""


def gradient_norm(grads: Tree) -> jax.Array:
    """Return the global norm (float32 scalar) of the gradients of the loss, without those of load biases.

    Args:
      grads: gradients, of the parameters' structure.
    """
    return global_norm(without_biases(grads))


def global_norm(tree: Tree) -> jax.Array:
    """Return the norm of all elements, float32 scalar; of stacks in host memory one layer at a time is on the device.

    Args:
      tree: arrays.
    """

    def square(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(x.astype(jnp.float32)))

    return jnp.sqrt(sum(sum_by_layer(square, x) for x in jax.tree.leaves(tree)))


def without_biases(tree: Tree) -> Tree:
    """Return the tree with `None` in place of each load bias.

    Args:
      tree: parameters or gradients.
    """
    return jax.tree_util.tree_map_with_path(lambda path, x: None if _is_bias(path) else x, tree)


def balanced(tx: optax.GradientTransformation, rate: float) -> optax.GradientTransformation:
    """Return `tx` for all parameters except load biases, and a fixed step for those (Wang et al. 2024).

    A load bias goes down by `rate` where the expert's load is above the mean, and up where it is below. Clipping,
    weight decay and momentum do not apply to it, and it has no state.

    Args:
      tx: the optimizer of all other parameters, clipping included.
      rate: how much a bias changes in a step (0.001 in DeepSeek-V3).
    """

    def init(params: Tree) -> Tree:
        return tx.init(without_biases(params))

    def moves(grads: Tree) -> Tree:
        return jax.tree.map(lambda g: -rate * jnp.sign(g), grads)

    def update(grads: Tree, state: Tree, params: Tree | None = None) -> tuple[Tree, Tree]:
        rest = None if params is None else without_biases(params)
        updates, state = tx.update(without_biases(grads), state, rest)
        return _with_biases(updates, moves(grads)), state

    def update_and_apply(grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        new, state = apply_gradients(tx, without_biases(grads), state, without_biases(params))
        return _with_biases(new, optax.apply_updates(params, moves(grads))), state

    return FusedTransformation(init, update, update_and_apply, getattr(tx, "notes", ()))


def _with_biases(rest: Tree, biases: Tree) -> Tree:
    """Take load biases from `biases` and all else from `rest`."""

    def pick(path: tuple[Any, ...], b: jax.Array, r: jax.Array) -> jax.Array:
        return b if _is_bias(path) else r

    return jax.tree_util.tree_map_with_path(pick, biases, rest)


def _is_bias(path: tuple[Any, ...]) -> bool:
    return bool(path) and getattr(path[-1], "key", None) == NAME
