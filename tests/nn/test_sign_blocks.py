"""Matrices as stacks of blocks of about one bit: against NumPy, and as many blocks as fit into a number of bytes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxscale as js
from jaxscale.convert.quantize import quantize
from jaxscale.convert.recipes import BitStack
from jaxscale.errors import ConfigError
from jaxscale.layout import TensorInfo
from jaxscale.models import TransformerConfig
from jaxscale.nn import as_weight, project
from jaxscale.nn.formats import FewerBlocks, SignBlocks, Stored
from jaxscale.nn.formats.sign_blocks import chosen
from jaxscale.parallel import Arithmetic
from jaxscale.step.state import describe_model
from tests.truth.errors import raises_saying

DRAW = np.random.default_rng(0)


def numpy_stack(w, blocks, rank, by):
    """Iterative absolute value decomposition (Wang et al. 2024, section 3.1) in float64, and the errors it leaves."""
    left, errors = w.astype(np.float64) * by[:, None], []
    total, square = np.zeros_like(left), np.sum(left**2)
    for _ in range(blocks):
        u, s, v = np.linalg.svd(np.abs(left))
        value = np.where(left >= 0, 1, -1) * (u[:, :rank] * s[:rank] @ v[:rank])
        total, left = total + value, left - value
        errors.append(np.sum(left**2) / square)
    return total / by[:, None], errors


def test_blocks_are_those_of_the_papers_decomposition_and_none_makes_the_error_larger():
    w, by = DRAW.normal(size=(16, 24)), DRAW.uniform(0.3, 3, 16)
    want, errors = numpy_stack(w, 4, 2, by)
    form = SignBlocks(4, 2, "float32")
    got = form.encode(jnp.asarray(w, jnp.float32), (-2,), jnp.asarray(by, jnp.float32))
    assert np.allclose(got.dense(), want, atol=2e-4)
    assert np.allclose([b.error for b in got.blocks], errors, rtol=1e-3)
    half = [float(b.error) for b in SignBlocks(8, 2).encode(jnp.asarray(w, jnp.float32), (-2,)).blocks]
    assert half == sorted(half, reverse=True) and half[-1] < 0.1 * half[0]


@pytest.mark.long
def test_layers_of_a_stack_and_several_dimensions_are_encoded_as_alone_and_multiply_as_the_dense_kernel():
    w = jnp.asarray(DRAW.normal(size=(2, 4, 8, 24)), jnp.float32)
    form = SignBlocks(3, 2, "float32")
    stack, axes = form.encode(w, (-3, -2)), ("heads", "head_dim", "embed")
    one = jax.tree.map(lambda a: a[1], stack)
    assert stack.shape == w.shape and one.shape == w.shape[1:]
    alone = form.encode(w[1].reshape(32, 24), (-2,)).dense()
    assert np.allclose(one.dense().reshape(32, 24), alone, atol=1e-5)
    x = jnp.asarray(DRAW.normal(size=(2, 3, 4, 8)), jnp.float32)
    run = jax.value_and_grad(lambda x, w: jnp.sum(project(x, w, axes, (0, 1), Arithmetic.cast(jnp.float32)) ** 2))
    (got, dx), (want, dense_dx) = run(x, one), run(x, one.dense())
    assert np.allclose(got, want, rtol=1e-5) and np.allclose(dx, dense_dx, rtol=1e-4, atol=1e-4)


def test_the_blocks_that_are_read_fit_and_leave_no_room_for_another():
    left = [sorted(DRAW.uniform(size=5), reverse=True) for _ in range(6)]
    sizes = DRAW.integers(10, 60, 6).tolist()
    assert chosen(left, sizes, sum(sizes) - 1) is None
    for budget in range(sum(sizes), 6 * sum(sizes), 37):
        counts = chosen(left, sizes, budget)
        over = budget - np.dot(counts, sizes)
        assert over >= 0 and all(n == 5 or size > over for n, size in zip(counts, sizes, strict=True))
    assert chosen([[1.0, 0.9], [1.0, 0.2]], [10, 10], 30) == [1, 2]


@pytest.mark.long
def test_one_run_fits_into_any_number_of_bytes(tmp_path):
    model = TransformerConfig(depth=2, vocab=256, width=16, heads=4, kv_heads=2, hidden=32)
    data = js.data.synthetic(documents=80, length=60, vocab_size=256)
    options = dict(data=data, layout=None, batch_size=8, seq_len=16, eval_batches=0, steps=2, quiet=True)
    base = js.fit(model=model, run=tmp_path / "base", **options)
    run = quantize(base, tmp_path / "stack", BitStack(blocks=3), rows=16, batch=8, say=lambda _: None)
    infos = describe_model(model)[1]
    whole = sum(i.nbytes for i in jax.tree.leaves(run.config.stored.infos(infos)))
    want, errors = run.params(), []
    for budget in (whole - 900, whole - 300, whole):
        part = FewerBlocks(budget).part_of(run.config.stored, infos, run.some_weights)
        weights = run.weights(part=part)
        size = sum(x.nbytes for x in jax.tree.leaves(weights))
        assert budget - 300 < size <= budget
        dense = jax.tree.map(lambda i, w: as_weight(w).dense(i.dtype), infos, weights)
        errors.append(
            sum(float(jnp.sum((a - b) ** 2)) for a, b in zip(*map(jax.tree.leaves, (dense, want)), strict=True))
        )
    assert errors[0] > errors[1] > errors[2] == 0
    few, every, plain = (
        run.generate("ab", max_tokens=4, temperature=0, weights=w).ids
        for w in (FewerBlocks(whole - 900), FewerBlocks(whole), None)
    )
    assert len(few) == 4 and every == plain
    with raises_saying(ConfigError, "FewerBlocks.bytes = 100"):
        run.generate("ab", max_tokens=4, weights=FewerBlocks(100))
    with raises_saying(ConfigError, "jaxscale quantize --recipe '@BitStack()'"):
        base.generate("ab", max_tokens=4, weights=FewerBlocks(100))
    with raises_saying(ConfigError, "leave out the weight format"):
        run.generate("ab", max_tokens=4, weights=Stored("int4"))


def test_settings_that_do_not_fit_are_one_sentence():
    with raises_saying(ConfigError, "SignBlocks.blocks = 0"):
        SignBlocks(0)
    with raises_saying(ConfigError, "SignBlocks.dtype = 'int8'"):
        SignBlocks(dtype="int8")
    with raises_saying(ConfigError, "BitStack.bits has no effect; set BitStack.blocks"):
        BitStack(bits=2)
    info = TensorInfo("q", (16, 24), jnp.float32, ("embed", "mlp"), (-2,))
    with raises_saying(ConfigError, "SignBlocks.rank = 17 is above the rank of q, which is 16"):
        SignBlocks(rank=17).covers(info)
