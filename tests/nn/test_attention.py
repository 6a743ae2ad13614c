"""The plain attention kernel against float64 NumPy, query by query."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.nn import dot_product_attention
from tests.truth import numpy_transformer as truth
from tests.truth.compare import assert_leaves_agree

B, S, D = 2, 12, 8
SEGMENTS = np.array([[1] * 5 + [2] * 4 + [3] * 3, [1] * 2 + [2] * 7 + [0] * 3], np.int32)
POSITIONS = np.array([[*range(5), *range(4), *range(3)], [*range(2), *range(7), 0, 0, 0]], np.int32)

PER_TOKEN = ("segment_ids", "positions")


def _inputs(heads, kv_heads, seed=0):
    random = np.random.default_rng(seed)
    shapes = (B, S, heads, D), (B, S, kv_heads, D), (B, S, kv_heads, D)
    return tuple(random.normal(size=s).astype(np.float32) * 2 for s in shapes)


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (3, 1)])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_every_query_head_reads_the_key_head_of_its_group(heads, kv_heads, softcap):
    _check({"softcap": softcap}, heads, kv_heads)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False},
        {"window": 1},
        {"window": 3},
        {"window": 3, "causal": False},
        {"window": 100},
        {"softcap": 2.0},
        {"softcap": 2.0, "scale": 0.7, "window": 4},
        {"scale": 0.1},
        {"segment_ids": SEGMENTS},
        {"segment_ids": SEGMENTS, "positions": POSITIONS},
        {"segment_ids": SEGMENTS, "positions": POSITIONS, "window": 3, "softcap": 5.0},
        {"segment_ids": SEGMENTS, "causal": False},
        {"positions": np.tile(np.random.default_rng(1).permutation(S), (B, 1)).astype(np.int32)},
    ],
    ids=lambda o: ",".join(k if isinstance(v, np.ndarray) else f"{k}={v}" for k, v in o.items()) or "plain",
)
def test_attention_equals_numpy(options):
    _check(options, 4, 2)


def _check(options, heads, kv_heads):
    q, k, v = _inputs(heads, kv_heads)
    arrays = {n: jnp.asarray(o) for n, o in options.items() if n in PER_TOKEN}
    rest = {n: o for n, o in options.items() if n not in PER_TOKEN}
    got = jax.jit(functools.partial(dot_product_attention, **rest))(q, k, v, **arrays)
    want = [
        truth.attention(
            *(np.float64(a[row]) for a in (q, k, v)),
            place=options["positions"][row] if "positions" in options else None,
            document=options["segment_ids"][row] if "segment_ids" in options else None,
            **rest,
        )
        for row in range(B)
    ]
    assert_leaves_agree(got, np.stack(want))


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_rows_of_padding_give_no_nan_forward_or_backward(softcap):
    q, k, v = _inputs(4, 2)
    segments = np.zeros((B, S), np.int32)
    segments[0, :3] = 1
    rows = dict(segment_ids=jnp.asarray(segments), positions=jnp.asarray(POSITIONS))

    def loss(q, k, v):
        out = dot_product_attention(q, k, v, **rows, window=2, softcap=softcap)
        return jnp.sum(out * (segments > 0)[..., None, None]), out

    grads, out = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
    assert np.isfinite(out).all()
    for g in grads:
        assert np.isfinite(g).all()
        assert not np.asarray(g)[segments == 0].any()


def test_what_a_row_pads_with_changes_nothing():
    q, k, v = _inputs(4, 2)
    segments = jnp.asarray(SEGMENTS)
    attend = jax.jit(lambda k, v: dot_product_attention(q, k, v, segment_ids=segments))
    padding = (SEGMENTS == 0)[..., None, None]
    np.testing.assert_array_equal(
        np.where(padding, 0, attend(k, v)), np.where(padding, 0, attend(k + 9 * padding, v - 9 * padding))
    )


def test_the_last_query_stands_at_the_last_key_while_decoding():
    q, k, v = _inputs(4, 2)
    attend = jax.jit(dot_product_attention, static_argnames=("window", "softcap"))
    for new, options in ((3, {"window": 5}), (1, {"softcap": 4.0})):
        assert_leaves_agree(attend(q[:, -new:], k, v, **options), attend(q, k, v, **options)[:, -new:])


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_softmax_is_float32_in_bfloat16_attention(softcap):
    q, k, v = (jnp.asarray(a, jnp.bfloat16) for a in _inputs(4, 2))
    attend = lambda q, k, v: dot_product_attention(q, k, v, softcap=softcap)  # noqa: E731
    assert attend(q, k, v).dtype == jnp.bfloat16
    exps = [e for e in _equations(jax.make_jaxpr(attend)(q, k, v).jaxpr) if e.primitive.name == "exp"]
    assert exps and all(e.outvars[0].aval.dtype == jnp.float32 for e in exps)


def _equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _equations(inner)
