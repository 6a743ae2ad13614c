"""`project` and its derivative: the plain expression's values, in the dtypes and shardings it promises."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxscale.layout import Layout, Rules
from jaxscale.nn import Embedding, Linear, head_logits, project
from jaxscale.parallel import Arithmetic
from tests.truth.compare import assert_leaves_agree
from tests.truth.layouts import in_force

LAYOUTS = [None, Layout("data=2,fsdp=2,tensor=2"), Layout("data=4,fsdp=2", "zero2")]

# name: (shape of x, shape of kernel, its axes, contracted dimensions, the plain expression)
CASES = {
    "up": ((8, 4, 16), (16, 32), ("embed", "mlp"), (0,), "bse,ef->bsf"),
    "query": ((8, 4, 16), (16, 4, 8), ("embed", "heads", "head_dim"), (0,), "bse,ehd->bshd"),
    "out": ((8, 4, 4, 8), (4, 8, 16), ("heads", "head_dim", "embed"), (0, 1), "bshd,hde->bse"),
    "head": ((8, 4, 16), (32, 16), ("vocab", "embed"), (1,), "bse,ve->bsv"),
    "two trailing": ((8, 4, 4, 8), (32, 4, 8), ("vocab", "positions", "head_dim"), (1, 2), "bshd,vhd->bsv"),
}


def _arrays(case):
    random = np.random.default_rng(0)
    return tuple(jnp.asarray(random.normal(size=s), jnp.float32) for s in CASES[case][:2])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_the_gradient_of_project_is_that_of_the_plain_expression(case, layout):
    _, _, axes, contracted, expression = CASES[case]
    x, kernel = _arrays(case)
    ours = lambda x, w: jnp.sum(jnp.sin(project(x, w, axes, contracted, Arithmetic.cast(jnp.float32))))  # noqa: E731
    plain = lambda x, w: jnp.sum(jnp.sin(jnp.einsum(expression, x, w)))  # noqa: E731
    want = jax.jit(jax.value_and_grad(plain, (0, 1)))(x, kernel)
    with in_force(layout):
        got = jax.jit(jax.value_and_grad(ours, (0, 1)))(x, kernel)
    assert_leaves_agree(got[0], want[0])
    assert_leaves_agree(got[1], want[1])


def _products(f, *args):
    """(input dtypes, output shape, output dtype) of each matrix product in `f`."""

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "dot_general":
                out = eqn.outvars[0].aval
                yield {str(v.aval.dtype) for v in eqn.invars}, out.shape, str(out.dtype)
            for value in eqn.params.values():
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    yield from walk(inner)

    return list(walk(jax.make_jaxpr(f)(*args).jaxpr))


@pytest.mark.parametrize("case", CASES)
def test_in_bfloat16_the_weight_gradient_leaves_the_product_in_float32(case):
    _, _, axes, contracted, _ = CASES[case]
    x, kernel = _arrays(case)
    x = x.astype(jnp.bfloat16)
    bf16 = jnp.dtype("bfloat16")
    loss = lambda x, w: jnp.sum(project(x, w, axes, contracted, Arithmetic.cast(bf16)).astype(jnp.float32))  # noqa: E731
    products = _products(jax.grad(loss, (0, 1)), x, kernel)
    assert len(products) == 3
    assert all(inputs == {"bfloat16"} for inputs, _, _ in products), "every multiplication is bfloat16's"
    assert [dtype for _, shape, dtype in products if shape == kernel.shape] == ["float32"]
    assert [dtype for _, shape, dtype in products if shape == x.shape] == ["bfloat16"]


def test_gradients_of_every_parameter_of_a_bfloat16_layer_are_summed_in_float32():
    linear = Linear({"embed": 4}, {"mlp": 3}, bias=True, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    table = Embedding(5, 4, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    many = 1000  # 1 + 1/256 is 1 in bfloat16, so its sum stops at 256

    def loss(params):
        layer, embed = (nnx.merge(g, p) for g, p in zip(defs, params, strict=True))
        x = embed(jnp.zeros((1, many), jnp.int32))
        return jnp.sum(layer(x).astype(jnp.float32)) + jnp.sum(x.astype(jnp.float32))

    defs, states = zip(*(nnx.split(m) for m in (linear, table)), strict=True)
    grads = jax.grad(loss)(tuple(nnx.to_pure_dict(s) for s in states))
    np.testing.assert_array_equal(grads[0]["bias"], np.full(3, many, np.float32))
    np.testing.assert_allclose(
        grads[1]["weight"][0], many * (1 + linear.kernel.get_value().astype(jnp.bfloat16).sum(1)), rtol=0.01
    )


@pytest.mark.parametrize(
    "rules, spec",
    [("fsdp_tensor", P("fsdp", "tensor")), ("zero2", P(("data", "fsdp"), "tensor")), (Rules(), P(None, None))],
)
def test_the_weight_gradient_lands_where_the_rules_for_gradients_say(rules, spec):
    x, kernel = _arrays("up")
    layout = Layout("data=2,fsdp=2,tensor=2", rules)
    _, _, axes, contracted, _ = CASES["up"]
    with layout:
        f = functools.partial(project, axes=axes, contracted=contracted, arithmetic=Arithmetic.cast(jnp.float32))
        got = jax.jit(jax.grad(lambda w: jnp.sum(f(x, w) ** 2)))(kernel)
    assert got.sharding.is_equivalent_to(jax.NamedSharding(layout.device_mesh, spec), 2), got.sharding


def test_a_linear_layer_starts_with_the_variance_of_its_fan_in():
    layer = Linear({"heads": 8, "head_dim": 16}, {"embed": 64}, scale=0.5, bias=True, rngs=nnx.Rngs(0))
    std = float(jnp.std(layer.kernel.get_value()))
    assert abs(std * np.sqrt(8 * 16) / 0.5 - 1) < 0.05
    assert not layer.bias.get_value().any()


def test_logits_are_float32_and_capped():
    hidden = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 16)) * 9, jnp.bfloat16)
    weight = jnp.asarray(np.random.default_rng(1).normal(size=(5, 16)), jnp.float32)
    plain, capped = head_logits(hidden, weight), head_logits(hidden, weight, softcap=20.0)
    assert plain.dtype == capped.dtype == jnp.float32 and plain.shape == (2, 3, 5)
    assert_leaves_agree(capped, 20.0 * np.tanh(np.asarray(plain, np.float64) / 20.0))
    want = np.asarray(hidden, np.float64) @ np.asarray(weight.astype(jnp.bfloat16), np.float64).T
    assert_leaves_agree(plain, want)
