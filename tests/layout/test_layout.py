"""Names to specs, errors before compiling, and traces that are not shared between layouts."""

from __future__ import annotations

import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxscale import config
from jaxscale.errors import LayoutError
from jaxscale.infer.cache import generating
from jaxscale.layout import Layout, Pipeline, Rules, TensorInfo, constrain, current, describe, say_once
from tests.truth.compiled import compilations
from tests.truth.errors import raises_saying


def test_two_dimensions_on_one_mesh_axis_are_refused():
    layout = Layout("tensor=8", Rules(params={"embed": "tensor", "mlp": ("data", "tensor")}))
    with raises_saying(LayoutError, "up/kernel", "(64, 128)", "params", "'embed'", "'mlp'", "'tensor'", "None"):
        layout.spec(("embed", "mlp"), (64, 128), name="up/kernel")


def test_a_dimension_that_does_not_divide_names_tensor_shape_rule_and_the_nearest_that_does():
    layout = Layout("tensor=4,data=2")
    with raises_saying(
        LayoutError,
        "q/kernel",
        "('embed', 'heads', 'head_dim')",
        "(64, 6, 16)",
        "params['heads'] = 'tensor'",
        "shards 6 over 4",
        "tensor=4",
        "4 or 8",
        "or shard it over 2 devices",
    ):
        layout.spec(("embed", "heads", "head_dim"), (64, 6, 16), name="q/kernel")


@pytest.mark.parametrize(("heads", "mesh"), [(1, "tensor=2"), (2, "tensor=4"), (6, "tensor=4")])
def test_key_heads_that_do_not_divide_are_whole_on_every_device(heads, mesh):
    layout, axes = Layout(mesh), ("embed", "kv_heads", "head_dim")
    for kind in ("params", "grads", "opt_state", "activations"):
        assert tuple(layout.spec(axes, (64, heads, 16), kind=kind)) == (None, None, None)
        assert layout.split("kv_heads", kind, size=heads) == 1
    row = describe([TensorInfo("k/kernel", (64, heads, 16), np.float32, axes)], layout)[0]
    assert row.rules == f"kv_heads whole ({heads} on {mesh})" and row.bytes_per_device == 64 * heads * 16 * 4


def test_key_heads_that_divide_are_cut():
    layout = Layout("tensor=2")
    assert tuple(layout.spec(("embed", "kv_heads", "head_dim"), (64, 4, 16))) == (None, "tensor", None)
    assert layout.split("kv_heads", size=4) == 2 and layout.why_whole("kv_heads", 4) is None


def test_whole_key_heads_are_announced_once(caplog):
    say_once.cache_clear()
    with Layout("tensor=4"):
        for _ in range(2):
            jax.eval_shape(lambda x: constrain(x, "batch", "seq", "kv_heads", "head_dim"), jnp.zeros((2, 4, 2, 8)))
    warnings = [r.getMessage() for r in caplog.records if "key and value heads" in r.getMessage()]
    assert len(warnings) == 1 and "2 on tensor=4" in warnings[0]


def test_a_dimension_smaller_than_the_mesh_names_the_smallest_that_divides():
    with raises_saying(LayoutError, "shards 3 over 8", "('data', 'fsdp')", "data=2 x fsdp=4", "that it divides is 8"):
        Layout("data=2,fsdp=4").spec(("batch",), (3,), kind="activations")


def test_an_unknown_name_is_refused_with_a_suggestion():
    with raises_saying(LayoutError, "'embd'", "did you mean 'embed'", "w"):
        Layout("data=8").spec(("embd",), (4,), name="w")
    with raises_saying(LayoutError, "Layout.split", "'bach'", "'batch'"):
        Layout("data=8").split("bach")


def test_names_and_dimensions_must_be_as_many():
    with raises_saying(LayoutError, "2 dimensions and 1 names"):
        Layout("data=8").spec(("embed",), (4, 4))


def test_split_counts_the_pieces_of_a_name():
    layout = Layout("data=2,fsdp=2,tensor=2")
    assert (layout.split("batch"), layout.split("seq"), layout.split("mlp")) == (4, 1, 2)
    assert (layout.split("embed"), layout.split("embed", "params")) == (1, 2)


def test_a_layout_says_what_it_is_in_a_line():
    assert str(Layout("tensor=2,data=4", sequence_sharded=True)) == "data=4,tensor=2 (fsdp_tensor, sequence-sharded)"
    assert str(Layout("data=1", Rules())) == "one device (own rules)"


def test_constrain_is_a_no_op_outside_of_a_layout():
    x = jnp.ones((3, 5))
    assert constrain(x, "batch", "embed") is x  # although no mesh axis divides 3
    assert not jax.make_jaxpr(lambda x: constrain(x, "batch", "embed"))(x).eqns


@pytest.mark.parametrize("layout", [None, Layout("data=8")], ids=["no layout", "layout"])
def test_constrain_checks_names_with_or_without_a_layout(layout):
    def use():
        with raises_saying(LayoutError, "'embedd'", "did you mean 'embed'"):
            constrain(jnp.ones((8, 8)), "batch", "embedd")

    if layout is None:
        use()
    else:
        with layout:
            use()


def test_constrain_says_which_activation_does_not_divide():
    with Layout("data=8"), raises_saying(LayoutError, "the activation", "(6, 4)", "activations['batch']", "8"):
        constrain(jnp.ones((6, 4)), "batch", "seq")


def test_constrain_reads_the_map_of_its_kind():
    x = jnp.ones((8, 8))
    with Layout("fsdp=4,tensor=2"):
        jaxpr = jax.make_jaxpr(lambda x: (constrain(x, "embed", "mlp"), constrain(x, "embed", "mlp", kind="grads")))(x)
    assert constraints(jaxpr.jaxpr) == [P(None, "tensor"), P("fsdp", "tensor")]


def test_layouts_nest_and_leave_nothing_behind():
    outer, inner = Layout("data=8"), Layout("tensor=8")
    with outer:
        with pytest.raises(RuntimeError), inner:
            assert current() is inner
            raise RuntimeError
        assert current() is outer
        with outer:
            assert jax.sharding.get_abstract_mesh().shape["data"] == 8
        assert current() is outer
    assert current() is None


def _wrapped_once():
    def body(c, _):
        return constrain(jnp.sin(c), "batch", "embed"), None

    def plain(x):
        return constrain(jnp.sin(x), "batch", "embed")

    return {
        "scan": lambda x: jax.lax.scan(body, x, None, length=2)[0],
        "jit": jax.jit(plain),
        "checkpoint": jax.checkpoint(plain),
    }


@pytest.mark.parametrize("wrapper", ["scan", "jit", "checkpoint"])
def test_two_rule_sets_on_one_mesh_do_not_share_traces(wrapper):
    f = _wrapped_once()[wrapper]
    x = jnp.ones((4, 8))
    specs = []
    for target in ("data", "fsdp", "data"):
        with Layout("data=4,fsdp=2", Rules(activations={"embed": target})):
            specs += constraints(jax.make_jaxpr(lambda x: f(x))(x).jaxpr)
    assert specs == [P(None, "data"), P(None, "fsdp"), P(None, "data")]


def test_two_rule_sets_on_one_mesh_do_not_share_a_compiled_function():
    f = jax.jit(lambda x: constrain(x * 2, "batch", "embed"))
    x = jnp.ones((8, 8))
    for target, spec in (("data", P(None, "data")), ("fsdp", P(None, "fsdp"))):
        layout = Layout("data=4,fsdp=2", Rules(activations={"embed": target}))
        with layout:
            y = f(x)
        assert y.sharding.is_equivalent_to(jax.NamedSharding(layout.device_mesh, spec), 2)
        np.testing.assert_array_equal(y, 2 * np.ones((8, 8)))


def test_equal_layouts_share_a_compiled_function():
    f = jax.jit(lambda x: constrain(x + 1, "batch", "embed"))
    counts, x = [], jnp.ones((8, 8))
    for _ in range(3):
        with Layout("data=4,tensor=2"):
            f(x)
        counts.append(compilations())
    assert counts[0] == counts[2]


def constraints(jaxpr):
    """The specs of every sharding constraint in a jaxpr and of nested ones."""
    specs = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "sharding_constraint":
            specs.append(eqn.params["sharding"].spec)
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                specs += constraints(inner)
    return specs


def test_a_layout_that_cannot_be_entered_is_not_left_in_force():
    with pytest.raises(LayoutError), Layout("data=16"):
        pass
    assert current() is None


def test_a_layout_that_was_used_can_be_pickled():
    layout = Layout("data=2,fsdp=4")
    with layout:
        pass
    assert pickle.loads(pickle.dumps(layout)) == layout


def test_the_same_function_on_two_sets_of_devices_runs_on_each():
    layout = Layout("data=2")
    first, second = (layout.on(jax.devices()[at : at + 2]) for at in (0, 2))
    assert len({layout, first, second, layout.on(jax.devices()[:2])}) == 3
    assert generating(first) != generating(second)
    whole = Layout("pipeline=2", pipeline=Pipeline(vocabulary="whole"))
    assert whole.cut("vocab") == () and generating(whole).cut("vocab") == ("pipeline",)

    @jax.jit
    def doubled(x):
        return constrain(x, "batch", None) * 2

    for placed, devices in ((first, jax.devices()[:2]), (second, jax.devices()[2:4]), (first, jax.devices()[:2])):
        with placed:
            assert doubled(jnp.ones((2, 2))).sharding.device_set == set(devices)
    assert first.abstract(kind="TPU v5") != first.abstract(kind="NVIDIA H200")


def test_a_placed_layout_is_written_as_its_specification():
    placed = Layout("data=2", "zero1").on(jax.devices()[:2])
    for written in (pickle.loads(pickle.dumps(placed)), placed.specification):
        assert type(written) is Layout and written == Layout("data=2", "zero1") and written != placed
    texts = {config.dumps("train", {"layout": layout}) for layout in (placed, placed.specification)}
    assert len(texts) == 1 and not config.lost(texts.pop())
    with raises_saying(LayoutError, "'data=4'", "Layout.on"):
        dataclasses.replace(placed, mesh="data=4")


def test_advice_without_a_common_divisor_names_the_largest_number_of_devices_that_divides():
    with raises_saying(LayoutError, "shards 16 over 5", "or shard it over 4 devices"):
        Layout("data=5").spec(("batch",), (16,), kind="activations")


def test_a_width_that_does_not_divide_names_the_setting_of_a_transformer():
    layout = Layout("fsdp=8").abstract(8)
    with raises_saying(LayoutError, "32 or 40 (Transformer.width if the model is a Transformer)"):
        layout.spec(("vocab", "embed"), (256, 36))
    layout.spec(("vocab", "embed"), (256, 40))
