"""Check of an objective: terms of parts of a batch add up, and its value is linear in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxscale.data import Batch
from jaxscale.step.backprop import numbered
from jaxscale.step.blueprint import blueprint_of
from jaxscale.step.config import TrainConfig
from jaxscale.step.objective import terms_of
from jaxscale.testing.params import random_params


def check_objective(config: TrainConfig, batch: Batch, *, tolerance: float = 1e-5) -> None:
    """Check `config.objective` on `config.model` with random parameters, without a mesh.

    Args:
      config: the settings of a run.
      batch: a batch as from the run's data, with the names of `Objective.inputs` and an even number of groups of rows.
      tolerance: relative tolerance, of sums in another order.

    Raises:
      AssertionError: a requirement does not hold; the message names it.
    """
    objective = config.objective
    blueprint, _ = blueprint_of(config)
    trees = (blueprint.infos, blueprint.frozen)
    params, frozen = (jax.tree.map(jnp.asarray, random_params(tree, seed=s)) for s, tree in enumerate(trees))
    inputs = objective.inputs(config)
    assert set(inputs) <= set(batch), f"the batch has no {sorted(set(inputs) - set(batch))}"
    rows = len(next(iter(batch.values())))
    half = rows // 2
    assert rows == 2 * half and half % objective.group == 0, f"{rows} rows do not split into two halves of whole groups"

    def terms(part: Mapping[str, jax.Array]) -> Any:
        model = nnx.merge(blueprint.graphdef, params)
        return terms_of(objective, model, part, reference=blueprint.reference_of(frozen))

    numbered_batch = numbered({name: jnp.asarray(batch[name]) for name in inputs})
    halves = [{k: x[at] for k, x in numbered_batch.items()} for at in (slice(0, half), slice(half, rows))]
    whole, first, second = jax.jit(lambda: [terms(part) for part in (numbered_batch, *halves)])()
    weights = objective.weights(numbered_batch, 1)
    both = set(whole) & set(weights)
    assert not both, f"terms and weights both have {sorted(both)}"

    def close(a: float | jax.Array, b: float | jax.Array) -> bool:
        return np.allclose(a, b, rtol=tolerance, atol=tolerance * max(1.0, float(np.max(np.abs(b)))))

    value = objective.value(whole | weights)
    kind = (value.shape, value.dtype)
    assert kind == ((), jnp.float32), f"the value is {value.dtype}{value.shape}, not a float32 scalar"
    for name in objective.evaluated:
        assert name in objective.metrics(whole | weights), f"metrics have no '{name}', which `evaluated` names"
    if not objective.additive:
        return
    summed = jax.tree.map(jnp.add, first, second)
    for path, a in jax.tree_util.tree_leaves_with_path(summed):
        b = dict(jax.tree_util.tree_leaves_with_path(whole))[path]
        assert close(a, b), (
            f"the terms{jax.tree_util.keystr(path)} of two halves sum to {a}, but those of the whole are {b}"
        )
    parts = objective.weights(numbered_batch, 2)
    apart = float(objective.value(first | parts)) + float(objective.value(second | parts))
    together = float(objective.value(summed | parts))
    assert close(apart, together), f"the value is not linear in the terms: {apart} apart, {together} together"
    if "weights" in inputs:
        zeros = {k: x if k == "rows" else jnp.zeros_like(x) for k, x in numbered_batch.items()}
        filled = float(objective.value(jax.tree.map(jnp.add, whole, jax.jit(terms)(zeros)) | weights))
        assert close(filled, float(value)), f"padding rows of zeros change the value {float(value)} to {filled}"
        empty = objective.weights(zeros, 1)
        assert all(float(empty[k]) == 0 for k in empty if k != "parts"), "padding rows of zeros have weights"
