"""Comparison of an optimizer's updates on several layouts, and on stacked and separate layers."""

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
"""A learning rate large enough that updates are not lost in the rounding of parameters."""


def compare_optimizer(
    optimizer: Optimizer, layouts: Iterable[Layout], *, model: ModelConfig = SMALL, steps: int = 3
) -> Agreement:
    """Compare an optimizer's updates without a layout, on each of `layouts`, and layer by layer, for equal gradients.

    A model's layers are one stacked tensor with a leading `layers` axis. An optimizer that takes a norm or a size of
    the stack as if it were one matrix gives other updates than for each layer alone; the last row shows that.

    Args:
      optimizer: see `jaxscale.optim.Optimizer`.
      layouts: the layouts; simulated devices suffice.
      model: the model whose parameters are updated, with random gradients.
      steps: number of steps.
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
    """The sum of all steps' updates of the parameters, in NumPy."""
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
    """Split stacked tensors into one per layer; without `infos`, `tree` itself has the `TensorInfo`s to split."""
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
