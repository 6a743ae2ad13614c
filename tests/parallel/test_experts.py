"""The bytes that dispatch sends, in programs compiled for a TPU and by formulas."""

from __future__ import annotations

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.layout import Layout, Rules, abstract, constrain, describe, shardings_of
from jaxscale.nn import MixtureOfExperts
from jaxscale.parallel import Arithmetic, Choices, Weights, expert_mlp, wire_rows
from jaxscale.parallel.dispatch import exchange as exchanges
from jaxscale.plan import compile_for, topology_devices
from jaxscale.plan.collectives import collectives
from tests.truth.compare import assert_leaves_agree

TOPOLOGY = "v5p:2x2x2"
SMALL = 16384
"""Bytes below which a collective is bookkeeping: counts, statistics, a router's gradient, weights of choices."""


def _collectives(layout, capacity):
    """Bytes by kind and mesh axes of a layer's large collectives, forward and back: 16 x 64 tokens, bfloat16."""
    config = MixtureOfExperts(experts=8, top_k=2, capacity=capacity, balance_loss=0.1)
    graphdef, infos = abstract(lambda: config(256, 512, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    stream = "batch", "residual_seq", "embed"

    def loss(params, x):
        y, stats = nnx.merge(graphdef, params)(constrain(x, *stream))
        return jnp.sum(jnp.square(constrain(y, *stream).astype(jnp.float32))) + stats["loss"]

    def gradients(params, x):
        grads, dx = jax.grad(loss, argnums=(0, 1))(params, x)
        return jax.tree.map(lambda g, i: constrain(g, *i.axes, kind="grads"), grads, infos), constrain(dx, *stream)

    pod = layout.on(topology_devices(TOPOLOGY))
    placed = lambda i, s: jax.ShapeDtypeStruct(i.shape, i.dtype, sharding=s)  # noqa: E731
    params = jax.tree.map(placed, infos, shardings_of(infos, pod))
    sharding = pod.sharding(stream, (16, 64, 256), kind="activations")
    x = jax.ShapeDtypeStruct((16, 64, 256), jnp.bfloat16, sharding=sharding)
    text = compile_for(gradients, TOPOLOGY, params, x, layout=layout).as_text()
    assert " conditional(" not in text, "a collective under a branch"
    total: collections.Counter[tuple[str, tuple[str, ...]]] = collections.Counter()
    for c in collectives(text, layout.sizes):
        if c.payload >= SMALL:
            total[c.kind, c.axes] += c.payload * c.times
    return dict(total)


# A device has 128 tokens of 256 numbers with 2 choices each, so 256 rows to send: a ragged exchange sends only these
# rows, however large the receiving buffers are. Rows are sent and returned, and so are their cotangents. A device has
# two of eight experts, whose three gradients of 256 x 512 are summed over the other axis.
@pytest.mark.tpu_aot
@pytest.mark.parametrize(
    "layout, along, across",
    [
        (Layout("expert=4,data=2"), "expert", "data"),
        (Layout("data=2,tensor=4", "folded", sequence_sharded=True), "tensor", "data"),
    ],
    ids=str,
)
def test_dropless_dispatch_sends_rows_there_and_back_and_gathers_nothing(layout, along, across):
    assert _collectives(layout, None) == {
        ("all-to-all", (along,)): 2 * 2 * 256 * 256 * 2,
        ("all-reduce", (across,)): 3 * 2 * 256 * 512 * 4,
    }


@pytest.mark.tpu_aot
def test_slots_travel_by_all_to_all_and_fsdp_gathers_weights_alone():
    # Four rows of tokens on a device; 20 slots = 1.25 * 2 * 64 / 8 of each of 8 experts for each row, sent four times.
    # A device has four experts: half of the hidden width (`tensor`), and half of the model width until gathered.
    # Outputs and the input's cotangent are summed over `tensor`.
    assert _collectives(Layout("expert=2,fsdp=2,tensor=2"), 1.25) == {
        ("all-to-all", ("expert",)): 4 * (4 * 8 * 20 * 256) * 2,
        ("all-gather", ("fsdp",)): 3 * (4 * 256 * 256) * 2,
        ("reduce-scatter", ("fsdp",)): 3 * (4 * 256 * 256) * 4,
        ("all-reduce", ("tensor",)): 2 * (4 * 64 * 256) * 2,
    }


@pytest.mark.tpu_aot
def test_partitioned_gradients_are_reduce_scattered_and_never_whole():
    # 2 rows of tokens on a device and 20 slots; a device has four experts, with gradients sharded over data x fsdp = 4
    assert _collectives(Layout("data=2,fsdp=2,expert=2", "zero2"), 1.25) == {
        ("all-to-all", ("expert",)): 4 * (2 * 8 * 20 * 256) * 2,
        ("reduce-scatter", ("data", "fsdp")): 3 * (4 * 512 * 256) * 4,
    }


def _documented_ragged(operand, output, begin, sizes, end, coming, *, axis_name):
    """`jax.lax.ragged_all_to_all` by its documentation, for platforms without it."""
    everyones = [jax.lax.all_gather(a, axis_name) for a in (operand, begin, sizes, end)]
    me, row = jax.lax.axis_index(axis_name), jnp.arange(len(output))
    for source in range(len(begin)):
        theirs, start, size, at = (a[source] for a in everyones)
        mine = (row >= at[me]) & (row < at[me] + size[me])
        output = jnp.where(mine[:, None], jnp.take(theirs, start[me] + row - at[me], axis=0, mode="clip"), output)
        output = jnp.where(size[me] == coming[source], output, jnp.nan)
    return output


def test_the_ragged_exchange_moves_the_rows_that_the_padded_one_does(monkeypatch):
    """The ragged exchange runs on TPUs only; here its primitive is emulated."""
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", _documented_ragged)
    random = np.random.default_rng(0)
    sent = random.integers(0, 4, (4, 4))
    sent[2] = 0
    exchange = exchanges.Exchange(("expert",), 4, 4, 14, True)  # up to 12 rows are sent, the last ones are not
    rows = random.normal(size=(4, 14, 3)).astype(np.float32)

    def both(rows, sent, received):
        rows, sent, received = rows[0], sent[0], received[0]
        results = []
        for carry in (exchanges._padded, exchanges._ragged):
            away = carry(rows, sent, received, exchange=exchange, outbound=True)
            results += [away[None], carry(2 * away, sent, received, exchange=exchange, outbound=False)[None]]
        return results

    with Layout("expert=4") as layout:
        cut = jax.sharding.PartitionSpec("expert")
        f = jax.shard_map(both, in_specs=cut, out_specs=cut, mesh=layout.device_mesh, check_vma=False)
        away, back, away_ragged, back_ragged = jax.jit(f)(rows, sent, sent.T)
    np.testing.assert_array_equal(away, away_ragged)
    np.testing.assert_array_equal(back, back_ragged)
    for device in range(4):
        gone = sent[device].sum()
        np.testing.assert_array_equal(back[device][:gone], 2 * rows[device][:gone])
        assert not np.any(back[device][gone:])


def test_rows_without_an_expert_add_nothing_whatever_their_values(monkeypatch):
    random, product = np.random.default_rng(0), jax.lax.ragged_dot
    x, up, down = (random.normal(size=shape).astype(np.float32) for shape in ((2, 4, 8), (4, 8, 6), (4, 6, 8)))
    ids = np.argsort(random.normal(size=(2, 4, 4)))[..., :2].astype(np.int32)
    scale = random.uniform(size=ids.shape).astype(np.float32)

    def loss(x, scale, up, down):
        routed, weights = Choices(ids, scale), Weights(None, up, down)
        return jnp.sum(
            jnp.square(expert_mlp(x, routed, weights, act=jax.nn.gelu, arithmetic=Arithmetic.cast(jnp.float32)))
        )

    def poisoned(rows, matrices, sizes, **options):
        return jnp.where(
            jnp.arange(len(rows))[:, None] < jnp.sum(sizes), product(rows, matrices, sizes, **options), jnp.nan
        )

    gradients = jax.value_and_grad(loss, (0, 1, 2, 3))
    want = gradients(x, scale, up, down)
    monkeypatch.setattr(jax.lax, "ragged_dot", poisoned)
    with Layout("tensor=2", Rules(params={"experts": "tensor"}, activations={"experts": "tensor"})):
        assert_leaves_agree(jax.jit(gradients)(x, scale, up, down), want)


def test_useful_and_padded_rows_are_counted_apart():
    ids = np.array([[[0, 1], [2, 3]], [[0, 1], [0, 2]]])  # devices hold experts 0, 1 and 2, 3
    assert wire_rows(ids, 4) == {"useful": 2 + 3, "padded": 2 * 4}
    assert wire_rows(ids % 2, 4) == {"useful": 4, "padded": 8}


def _bytes_per_device(layout):
    infos = abstract(lambda: MixtureOfExperts(experts=8)(256, 512, rngs=nnx.Rngs(0)))[1]
    return {r.path: r.bytes_per_device for r in describe(infos, layout)}


def test_two_foldings_hold_the_same_bytes_of_experts():
    whole = 8 * 256 * 512 * 4
    cut, folded = (_bytes_per_device(Layout("data=2,tensor=4", rules)) for rules in ("fsdp_tensor", "folded"))
    assert cut["up"] == folded["up"] == whole // 4
    assert cut["router"] == folded["router"] == 256 * 8 * 4
