"""Weights of which a part is not stored: against NumPy, and the new formats on layouts."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxscale as js
from jaxscale.convert.recipes import BlockPruning, LowRank
from jaxscale.errors import ConfigError
from jaxscale.layout import TensorInfo, abstract, shardings_of
from jaxscale.nn import Linear, project
from jaxscale.nn.formats import Factors, MixedBlocks, SignBlocks, Sparse, Stored
from jaxscale.parallel import Arithmetic
from jaxscale.testing.params import random_params
from tests.convert.test_recipes import OUT, N, drawn, inputs_of
from tests.truth.errors import raises_saying
from tests.truth.long import short

RNG = np.random.default_rng(0)


def masked(w, scores, rows):
    """Keep the `rows` blocks of largest scores in each column of blocks: (n, group, columns, outputs)."""
    out = np.zeros_like(w)
    for c in range(w.shape[2]):
        best = np.argsort(-scores[:, c], kind="stable")[:rows]
        out[best, :, c] = w[best, :, c]
    return out


@pytest.mark.parametrize(("group", "outputs", "share"), short(2, [(1, 1, 0.6), (1, 1, 0.9), (4, 8, 0.5)]))
def test_a_sparse_weight_is_the_masked_dense_one_and_multiplies_as_it(group, outputs, share):
    w = RNG.normal(size=(2, 4, 8, OUT)).astype(np.float32)
    form = Sparse(share, group, outputs, "float32")
    weight = form.encode(jnp.asarray(w), (-3, -2))
    blocks = w.reshape(2, N // group, group, OUT // outputs, outputs)
    rows = N // group - int(share * (N // group) + 1e-9)
    want = np.stack([masked(b, (b.astype(np.float64) ** 2).sum((1, 3)), rows) for b in blocks]).reshape(w.shape)
    assert weight.shape == w.shape and np.array_equal(weight.dense(), want)
    places = -(-(N // group) // 8) * (OUT // outputs)
    assert [x.nbytes for x in (weight.values, weight.mask)] == [2 * 4 * rows * group * OUT, 2 * places]
    one, axes = jax.tree.map(lambda a: a[1], weight), ("heads", "head_dim", "embed")
    x = jnp.asarray(RNG.normal(size=(2, 3, 4, 8)), jnp.float32)
    run = jax.value_and_grad(lambda x, w: jnp.sum(project(x, w, axes, (0, 1), Arithmetic.cast("float32")) ** 2))
    for got, dense in zip(run(x, one), run(x, jnp.asarray(want[1])), strict=True):
        np.testing.assert_allclose(got, dense, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("group", "outputs"), [(1, 1), (4, 8)])
def test_taylor_scores_are_the_squared_changes_of_the_outputs_without_a_block(group, outputs):
    w, x = drawn(8)
    recipe = BlockPruning(group=group, outputs=outputs, share=0.5, dtype="float32")
    blocks = w.astype(np.float64).reshape(N // group, group, OUT // outputs, outputs)
    scores = np.zeros((N // group, OUT // outputs))
    for i, c in np.ndindex(*scores.shape):
        part = x[:, i * group : (i + 1) * group].astype(np.float64) @ blocks[i, :, c]
        scores[i, c] = np.sum(part**2) / len(x)
    want = masked(blocks, scores, N // group // 2).reshape(w.shape)
    got = np.asarray(recipe.quantize(jnp.asarray(w), (-2,), inputs_of(x)).dense())
    np.testing.assert_allclose(got, want, rtol=1e-6)
    plain = np.asarray(recipe.quantize(jnp.asarray(w), (-2,)).dense())

    def error(values):
        return np.sum((x.astype(np.float64) @ (values - w)) ** 2)

    assert error(got) < error(plain)


def test_factors_have_the_least_output_error_of_their_rank_and_never_make_the_matrix():
    w, x = drawn(9, out=40)
    kernel = jnp.asarray(w).reshape(4, 8, 40)
    weight = LowRank(rank=6, dtype="float32").quantize(kernel, (-3, -2), inputs_of(x))
    values = np.linalg.svd(x.astype(np.float64) @ w / np.sqrt(len(x)), compute_uv=False)
    change = np.asarray(weight.dense(), np.float64).reshape(w.shape) - w
    left = np.sum((x.astype(np.float64) @ change) ** 2) / len(x)
    assert left == pytest.approx(np.sum(values[6:] ** 2), rel=1e-3)
    axes, args = ("heads", "head_dim", "embed"), (jnp.asarray(x).reshape(-1, 4, 8), weight)
    got, text = (
        (f := jax.jit(lambda x, w: project(x, w, axes, (0, 1), Arithmetic.cast("float32"))))(*args),
        f.lower(*args).as_text(),
    )
    np.testing.assert_allclose(got, x @ np.asarray(weight.dense()).reshape(w.shape), rtol=1e-3, atol=1e-3)
    assert "32x40xf32" not in text and "4x8x40xf32" not in text
    whole = Factors(N, "float32").encode(jnp.stack([kernel, kernel]), (-3, -2))
    np.testing.assert_allclose(whole.dense()[1], kernel, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize(
    "made",
    [
        Sparse(0.5), Sparse(0.5, group=4, outputs=8), Factors(8), SignBlocks(3, 2),
        MixedBlocks(Stored("int4", group=8, activations=4), 0.25),
    ],
    ids=lambda f: type(f).__name__,
)  # fmt: skip
@pytest.mark.parametrize("sizes", [({"embed": 32}, {"heads": 4, "head_dim": 16}), ({"mlp": 64}, {"embed": 32})])
def test_sharded_weights_are_those_of_one_device(made, sizes):
    graphdef, infos = abstract(lambda: nnx.eval_shape(lambda: Linear(*sizes, rngs=nnx.Rngs(0))))
    params = jax.tree.map(jnp.asarray, random_params(infos))
    alone = made.encoded(jax.tree.map(jnp.copy, params), infos, None)
    x = jnp.asarray(RNG.normal(size=(8, 4, *sizes[0].values())), jnp.float32)

    def loss(weights, x):
        return jnp.sum(nnx.merge(graphdef, weights)(x) ** 2)

    want = jax.jit(jax.value_and_grad(loss, argnums=1))(alone, x)
    for mesh in ("data=2,fsdp=2,tensor=2", "fsdp=4,tensor=2"):
        layout = js.Layout(mesh)
        weights = jax.tree.map(jax.device_put, alone, shardings_of(made.infos(infos), layout))
        assert any(not w.sharding.is_fully_replicated for w in jax.tree.leaves(weights))
        with layout:
            got = jax.jit(jax.value_and_grad(loss, argnums=1))(weights, x)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5 * float(jnp.abs(b).max()))


def test_settings_that_do_not_fit_are_one_sentence():
    info = TensorInfo("q", (16, 24), jnp.float32, ("embed", "mlp"), (-2,))
    with raises_saying(ConfigError, "Sparse.group = 5 does not divide the 16 inputs of q", "4"):
        Sparse(group=5).covers(info)
    assert Sparse(group=4).covers(info)
    both = [info, dataclasses.replace(info, path="up", shape=(36, 24))]
    with raises_saying(ConfigError, "Sparse.group = 8 does not divide the 36 inputs of up", "is 4, which divides"):
        Sparse(group=8).check(both)
    Sparse(group=4).check(both)
    with raises_saying(ConfigError, "Sparse.share = 1"):
        BlockPruning(share=1)
    with raises_saying(ConfigError, "leave BlockPruning.bits"):
        BlockPruning(bits=2)
    with raises_saying(ConfigError, "Factors.rank = 17 is above the rank of q, which is 16"):
        Factors(17).covers(info)
    with raises_saying(ConfigError, "LowRank.bits has no effect; set LowRank.rank"):
        LowRank(bits=2)


@pytest.mark.parametrize("form", [Sparse(0.9), MixedBlocks(), Stored("int4", group=16), Stored("nf4")])
def test_a_nan_does_not_vanish_when_a_matrix_is_converted_alone(form):
    w = RNG.normal(size=(128, OUT)).astype(np.float32)
    w[3, 5] = np.nan
    assert np.isnan(form.encode(jnp.asarray(w), (-2,)).dense()).any()
