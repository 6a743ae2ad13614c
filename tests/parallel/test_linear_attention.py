"""Linear attention in chunks against the recurrence, token by token in float64; on sharded sequences, with restarts."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.errors import LayoutError
from jaxscale.layout import Layout
from jaxscale.parallel import linear_attention, short_convolution
from jaxscale.parallel.context import zigzag
from pallas_kernels.chunked_recurrence import chunked_recurrence
from tests.truth.long import short

B, S, H, K, V = 2, 48, 2, 20, 3
CHUNK = 20  # does not divide S, and is more than one block of rows; blocks of 16 do not divide it


def _reference(q, k, v, log_decay, beta, starts):
    """In float64, by the recurrence of the papers."""
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    for b, h in np.ndindex(q.shape[0], q.shape[2]):
        state = np.zeros((q.shape[-1], v.shape[-1]))
        for t in range(q.shape[1]):
            decay = 1.0 if log_decay is None else np.exp(log_decay[b, t, h]).reshape(-1, 1)
            state = np.zeros_like(state) if starts[b, t] else decay * state
            key = k[b, t, h]
            new = v[b, t, h] if beta is None else beta[b, t, h] * (v[b, t, h] - state.T @ key)
            state = state + np.outer(key, new)
            out[b, t, h] = state.T @ q[b, t, h]
    return out


def _operands(decay, delta):
    random = np.random.default_rng(0)
    q, k = random.standard_normal((2, B, S, H, K))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    rates = {"none": None, "heads": (B, S, H), "channels": (B, S, H, K), "strong": (B, S, H, K)}[decay]
    log_decay = None if rates is None else -random.exponential(20 if decay == "strong" else 0.3, rates)
    beta = random.random((B, S, H)) if delta else None
    starts = random.random((B, S)) < 0.08
    starts[:, 0] = True
    return q, k, random.standard_normal((B, S, H, V)), log_decay, beta, starts


def _single(x):
    return None if x is None else jnp.asarray(x, bool if x.dtype == bool else jnp.float32)


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("decay", ["none", "heads", "channels", "strong"])
def test_chunks_equal_the_recurrence(decay, delta):
    operands = _operands(decay, delta)
    got = jax.jit(lambda *x: linear_attention(*x, chunk=CHUNK))(*map(_single, operands))
    want = _reference(*operands)
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max() * (10 if decay == "strong" else 1))


@pytest.mark.parametrize(
    "mesh,in_zigzag", short(1, [("context=4,tensor=2", False), ("context=2,data=2,tensor=2", True)])
)
def test_shards_of_a_sequence_go_on_from_each_other_and_gradients_are_those_of_one_device(mesh, in_zigzag):
    *operands, starts = _operands("channels", True)
    layout = Layout(mesh)
    order = np.asarray(zigzag(S, layout.sizes["context"])) if in_zigzag else np.arange(S)
    places = jnp.asarray(order, jnp.int32) if in_zigzag else None
    weights = np.random.default_rng(1).standard_normal((B, S, H, V))

    def loss(arrays, starts, places, weights):
        return jnp.sum(linear_attention(*arrays, starts, places, chunk=CHUNK) * weights)

    arrays = [_single(x) for x in operands]
    want = jax.jit(jax.value_and_grad(loss), static_argnums=())(arrays, jnp.asarray(starts), None, _single(weights))
    with layout:
        mine = [x[:, order] for x in arrays]
        value, gradients = jax.jit(jax.value_and_grad(loss))(
            mine, jnp.asarray(starts[:, order]), places, _single(weights[:, order])
        )
    np.testing.assert_allclose(value, want[0], rtol=1e-4)
    for a, b in zip(gradients, want[1], strict=True):
        np.testing.assert_allclose(a, b[:, order], atol=2e-5 * np.abs(b).max())


@pytest.mark.parametrize("decay", [-1e8, -np.inf])
def test_weak_decays_after_one_that_leaves_nothing_are_exact(decay):
    x = jnp.ones((1, 4, 1, 2))
    got = linear_attention(x, x, x, jnp.asarray([0, decay, -0.1, -0.1])[None, :, None])[0, :, 0, 0]
    np.testing.assert_allclose(got, [2, 2, 2 + 2 * np.exp(-0.1), 2 + 2 * np.exp(-0.1) + 2 * np.exp(-0.2)], rtol=1e-5)


@pytest.mark.long
def test_equal_keys_are_solved_as_exactly_as_others():
    x = jnp.ones((1, 64, 1, 4)) / 2  # a text of one token, each of which replaces what the last one wrote
    v = jnp.arange(64.0)[None, :, None, None]
    np.testing.assert_allclose(linear_attention(x, x, v, None, jnp.ones((1, 64, 1)))[0, :, 0, 0], v.ravel(), atol=1e-4)


@pytest.mark.parametrize(
    ("decay", "delta"), short(1, [("channels", True), ("heads", True), ("heads", False), ("none", False)])
)
def test_products_in_bfloat16_have_the_error_of_its_rounding_on_one_device_and_on_several(decay, delta):
    operands = _operands(decay, delta)
    want = _reference(*operands)

    def run(*arrays):
        return linear_attention(*arrays, chunk=CHUNK, product_dtype="bfloat16")

    errors = []
    for layout in (None, Layout("context=2")):
        with layout or contextlib.nullcontext():
            got = np.asarray(jax.jit(run)(*map(_single, operands)))
        errors.append(np.linalg.norm(got - want) / np.linalg.norm(want))
    assert 2**-11 < min(errors) < max(errors) < 2**-7, errors


def test_gradients_are_those_of_the_recurrence():
    *operands, starts = map(_single, _operands("channels", True))

    def by_tokens(q, k, v, log_decay, beta):
        def step(state, token):
            q, k, v, log_decay, beta, start = token
            state = jnp.where(start[:, None, None, None], 0, jnp.exp(log_decay)[..., None] * state)
            new = beta[..., None] * (v - jnp.einsum("bhkv,bhk->bhv", state, k))
            state = state + k[..., None] * new[..., None, :]
            return state, jnp.einsum("bhkv,bhk->bhv", state, q)

        tokens = [jnp.moveaxis(x, 1, 0) for x in (q, k, v, log_decay, beta, starts)]
        return jnp.moveaxis(jax.lax.scan(step, jnp.zeros((B, H, K, V)), tokens)[1], 0, 1)

    def gradients(f):
        return jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(f(*x)))))(operands)

    chunked = gradients(lambda *x: linear_attention(*x, starts, chunk=CHUNK))
    for a, b in zip(chunked, gradients(by_tokens), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(b).max())


def test_gradients_by_channels_do_not_depend_on_the_size_of_a_chunk():
    """With chunks of 32 the program once wrote out of bounds on a CPU, by a fault of jaxlib 0.10.2."""
    q, k, v, rates = jnp.asarray(np.random.default_rng(0).standard_normal((4, 1, 40, 2, 16)), jnp.float32)
    grads = [
        jax.jit(jax.grad(lambda *x, n=n: (linear_attention(*x, chunk=n) ** 2).sum(), argnums=(0, 1, 2, 3)))(
            q, k, v, -abs(rates)
        )
        for n in (16, 32)
    ]
    for a, b in zip(*grads, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3)


@pytest.mark.long
def test_a_sequence_in_two_calls_is_the_sequence_in_one():
    q, k, v, log_decay, beta, _ = map(_single, _operands("heads", True))
    whole, last = chunked_recurrence(q, k, v, log_decay, beta)
    first = chunked_recurrence(*(x[:, :17] for x in (q, k, v, log_decay, beta)))
    second = chunked_recurrence(*(x[:, 17:] for x in (q, k, v, log_decay, beta)), initial=first[1])
    np.testing.assert_allclose(jnp.concatenate([first[0], second[0]], 1), whole, atol=1e-5)
    np.testing.assert_allclose(second[1], last, atol=1e-5)


@pytest.mark.parametrize("mesh,in_zigzag", [(None, False), ("context=4,tensor=2", False), ("context=2,data=2", True)])
def test_short_convolutions_see_their_document_only(mesh, in_zigzag):
    random = np.random.default_rng(0)
    x, kernel = random.standard_normal((2, 16, 4)), random.standard_normal((4, 4))
    starts = np.zeros((2, 16), bool)
    starts[:, 0] = starts[0, 6] = starts[1, 9] = starts[1, 10] = True
    documents, want = np.cumsum(starts, 1), np.zeros_like(x)
    for b, t, i in np.ndindex(2, 16, 4):
        if i <= t and documents[b, t - i] == documents[b, t]:
            want[b, t] += kernel[3 - i] * x[b, t - i]
    layout = Layout(mesh or "data=1")
    order = np.asarray(zigzag(16, layout.sizes["context"])) if in_zigzag else np.arange(16)
    places = jnp.asarray(order, jnp.int32) if in_zigzag else None
    with layout:
        got = jax.jit(lambda *a: short_convolution(*a, places))(
            _single(x[:, order]), _single(kernel), jnp.asarray(starts[:, order])
        )
    np.testing.assert_allclose(got, want[:, order], atol=1e-5)


def test_shards_shorter_than_a_convolution_are_refused():
    with Layout("context=8"), pytest.raises(LayoutError, match="at least 3 in each shard of the sequence.* have 2"):
        short_convolution(jnp.ones((1, 16, 4)), jnp.ones((4, 4)))
