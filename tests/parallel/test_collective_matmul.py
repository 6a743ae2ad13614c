"""Overlapped products against plain ones, and the collectives of the compiled program."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.errors import LayoutError
from jaxscale.layout import Layout
from jaxscale.models import TransformerConfig
from jaxscale.parallel import Arithmetic
from jaxscale.parallel.collective_matmul import gather_matmul, matmul_scatter
from jaxscale.plan.collectives import collectives
from jaxscale.step.state import describe_model
from tests.truth.compare import assert_leaves_agree
from tests.truth.errors import raises_saying
from tests.truth.layouts import assert_layouts_agree, random_batch, train
from tests.truth.long import short

LAYOUTS = [
    Layout("tensor=4,data=2", sequence_sharded=True),
    Layout("tensor=2,fsdp=2,context=2", sequence_sharded=True),
    Layout("tensor=2,data=2,fsdp=2", "zero2", sequence_sharded=True),
]
B, S, E, H, D, F = 4, 16, 8, 4, 6, 12
QUERY, UP, DOWN = ("embed", "heads", "head_dim"), ("embed", "mlp"), ("mlp", "embed")


def arrays():
    rng = np.random.default_rng(0)
    shapes = [(B, S, E), (E, H, D), (E, F), (F, E)]
    return [jnp.asarray(rng.standard_normal(s), jnp.float32) for s in shapes]


def through(x, q, up, down):
    y, h = gather_matmul(x, (q, up), (QUERY, UP), Arithmetic.cast(jnp.float32))
    return jnp.sum(jnp.sin(y)) + jnp.sum(
        jnp.cos(matmul_scatter(jax.nn.gelu(h), down, DOWN, Arithmetic.cast(jnp.float32)))
    )


def plainly(x, q, up, down):
    y, h = jnp.einsum("bse,ehd->bshd", x, q), x @ up
    return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.cos(jax.nn.gelu(h) @ down))


@pytest.mark.parametrize("layout", short(1, LAYOUTS), ids=str)
def test_values_and_gradients_are_those_of_the_plain_products(layout):
    arguments = arrays()
    want = jax.value_and_grad(plainly, argnums=(0, 1, 2, 3))(*arguments)
    with layout:
        got = jax.jit(jax.value_and_grad(through, argnums=(0, 1, 2, 3)))(*arguments)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    assert_leaves_agree(got[1], want[1], what=str(layout))


MODEL = TransformerConfig(
    depth=2, vocab=64, width=32, heads=4, kv_heads=4, head_dim=8, hidden=64, bias=True, overlap=("attention", "mlp")
)


@pytest.mark.parametrize("layout", [pytest.param(LAYOUTS[0], marks=pytest.mark.long), LAYOUTS[1]], ids=str)
def test_a_model_with_overlapped_layers_trains_to_the_same_numbers(layout):
    assert_layouts_agree(MODEL, [layout], batch=random_batch(64, seq=16))


def test_overlapped_products_send_permutes_and_nothing_else():
    layout = LAYOUTS[0]
    with layout:
        compiled = jax.jit(jax.grad(through, argnums=(0, 1, 2, 3))).lower(*arrays()).compile()
    sent = [c for c in collectives(compiled, layout.sizes) if c.axes == ("tensor",) and c.payload > 4]
    assert {c.kind for c in sent} == {"collective-permute"}
    # Four rings of three steps: x, the sum y, dy, the sum dx. x's second round, for the kernels' gradients, is the
    # same instructions as its first, which the compiler merges here. A shard: 2 of 4 rows, 4 of 16 positions, width 8.
    assert sum(c.sent for c in sent) == 4 * 3 * (2 * 4 * 8 * 4)


def test_a_layout_without_a_ring_is_named():
    with (
        Layout("tensor=4,data=2"),
        raises_saying(LayoutError, "does not shard the residual stream", "sequence_sharded"),
    ):
        jax.eval_shape(through, *arrays())
    with raises_saying(LayoutError, "nothing is sent that could overlap"):
        jax.eval_shape(through, *arrays())


def test_whole_key_heads_are_no_ring_and_the_feed_forward_alone_overlaps():
    batch = jnp.zeros((8, 16), jnp.int32)

    def traced(overlap):
        model = dataclasses.replace(MODEL, kv_heads=2, overlap=overlap)
        graphdef, infos = describe_model(model)
        params = jax.tree.map(lambda i: jax.ShapeDtypeStruct(i.shape, i.dtype), infos)
        return jax.eval_shape(lambda p, t: nnx.merge(graphdef, p).hidden(t), params, batch)

    with LAYOUTS[0]:
        with raises_saying(LayoutError, "'kv_heads' of 2", "remove 'attention' from Transformer.overlap"):
            traced(("attention", "mlp"))
        assert traced(("mlp",)).shape == (8, 16, 32)


def test_one_device_has_nothing_to_overlap():
    plain = dataclasses.replace(MODEL, overlap=())
    batch = random_batch(64, seq=16)
    got, want = (train(m, None, batch=batch, steps=1) for m in (MODEL, plain))
    np.testing.assert_array_equal(got.losses, want.losses)
