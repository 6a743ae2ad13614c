"""An optimizer on layouts, and on layers one by one: what it does to a parameter is no matter of how that is kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.layout import Layout, TensorInfo, shardings_of
from jaxscale.models import ModelConfig, TransformerConfig
from jaxscale.optim import Optimizer, apply_gradients, state_shardings
from jaxscale.step import describe_model
from jaxscale.testing.compare import Agreement, differences
from jaxscale.testing.layouts import QUICKLY, in_force, to_numpy
from jaxscale.testing.params import random_params

Tree = Any
SMALL = TransformerConfig(depth=2, vocab=64, width=32, heads=4, hidden=64)
RATE = 0.5
"""Large, so that what is added to a parameter is not lost in its rounding."""


def compare_optimizer(
    optimizer: Optimizer, layouts: Iterable[Layout], *, model: ModelConfig = SMALL, steps: int = 3
) -> Agreement:
    """Gives an optimizer the same gradients on no layout, on each of `layouts`, and layer by layer.

    A model's layers are one stacked tensor with a leading `layers`; an optimizer that takes a norm or a size of it as
    if it were one matrix does other than it does to each layer alone, which the last row tells.

    Args:
      optimizer: see `jaxscale.optim.Optimizer`.
      layouts: where; simulated devices do.
      model: whose parameters it is given, with random gradients of theirs.
      steps: how many.
    """
    _, infos = describe_model(model)
    params = random_params(infos)
    grads = [random_params(infos, seed=1 + i) for i in range(steps)]
    want = _updates(optimizer, infos, params, grads, None)
    rows = {}
    for layout in layouts:
        rows[str(layout)] = {"updates": differences(_updates(optimizer, infos, params, grads, layout), want)}
    alone = _updates(optimizer, _apart(infos), _apart(params, infos), [_apart(g, infos) for g in grads], None)
    rows["layers one by one"] = {"updates": differences(alone, _apart(want, infos))}
    return Agreement(f"{type(optimizer).__name__}, {steps} steps", rows)


def _updates(optimizer: Optimizer, infos: Tree, params: Tree, grads: list[Tree], layout: Layout | None) -> Tree:
    """What the steps add to the parameters, in NumPy."""
    tx = optimizer.make(lambda _: jnp.asarray(RATE, jnp.float32), infos)
    first = jax.tree.map(jnp.asarray, params)
    with in_force(layout):
        state = tx.init(first)
        step: Any = jax.jit(lambda grads, state, params: apply_gradients(tx, grads, state, params))
        if layout is not None:
            where = shardings_of(infos, layout), state_shardings(tx, infos, layout)
            first, state = jax.device_put(first, where[0]), jax.device_put(state, where[1])
            step = jax.jit(step, in_shardings=(where[0], where[1], where[0]), out_shardings=where)
            grads = [jax.device_put(g, where[0]) for g in grads]
        compiled = step.lower(grads[0], state, first).compile(QUICKLY)
        params_now = first
        for g in grads:
            params_now, state = compiled(g, state, params_now)
        return jax.tree.map(lambda a, b: a - b, to_numpy(params_now), params)


def _apart(tree: Tree, infos: Tree | None = None) -> dict[str, Any]:
    """Every layer's tensors as tensors of their own; of `TensorInfo`s where no others are given."""
    out: dict[str, Any] = {}

    def put(info: TensorInfo, x: Any) -> None:
        at = info.axes.index("layers") if "layers" in info.axes else None
        if at is None:
            out[info.path] = x
            return
        for i in range(info.shape[at]):
            axes, shape = info.axes[:at] + info.axes[at + 1 :], info.shape[:at] + info.shape[at + 1 :]
            alone = dataclasses.replace(info, path=f"{i}/{info.path}", axes=axes, shape=shape)
            out[alone.path] = alone if x is info else np.take(x, i, axis=at)

    jax.tree.map(put, tree if infos is None else infos, tree)
    return out
