"""Optimizer state is sharded by the rules for `opt_state`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

from jaxscale import optim
from jaxscale.layout import Layout, shardings_of
from jaxscale.models import TransformerConfig
from jaxscale.optim import state_shardings
from jaxscale.step.state import describe_model

CONFIG = TransformerConfig(depth=2, vocab=64, width=32, heads=4, hidden=64)
ZERO1 = Layout("data=2,fsdp=4", "zero1")


def _adamw_state(layout, tx=None):
    _, infos = describe_model(CONFIG)
    return infos, state_shardings(tx or optim.adamw(0.1), infos, layout)


def test_zero1_splits_the_moments_over_all_replicas_and_leaves_parameters_whole():
    infos, state = _adamw_state(ZERO1)
    params = shardings_of(infos, ZERO1)
    assert {s.spec for s in jax.tree.leaves(params)} == {P(*[None] * n) for n in (1, 2, 3, 4)}
    both = ("data", "fsdp")
    for moment in (state.mu, state.nu):
        assert moment["embed"]["weight"].spec == P(None, both)
        assert moment["norm"]["scale"].spec == P(both)
        assert moment["runs"][0]["blocks"][0]["mlp"]["down"]["kernel"].spec == P(None, None, both)
        assert all(
            s.shard_shape(i.shape) != i.shape for s, i in zip(*map(jax.tree.leaves, (moment, infos)), strict=True)
        )
    assert state.count.spec == P()


@pytest.mark.parametrize("name", ["zero2", "fsdp", "tensor", "fsdp_tensor"])
def test_moments_live_where_gradients_do(name):
    layout = Layout("data=2,fsdp=2,tensor=2", name)
    infos, state = _adamw_state(layout)
    assert state.mu == state.nu == shardings_of(infos, layout, "grads")


@pytest.mark.parametrize(
    "tx",
    [
        optax.adam(0.1),
        optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_schedule(lambda _: 1.0), optax.trace(0.9)),
        optim.chain(optax.clip_by_global_norm(1.0), optim.adamw(0.1)),
        optax.sgd(0.1),
    ],
    ids=["adam", "trace", "chain", "sgd"],
)
def test_the_tree_of_shardings_fits_any_transformations_state(tx):
    infos, shardings = _adamw_state(ZERO1, tx)
    state = tx.init(jax.tree.map(lambda i: jnp.zeros(i.shape, i.dtype), infos))
    placed = jax.device_put(state, shardings)
    assert jax.tree.structure(placed) == jax.tree.structure(state)
    for x, s in zip(jax.tree.leaves(placed), jax.tree.leaves(shardings), strict=True):
        assert x.sharding == s
        assert x.ndim == 0 or s.spec != P(), "a moment is not whole"


def test_without_a_layout_there_is_nothing_to_shard():
    assert _adamw_state(None)[1] is None
