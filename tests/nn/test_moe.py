"""Layers of experts against float64 NumPy, layouts against one device, and errors."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.errors import ConfigError, LayoutError
from jaxscale.layout import Layout, Rules, abstract, constrain, experts_as, preset, shardings_of
from jaxscale.models import TransformerConfig
from jaxscale.nn import GELU, ClampedSwiGLU, ExpertChoiceRouter, MixtureOfExperts, ReGLU, SigmoidRouter, SoftmaxRouter
from jaxscale.parallel import Capacity, Choices
from jaxscale.parallel.dispatch.routed import fill
from tests.truth import numpy_experts as truth
from tests.truth.compare import assert_leaves_agree
from tests.truth.errors import raises_saying
from tests.truth.layouts import assert_layouts_agree, in_force, random_batch, to_numpy
from tests.truth.long import short
from tests.truth.params import random_params

WIDTH, HIDDEN, ROWS, SEQ = 4, 4, 8, 8

Four = functools.partial(MixtureOfExperts, experts=4)
LAYERS = {
    "mixtral": Four(),
    "deepseek_moe": Four(hidden=2, router=SoftmaxRouter(normalized=False), shared=2, balance_loss=0.1),
    "switch": Four(
        top_k=1, router=SoftmaxRouter(normalized=False), expert=GELU, capacity=1.0, balance_loss=0.1, z_loss=0.2
    ),
    "gshard": Four(capacity=0.75, group=4, balance_loss=0.3),
    "qwen_moe": Four(hidden=2, router=SoftmaxRouter(normalized=False), shared=2, shared_gate=True),
    "deepseek_v3": Four(top_k=3, router=SigmoidRouter(scale=2.5), shared=1, balance_loss=0.1, sequence_balance=True),
    "sigmoid with slots": Four(
        router=SigmoidRouter(normalized=False, balanced=False), expert=ReGLU, capacity=1.5, z_loss=0.1
    ),
    "balanced softmax": Four(router=SoftmaxRouter(balanced=True), expert=GELU),
    "expert choice": Four(top_k=1, router=ExpertChoiceRouter(), capacity=1.25, z_loss=0.1),
    "expert choice in groups": Four(router=ExpertChoiceRouter(), capacity=0.5, group=4, shared=1),
}


@functools.cache
def _made(name):
    """The layer, its parameters, an input and the weight of each output."""
    graphdef, infos = abstract(lambda: LAYERS[name](WIDTH, HIDDEN, rngs=nnx.Rngs(0)))
    random = np.random.default_rng(1)
    x, d = random.normal(size=(2, ROWS, SEQ, WIDTH)).astype(np.float32)
    params = random_params(infos)
    if "load_bias" in params:
        params["load_bias"] = 0.1 * random.normal(size=4).astype(np.float32)
    return graphdef, params, x, d


@functools.cache
def _run(name, layout, memory="none"):
    """Output, statistics, gradients of their sum, and the router's choices."""
    graphdef, params, x, d = _made(name)

    def loss(params, x, d):
        y, stats = nnx.merge(graphdef, params)(constrain(x, "batch", "residual_seq", "embed"))
        return jnp.sum(constrain(y, "batch", "residual_seq", "embed") * d) + stats["loss"], (y, stats)

    def run(params, x, d):
        grads, out = jax.grad(loss, argnums=(0, 1), has_aux=True)(params, x, d)
        module = nnx.merge(graphdef, params)
        c, bias = module.config, params.get("load_bias")
        routed = c.router(
            module.scores(x), bias, top_k=c.top_k, capacity=c.slots(SEQ), real=jnp.ones(x.shape[:2], bool)
        )
        return *out, grads, routed[0]

    with in_force(layout):
        return to_numpy(jax.jit(run)(params, x, d))


@pytest.mark.parametrize("name", short(5, LAYERS))
def test_a_layer_is_that_of_the_papers(name):
    _, params, x, _ = _made(name)
    y, stats, _, _ = _run(name, None)
    want, reports = truth.layer(LAYERS[name], _float64(params), x.astype(np.float64))
    assert_leaves_agree(y, want, what=name)
    assert_leaves_agree(stats, reports, what=name)
    if LAYERS[name].capacity is not None and LAYERS[name].capacity < 1.25:
        assert reports["dropped"] > 0.01, "a test of dropping drops something"


@pytest.mark.parametrize("name", short(5, LAYERS))
def test_padding_is_given_to_no_expert_takes_no_slot_and_is_in_no_statistic(name):
    graphdef, params, x, d = _made(name)
    real = np.random.default_rng(2).random((ROWS, SEQ)) < 0.6
    d = d * real[..., None]

    @jax.jit
    def run(params, x):
        def loss(params, x):
            y, stats = nnx.merge(graphdef, params)(x, jnp.asarray(real))
            return jnp.sum(y * d) + stats["loss"], (y * real[..., None], stats)

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(params, x)

    garbage = 9 * np.random.default_rng(3).normal(size=x.shape).astype(np.float32)
    once, other = (to_numpy(run(params, np.where(real[..., None], x, w))) for w in (x, garbage))
    assert_leaves_agree(other, once, what=name)
    assert not np.any(once[0][1][~real])
    want, reports = truth.layer(LAYERS[name], _float64(params), x.astype(np.float64), real)
    assert_leaves_agree(once[1][0], want * real[..., None], what=name)
    assert_leaves_agree(once[1][1], reports, what=name)


@pytest.mark.parametrize("name", short(5, LAYERS))
def test_a_layers_gradients_are_those_of_the_papers_formulas(name):
    _, params, x, d = _made(name)
    _, _, (grads, dx), _ = _run(name, None)
    params, x = _float64(params), x.astype(np.float64)

    def value():
        y, stats = truth.layer(LAYERS[name], params, x)
        return float(np.sum(y * d) + stats["loss"])

    some = lambda a: np.random.default_rng(2).choice(a.size, 10)  # noqa: E731
    at = {**params, "x": x}
    got = {**grads, "x": dx}
    at.pop("load_bias", None), got.pop("load_bias", None)
    want = jax.tree.map(lambda a: truth.slope(value, a, some(a)), at)
    assert_leaves_agree(jax.tree.map(lambda a: a.reshape(-1)[some(a)], got), want, what=name)


@pytest.mark.parametrize("name", ["deepseek_v3", "balanced softmax"])
def test_a_load_biass_gradient_is_the_load_above_the_mean(name):
    _, params, x, _ = _made(name)
    load = truth.load(LAYERS[name], _float64(params), x.astype(np.float64))
    assert_leaves_agree(_run(name, None)[2][0]["load_bias"], load - 1 / 4)


def test_without_drops_a_layer_is_the_sum_of_all_experts_with_weights_of_zero():
    graphdef, params, x, _ = _made("mixtral")
    p, x64 = _float64(params), x.astype(np.float64)
    scores = x64 @ p["router"]
    top = np.sort(scores, -1)[..., -2:-1]
    weights = np.where(scores >= top, np.exp(scores), 0.0)
    weights /= weights.sum(-1, keepdims=True)
    gate = np.einsum("bse,xef->bsxf", x64, p["gate"])
    hidden = gate / (1 + np.exp(-gate)) * np.einsum("bse,xef->bsxf", x64, p["up"])
    want = np.einsum("bsxf,xfe,bsx->bse", hidden, p["down"], weights)
    assert_leaves_agree(_run("mixtral", None)[0], want)


def test_enough_slots_drop_nothing():
    graphdef, params, x, _ = _made("mixtral")
    roomy = nnx.merge(graphdef, params)
    roomy.config = Four(capacity=4.0)
    y, stats = jax.jit(lambda x: roomy(x))(x)
    assert stats["dropped"] == 0
    assert_leaves_agree(y, _run("mixtral", None)[0])


# Attention and experts on other factorings of the same eight devices.
_BOTH = ("data", "tensor")
FOLDED = Rules(
    params={**preset("tensor").params, "experts": _BOTH, "expert_mlp": None},
    activations={**preset("tensor").activations, "experts": _BOTH, "expert_mlp": None, "expert_seq": "tensor"},
)
SPLIT = Rules(  # over one axis that shards tokens and one that does not
    params={"experts": ("tensor", "expert"), "expert_embed": "fsdp"},
    activations={**preset("replicated").activations, "experts": ("tensor", "expert")},
)
LAYOUTS = {
    "expert": Layout("expert=4"),
    "tensor": Layout("expert=2,data=2,tensor=2", sequence_sharded=True),
    "fsdp": Layout("expert=2,fsdp=2,data=2"),
    "context": Layout("expert=2,context=2,tensor=2"),
    "folded": Layout("data=2,tensor=4", "folded", sequence_sharded=True),
    "folded over data": Layout("data=2,tensor=2", FOLDED),
    "split": Layout("expert=2,tensor=2,fsdp=2", SPLIT),
    "replicated": Layout("data=2,expert=2", "replicated"),
    "zero2": Layout("data=2,expert=2,tensor=2", "zero2"),
    "experts gathered": Layout("expert=2,fsdp=2,tensor=2", experts_as("gathered")),
    "experts split": Layout("expert=2,fsdp=2,tensor=2", experts_as("split")),
}
PAIRS = [
    ("mixtral", "expert"),
    ("mixtral", "experts gathered"),
    ("deepseek_v3", "experts split"),
    ("mixtral", "fsdp"),
    ("mixtral", "folded"),
    ("mixtral", "split"),
    ("mixtral", "zero2"),
    ("deepseek_v3", "tensor"),
    ("deepseek_v3", "context"),
    ("deepseek_moe", "replicated"),
    ("switch", "tensor"),
    ("gshard", "split"),
    ("gshard", "folded over data"),
    ("expert choice", "expert"),
    ("expert choice in groups", "context"),
]


@pytest.mark.parametrize("name, layout", short(4, PAIRS), ids=[" on ".join(p) for p in PAIRS])
def test_a_layer_is_the_same_on_every_layout(name, layout):
    want, got = _run(name, None), _run(name, LAYOUTS[layout])
    np.testing.assert_array_equal(got[3], want[3], err_msg="other experts were chosen")
    assert_leaves_agree(got[0], want[0], what="outputs")
    assert_leaves_agree(got[1], want[1], what="statistics")
    assert_leaves_agree(got[2], want[2], what="gradients")


def test_experts_are_computed_another_way_with_every_array_where_it_was():
    """Tutel's switch: stored weights, gradients and optimizer state keep their buffers; only their use differs."""
    _, infos = abstract(lambda: LAYERS["mixtral"](WIDTH, HIDDEN, rngs=nnx.Rngs(0)))
    sent, *others = (Layout("expert=2,fsdp=2,tensor=2", experts_as(way)) for way in ("sent", "gathered", "split"))
    for kind in ("params", "grads", "opt_state"):
        stored = shardings_of(infos, sent, kind)
        for layout in others:
            assert shardings_of(infos, layout, kind) == stored
            assert layout.resolved_rules.activations != sent.resolved_rules.activations
    with raises_saying(LayoutError, "'folded'", "such as 'fsdp_tensor'"):
        experts_as(rules="folded")
    with raises_saying(LayoutError, "sent, split, gathered"):
        experts_as("moved")


def test_slots_go_to_first_choices_first_and_then_by_position():
    ids = jnp.asarray([[[0, 1], [0, 1], [1, 0], [0, 2]]])
    slots = fill(Choices(ids, jnp.arange(8.0).reshape(1, 4, 2)), 3, Capacity(2, 4))
    np.testing.assert_array_equal(slots.token[0, 0], [[0, 1], [2, 0], [3, 4]])
    np.testing.assert_array_equal(slots.weight[0, 0], [[0.0, 2.0], [4.0, 1.0], [7.0, 0.0]])


@pytest.mark.parametrize(
    "fields, words",
    [
        (dict(experts=4, top_k=5), ["top_k = 5", "4 experts", "the most is 4"]),
        (dict(experts=0), ["experts = 0", "at least 1"]),
        (dict(capacity=float("inf")), ["capacity = inf", "finite"]),
        (dict(balance_loss=float("inf")), ["balance_loss = inf", "finite"]),
        (dict(capacity=0), ["capacity = 0", "above 0", "None"]),
        (dict(shared=-1), ["shared = -1", "at least 0"]),
        (dict(shared_gate=True), ["shared_gate = True", "set shared"]),
        (dict(router=ExpertChoiceRouter()), ["ExpertChoiceRouter", "capacity", "1.0"]),
        (dict(sequence_balance=True), ["sequence_balance = True", "set balance_loss"]),
        (dict(group=8), ["group = 8", "set capacity"]),
        (dict(balance_loss=-0.1), ["balance_loss = -0.1", "at least 0"]),
    ],
    ids=lambda v: "-".join(map(str, v)) if isinstance(v, dict) else "",
)
def test_sizes_that_do_not_go_together_are_refused(fields, words):
    with raises_saying(ConfigError, *words):
        MixtureOfExperts(**fields)


def test_a_group_that_does_not_fill_the_row_is_refused():
    with raises_saying(ConfigError, "group = 6", "rows of 8", "nearest that does is 4"):
        Four(capacity=1.0, group=6).slots(8)


def test_a_group_that_a_layout_cuts_is_refused():
    with raises_saying(LayoutError, "rows of 8 tokens over 2", "groups of 8", "MixtureOfExperts.group = 4"):
        _run("switch", Layout("context=2"))


def _float64(tree):
    return jax.tree.map(lambda a: np.asarray(a, np.float64), tree)


@pytest.mark.long
@pytest.mark.parametrize("capacity", [None, pytest.param(1.5, marks=pytest.mark.long)])
def test_experts_with_biases_and_a_clamped_gate_train_alike_on_every_layout(capacity):
    mlp = MixtureOfExperts(experts=4, top_k=2, hidden=16, expert=ClampedSwiGLU, capacity=capacity)
    config = TransformerConfig(depth=1, width=16, heads=4, head_dim=4, vocab=32, hidden=16, mlp=mlp, bias=True)
    batch = random_batch(32, rows=4, seq=8, lengths=(4, 1, 2))
    assert_layouts_agree(config, [Layout("expert=2,tensor=2,fsdp=2")], batch=batch)
