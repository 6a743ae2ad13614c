"""Devices are lost in the middle of a run, and its numbers go on as if they were not."""

from __future__ import annotations

import ctypes
import functools

import jax
import numpy as np
import pytest

import jaxscale as js
from jaxscale.errors import ConfigError, LayoutError, RunError
from jaxscale.layout import Layout, experts_as
from jaxscale.models import TransformerConfig
from jaxscale.step import TrainConfig
from jaxscale.train.elastic import Deal, Elastic, deal

pytestmark = pytest.mark.once

Small = functools.partial(TransformerConfig, vocab=32, width=16, heads=2, hidden=32, depth=1, dropout=0.1)


def config(mesh, **changes):
    settings = dict(data=js.data.synthetic(32, documents=64, length=64), steps=6, lr=1e-2, eval_batches=0)
    settings = dict(model=Small()) | settings
    return TrainConfig(layout=Layout(mesh), batch_size=8, seq_len=16, **settings | changes)


def destroy(state, devices):
    """Overwrites what devices hold of a state: whoever reads it gets no number."""
    for x in jax.tree.leaves(state.params) + [x for x in jax.tree.leaves(state.opt_state) if x.ndim]:
        for shard in x.addressable_shards:
            if shard.device in devices:
                ctypes.memset(shard.data.unsafe_buffer_pointer(), 0xFF, shard.data.nbytes)


@pytest.mark.parametrize("rows, shards, at_once", [(8, 3, 2), (16, 3, 4), (7, 2, 1), (5, 5, 1), (9, 1, 4)], ids=str)
def test_a_batch_is_dealt_whole_and_no_device_gets_more_at_once(rows, shards, at_once):
    dealt = deal(rows, shards, at_once)
    assert dealt.rows >= rows and dealt.rows % (dealt.micro_batches * shards) == 0
    assert dealt.at_once <= at_once
    assert dealt.rows - rows < dealt.micro_batches * shards  # one row more everywhere would do without


@pytest.mark.long
def test_losses_are_those_of_a_run_that_lost_nothing():
    whole = Elastic(config("data=4,tensor=2"))
    expected = [whole.step()["loss"] for _ in range(6)]
    run, losses = Elastic(config("data=4,tensor=2")), []
    lost = run.alive[2:4]
    for step in range(6):
        if step == 3:
            destroy(jax.block_until_ready(run.state), lost)
            run.lose(lost)
        losses.append(run.step()["loss"])
    assert run.layout.sizes["data"] == 3 and run.deal == Deal(micro_batches=2, shards=3, rows=12)
    assert not set(lost) & set(run.layout.device_mesh.devices.flat)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)


def test_what_only_lost_devices_held_is_said_and_nothing_is_changed():
    run = Elastic(config("data=2,fsdp=2"))
    lost = [run.alive[0], run.alive[2]]  # one part of fsdp, of both copies
    state = run.state
    with pytest.raises(RunError, match="was on lost devices only"):
        run.lose(lost)
    assert run.state is state and run.layout.sizes["data"] == 2


def test_too_few_devices_for_a_slice_are_refused():
    run = Elastic(config("data=2,tensor=2"))
    with pytest.raises(LayoutError, match="1 devices are left, but one slice of the data axis"):
        run.lose(run.alive[:3])
    before = run.layout, run.alive, run.blueprint, run.state
    with pytest.raises(LayoutError, match="3 does not divide 16"):
        run.rescale("data=1,context=3")
    assert all(now is old for now, old in zip((run.layout, run.alive, run.blueprint, run.state), before, strict=True))
    with pytest.raises(ConfigError, match="needs a layout with a data axis"):
        Elastic(config("tensor=2"))


@pytest.mark.long
def test_expert_parallelism_grows_and_shrinks_between_steps_with_the_same_losses():
    model = Small(dropout=0.0, mlp=js.nn.MixtureOfExperts(experts=8, top_k=2, hidden=16))
    whole = Elastic(config("expert=2", model=model))
    expected = [whole.step()["loss"] for _ in range(6)]
    run, losses = Elastic(config("expert=2", model=model)), []
    of_experts = sum(x.nbytes for x in jax.tree.leaves(run.state) if x.shape == (1, 8, 16, 16))
    for mesh in (None, "expert=4", "expert=8", "expert=4", "another way", None):
        if mesh == "another way":  # the same arrays, which other devices multiply
            assert run.rescale("expert=4", rules=experts_as("gathered")) == 0
            mesh = None
        if mesh is not None:
            before = {d for x in jax.tree.leaves(run.state.params) for d in x.devices()}
            received = run.rescale(mesh)
            new = len({*run.alive} - before)
            rest = sum(x.nbytes for x in jax.tree.leaves(run.state)) - of_experts
            # new devices get all but experts, whole; of the experts half moves, to new devices or from lost ones
            assert received == pytest.approx(new * rest + of_experts / 2, rel=1e-3), mesh
        losses.append(run.step()["loss"])
    assert run.layout.sizes["expert"] == 4
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
