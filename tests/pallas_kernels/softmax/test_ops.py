"""The public ops and their gradients, by XLA on this machine, against float64 and, for special values, jax.nn."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import KernelError
from pallas_kernels.softmax import log_softmax, logsumexp, softmax
from tests.pallas_kernels.softmax.cases import (
    DTYPES,
    OPS,
    assert_as_exact_as,
    assert_same,
    cotangent,
    edge_rows,
    gradient_truth,
    normal,
    truth,
    units,
    value_and_gradient,
)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.__name__)
def test_values_and_gradients_are_as_exact_as_the_plain_ones(op, dtype):
    f, plain = OPS[op]
    x = normal((5, 3, 257), dtype)
    g = cotangent(op, x)
    (y, dx), (theirs, plain_dx) = value_and_gradient(f, x, g), value_and_gradient(plain, x, g)
    assert y.dtype == (jnp.float32 if op == "logsumexp" else dtype) and dx.dtype == dtype
    assert_as_exact_as(y, theirs, truth(op, x), "value")
    assert_as_exact_as(dx, plain_dx, gradient_truth(op, x, g), "gradient", units(op))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", [(1,), (2, 1, 13), (0, 5), (1, 1_000_003)], ids=str)
def test_any_leading_shape_and_any_length_will_do(op, shape):
    f, plain = OPS[op]
    x = normal(shape)
    y, dx = value_and_gradient(f, x, cotangent(op, x))
    assert_same(y, plain(x))
    assert dx.shape == shape and jnp.isfinite(dx).all()


@pytest.mark.parametrize("op", OPS)
def test_every_edge_is_answered_as_jax_nn_answers_it(op):
    f, plain = OPS[op]
    assert_same(f(edge_rows()), plain(edge_rows()))
    half = jnp.asarray([[65504.0, -65504.0, 65504.0]], jnp.float16)
    assert_same(f(half), plain(half.astype(jnp.float32)).astype(f(half).dtype))


@pytest.mark.parametrize("op", OPS)
def test_masked_values_are_ignored(op):
    f, plain = OPS[op]
    x = normal((4, 2, 6)).at[:, :, 1].set(jnp.nan).at[:, :, 2].set(jnp.inf)
    where = jnp.asarray([[True, False, False, True, True, False], [False] * 6])
    assert_same(f(x, where=where), plain(x, where=where))
    g = normal(f(x, where=where).shape, seed=1)
    g = g if op == "logsumexp" else g.at[:, :, 1].set(jnp.nan)
    (got,) = jax.vjp(lambda x: f(x, where=where), x)[1](g)
    assert not np.asarray(got)[..., ~np.asarray(where)[0]].any()
    unmasked = np.asarray([0, 3, 4])
    want = gradient_truth(op, x[:, 0, unmasked], g[:, 0] if op == "logsumexp" else g[:, 0, unmasked])
    np.testing.assert_allclose(got[:, 0, unmasked], want, rtol=1e-4, atol=1e-6)
    assert not np.asarray(got)[:, 1].any()


def test_the_gradient_of_logsumexp_is_zero_where_there_is_nothing():
    x = jnp.full((2, 3), -jnp.inf)
    assert not jax.grad(lambda x: logsumexp(x).sum())(x).any()


def test_a_softmax_keeps_its_output_and_nothing_else_for_its_gradient():
    x = normal((4, 64), jnp.bfloat16)
    for f in (softmax, log_softmax):
        saved = jax.tree.leaves(jax.vjp(f, x)[1])
        assert [(k.shape, k.dtype) for k in saved] == [(x.shape, x.dtype)]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: softmax(jnp.arange(4)), ("int32", "astype")),
        (lambda: log_softmax(jnp.ones(3, jnp.complex64)), ("complex64",)),
        (lambda: softmax(jnp.ones((3, 0))), ("at least one column", "(3, 0)")),
        (lambda: logsumexp(jnp.float32(1)), ("last axis",)),
        (lambda: softmax(jnp.ones(3), where=jnp.ones(3)), ("boolean", "float32")),
        (lambda: softmax(jnp.ones(3), where=jnp.ones((2, 3), bool)), ("broadcast", "(2, 3)")),
        (lambda: softmax(jnp.ones(3), implementation="mosaic_tpu"), ("mosaic_tpu", "cpu")),
        (lambda: softmax(jnp.ones(3), implementation="mosaic"), ("mosaic", "did you mean")),
    ],
)
def test_bad_input_raises_one_sentence(make, words):
    with pytest.raises(KernelError) as caught:
        make()
    message = str(caught.value)
    assert "\n" not in message and all(w in message for w in words), message
