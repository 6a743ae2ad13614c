"""Ways to compute experts: their times are those of plans, and no weight moves from one to another."""

from __future__ import annotations

import dataclasses

import jax
import pytest
from flax import nnx

from jaxscale.errors import ConfigError
from jaxscale.layout import Layout, abstract, experts_as, shardings_of
from jaxscale.layout.rules import EXPERTS
from jaxscale.models.presets import mixtral_8x7b
from jaxscale.nn import MixtureOfExperts, flash_attention
from jaxscale.plan import plan_for
from jaxscale.plan.collectives import collectives
from jaxscale.plan.expert_loads import loads_of
from jaxscale.plan.expert_ways import ExpertChooser
from jaxscale.step import TrainConfig
from tests.truth.errors import raises_saying

HARDWARE = "v5e:2x2"
MODEL = mixtral_8x7b(
    depth=1,
    vocab=256,
    width=256,
    heads=4,
    kv_heads=4,
    hidden=256,
    mlp=MixtureOfExperts(8, 2),
    attention=flash_attention,
)
CONFIG = TrainConfig(model=MODEL, layout=Layout("expert=4"), batch_size=8, seq_len=128)


def test_from_one_way_to_another_the_compiled_program_sends_nothing():
    _, infos = abstract(lambda: MixtureOfExperts(8, 2)(16, 32, rngs=nnx.Rngs(0)))

    def sent(before, after):
        old, new = (shardings_of(infos, layout) for layout in (before, after))
        shapes = jax.tree.map(lambda i, s: jax.ShapeDtypeStruct(i.shape, i.dtype, sharding=s), infos, old)
        text = jax.jit(lambda p: p, out_shardings=new).lower(shapes).compile().as_text()
        return sum(c.sent for c in collectives(text, before.sizes))

    mesh = "expert=4,fsdp=2"
    ways = [Layout(mesh, experts_as(way)) for way in EXPERTS]
    assert [sent(a, b) for a in ways for b in ways] == [0] * 9
    assert sent(ways[0], Layout(mesh, "replicated")) > 0


@pytest.mark.long
def test_ways_cost_what_their_plans_cost_and_the_fastest_is_first():
    chooser, loads = ExpertChooser(CONFIG, HARDWARE), loads_of("zipf:1", 8)
    for some in (None, loads):
        ways = chooser(some)
        assert {way.name for way in ways} == {"sent", "sent to all", "split", "gathered"}
        assert [way.step.total for way in ways] == sorted(way.step.total for way in ways)
        for way in ways:
            plan = plan_for(way.config, HARDWARE, compile="never", loads=some)
            assert plan.step.total == pytest.approx(way.step.total, rel=1e-9)
    even, skewed = ({way.name: way.step.total for way in chooser(some)} for some in (None, loads))
    assert skewed["sent"] > even["sent"] and skewed["gathered"] == pytest.approx(even["gathered"], rel=0.05)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(layout=Layout("fsdp=4")), ["all experts everywhere", "add expert=2"]),
        (dict(model=dataclasses.replace(MODEL, mlp=MixtureOfExperts(8, 2, capacity=1.0))), ["capacity = None"]),
        (dict(layout=Layout("expert=4", dataclasses.replace(experts_as("sent"), grads={}))), ["rules by name"]),
    ],
    ids=["mesh", "capacity", "rules"],
)
def test_what_has_no_ways_is_refused(changes, words):
    with raises_saying(ConfigError, *words):
        ExpertChooser(dataclasses.replace(CONFIG, **changes), HARDWARE)
