"""Products in 8 bits: the recipes against NumPy and qwix, and on every layout the numbers of one device."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from jaxscale.errors import ConfigError
from jaxscale.layout import Boxes, Layout, constrain
from jaxscale.models import TransformerConfig
from jaxscale.nn import MXFP8, Fp8, Int8, Linear, MemoryPolicy, MixtureOfExperts, ProductRule, Rounded, project
from jaxscale.nn.adapted import Adapted
from jaxscale.nn.linear import into
from jaxscale.nn.products import HeadWeight, head_arithmetic, layers_of
from jaxscale.parallel import Arithmetic, Capacity, Choices, Weights, expert_mlp
from jaxscale.parallel.collective_matmul import gather_matmul, matmul_scatter
from jaxscale.parallel.scaled import INT32_TERMS, exponents, powers_of_two, rounded_at_random
from jaxscale.parallel.seeds import random_products
from jaxscale.plan import compile_for, topology_devices
from jaxscale.plan.collectives import collectives
from jaxscale.plan.partition import partitioned
from jaxscale.step.loss import CutLoss, MaterialisedLoss
from jaxscale.step.number_types import check_number_types
from jaxscale.step.state import describe_model
from tests.truth.compare import assert_leaves_agree
from tests.truth.errors import raises_saying
from tests.truth.layouts import random_batch, train
from tests.truth.long import short

ALL = [
    Int8(kernel_gradient=True),
    Int8(scaling="tensor"),
    Int8(block=8, input_gradient=False),
    Fp8(),
    Fp8(scaling="tensor", kernel_gradient=False),
    MXFP8(block=8),
]
long = functools.partial(pytest.param, marks=pytest.mark.long)
B, S, E, F = 2, 16, 32, 24
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


def arrays(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=s).astype(np.float32) * np.exp2(rng.integers(-3, 3, s[-1:])) for s in shapes]


def rounded(a, axis, name, recipe):
    """Return `a` rounded as the recipe says, in float64; `axis` is summed over."""
    largest, at = LARGEST[name], axis if isinstance(axis, tuple) else (axis,)
    size = recipe.block or None
    blocks = np.moveaxis(np.abs(a), at[-1], -1)
    if size:
        blocks = blocks.reshape(*blocks.shape[:-1], -1, size).max(-1).repeat(size, -1)
        scale = np.moveaxis(blocks, -1, at[-1]) / np.float32(largest)
    else:
        scale = np.abs(a).max(None if recipe.scaling == "tensor" else at, keepdims=True) / np.float32(largest)
    if recipe.powers:
        scale = np.exp2(np.ceil(np.log2(scale.astype(np.float64)))).astype(np.float32)
    scaled = np.clip(a / scale, -largest, largest)
    codes = np.rint(scaled) if name == "int8" else scaled.astype(getattr(ml_dtypes, name))
    return codes.astype(np.float64) * scale


@pytest.mark.parametrize("recipe", short(3, ALL), ids=str)
def test_a_product_and_its_gradients_are_those_of_the_recipe_in_numpy(recipe):
    x, kernel, dy = arrays((B, S, E), (E, F), (B, S, F))
    f = functools.partial(project, axes=("embed", "mlp"), contracted=(0,), arithmetic=recipe.arithmetic("float32"))
    y, pull = jax.jit(lambda x, k: jax.vjp(f, x, k))(x, kernel)
    got = (y, *pull(jnp.asarray(dy)))
    a, g = recipe.operands, recipe.cotangents
    exact = lambda v, *_: v.astype(np.float64)  # noqa: E731
    of = [functools.partial(rounded, recipe=recipe) if on else exact
          for on in (recipe.forward, recipe.input_gradient, recipe.kernel_gradient)]  # fmt: skip
    want = (
        of[0](x, 2, a) @ of[0](kernel, 0, a),
        of[1](dy, 2, g) @ of[1](kernel, 1, a).T,
        np.einsum("bse,bsf->ef", of[2](x, (0, 1), a), of[2](dy, (0, 1), g)),
    )
    plain = (x @ kernel, dy @ kernel.T, np.einsum("bse,bsf->ef", x, dy))
    for ours, theirs, unrounded in zip(got, want, plain, strict=True):
        error = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
        assert error < 1e-6, error
        assert np.linalg.norm(theirs - unrounded) < 0.1 * np.linalg.norm(unrounded)
    assert np.linalg.norm(got[0] - plain[0]) > 1e-3 * np.linalg.norm(plain[0])  # something is rounded


@pytest.mark.parametrize("recipe, name", [(Int8(), "int8"), (Fp8(), "float8_e4m3fn")], ids=str)
def test_the_product_is_that_of_qwix(recipe, name):
    qwix = pytest.importorskip("qwix")
    x, kernel = arrays((S, E), (E, F))
    numbers = recipe.arithmetic("float32").forward  # qwix's own scales of int8 map the largest number to 127.5
    left, right = (
        qwix.QArray(qvalue=coded.codes, scale=coded.scale, qtype=name)
        for coded in (numbers.left(jnp.asarray(x), (1,)), numbers.right(jnp.asarray(kernel), (0,)))
    )
    theirs = qwix.dot_general(left, right, (((1,), (0,)), ((), ())))
    ours = project(x[None], kernel, ("embed", "mlp"), (0,), recipe.arithmetic("float32"))[0]
    np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-3)


CASES = {
    "into a sharded dimension": ((E,), (4, 6), ("embed", "heads", "head_dim"), (0,)),
    "out of a sharded dimension": ((4, 6), (E,), ("heads", "head_dim", "embed"), (0, 1)),
}


@pytest.mark.parametrize(
    "case, recipe",
    short(
        1,
        [
            ("out of a sharded dimension", Int8(kernel_gradient=True, stochastic=True)),
            ("into a sharded dimension", Fp8()),
            long("out of a sharded dimension", MXFP8(block=2)),
        ],
    ),
)
def test_on_a_layout_a_product_and_its_gradients_are_those_of_one_device(case, recipe):
    inner, outer, axes, contracted = CASES[case]
    x, kernel, dy = arrays((4, S, *inner), (*inner, *outer), (4, S, *outer))
    f = functools.partial(project, axes=axes, contracted=contracted, arithmetic=recipe.arithmetic("float32"))

    def all_of(x, kernel):
        y, pull = jax.vjp(f, x, kernel)
        return y, *pull(jnp.asarray(dy))

    want = all_of(x, kernel)
    with Layout("data=2,fsdp=2,tensor=2"):
        assert_leaves_agree(jax.jit(all_of)(x, kernel), want)


@pytest.mark.parametrize(
    "recipe",
    [
        Int8(sums=True),
        *map(long, (Int8(), Int8(scaling="tensor", kernel_gradient=True), Fp8(sums=True), MXFP8(block=2, sums=True))),
    ],
    ids=str,
)
def test_overlapped_products_are_those_of_one_device(recipe):
    axes, into, out = ("embed", "heads", "head_dim"), ("embed", "mlp"), ("mlp", "embed")
    x, q, up, down, h, *dys = arrays(
        (4, S, E), (E, 4, 6), (E, F), (F, E), (4, S, F), (4, S, 4, 6), (4, S, F), (4, S, E)
    )
    arithmetic = recipe.arithmetic("float32")

    def ring(x, q, up, down, h):
        (y, z), pull = jax.vjp(lambda *a: gather_matmul(a[0], a[1:], (axes, into), arithmetic), x, q, up)
        s, push = jax.vjp(lambda h, k: matmul_scatter(h, k, out, arithmetic), h, down)
        return y, z, s, pull(tuple(map(jnp.asarray, dys[:2]))), push(jnp.asarray(dys[2]))

    def plainly(x, q, up, down, h):
        product = functools.partial(project, arithmetic=arithmetic)
        y, pull = jax.vjp(lambda x, q: product(x, q, axes, (0,)), x, q)
        z, pull_up = jax.vjp(lambda x, up: product(x, up, into, (0,)), x, up)
        s, push = jax.vjp(lambda h, k: product(h, k, out, (0,)), h, down)
        (dx, dq), (dx_up, dup) = pull(jnp.asarray(dys[0])), pull_up(jnp.asarray(dys[1]))
        return y, z, s, (dx + dx_up, dq, dup), push(jnp.asarray(dys[2]))

    want = plainly(x, q, up, down, h)
    with Layout("tensor=2,data=2,fsdp=2", sequence_sharded=True):
        got = jax.jit(ring)(x, q, up, down, h)
    if recipe.sums:  # of the product and of its input's gradient: each device's term is rounded once
        (*y, s, (dx, *dq), dh), (*want_y, want_s, (want_dx, *want_dq), want_dh) = got, want
        for a, b, name in ((s, want_s, recipe.operands), (dx, want_dx, recipe.cotangents)):
            apart = np.linalg.norm(a - b) / np.linalg.norm(b)
            assert 1e-4 < apart < {"int8": 0.01, "float8_e4m3fn": 0.04, "float8_e5m2": 0.08}[name]
        got, want = (y, dq, dh), (want_y, want_dq, want_dh)
    assert_leaves_agree(got, want)


def test_overlapped_layers_of_several_numbers_each_have_their_own():
    q, k = (Linear({"embed": 8}, {"heads": 4}, rngs=nnx.Rngs(n)) for n in range(2))
    k.arithmetic = Int8().arithmetic("float32")
    (x,) = arrays((1, 4, 8))
    want = [q(x), k(x)]
    assert float(jnp.max(jnp.abs(want[1] - x @ k.kernel[...]))) > 1e-4
    with Layout("tensor=2", sequence_sharded=True):
        got = jax.jit(lambda x: into(constrain(x, "batch", "residual_seq", "embed"), q, k, overlap=True))(x)
    assert_leaves_agree(got, want)


SLOTS = Capacity(8, 8)


@pytest.mark.long
@pytest.mark.parametrize(
    "recipe, capacity",
    short(
        1,
        [
            (Int8(kernel_gradient=True), None),
            (Fp8(scaling="tensor"), SLOTS),
            long(MXFP8(block=2), None),
        ],
    ),
)
def test_experts_on_a_layout_are_those_of_one_device(recipe, capacity):
    rng = np.random.default_rng(0)
    x, up, down = arrays((8, 8, E), (4, E, 16), (4, 16, E))
    ids = np.argsort(rng.normal(size=(8, 8, 4)))[..., :2].astype(np.int32)
    scale = rng.uniform(size=ids.shape).astype(np.float32)

    def loss(arithmetic, x, up, down):
        routed, weights = Choices(ids, scale), Weights(None, up, down)
        y = expert_mlp(x, routed, weights, act=jax.nn.relu, arithmetic=arithmetic, capacity=capacity)
        return jnp.sum(jnp.square(y))

    gradients = functools.partial(jax.value_and_grad(loss, (1, 2, 3)), recipe.arithmetic("float32"))
    want = gradients(x, up, down)
    plain = jax.grad(loss, 1)(Linear({"embed": 1}, {"mlp": 1}, rngs=nnx.Rngs(0)).arithmetic, x, up, down)
    assert 1e-3 < np.linalg.norm(want[1][0] - plain) / np.linalg.norm(plain) < 0.15
    with Layout("data=2,fsdp=2,expert=2"):
        got = jax.jit(gradients)(x, up, down)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):  # a code in thousands may differ
        assert np.linalg.norm(ours - theirs) < 1e-3 * np.linalg.norm(theirs)


def model(products, **settings):
    sizes = dict(depth=2, vocab=64, width=32, heads=4, kv_heads=4, head_dim=8, hidden=64)
    return TransformerConfig(products=products, **sizes, **settings)


@pytest.mark.long
@pytest.mark.parametrize(
    "layout, recipe",
    [
        (Layout("data=2,fsdp=2,tensor=2"), Int8(kernel_gradient=True)),
        (Layout("tensor=2,fsdp=2,context=2", sequence_sharded=True), Fp8(kernel_gradient=False)),
        (Layout("pipeline=2,fsdp=2", pipeline="zb-h1"), Int8()),
    ],
    ids=["fsdp_tensor", "context", "pipeline"],
)
def test_a_model_trains_on_a_layout_as_on_one_device_in_the_same_recipe(layout, recipe):
    batch = random_batch(64, seq=16)
    ours, alone, plain = (train(model(p), on, batch=batch, steps=1) for p, on in
                          ((recipe, layout), (recipe, None), (None, None)))  # fmt: skip

    def far(a, b):
        pairs = zip(jax.tree.leaves(a.gradients), jax.tree.leaves(b.gradients), strict=True)
        return np.sqrt(sum(np.sum((x - y) ** 2) for x, y in pairs))

    assert far(ours, alone) < 0.1 * far(alone, plain)
    assert far(alone, plain) > 0


def test_the_frozen_kernel_of_an_adapter_is_rounded_and_the_adapter_is_not():
    x, kernel, a, b = arrays((B, S, E), (E, F), (E, 2), (2, F))
    arithmetic = Int8().arithmetic("float32")
    got = project(x, Adapted(kernel, a, b, 0.5), ("embed", "mlp"), (0,), arithmetic)
    want = rounded(x, 2, "int8", Int8()) @ rounded(kernel, 0, "int8", Int8()) + 0.5 * (x @ a @ b)
    assert np.linalg.norm(got - want) < 1e-6 * np.linalg.norm(want)


RNG = np.random.default_rng(0)
HEAD_CASE = (*arrays((4, S, E), (63, E)), RNG.integers(0, 63, (4, S), np.int32), np.float32(RNG.normal(size=(4, S))))


def head_losses(loss, x, w, targets, recipe=Int8()):  # noqa: B008
    numbers = head_arithmetic((ProductRule("head", recipe),), "float32")
    return loss(0.1 * x, HeadWeight(w, numbers), targets, softcap=None)


def head_gradients(loss, x, w, targets, factor):
    return jax.value_and_grad(lambda x, w: jnp.sum(factor * head_losses(loss, x, w, targets)[0]), (0, 1))(x, w)


def test_an_output_head_in_8_bits_has_the_losses_of_rounded_numbers():
    x, w, targets, _ = HEAD_CASE
    logits = rounded(np.float32(0.1) * x, 2, "int8", Int8()) @ rounded(w, 1, "int8", Int8()).T
    want = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    np.testing.assert_allclose(head_losses(MaterialisedLoss(), x, w, targets)[0], want, rtol=1e-5)


def test_an_output_head_in_8_bits_that_holds_few_logits_has_the_same_losses_on_every_layout(monkeypatch):
    want = jax.jit(head_gradients, static_argnums=0)(MaterialisedLoss(), *HEAD_CASE)
    monkeypatch.setattr("jaxscale.step.loss.TILE", 4)
    tiled = jax.jit(functools.partial(head_gradients, CutLoss()))
    assert_leaves_agree(tiled(*HEAD_CASE), want)
    with Layout("data=2,fsdp=2,tensor=2"):  # which does not divide a vocabulary of 63
        assert_leaves_agree(jax.jit(functools.partial(head_gradients, CutLoss()))(*HEAD_CASE), want)


def test_a_rule_for_the_head_is_about_the_head_alone():
    rules = (ProductRule("mlp", Int8()), ProductRule("head", Fp8()))
    made = nnx.eval_shape(lambda: model(rules).make(nnx.Rngs(0)))
    assert made.head_weight().arithmetic_of_head.forward.left_type == "float8_e4m3fn"
    assert nnx.eval_shape(lambda: model(Int8()).make(nnx.Rngs(0))).head_arithmetic is None


def test_rules_choose_layers_by_axis_and_by_path():
    def chosen(*rules):
        made = nnx.eval_shape(lambda: model(rules).make(nnx.Rngs(0)))
        return {p.rsplit("/", 1)[1] for p, m, _ in layers_of(made) if m.arithmetic.forward.rounds}

    assert chosen(ProductRule("mlp", Int8())) == {"gate", "up", "down"}
    assert chosen(ProductRule("*/attn/q", Fp8())) == {"q"}
    assert chosen(ProductRule("*/down"), ProductRule("*", Int8())) == {"q", "k", "v", "out", "gate", "up"}
    both = nnx.eval_shape(lambda: model(Int8(), mlp=MixtureOfExperts(experts=4, shared=1)).make(nnx.Rngs(0)))
    assert all(m.arithmetic.forward.rounds for _, m, _ in layers_of(both))
    assert any(p.endswith("/mlp") for p, _, _ in layers_of(both))


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Int8(scaling="row"), ("'row'", "'channel', 'tensor' or 'delayed'")),
        (lambda: MXFP8(block=0), ("MXFP8.block = 0", "at least 1")),
        (lambda: Int8(scaling="tensor", block=8), ("remove one",)),
        (lambda: Int8(forward=False, input_gradient=False), ("no product", "kernel_gradient")),
        (lambda: Int8(input_gradient=False, stochastic=True), ("stochastic", "False")),
        (lambda: model("int8"), ("'int8'", "@Int8()")),
        (lambda: model((Int8(),)), ("@ProductRule()",)),
        (lambda: head_losses(CutLoss(filter=1e-4), *HEAD_CASE[:3]), ("CutLoss.filter", "'head'")),
        (lambda: model((ProductRule("*/dwn", Int8()),)).make(nnx.Rngs(0)), ("*/dwn", "no layer")),
    ],
)
def test_a_setting_that_cannot_be_is_refused(make, words):
    with raises_saying(ConfigError, *words):
        make()


def test_a_type_that_a_chip_would_widen_is_refused_before_training(caplog):
    check_number_types(model(Fp8()).number_types(), "NVIDIA H100 80GB HBM3")
    check_number_types(model(Int8()).number_types(), "TPU v5 lite")
    check_number_types(model((ProductRule("mlp", Fp8()),)).number_types(), "cpu")
    assert not caplog.records
    check_number_types(model(Fp8()).number_types(), "TPU v6 lite")
    assert "v6e multiplies float8 no faster than bfloat16" in caplog.text
    with raises_saying(ConfigError, "float8", "v5e", "@Int8() or None"):
        check_number_types(model((ProductRule("mlp", Fp8()),)).number_types(), "TPU v5 lite")


def test_blocks_that_do_not_divide_a_sum_are_refused_with_some_that_do():
    x, kernel = arrays((B, S, 24), (24, F))
    with raises_saying(ConfigError, "blocks of 32", "24 terms", "blocks of 8"):
        project(x, kernel, ("embed", "mlp"), (0,), MXFP8().arithmetic("float32"))
    project(x, kernel, ("embed", "mlp"), (0,), MXFP8(block=8).arithmetic("float32"))


def test_a_sum_that_int32_may_not_hold_is_refused():
    x, kernel = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1, 1, INT32_TERMS + 1), (INT32_TERMS + 1, 1)))
    f = functools.partial(project, axes=("embed", "mlp"), contracted=(0,), arithmetic=Int8().arithmetic("float32"))
    with raises_saying(ConfigError, "int32", "133,144"):
        jax.eval_shape(f, x, kernel)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(
    "recipe", short(3, [Int8(), Fp8(), MXFP8(block=8), Rounded("mxfp4"), Rounded("nf4", "int8")]), ids=str
)
def test_a_number_that_is_not_finite_is_not_rounded_away(recipe, bad):
    x, kernel = arrays((B, S, 64), (64, 192))  # so large that XLA's maximum on a CPU leaves NaN out
    f = jax.jit(lambda *a: project(*a, ("embed", "mlp"), (0,), recipe.arithmetic("float32")))
    wrong = np.where(np.arange(64) == 7, bad, x)
    y = f(np.where(np.arange(B)[:, None, None] == 0, wrong, x), kernel)
    assert not np.isfinite(y[0]).any() and np.isfinite(y[1]).all()
    assert not np.isfinite(f(x, np.where(np.arange(192) == 5, wrong[0, 0, :, None], kernel))[..., 5]).any()
    assert np.isfinite(project(0 * kernel.T[None], kernel, ("embed", "mlp"), (0,), recipe.arithmetic("float32"))).all()


@pytest.mark.parametrize("name", LARGEST)
def test_numbers_rounded_at_random_are_neighbours_and_right_on_average(name):
    x = np.full(40000, 3.3, np.float32)
    y = np.asarray(rounded_at_random(jnp.asarray(x), name))
    assert len(np.unique(y)) == 2
    np.testing.assert_array_equal(y, y.astype(name).astype(np.float32))
    assert abs(y.mean() - 3.3) < 0.01


def products_of(x, kernel, dy, key, *, rows=None, number=0, times=1):
    """Return the cotangents of a layer's input and kernel, of each of its equal products, rounded at random."""
    arithmetic = Int8(kernel_gradient=True, stochastic=True).arithmetic("float32")
    with random_products(key, rows, number):
        pulls = [jax.vjp(lambda x, k: project(x, k, ("embed", "mlp"), (0,), arithmetic), x, kernel)[1]
                 for _ in range(times)]  # fmt: skip
    return [pull(dy) for pull in pulls]


def test_random_numbers_differ_in_each_step_and_product_and_are_those_of_the_key():
    x, kernel, dy = map(jnp.asarray, arrays((B, S, E), (E, F), (B, S, F)))
    key = jax.random.key(0)
    one, other = products_of(x, kernel, dy, key, times=2)
    again, layer, step = (products_of(x, kernel, dy, k, number=n)[0]
                          for k, n in ((key, 0), (key, 1), (jax.random.fold_in(key, 1), 0)))  # fmt: skip
    assert_leaves_agree(again, one)
    for different in (other, layer, step):
        for a, b in zip(different, one, strict=True):
            assert 1e-3 < np.linalg.norm(a - b) / np.linalg.norm(b) < 0.1


def test_random_numbers_are_the_same_for_a_part_of_the_batch_and_on_every_layout():
    x, kernel, dy = map(jnp.asarray, arrays((4, S, E), (E, F), (4, S, F)))
    key = jax.random.key(0)
    want = products_of(x, kernel, dy, key)[0]
    part = products_of(x[2:], kernel, dy[2:], key, rows=jnp.array([2, 3]))[0]
    assert_leaves_agree(part[0], want[0][2:])
    with Layout("data=2,fsdp=2,tensor=2"):
        assert_leaves_agree(jax.jit(products_of)(x, kernel, dy, key)[0], want)


@pytest.mark.long
@pytest.mark.parametrize(
    "layout, settings",
    [
        (Layout("fsdp=2,tensor=2", sequence_sharded=True), dict(overlap=("attention", "mlp"))),
        long(Layout("data=2,expert=2"), dict(mlp=MixtureOfExperts(experts=4))),
        long(Layout("pipeline=2,fsdp=2", pipeline="zb-h1"), {}),
    ],
    ids=["overlap", "experts", "pipeline"],
)
def test_gradients_rounded_at_random_are_right_and_repeat_on_a_layout(layout, settings):
    batch, recipe = random_batch(64, seq=16), Int8(kernel_gradient=True, stochastic=True)
    run = lambda p: np.concatenate([a.ravel() for a in jax.tree.leaves(  # noqa: E731
        train(model(p, **settings), layout, batch=batch, steps=1).gradients)])  # fmt: skip
    one, two, plain = run(recipe), run(recipe), run(None)
    np.testing.assert_array_equal(one, two)
    assert 1e-3 < np.linalg.norm(one - plain) / np.linalg.norm(plain) < 0.2


def test_powers_of_two_are_rounded_up_and_stored_in_a_byte():
    x = np.array([1.0, 1.1, 0.5, 2.0**-126, 3e38, np.nan, np.inf], np.float32)
    np.testing.assert_array_equal(powers_of_two(exponents(x)), [1, 2, 0.5, 2.0**-126, 2.0**127, np.nan, np.nan])


def test_the_policy_that_saves_products_saves_the_product_and_not_its_integers():
    x, kernel = arrays((B, S, E), (E, F))
    f = functools.partial(project, axes=("embed", "mlp"), contracted=(0,), arithmetic=Int8().arithmetic("bfloat16"))
    policy = MemoryPolicy(rest="dots")
    saved_tree = jax.eval_shape(lambda *a: jax.vjp(policy.checkpoint(lambda *a: jnp.sin(f(*a))), *a)[1], x, kernel)
    saved = [(a.shape, a.dtype) for a in jax.tree.leaves(saved_tree)]
    assert ((B, S, F), jnp.bfloat16) in saved and not any(d == jnp.int32 and len(s) > 1 for s, d in saved)


def steps(x, up, down, arithmetic):
    """Apply stacked feed-forward layers by a scan, as models do, so that the backward pass gathers once more."""
    x = constrain(x, "batch", "seq", "embed")

    def layer(x, kernels):
        h = project(x, kernels[0], ("embed", "mlp"), (0,), arithmetic)
        return x + project(jnp.sin(h), kernels[1], ("mlp", "embed"), (0,), arithmetic), None

    return jnp.sum(jax.lax.scan(layer, x, (up, down))[0].astype(jnp.float32) ** 2)


@pytest.mark.tpu_aot
@pytest.mark.parametrize(
    "topology, recipe, wide",
    [
        ("v6e:2x2", Int8(), "s8 s8"),
        pytest.param("tpu7x:2x2x1", Fp8(), "f8e4m3fn f8e4m3fn", marks=pytest.mark.long),
    ],
)
def test_on_a_tpu_codes_are_gathered_and_multiplied(topology, recipe, wide):
    devices = topology_devices(topology)
    layout = Layout(f"fsdp={len(devices)}")
    shapes = [jax.ShapeDtypeStruct((8, 256, 512), jnp.bfloat16)]
    shapes += [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((3, 512, 1024), (3, 1024, 512))]

    def compiled(arithmetic):
        gradients = jax.grad(functools.partial(steps, arithmetic=arithmetic), argnums=(0, 1, 2))
        program = compile_for(gradients, topology, *shapes, layout=layout)
        sent = sum(c.sent for c in collectives(program, layout.sizes) if c.kind == "all-gather")
        return sent, program.as_text()

    plain, _ = compiled(Arithmetic.cast("bfloat16"))
    eight, text = compiled(recipe.arithmetic("bfloat16"))
    assert plain / 2 <= eight < 0.53 * plain  # codes, and scales
    types = dict(re.findall(r"(%[\w.-]+) = \(?([a-z0-9]+)\[", text))
    operands = {
        f"{types.get(a)} {types.get(b)}" for a, b in re.findall(r" convolution\((%[\w.-]+), (%[\w.-]+)\)", text)
    }
    assert wide in operands, operands


@pytest.mark.tpu_aot
@pytest.mark.parametrize("topology", [long("v5p:2x2x1"), "v6e:2x2"])
def test_on_a_tpu_sums_of_overlapped_layers_travel_as_codes_and_the_plan_counts_them(topology):
    layout = Layout("tensor=4", sequence_sharded=True)
    shapes = [jax.ShapeDtypeStruct((2, 512, 256), jnp.bfloat16)]
    shapes += [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((256, 1024), (1024, 256))]
    split = [Boxes(((), ("tensor",), ())), Boxes(((), ("tensor",))), Boxes((("tensor",), ()))]

    def layer(x, up, down, arithmetic):
        x = constrain(x, "batch", "residual_seq", "embed")
        (h,) = gather_matmul(x, (up,), (("embed", "mlp"),), arithmetic)
        y = matmul_scatter(jax.nn.gelu(h), down, ("mlp", "embed"), arithmetic)
        return jnp.sum(jnp.sin(y.astype(jnp.float32)))

    def sent(recipe):
        gradients = jax.grad(functools.partial(layer, arithmetic=recipe.arithmetic("bfloat16")), argnums=(0, 1, 2))
        program = compile_for(gradients, topology, *shapes, layout=layout)
        both = collectives(program, layout.sizes), partitioned(gradients, shapes, split, layout).collectives
        compiled, planned = (sum(c.sent for c in every if c.kind == "collective-permute") for every in both)
        assert compiled == planned
        return compiled

    numbers, tokens = 2 * 128 * 256, 2 * 128  # of a device's shard of the residual stream
    codes, wide = numbers + 4 * tokens, 2 * numbers
    # x; the sum; then x and the cotangent, for the matrices' gradients in bfloat16; the sum for the input's gradient
    assert sent(Int8()) == 3 * (codes + 4 * wide)
    assert sent(Int8(sums=True)) == 3 * (3 * codes + 2 * wide)


def test_sums_without_overlapped_layers_are_refused():
    small = dict(depth=1, vocab=64, width=32, heads=4)
    with raises_saying(
        ConfigError, "Int8.sums = True acts in overlapped layers only", "Transformer.overlap = ('attention',"
    ):
        TransformerConfig(**small, products=Int8(sums=True))
    describe_model(TransformerConfig(**small, products=Int8(sums=True), overlap=("attention", "mlp")))
    with raises_saying(ConfigError, "mlp/down is not overlapped", "add its sub-layer to Transformer.overlap"):
        describe_model(TransformerConfig(**small, products=Int8(sums=True), overlap=("attention",)))
    rules = (ProductRule("mlp", Int8()), ProductRule("*", Int8(sums=True)))
    describe_model(TransformerConfig(**small, products=rules, overlap=("attention",)))
    with raises_saying(ConfigError, "the output head is not one of them", "leave sums False"):
        TransformerConfig(**small, products=ProductRule("head", Int8(sums=True)), overlap=("attention",))
