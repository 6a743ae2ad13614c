"""A vocabulary that devices do not divide: filled up while it is used, and nowhere to be seen."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.layout import Layout, describe, filled_notes
from jaxscale.models import TransformerConfig, gpt2
from jaxscale.nn import head_logits
from jaxscale.optim import LAMB, Adafactor, AdamW, Muon, state_infos
from jaxscale.parallel import sharded_lookup
from jaxscale.plan import estimate, explain
from jaxscale.plan.communication import predict
from jaxscale.step import CutLoss, MaterialisedLoss, NextToken, TrainConfig, blueprint_of, check, describe_model
from jaxscale.step.backprop import make_loss_and_grads
from jaxscale.testing.params import random_params
from tests.truth.compare import assert_leaves_agree
from tests.truth.layouts import assert_layouts_agree, random_batch
from tests.truth.long import short

V = 61
MODEL = TransformerConfig(
    depth=2, vocab=V, width=32, heads=8, kv_heads=4, head_dim=8, hidden=64, tied=True, logit_softcap=5.0
)
EVERY = Layout("fsdp=2,tensor=2,pipeline=2", pipeline="1f1b:2")
BATCH = random_batch(V, lengths=(7, 2, 4))


@pytest.mark.parametrize(
    "layout,loss",
    short(
        1,
        [
            (Layout("fsdp=2,tensor=4", sequence_sharded=True), MaterialisedLoss()),
            (EVERY, CutLoss()),
            (EVERY, MaterialisedLoss()),
        ],
    ),
    ids=str,
)
def test_training_gives_the_same_numbers_on_every_layout(layout, loss):
    def make(blueprint, *, objective, **options):
        return make_loss_and_grads(blueprint, objective=dataclasses.replace(objective, loss=loss), **options)

    assert_layouts_agree(MODEL, [layout], batch=BATCH, objective=NextToken(z_loss=1e-2), make_loss_and_grads=make)


@pytest.mark.parametrize("layout", [Layout("tensor=4"), Layout("fsdp=2,tensor=2,pipeline=2")], ids=str)
def test_a_step_of_generation_moves_no_table(layout):
    table, ids = jnp.asarray(random_params(describe_model(MODEL)[1]["embed"])["weight"]), jnp.asarray([[3], [V - 1]])

    def step(table, ids):
        hidden = sharded_lookup(table, ids, "vocab")
        return hidden, head_logits(hidden, table, softcap=5.0)

    want = jax.jit(step)(table, ids)
    with layout:
        placed = jax.device_put(table, layout.sharding(("vocab", "embed"), table.shape))
        program = jax.jit(step).lower(placed, ids).compile()
        got = program(placed, ids)
    assert got[1].shape == (2, 1, V) and "all-to-all" not in program.as_text()
    assert_leaves_agree(got, want)


@pytest.mark.parametrize(
    "layout, rows, times",
    [(None, V, 1), (Layout("tensor=4"), V, 1), (Layout("tensor=4"), V, 4), (Layout("tensor=4"), 64, 1)],
    ids=["one device", "few tokens", "many tokens", "rows that divide"],
)
def test_an_id_outside_the_table_gives_nan_and_has_no_gradient(layout, rows, times):
    table = jax.random.normal(jax.random.key(0), (rows, 32))
    ids = jnp.tile(jnp.asarray([[0, rows - 1, rows, rows + 2, 10**6, -1, -rows - 1]]), (times, 1))

    def of(lookup):
        out, pull = jax.vjp(lookup, table)
        return out, pull(jnp.ones_like(out))[0]

    want = of(lambda table: jnp.take(table, ids, axis=0, mode="fill"))
    with layout or contextlib.nullcontext():
        got = jax.jit(lambda: of(lambda table: sharded_lookup(table, ids, "vocab")))()
    assert np.isnan(got[0]).all(-1)[0].tolist() == [False, False, True, True, True, False, True]
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_is_kept_is_the_same_on_every_layout():
    for optimizer in (AdamW(), LAMB(), Muon(), Adafactor(min_dim_size_to_factor=8)):
        config = TrainConfig(model=MODEL, optimizer=optimizer)
        want = blueprint_of(config)[0]
        for layout in (EVERY, Layout("data=4,tensor=2", "zero2")):
            blueprint = blueprint_of(TrainConfig(model=MODEL, optimizer=optimizer, layout=layout))[0]
            assert blueprint.infos == want.infos and blueprint.infos["embed"]["weight"].shape == (V, 32)
            assert state_infos(blueprint.tx, blueprint.infos) == state_infos(want.tx, want.infos)
            blueprint.shardings()


def test_a_table_is_kept_in_equal_parts():
    for layout in (EVERY, Layout("data=2,tensor=4"), Layout("data=2,tensor=4", "zero2")):
        for kind in ("params", "grads", "opt_state"):
            row = describe(describe_model(MODEL)[1]["embed"], layout, kind)[0]
            pieces = layout.split("vocab", kind) * layout.split("embed", kind)
            assert row.spec[0] is None and row.bytes_per_device == V * 32 * 4 // pieces


@pytest.mark.parametrize("layout", [EVERY, Layout("fsdp=4,tensor=2")], ids=str)
def test_a_plan_adds_what_brings_a_table_to_its_rows(layout):
    one, other = (
        TrainConfig(model=dataclasses.replace(MODEL, vocab=v), layout=layout, batch_size=16, seq_len=16, prompt=None)
        for v in (V, layout.filled("vocab", V))
    )
    plan, want = (predict(c, "v5p:2x2x2") for c in (one, other))
    counts = [Counter((c.kind, c.axes, c.payload, c.times) for c in one) for one in (plan, want)]
    more = counts[0] - counts[1]
    assert counts[1] - counts[0] == Counter()
    assert {a for _, axes, _, _ in more for a in axes} == {a for a in ("pipeline", "tensor") if layout.sizes[a] > 1}
    assert {kind for kind, *_ in more} <= {"all-to-all", "all-gather"} and max(times for *_, times in more) == 1
    assert 1 <= estimate(one, "v5p:2x2x2").peak / estimate(other, "v5p:2x2x2").peak < 1.1


def test_gpt2_is_laid_out_and_what_that_costs_is_told():
    model = gpt2(dtype="float32", depth=2)
    for layout in (Layout("tensor=2"), Layout("tensor=2,pipeline=2")):
        blueprint, _ = check(TrainConfig(model=model, layout=layout, batch_size=8, seq_len=128))
        assert blueprint.infos["embed"]["weight"].shape == (50257, 768)
        (note,) = filled_notes(blueprint.infos, layout)
        assert "vocab of 50,257, so" in note and f"a vocab of {layout.filled('vocab', 50257):,} would" in note
    assert note in explain(TrainConfig(model=model, layout=layout, batch_size=8, seq_len=128)).notes
