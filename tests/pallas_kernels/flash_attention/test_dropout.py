"""Dropout of attention weights: the generator's bits, values and gradients against float64, and what is refused."""

from __future__ import annotations

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tiles
from pallas_kernels.dispatch import KernelError, interpreted
from pallas_kernels.flash_attention import flash_attention, gpu, gradients, tpu_forward, xla
from pallas_kernels.flash_attention.dropout import threefry
from pallas_kernels.registers import registers_stay
from tests.pallas_kernels.flash_attention.cases import seen_at_once
from tests.pallas_kernels.flash_attention.dropout_cases import RATE, keep_of, truth
from tests.truth.long import short

B, S, T, H, K, D = 2, 40, 56, 4, 2, 8


def case(seed=0, s=S, t=T, d=D, dtype=jnp.float32):
    random = np.random.default_rng(seed)
    shapes = (B, s, H, d), (B, t, K, d), (B, t, K, d), (B, s, H, d), (B, s, H)
    *arrays, dlse = (jnp.asarray(random.normal(size=shape), dtype) for shape in shapes)
    seeds = random.integers(0, 2**32, (B, H, 2), np.uint32)
    return (*arrays, dlse.astype(jnp.float32)), seeds


def test_the_generator_is_threefry():
    """Against Random123's known answers (kat_vectors), of 13 and of JAX's 20 rounds, and JAX's own."""
    ones, pi = 0xFFFFFFFF, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    known = {
        (13, (0, 0, 0, 0)): (0x9D1C5EC6, 0x8BD50731),
        (13, (ones,) * 4): (0xFD36D048, 0x2D17272C),
        (13, pi): (0xBA3E4725, 0xF27D669E),
        (20, pi): (0xC4923A9C, 0x483DF7A0),
    }
    for (rounds, words), want in known.items():
        x, y, *key = (jnp.asarray(np.array(w, np.uint32).view(np.int32)) for w in words)
        got = threefry(tuple(key), x, y, rounds=rounds)
        assert tuple(int(np.asarray(w).view(np.uint32)) for w in got) == want


MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 9, "softcap": 2.0},
    "documents": {"causal": True, "segment_ids": True},
    "places": {"causal": True, "places": True},
}


@pytest.mark.parametrize(
    "name, implementation", short(2, [(name, which) for name in sorted(MASKS) for which in ("xla", "dense")])
)
def test_values_and_gradients_are_those_of_float64_with_the_same_bits(name, implementation, monkeypatch):
    monkeypatch.setattr(xla, "TILE", 16)
    check_case(name, implementation)


def check_case(name, implementation, tolerance=2e-5, **sizes):
    options = dict(MASKS[name])
    (q, k, v, dout, dlse), seeds = case(**sizes)
    s, t = q.shape[1], k.shape[1]
    random = np.random.default_rng(1)
    if options.pop("segment_ids", None):
        ids = np.sort(random.integers(0, 3, (B, s)), 1).astype(np.int32)
        other = np.concatenate([ids, np.repeat(ids[:, -1:], t - s, 1)], 1)
        options |= {"segment_ids": (ids, other)}
    q_places, k_places = (np.broadcast_to(np.arange(n), (B, n)) for n in (s, t))
    places = {}
    if options.pop("places", None):
        q_places, k_places = (random.permuted(np.broadcast_to(np.arange(n), (B, n)), axis=1) for n in (s, t))
        places = {"dropout_places": (q_places.astype(np.int32), k_places.astype(np.int32))}
    # a query that sees no key has no log-sum-exp
    seen = seen_at_once(options, B, s, t)
    assert seen.any(-1).all() or name == "documents"
    options |= {"dropout": RATE, "dropout_seeds": seeds, **places}
    f = functools.partial(flash_attention, return_lse=True, implementation=implementation, **options)
    got, pull = jax.vjp(jax.jit(f), q, k, v)
    grads = pull((dout, dlse))
    keep = keep_of(seeds, q_places, k_places)
    want, want_grads = truth(q, k, v, seen, keep, dout, dlse, options.get("softcap"))
    got, grads = jax.tree.map(lambda x: np.asarray(x, np.float64), (got, grads))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), got, want)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), grads, want_grads)


@pytest.mark.parametrize("tile", short(1, [16, 24, 512]))
def test_tiles_of_any_size_drop_the_same_weights(tile, monkeypatch):
    """With equal scores and the unit matrix as values, the output is the mask itself."""
    monkeypatch.setattr(xla, "TILE", tile)
    (q, k, *_), seeds = case()
    v = jnp.broadcast_to(jnp.eye(T)[:, None], (B, T, K, T))
    out = flash_attention(0 * q, k, v, dropout=RATE, dropout_seeds=seeds, implementation="xla")
    keep = keep_of(seeds, np.broadcast_to(np.arange(S), (B, S)), np.broadcast_to(np.arange(T), (B, T)))
    np.testing.assert_allclose(out, keep.transpose(0, 2, 1, 3) / (T * (1 - RATE)), rtol=1e-6)


def test_a_weight_is_dropped_at_the_rate_whatever_its_head_query_and_key_and_the_mean_output_is_that_without():
    random, draws, n = np.random.default_rng(0), 200, 16
    seeds = random.integers(0, 2**32, (draws, H, 2), np.uint32)
    places = np.broadcast_to(np.arange(n), (draws, n))
    keep = keep_of(seeds, places, places)  # (draws, H, n, n)
    for axes in ((0, 2, 3), (0, 1, 3), (0, 1, 2), (1, 2, 3)):
        count = keep.size // np.delete(np.array(keep.shape), axes)[0]
        assert (abs(keep.mean(axes) - (1 - RATE)) < 5 * np.sqrt(RATE * (1 - RATE) / count)).all()
    apart = [keep - keep.mean()] * 2
    for axis in range(4):  # neighbours are independent
        a, b = (np.take(x, np.arange(x.shape[axis] - 1) + i, axis) for i, x in enumerate(apart))
        assert abs((a * b).mean()) < 5 * RATE * (1 - RATE) / np.sqrt(a.size)
    q, k, v = (jnp.asarray(random.normal(size=(1, n, H, D)), jnp.float32) for _ in range(3))
    many = lambda x: jnp.broadcast_to(x, (draws, *x.shape[1:]))  # noqa: E731
    out = flash_attention(many(q), many(k), many(v), dropout=RATE, dropout_seeds=seeds, implementation="xla")
    mean, plain = out.mean(0), flash_attention(q, k, v, implementation="xla")[0]
    assert (abs(mean - plain) < 5 * np.asarray(out).std(0) / np.sqrt(draws)).all()
    assert (abs(mean - plain) > 0).any()


@pytest.mark.long
def test_gradients_of_two_parts_of_the_keys_add_up():
    (q, k, v, dout, dlse), seeds = case()
    dropped = {"dropout": RATE, "dropout_seeds": seeds}
    f = lambda *a: flash_attention(*a, return_lse=True, implementation="xla", **dropped)  # noqa: E731
    (out, lse), pull = jax.vjp(f, q, k, v)
    want = pull((dout, dlse))
    at = lambda *range_: np.broadcast_to(np.arange(*range_, dtype=np.int32), (B, range_[1] - range_[0]))  # noqa: E731
    parts = [
        gradients(
            q, k[:, a:b], v[:, a:b], out, lse, dout, dlse=dlse, implementation="xla", **dropped,
            dropout_places=(at(0, S), at(a, b)),
        )
        for a, b in ((0, 20), (20, T))
    ]  # fmt: skip
    got = (parts[0][0] + parts[1][0], *(jnp.concatenate([parts[0][n], parts[1][n]], 1) for n in (1, 2)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, want)


def test_rate_zero_is_the_program_without_dropout():
    (q, k, v, *_), seeds = case()
    of = lambda **options: str(jax.make_jaxpr(jax.grad(lambda q: flash_attention(q, k, v, **options).sum()))(q))  # noqa: E731
    assert of() == of(dropout=0.0, dropout_seeds=seeds)
    assert of() != of(dropout=0.1, dropout_seeds=seeds)


ON = {"dropout": 0.1, "dropout_seeds": np.zeros((B, H, 2), np.uint32)}


@pytest.mark.parametrize(
    "options, message",
    [
        ({"dropout": 1.0}, "at least 0 and below 1, not 1.0"),
        ({"dropout": -0.1}, "at least 0 and below 1, not -0.1"),
        ({"dropout": 0.1}, r"needs dropout_seeds, uint32 of shape \(2, 4, 2\)"),
        ({"dropout": 0.1, "dropout_seeds": np.zeros((B, H), np.uint32)}, r"not uint32 of shape \(2, 4\)"),
        ({"dropout": 0.1, "dropout_seeds": np.zeros((B, H, 2), np.int32)}, "not int32 of shape"),
        ({**ON, "dropout_places": np.zeros((B, S), np.int32)}, r"places of the keys have to be of shape \(2, 56\)"),
        ({**ON, "kind": "sigmoid"}, "only softmax attention has dropout"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(options, message):
    (q, k, v, *_), _ = case()
    with pytest.raises(KernelError, match=message):
        flash_attention(q, k, v, **options)


@pytest.mark.long
@pytest.mark.parametrize("name", ["documents", "full", "window", "places"])
def test_the_tpu_kernels_drop_the_same_weights(name, monkeypatch, capsys):
    monkeypatch.setattr(tpu_forward, "PART", 8)
    with tiles.trying("flash_attention", {"q": 16, "k": 32}), interpreted(races=True):
        check_case(name, "mosaic_tpu")
    assert "RACE" not in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the interpreter needs jax 0.11")
@pytest.mark.parametrize(
    ("name", "width", "stay"),
    [
        ("documents", 64, False),
        ("full", 128, False),
        ("window", 128, True),
        ("causal", 64, True),
        ("places", 64, False),
        ("places", 192, True),
        ("causal", 256, True),
    ],
)
def test_the_hopper_kernels_drop_the_same_weights(name, width, stay):
    jax.clear_caches()
    with interpreted(races=True), registers_stay() if stay else contextlib.nullcontext():
        check_case(name, "mosaic_gpu", tolerance=3e-2, s=140, t=156, d=width, dtype=jnp.bfloat16)
    jax.clear_caches()


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the interpreter needs jax 0.11")
def test_gradients_too_wide_for_random_bits_in_registers_are_refused_with_the_width(monkeypatch):
    monkeypatch.setattr(gpu, "registers_move", lambda: True)
    (q, k, v, *_), seeds = case(d=256, dtype=jnp.bfloat16)
    f = functools.partial(flash_attention, implementation="mosaic_gpu", dropout=RATE, dropout_seeds=seeds)
    with interpreted(), pytest.raises(KernelError, match="no registers beside sums 256 wide"):
        jax.eval_shape(lambda q: jax.vjp(lambda q: f(q, k, v), q)[1](q), q)
