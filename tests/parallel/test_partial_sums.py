"""`Layout.sums`: stars and chunks against plain all-reduces, and what they send and cost."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.errors import LayoutError
from jaxscale.hardware import topology
from jaxscale.layout import Layout, abstract, say_once
from jaxscale.models import TransformerConfig
from jaxscale.nn import Linear
from jaxscale.nn.formats import Stored
from jaxscale.nn.linear import out_of
from jaxscale.parallel import Arithmetic, ChunkedSum, StarSum
from jaxscale.parallel.partial_sums import chosen_sums, ring_seconds, summed_matmul
from jaxscale.plan.collectives import Collective, collectives
from jaxscale.plan.communication import predict
from jaxscale.plan.roofline import collective_time, hides_behind
from jaxscale.step import TrainConfig
from jaxscale.testing.params import random_params
from tests.truth.compare import assert_leaves_agree
from tests.truth.layouts import assert_layouts_agree, random_batch

B, S, E, F = 4, 10, 8, 12
DOWN = ("mlp", "embed")
SUMS = [StarSum(), ChunkedSum(3)]


def loss(h, down):
    arithmetic = Arithmetic.cast(jnp.float32)
    sums = chosen_sums(DOWN, down.shape)
    return jnp.sum(jnp.cos(h @ down if sums is None else summed_matmul(h, down, DOWN, arithmetic, sums)))


def arrays():
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((B, S, F), (F, E))]


@pytest.mark.parametrize("sums", SUMS, ids=str)
def test_values_gradients_and_collectives(sums):
    want = jax.value_and_grad(loss, argnums=(0, 1))(*arrays())
    with Layout("tensor=4,data=2", sums=sums) as layout:
        lowered = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*arrays())
        compiled = lowered.compile()
        got = compiled(*arrays())
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    assert_leaves_agree(got[1], want[1], what=str(layout))
    sent = [c for c in collectives(compiled, layout.sizes) if c.axes == ("tensor",) and c.payload > 4]
    whole = B // 2 * S * E * 4
    if isinstance(sums, StarSum):  # three devices to the first, and back
        assert [(c.kind, c.payload) for c in sent] == [("collective-permute", whole)] * 6
    else:
        # the CPU compiler drops the barrier and merges the three; the TPU compiler does not
        assert lowered.as_text().count("stablehlo.all_reduce") == 3
        assert {c.kind for c in sent} == {"all-reduce"} and sum(c.payload for c in sent) == whole


def test_a_star_leaves_the_same_bits_on_every_device():
    with Layout("tensor=8", sums=StarSum()):
        y = jax.jit(lambda h, w: summed_matmul(h, w, DOWN, Arithmetic.cast(jnp.bfloat16), StarSum()))(
            arrays()[0][..., :8], arrays()[1][:8]
        )
    copies = [np.asarray(s.data).view(np.uint16) for s in y.addressable_shards]
    assert len(copies) == 8 and all(np.array_equal(copies[0], c) for c in copies)


MODEL = TransformerConfig(depth=2, vocab=64, width=32, heads=4, kv_heads=4, head_dim=8, hidden=64, bias=True)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(Layout("tensor=2,fsdp=2", sums=StarSum()), marks=pytest.mark.long),
        pytest.param(Layout("tensor=2,pipeline=2", sums=StarSum()), marks=pytest.mark.long),
        pytest.param(Layout("tensor=2,context=2", sums=ChunkedSum(4)), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_model_trains_to_the_same_numbers(layout):
    assert_layouts_agree(MODEL, [layout], batch=random_batch(64, seq=16))


def test_a_star_costs_two_latencies_and_the_payloads_of_all_others():
    hardware = topology("h100:8")
    link, speed = hardware.link({"tensor": 8}, ("tensor",))
    permute = Collective("collective-permute", ("tensor",), 8, 16384, name="star_sum/ppermute")
    share = hardware.chip.efficiency.get(link.name, hardware.chip.efficiency.get("link", 1.0))
    star = 14 * collective_time(permute, hardware, {"tensor": 8})
    assert star == pytest.approx(StarSum().seconds(8, 16384, link.latency, speed * share))
    ring = collective_time(Collective("all-reduce", ("tensor",), 8, 16384), hardware, {"tensor": 8})
    assert ring == pytest.approx(ring_seconds(8, 16384, link.latency, speed * share))
    assert star < ring and hides_behind(permute) is None


@pytest.mark.long
def test_the_planner_sees_the_star_in_the_traced_step():
    layouts = [Layout("tensor=4", sums=s) for s in (None, StarSum())]
    plain, star = (
        predict(TrainConfig(model=MODEL, layout=layout, batch_size=4, seq_len=16), "h100:4") for layout in layouts
    )
    permutes = [c for c in star if c.kind == "collective-permute"]
    assert permutes and all("star_sum" in c.name and c.devices == 4 for c in permutes)
    assert not [c for c in plain if c.kind == "collective-permute"]


def test_products_with_weights_in_few_bits_say_that_their_sums_are_all_reduces(caplog):
    say_once.cache_clear()
    graphdef, infos = abstract(lambda: Linear({"mlp": 16}, {"embed": 8}, rngs=nnx.Rngs(0)))
    params, x = jax.tree.map(jnp.asarray, random_params(infos)), jnp.ones((2, 3, 16))
    few_bits = Stored("int8", group=4).encoded(jax.tree.map(jnp.copy, params), infos, None)
    with Layout("tensor=4,data=2", sums=StarSum()):
        jax.jit(out_of)(x, nnx.merge(graphdef, params))
        assert not caplog.messages
        jax.jit(out_of)(x, nnx.merge(graphdef, few_bits))
    (message,) = caplog.messages
    assert "Layout.sums = StarSum()" in message and "StoredWeight" in message and "all-reduces" in message


def test_sums_and_a_sharded_sequence_are_refused():
    with pytest.raises(LayoutError, match="reduce-scatters"):
        Layout("tensor=2", sequence_sharded=True, sums=StarSum())
