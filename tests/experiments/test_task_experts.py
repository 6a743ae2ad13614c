"""A task of the example's mixture reads its own experts, and multiplies by no others."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

pytest.importorskip("sklearn")
from experiments.bring_your_own.task_experts import M3ViT
from experiments.bring_your_own.vit import ViT

IMAGES = np.random.default_rng(0).normal(size=(4, 8, 8)).astype(np.float32)


def flops(config):
    graphdef, params = nnx.split(config.make(nnx.Rngs(0)))
    run = jax.jit(lambda p: nnx.merge(graphdef, p)(IMAGES))
    return run.lower(params).compile().cost_analysis()["flops"]


@pytest.mark.long
def test_a_task_has_gradients_for_its_own_experts_and_the_flops_of_a_layer_without_experts():
    config = M3ViT(depth=1, width=32, experts=8, tasks=2)
    gate = jnp.zeros((2, 8)).at[0, jnp.array([1, 6])].set(1.0).at[1, jnp.array([2, 3])].set(1.0)
    for task, own in ((0, {1, 6}), (1, {2, 3})):
        model = dataclasses.replace(config, task=task).make(nnx.Rngs(0))
        model.blocks[0].experts.gate[...] = gate
        graphdef, params = nnx.split(model)
        grads = jax.jit(jax.grad(lambda p, g=graphdef: jnp.sum(nnx.merge(g, p)(IMAGES) ** 2)))(params)
        for name in ("up", "down"):
            size = np.abs(np.asarray(getattr(nnx.merge(graphdef, grads).blocks[0].experts, name)[...])).sum((1, 2))
            assert set(np.flatnonzero(size)) == own
    dense, every = flops(ViT(depth=1, width=32)), flops(M3ViT(depth=1, width=32, experts=8, top_k=8))
    few = flops(config)
    assert few < 1.05 * dense and every < 1.05 * dense  # as wide together, whatever their number
    assert flops(dataclasses.replace(config, experts=64)) < 1.01 * few
