"""Several TPU slices: where their devices stand in a mesh, and what travels between them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jaxscale as js
from jaxscale.errors import LayoutError
from jaxscale.plan import compile_for, plan_for, topology_devices
from jaxscale.plan.collectives import collectives
from tests.truth.errors import raises_saying

TWO = "v5e:2x2*2"
pytestmark = pytest.mark.tpu_aot


@pytest.mark.parametrize("mesh, across", [("data=2,fsdp=4", "data"), ("fsdp=4,tensor=2", "fsdp"), ("fsdp=-1", "fsdp")])
def test_one_axis_goes_over_slices_and_the_others_stay_within_one(mesh, across):
    placed = js.Layout(mesh, across=across).on(topology_devices(TWO)).device_mesh
    assert placed.devices.size == 8
    slices = jax.tree.map(lambda d: d.slice_index, placed.devices.tolist())
    for axis, name in enumerate(placed.axis_names):
        along = np.moveaxis(np.array(slices), axis, 0)
        crossing = bool((along != along[:1]).any())
        assert crossing == (name == across), f"{name} changes slices: {crossing}"
    first, second = np.split(np.array(slices), 2, axis=placed.axis_names.index(across))
    assert (first == 0).all() and (second == 1).all()


@pytest.mark.parametrize(
    "layout, words",
    [
        (js.Layout("data=2,fsdp=4"), ["2 slices", "does not say which axis", "Layout.across = 'data'"]),
        (js.Layout("data=1,fsdp=8", across="data"), ["data=1", "2 slices", "Layout.across = 'fsdp'"]),
        (js.Layout("data=2,fsdp=2", across="data"), ["has 4 devices", "have 8", "all of their devices"]),
    ],
    ids=["unnamed", "indivisible", "smaller"],
)
def test_a_mesh_that_slices_do_not_carry_is_refused(layout, words):
    with raises_saying(LayoutError, *words):
        _ = layout.on(topology_devices(TWO)).device_mesh


def test_only_the_named_axis_sends_between_slices():
    layout = js.Layout("data=2,fsdp=4", across="data")

    def loss(w, x):
        rows = jax.lax.with_sharding_constraint(x @ jax.lax.with_sharding_constraint(w, PartitionSpec()), batch)
        return jnp.square(rows).sum()

    def step(w, x):
        return w - jax.lax.with_sharding_constraint(jax.grad(loss)(w, x), PartitionSpec("fsdp"))

    batch = PartitionSpec(("data", "fsdp"))
    placed = layout.on(topology_devices(TWO))
    shape = lambda spec, *s: jax.ShapeDtypeStruct(s, jnp.float32, sharding=jax.NamedSharding(placed.device_mesh, spec))  # noqa: E731
    arrays = (shape(PartitionSpec("fsdp"), 256, 128), shape(batch, 64, 256))
    compiled = compile_for(step, TWO, *arrays, layout=layout)
    result = collectives(compiled, placed.sizes, across="data")
    between = [c for c in result if "data" in c.axes]
    assert {c.axes for c in result} == {("data",), ("fsdp",)}
    # each device's quarter of the gradient, summed over two slices: what one of them sends is that quarter
    assert [(c.kind, c.devices, c.sent) for c in between] == [("all-reduce", 2, 256 * 128 * 4 // 4)]
    with raises_saying(LayoutError, "several slices", "across"):
        collectives(compiled, placed.sizes)


def test_the_axis_over_slices_is_a_mesh_axis():
    with raises_saying(LayoutError, "Layout.across", "'dta'", "did you mean 'data'"):
        js.Layout("data=2", across="dta")


@pytest.mark.parametrize("name, words", [("h200:8*2", ["*2", "TPUs"]), ("v5e:2x2*0", ["v5e:2x2*0"])])
def test_slices_are_of_tpus(name, words):
    with raises_saying(LayoutError, *words):
        topology_devices(name)


def test_a_plan_over_slices_says_what_its_compiled_step_sends_between_them():
    config = js.TrainConfig(
        model=js.models.Transformer.Config(depth=1, width=128, heads=1, vocab=128, dtype="bfloat16"),
        layout=js.Layout("data=2,fsdp=4", across="data"), batch_size=8, seq_len=32, prompt=None,
    )  # fmt: skip
    plan = plan_for(config, TWO, compile="always")
    between = {t.axes: t for t in plan.step.traffic if "data" in t.axes}
    compiled = {t.axes: t for t in plan.compiled.step.traffic if "data" in t.axes}
    assert {t.link for t in (*between.values(), *compiled.values())} == {"dcn"}
    # a quarter of the gradients each, summed over two slices; the compiler sends some scalars besides
    weights = sum(i.nbytes for i in jax.tree.leaves(js.step.describe_model(config.model)[1])) / 4
    assert between["data",].sent == pytest.approx(weights, rel=0.05)
    assert compiled["data",].sent == pytest.approx(weights, rel=0.1)
