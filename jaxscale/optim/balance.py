"""Experts' biases: parameters that follow the load and not the loss."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxscale.optim.base import FusedTransformation, Tree, apply_gradients

NAME = "load_bias"
"""What such a parameter is called; its gradient is how far each expert's load lies above the mean."""


def gradient_norm(grads: Tree) -> jax.Array:
    """The global norm, float32, of all gradients of the loss."""
    return optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.float32), without_biases(grads)))


def without_biases(tree: Tree) -> Tree:
    """The tree with nothing where a load bias stands."""
    return jax.tree_util.tree_map_with_path(lambda path, x: None if _is_bias(path) else x, tree)


def balanced(tx: optax.GradientTransformation, rate: float) -> optax.GradientTransformation:
    """`tx` for all parameters but load biases, which go down by `rate` where the load is above the mean, else up.

    (Wang et al. 2024.) No clipping, decay or momentum touches them, and they have no state.

    Args:
      tx: the optimizer of all others, clipping included.
      rate: what a bias moves by in a step (0.001 in DeepSeek-V3).
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
    """Load biases from the one tree, all else from the other."""
    pick = lambda path, b, r: b if _is_bias(path) else r  # noqa: E731
    return jax.tree_util.tree_map_with_path(pick, biases, rest)


def _is_bias(path: tuple[Any, ...]) -> bool:
    return bool(path) and getattr(path[-1], "key", None) == NAME
