"""What each preset shards, and errors for rules with unknown names."""

from __future__ import annotations

import pytest
from jax.sharding import PartitionSpec as P

from jaxscale.errors import LayoutError
from jaxscale.layout import PRESETS, Layout, Rules, preset
from tests.truth.errors import raises_saying

MESH = "data=2,fsdp=2,tensor=2"
ALL = ("data", "fsdp")

QUERY = ("layers", "embed", "heads", "head_dim")
DOWN = ("layers", "mlp", "embed")
TABLE = ("vocab", "embed")
NORM = ("layers", "norm")

WHOLE = {QUERY: P(None, None, None, None), DOWN: P(None, None, None), TABLE: P(None, None), NORM: P(None, None)}
OVER_ALL = {
    QUERY: P(None, ALL, "tensor", None),
    DOWN: P(None, "tensor", ALL),
    TABLE: P("tensor", ALL),
    NORM: P(None, ALL),
}
# `fsdp` outermost, then `data`
INNER = ("fsdp", "data")
NESTED = {
    QUERY: P(None, INNER, "tensor", None),
    DOWN: P(None, "tensor", INNER),
    TABLE: P("tensor", INNER),
    NORM: P(None, INNER),
}
THREE = ("fsdp", "data", "replica")
OVER_THREE = {
    QUERY: P(None, THREE, "tensor", None),
    DOWN: P(None, "tensor", THREE),
    TABLE: P("tensor", THREE),
    NORM: P(None, THREE),
}
OVER_FSDP = {QUERY: P(None, "fsdp", None, None), DOWN: P(None, None, "fsdp"), TABLE: P(None, "fsdp"), NORM: WHOLE[NORM]}
OVER_TENSOR = {
    QUERY: P(None, None, "tensor", None),
    DOWN: P(None, "tensor", None),
    TABLE: P("tensor", None),
    NORM: WHOLE[NORM],
}
OVER_BOTH = {
    QUERY: P(None, "fsdp", "tensor", None),
    DOWN: P(None, "tensor", "fsdp"),
    TABLE: P("tensor", "fsdp"),
    NORM: WHOLE[NORM],
}

# preset -> mesh axes of parameters, gradients and optimizer state
SPLITS = {
    "replicated": (WHOLE, WHOLE, WHOLE),
    "zero1": (OVER_TENSOR, OVER_ALL, OVER_ALL),
    "zero2": (OVER_TENSOR, OVER_ALL, OVER_ALL),
    "hierarchical": (OVER_BOTH, NESTED, NESTED),
    "three_level": (OVER_BOTH, NESTED, NESTED),  # without `replica`
    "fsdp": (OVER_FSDP, OVER_FSDP, OVER_FSDP),
    "tensor": (OVER_TENSOR, OVER_TENSOR, OVER_TENSOR),
    "fsdp_tensor": (OVER_BOTH, OVER_BOTH, OVER_BOTH),
    "fsdp_context": (OVER_BOTH, OVER_BOTH, OVER_BOTH),  # without `context`
    "folded": (OVER_BOTH, OVER_BOTH, OVER_BOTH),
}


def test_the_table_knows_every_preset():
    assert set(SPLITS) == set(PRESETS)


@pytest.mark.parametrize("name", SPLITS)
def test_each_preset_splits_what_its_name_promises(name):
    layout = Layout(MESH, name)
    for kind, expected in zip(("params", "grads", "opt_state"), SPLITS[name], strict=True):
        for axes, spec in expected.items():
            assert layout.spec(axes, kind=kind) == spec, (kind, axes)


def test_three_levels_split_states_over_replicas():
    layout = Layout("replica=2," + MESH, "three_level")
    for kind, expected in (("params", OVER_BOTH), ("grads", NESTED), ("opt_state", OVER_THREE)):
        assert {axes: layout.spec(axes, kind=kind) for axes in expected} == expected


def test_devices_that_share_a_row_split_state_too():
    layout = Layout("fsdp=2,context=2,tensor=2", "fsdp_context")
    both = ("fsdp", "context")
    expected = {QUERY: P(None, both, "tensor", None), DOWN: P(None, "tensor", both), TABLE: P("tensor", both)}
    for kind in ("params", "grads", "opt_state"):
        assert {axes: layout.spec(axes, kind=kind) for axes in expected} == expected


@pytest.mark.parametrize("name", SPLITS)
def test_every_preset_splits_the_batch_over_all_replicas_and_leaves_the_residual_stream_whole(name):
    layout = Layout(MESH, name)
    assert layout.spec(("batch", "residual_seq", "embed"), kind="activations") == P(ALL, None, None)
    assert layout.spec(("batch", "seq"), kind="activations") == P(ALL, None)


@pytest.mark.parametrize("name", SPLITS)
def test_all_presets_but_the_plainest_split_what_attention_and_feed_forward_compute_over_tensor(name):
    layout = Layout(MESH, name)
    split = None if name in ("replicated", "fsdp") else "tensor"
    for axis in ("heads", "kv_heads", "mlp", "vocab"):
        assert layout.spec(("batch", "seq", axis), kind="activations") == P(ALL, None, split)


def test_sequence_sharding_splits_the_residual_stream_over_tensor_and_nothing_else():
    layout = Layout(MESH, sequence_sharded=True)
    assert layout.spec(("batch", "residual_seq", "embed"), kind="activations") == P(ALL, "tensor", None)
    assert layout.spec(("batch", "seq", "mlp"), kind="activations") == P(ALL, None, "tensor")
    both = Layout("context=2,tensor=4", sequence_sharded=True)
    assert both.spec(("batch", "residual_seq", "embed"), kind="activations") == P(None, ("context", "tensor"), None)


def test_context_and_expert_split_their_own_names():
    layout = Layout("context=2,expert=2")
    assert layout.spec(("batch", "seq"), kind="activations") == P("expert", "context")
    assert layout.spec(("layers", "experts", "expert_embed", "expert_mlp")) == P(None, "expert", None, None)


def test_folding_lays_experts_where_attention_has_its_heads_and_sequence():
    weights, tokens = ("experts", "expert_embed", "expert_mlp"), ("expert_batch", "expert_seq", "embed")
    plain, folded = (Layout("fsdp=2,expert=2,context=2,tensor=2", rules) for rules in ("fsdp_tensor", "folded"))
    assert plain.spec(weights) == P("expert", "fsdp", "tensor")
    assert folded.spec(weights) == P(("expert", "context", "tensor"), "fsdp", None)
    assert plain.spec(tokens, kind="activations") == P(("fsdp", "expert"), "context", None)
    assert folded.spec(tokens, kind="activations") == P(("fsdp", "expert"), ("context", "tensor"), None)
    heads = ("batch", "seq", "heads")
    assert plain.spec(heads, kind="activations") == folded.spec(heads, kind="activations")


def test_an_axis_of_size_one_splits_nothing():
    assert Layout("data=8").spec(QUERY) == P(None, None, None, None)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: preset("fsdp_tensro"), ["'fsdp_tensro'", "did you mean 'fsdp_tensor'"]),
        (lambda: Layout("data=8", "zero3"), ["'zero3'", "did you mean 'fsdp'"]),
        (lambda: Rules(params={"embd": "fsdp"}), ["Rules.params", "'embd'", "did you mean 'embed'"]),
        (lambda: Rules(grads={"embed": "fdsp"}), ["Rules.grads['embed']", "'fdsp'", "did you mean 'fsdp'"]),
        (lambda: Rules(activations={"batch": ("data", "data")}), ["Rules.activations['batch']", "twice", "once"]),
        (
            lambda: Layout("data=8", Rules(), sequence_sharded=True),
            ["sequence_sharded", "preset", "'residual_seq'", "('context', 'tensor')"],
        ),
    ],
)
def test_rules_that_name_nothing_are_refused_with_a_suggestion(make, words):
    with raises_saying(LayoutError, *words):
        make()


def test_gradients_default_to_the_rules_for_parameters_and_state_to_those_for_gradients():
    assert Rules(params={"embed": "fsdp"}).target("opt_state", "embed") == ("fsdp",)
    rules = Rules(params={"embed": "fsdp"}, grads={"embed": ("data", "fsdp")})
    assert rules.target("opt_state", "embed") == ("data", "fsdp")
    assert Rules(params={"embed": "fsdp"}, grads={}).target("grads", "embed") == ()


def test_rules_are_values():
    a, b = (Rules(params={"embed": "fsdp", "mlp": m}) for m in ("tensor", ("tensor",)))
    assert a == b and hash(a) == hash(b)
    assert a != Rules(params={"embed": "fsdp"})
    assert Layout("data=8", a) == Layout("data=8", b)
