"""The named tensors of a module, and their bytes per device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.errors import LayoutError
from jaxscale.layout import Layout, TensorInfo, abstract, describe, named, shardings_of
from jaxscale.models import TransformerConfig
from jaxscale.nn import Embedding, Linear
from jaxscale.step.state import describe_model
from tests.truth.compare import assert_leaves_agree
from tests.truth.errors import raises_saying
from tests.truth.layouts import in_force

LAYOUTS = [
    Layout("data=8"),
    Layout("fsdp=8"),
    Layout("tensor=4,data=2"),
    Layout("data=2,fsdp=2,tensor=2"),
    Layout("data=2,fsdp=4", "zero1"),
    Layout("data=2,fsdp=4", "zero2"),
    Layout("data=4,context=2", "fsdp"),
    Layout("expert=2,fsdp=2"),
]
SMALL = TransformerConfig(depth=2, vocab=64, width=32, heads=4, head_dim=8, hidden=64, bias=True)


class Tied(nnx.Module):
    """A tied embedding and output head."""

    def __init__(self, rngs):
        self.embed = Embedding(16, 8, scale=1.0, rngs=rngs)
        self.head = self.embed.weight

    def __call__(self, ids):
        return jnp.tanh(self.embed(ids)) @ self.head.get_value().T

    @staticmethod
    def plainly(w, ids):
        return jnp.tanh(w[ids]) @ w.T


class Shared(nnx.Module):
    """One layer, applied twice."""

    def __init__(self, rngs):
        self.first = Linear({"embed": 8}, {"mlp": 8}, rngs=rngs)
        self.second = self.first

    def __call__(self, ids):
        return self.second(jnp.tanh(self.first(jax.nn.one_hot(ids, 8))))

    @staticmethod
    def plainly(w, ids):
        return jnp.tanh(jax.nn.one_hot(ids, 8) @ w) @ w


@pytest.mark.parametrize("module", [Tied, Shared])
def test_a_tied_and_a_shared_parameter_stay_one_leaf(module):
    _, infos = abstract(lambda: module(nnx.Rngs(0)))
    assert len(jax.tree.leaves(infos)) == 1


@pytest.mark.parametrize("module", [Tied, Shared])
@pytest.mark.parametrize("layout", [None, Layout("fsdp=4,tensor=2")], ids=str)
def test_a_tied_and_a_shared_parameter_train_to_the_values_of_one_array(module, layout):
    graphdef, infos = abstract(lambda: module(nnx.Rngs(0)))
    params = nnx.to_pure_dict(nnx.split(module(nnx.Rngs(0)))[1])
    ids = jnp.arange(16).reshape(8, 2) % 8
    loss = lambda y: jnp.mean(jnp.square(y - 1.0))  # noqa: E731

    def descend(f, w):
        return jax.tree.map(lambda p, g: p - 0.3 * g, w, jax.grad(f)(w))

    plain = jax.tree.leaves(params)[0]
    step = jax.jit(lambda w: descend(lambda w: loss(module.plainly(w, ids)), w))
    for _ in range(3):
        plain = step(plain)

    with in_force(layout):
        if layout is not None:
            params = jax.device_put(params, shardings_of(infos, layout))
        step = jax.jit(lambda p: descend(lambda p: loss(nnx.merge(graphdef, p)(ids)), p))
        for _ in range(3):
            params = step(params)
    (got,) = jax.tree.leaves(params)
    assert_leaves_agree(got, plain)


def test_the_description_is_that_of_the_module_made():
    _, infos = describe_model(SMALL)
    made = nnx.to_pure_dict(nnx.split(nnx.eval_shape(lambda: SMALL.make(nnx.Rngs(0))))[1])
    assert jax.tree.structure(infos) == jax.tree.structure(made)
    jax.tree.map(lambda i, a: (i.shape, i.dtype) == (a.shape, a.dtype) or pytest.fail(i.path), infos, made)
    up = infos["runs"][0]["blocks"][0]["mlp"]["up"]["kernel"]
    assert up == TensorInfo(
        "runs/0/blocks/0/mlp/up/kernel", (2, 32, 64), np.dtype("float32"), ("layers", "embed", "mlp")
    )
    assert (up.size, up.nbytes) == (2 * 32 * 64, 4 * 2 * 32 * 64)


def _module(variable):
    class M(nnx.Module):
        def __init__(self):
            self.inner = nnx.Dict(w=variable())

    return M


def test_a_parameter_without_names_is_refused():
    with raises_saying(LayoutError, "inner/w", "(2, 3)", "no axis names", "named(init, 'embed', 'mlp')"):
        abstract(_module(lambda: nnx.Param(jnp.zeros((2, 3)))))


def test_a_parameter_with_too_few_names_is_refused():
    init = named(jax.nn.initializers.zeros, "embed")
    with raises_saying(LayoutError, "inner/w", "2 dimensions", "('embed',)"):
        abstract(_module(lambda: nnx.Param(init(jax.random.key(0), (2, 3), jnp.float32))))


def test_a_variable_that_is_no_parameter_is_refused():
    with raises_saying(LayoutError, "inner/w", "BatchStat", "nnx.Param", "arguments"):
        abstract(_module(lambda: nnx.BatchStat(jnp.zeros(3))))


def test_an_unknown_name_is_refused_where_it_is_written():
    with raises_saying(LayoutError, "named(..., 'embed', 'mpl')", "'mpl'", "did you mean 'mlp'"):
        named(jax.nn.initializers.zeros, "embed", "mpl")


def test_without_a_layout_there_is_nothing_to_shard():
    assert shardings_of(describe_model(SMALL)[1], None) is None


def test_a_tensor_that_cannot_be_laid_out_is_named():
    with raises_saying(LayoutError, "runs/0/blocks/0/attn/", "heads", "4 over 8"):
        shardings_of(describe_model(SMALL)[1], Layout("tensor=8"))


@pytest.mark.parametrize("kind", ["params", "opt_state"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_described_bytes_are_those_of_the_shards(layout, kind):
    _, infos = describe_model(SMALL)
    arrays = jax.tree.map(lambda i: np.zeros(i.shape, i.dtype), infos)
    arrays = jax.device_put(arrays, shardings_of(infos, layout, kind))
    rows = describe(infos, layout, kind)
    for row, array in zip(rows, jax.tree.leaves(arrays), strict=True):
        assert {s.data.nbytes for s in array.addressable_shards} == {row.bytes_per_device}, row


def test_a_row_says_which_rules_fired():
    _, infos = describe_model(SMALL)
    rows = {r.path: r for r in describe(infos, Layout("data=2,fsdp=2,tensor=2"))}
    assert rows["embed/weight"].rules == "vocab→tensor embed→fsdp"
    assert rows["embed/weight"].spec == ("tensor", "fsdp")
    assert "no rule" in rows["norm/scale"].rules
    assert all(r.rules == "one device" for r in describe(infos, None))


def test_a_pod_is_described_on_a_laptop():
    _, infos = describe_model(SMALL)
    rows = {r.path: r for r in describe(infos, Layout("data=64,fsdp=32,tensor=4"))}
    assert rows["embed/weight"].bytes_per_device == 64 * 32 * 4 // 128
