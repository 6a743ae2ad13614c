"""Attention besides its values: edge cases, alignment, composition, memory, and errors."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import chosen
from pallas_kernels.dispatch import KernelError
from pallas_kernels.flash_attention import (
    FULL,
    IMPLEMENTATIONS,
    NAMES,
    PARTIAL,
    SKIP,
    Blocks,
    Mask,
    Tokens,
    flash_attention,
    tile_table,
    visible,
    xla,
)

B, S, H, K, D = 2, 40, 4, 2, 8


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(xla, "TILE", 16)


def arrays(s=S, t=S, seed=0):
    random = np.random.default_rng(seed)
    shapes = (B, s, H, D), (B, t, K, D), (B, t, K, D)
    return tuple(jnp.asarray(random.normal(size=shape), jnp.float32) for shape in shapes)


def attend(q, k, v, **options):
    return jax.jit(lambda *a: flash_attention(*a, **options))(q, k, v)


def close(got, want, tolerance=2e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), got, want)


# ---- edges


@pytest.mark.parametrize("implementation", ["xla", "dense"])
def test_rows_that_see_nothing_are_zero_with_minus_infinity_and_have_no_gradient(implementation):
    q, k, v = arrays()
    of_q = np.ones((B, S), np.int32)
    of_q[:, 10:30] = 7  # nobody has this id; a whole tile of queries is among them

    @jax.jit
    def both(q, k, v):
        f = functools.partial(
            flash_attention,
            segment_ids=(of_q, np.ones((B, S), np.int32)),
            return_lse=True,
            implementation=implementation,
        )
        y, pull = jax.vjp(f, q, k, v)
        # what a merge of two empty rows makes: NaN
        return y, pull((jnp.ones_like(y[0]), jnp.where(jnp.isneginf(y[1]), jnp.nan, 1.0)))

    (out, lse), grads = both(q, k, v)
    empty = of_q == 7
    assert not np.asarray(out)[empty].any() and np.isneginf(lse[empty]).all() and np.isfinite(lse[~empty]).all()
    assert all(np.isfinite(g).all() for g in grads)
    assert not np.asarray(grads[0])[empty].any() and np.asarray(grads[0])[~empty].any()


def test_the_last_query_stands_at_the_last_key():
    q, k, v = arrays()
    for options in ({"causal": True}, {"causal": True, "window": 9, "softcap": 3.0}):
        whole = attend(q, k, v, **options)
        close(attend(q[:, -23:], k, v, **options), whole[:, -23:])
        close(attend(q[:, -1:], k, v, **options), whole[:, -1:])


def test_parts_of_the_keys_merge_by_their_log_sum_exp_gradients_too():
    q, k, v = arrays()
    weights = jax.random.normal(jax.random.key(1), q.shape)

    def merged(q, k, v):
        parts = [
            flash_attention(
                q, k[:, a:b], v[:, a:b], causal=True, return_lse=True,
                positions=(np.tile(np.arange(S), (B, 1)), np.tile(np.arange(a, b), (B, 1))),
            )
            for a, b in ((0, 17), (17, S))
        ]  # fmt: skip
        total = jnp.logaddexp(parts[0][1], parts[1][1])
        return sum(out * jnp.exp(lse - total)[..., None] for out, lse in parts)

    loss = lambda f: jax.jit(jax.value_and_grad(lambda *a: jnp.sum(weights * f(*a)), (0, 1, 2)))  # noqa: E731
    close(loss(merged)(q, k, v), loss(lambda *a: flash_attention(*a, causal=True))(q, k, v))


def test_one_array_of_segments_serves_both_and_zero_is_an_id_like_any_other():
    q, k, v = arrays()
    ids = np.repeat(np.array([[1, 2, 3, 0], [1, 1, 0, 0]], np.int32), S // 4, axis=1)
    got = attend(q, k, v, causal=True, segment_ids=ids)
    close(got, attend(q, k, v, causal=True, segment_ids=(ids, ids)))
    close(got[0, 30:], attend(q[:1, 30:], k[:1, 30:], v[:1, 30:], causal=True)[0])


# ---- masks


def test_a_table_of_blocks_equals_the_dense_mask():
    q, k, v = arrays()
    table = np.array([[1, 0, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0]], bool)
    blocks = Blocks.of(table, query=16, key=12)
    bias = jnp.where(jnp.asarray(table[np.arange(S) // 16][:, np.arange(S) // 12]), 0.0, -1e30)[None, None]
    weights = jax.random.normal(jax.random.key(1), q.shape).at[:, 32:].set(0)  # the last row of blocks sees nothing

    def loss(q, k, v, **options):
        return jnp.sum(weights * flash_attention(q, k, v, **options))

    value = lambda **options: jax.jit(jax.value_and_grad(functools.partial(loss, **options), (0, 1, 2)))(q, k, v)  # noqa: E731
    close(value(blocks=blocks), value(bias=bias, implementation="dense"))
    assert not np.asarray(attend(q, k, v, blocks=blocks))[:, 32:].any()


MASKS = {
    "plain": (Mask(), ()),
    "causal": (Mask(causal=True), ()),
    "window": (Mask(causal=True, window=5), ()),
    "both sides": (Mask(window=20), ()),
    "segments": (Mask(causal=True), ("segments",)),
    "positions": (Mask(causal=True, window=30), ("positions",)),
    "blocks": (Mask(blocks=Blocks.of(np.tri(5, 4, dtype=bool), query=13, key=20)), ()),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("q_tile", "k_tile"), [(16, 24), (8, 8)])
def test_a_tile_is_skipped_or_full_only_where_every_element_is(name, q_tile, k_tile):
    (mask, data), s, t = MASKS[name], 61, 72
    random = np.random.default_rng(0)
    pairs = {
        "segments": [np.sort(random.integers(1, 4, (B, n)), 1) for n in (s, t)],
        "positions": [np.sort(random.integers(0, 90, (B, n)), 1) for n in (s, t)],
    }
    tokens = Tokens(*(pairs["segments"] if "segments" in data else (None, None)),
                    *(pairs["positions"] if "positions" in data else (None, None)))  # fmt: skip
    seen = visible(mask, tokens, np.arange(s), np.arange(t), s=s, t=t)
    seen = np.ones((1, s, t), bool) if seen is None else np.asarray(seen)
    table = tile_table(mask, tokens, s=s, t=t, q_tile=q_tile, k_tile=k_tile)
    assert isinstance(table, np.ndarray), "what depends on no array being traced is known while tracing"
    for (i, j), state in np.ndenumerate(table):
        tile = seen[:, i * q_tile : (i + 1) * q_tile, j * k_tile : (j + 1) * k_tile]
        exact = FULL if tile.all() else PARTIAL if tile.any() else SKIP
        assert state in (exact, PARTIAL), (i, j, state, exact)
        if not data:  # indices alone are decided exactly
            assert state == exact, (i, j, state, exact)
    if name != "plain":
        assert (table == SKIP).any()
    jitted = jax.jit(lambda x: tile_table(mask, x, s=s, t=t, q_tile=q_tile, k_tile=k_tile))(tokens)
    np.testing.assert_array_equal(jitted, table)


@pytest.mark.parametrize("mask", [Mask(), Mask(causal=True), Mask(causal=True, window=20)], ids=str)
@pytest.mark.parametrize("padding", [0, 7, 40])
def test_of_documents_in_order_and_padding_a_tile_is_visited_only_if_something_in_it_is_visible(mask, padding):
    random = np.random.default_rng(padding)
    ids = np.sort(random.integers(1, 9, (4, 128)), 1).astype(np.int32)
    ids[:, 128 - padding :] = 0
    tokens, tile = Tokens(ids, ids), 16
    seen = np.asarray(visible(mask, tokens, np.arange(128), np.arange(128), s=128, t=128))
    want = seen.reshape(4, 8, tile, 8, tile).any((2, 4))
    for on_host_or_device in (tokens, jax.tree.map(jnp.asarray, tokens)):
        table = tile_table(mask, on_host_or_device, s=128, t=128, q_tile=tile, k_tile=tile, each=True)
        np.testing.assert_array_equal(np.asarray(table) != SKIP, want)


@pytest.mark.parametrize("options", [{"causal": True}, {"causal": True, "window": 16}, {"segments": True}], ids=str)
def test_an_invisible_tile_is_not_read(options):
    q, k, v = arrays()
    last = (np.arange(S) >= 32).astype(np.int32)  # a tile of its own
    spoil = lambda x: x.at[:, 32:].set(jnp.nan)  # noqa: E731
    rest = {n: o for n, o in options.items() if n != "segments"}
    rest |= {"segment_ids": np.tile(last, (B, 1))} if options.get("segments") else {}

    def value(q, k, v):
        f = lambda q, k, v: flash_attention(q, k, v, **rest)[:, :32]  # noqa: E731
        y, pull = jax.vjp(f, q, k, v)
        return y, pull(jnp.ones_like(y))[0][:, :32]

    close(jax.jit(value)(q, spoil(k), spoil(v)), jax.jit(value)(q, k, v))


# ---- composition


def test_it_goes_under_vmap_scan_remat_and_grad():
    q, k, v = arrays()
    ids = np.sort(np.random.default_rng(0).integers(1, 4, (B, S)), 1)

    def layer(x, ids):
        return jnp.tanh(x + flash_attention(x, x[:, :, :K], x[:, :, K:], causal=True, segment_ids=ids))

    def scanned(x, ids):
        body = jax.checkpoint(lambda c, _: (layer(c, ids), None), prevent_cse=False)
        return jnp.sum(jax.lax.scan(body, x, None, length=3)[0] ** 2)

    def unrolled(x, ids):
        for _ in range(3):
            x = layer(x, ids)
        return jnp.sum(x**2)

    want = jax.jit(jax.grad(unrolled))(q, ids)
    close(jax.jit(jax.grad(scanned))(q, ids), want)
    one_by_one = jax.vmap(lambda x, ids: jax.grad(unrolled)(x[None], ids[None])[0])
    close(jax.jit(one_by_one)(q, ids), want)


def test_a_checkpoint_policy_that_saves_the_names_does_not_run_the_forward_again():
    q, k, v = arrays()

    def products(policy):
        f = jax.checkpoint(lambda q: jnp.sum(jnp.sin(flash_attention(q * 2, k, v, causal=True))), policy=policy)
        return str(jax.make_jaxpr(jax.grad(f))(q)).count("dot_general")

    policies = jax.checkpoint_policies
    forward, backward = 2, 5
    assert products(policies.everything_saveable) == forward + backward
    assert products(policies.nothing_saveable) == 2 * forward + backward
    assert products(policies.save_only_these_names(*NAMES)) == forward + backward


@pytest.mark.parametrize("options", [{"causal": True}, {"segments": True, "window": 300, "softcap": 5.0}], ids=str)
def test_memory_grows_with_the_sequence_and_not_with_its_square(options, monkeypatch):
    monkeypatch.setattr(xla, "TILE", 256)
    heads, width = 2, 64

    def temporary(s):
        x, ids = jax.ShapeDtypeStruct((1, s, heads, width), jnp.bfloat16), jax.ShapeDtypeStruct((1, s), jnp.int32)
        rest = {n: o for n, o in options.items() if n != "segments"}

        def loss(q, k, v, ids):
            segments = ids if options.get("segments") else None
            return flash_attention(q, k, v, segment_ids=segments, **rest).astype(jnp.float32).sum()

        grad = jax.jit(jax.grad(loss, (0, 1, 2)))
        return grad.lower(x, x, x, ids).compile().memory_analysis().temp_size_in_bytes

    small, middle, large = (temporary(1024 * n) for n in (1, 4, 16))
    assert middle <= 4.1 * small and large <= 4.1 * middle, (small, middle, large)
    assert large < 16384**2 * heads / 4, "an eighth of a bfloat16 matrix of scores"


@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
def test_no_layer_of_a_scan_shares_masks_with_the_others(again, monkeypatch):
    """Masks do not depend on the layer, so JAX could compute them before the scan: S x S for every head."""
    monkeypatch.setattr(xla, "TILE", 256)

    def loss(x, ids):
        body = lambda x, _: (flash_attention(x, x, x, causal=True, segment_ids=ids), None)  # noqa: E731
        return jnp.sum(jax.lax.scan(jax.checkpoint(body) if again else body, x, None, length=3)[0])

    x, ids = jax.ShapeDtypeStruct((1, 8192, 2, 8), jnp.float32), jax.ShapeDtypeStruct((1, 8192), jnp.int32)
    assert "32,32,1,2,1,256,256]" not in str(jax.make_jaxpr(jax.grad(loss))(x, ids))
    temporaries = jax.jit(jax.grad(loss)).lower(x, ids).compile().memory_analysis().temp_size_in_bytes
    assert temporaries < 8192**2 / 2, "half a matrix of bool"


def test_equal_inputs_give_equal_bits():
    q, k, v = arrays()
    grad = jax.jit(jax.grad(lambda *a: flash_attention(*a, causal=True, deterministic=True).sum(), (0, 1, 2)))
    jax.tree.map(np.testing.assert_array_equal, grad(q, k, v), grad(q, k, v))


# ---- choice and refusals


def test_chosen_returns_the_choice():
    attend(*arrays(), causal=True)
    assert {c.implementation for c in chosen("flash_attention")} >= {"xla"}
    assert IMPLEMENTATIONS[-1].name == "xla" and not IMPLEMENTATIONS[-1].platforms


def _zeros(*shapes, dtype=jnp.float32):
    return tuple(jnp.zeros(s, dtype) for s in shapes)


QKV = _zeros((2, 8, 4, 16), (2, 8, 2, 16), (2, 8, 2, 16))
LONG = _zeros((2, 8, 4, 16), (2, 12, 2, 16), (2, 12, 2, 16))


@pytest.mark.parametrize(
    ("inputs", "options", "words"),
    [
        (_zeros((2, 8, 5, 16), (2, 8, 2, 16), (2, 8, 2, 16)), {}, ("5 query heads", "multiple of 2", "is 4")),
        (_zeros((2, 8, 4, 16), (2, 8, 2, 12), (2, 8, 2, 16)), {}, ("head_dim", "16", "12")),
        (_zeros((2, 8, 4, 16), (2, 8, 2, 16), (2, 9, 2, 16)), {}, ("k of shape", "v of shape")),
        (_zeros((1, 8, 4, 16), (2, 8, 2, 16), (2, 8, 2, 16)), {}, ("batch of 1", "2")),
        (_zeros((8, 4, 16), (8, 2, 16), (8, 2, 16)), {}, ("(batch, sequence, heads, head_dim)", "(8, 4, 16)")),
        (_zeros((2, 0, 4, 16), (2, 8, 2, 16), (2, 8, 2, 16)), {}, ("nothing in it",)),
        (_zeros(*(x.shape for x in QKV), dtype=jnp.int32), {}, ("int32", "q.astype")),
        ((QKV[0].astype(jnp.bfloat16), *QKV[1:]), {}, ("share a dtype", "bfloat16")),
        (QKV, {"window": 0}, ("window", "at least 1", "0")),
        (QKV, {"window": 2.5}, ("window", "integer", "2.5")),
        (QKV, {"softcap": -1.0}, ("softcap", "greater than 0")),
        (QKV, {"scale": "big"}, ("scale", "number")),
        (QKV, {"kind": "relu"}, ("kind", "'sigmoid'", "'relu'")),
        (QKV, {"kind": "sigmoid", "return_lse": True}, ("sigmoid", "log-sum-exp")),
        (QKV, {"segment_ids": np.ones((2, 9), np.int32)}, ("segment_ids", "(2, 8)", "(2, 9)")),
        (QKV, {"segment_ids": np.ones((2, 8))}, ("segment_ids", "integers", "float")),
        (LONG, {"segment_ids": np.ones((2, 8), np.int32)}, ("segment_ids", "pair", "(2, 12)")),
        (LONG, {"positions": (np.ones((2, 8), np.int32),) * 2}, ("positions of the keys", "(2, 12)")),
        (QKV, {"bias": jnp.zeros((3, 1, 1, 1))}, ("bias", "(3, 1, 1, 1)", "(2, 4, 8, 8)")),
        (QKV, {"bias": jnp.ones((2, 1, 8, 8), bool)}, ("bias", "bool", "mask")),
        (QKV, {"blocks": Blocks.of(np.ones((2, 2), bool), query=2, key=4)}, ("blocks of 2 by 4", "(4, 2)", "(2, 2)")),
        (QKV, {"implementation": "xlaa"}, ("xlaa", "did you mean 'xla'")),
        (QKV, {"implementation": "cudnn"}, ("cudnn", "cuda", "cpu")),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, tuple) and isinstance(x[0], str) else "",
)
def test_arguments_that_do_not_fit_raise_one_sentence(inputs, options, words):
    with pytest.raises(KernelError) as caught:
        flash_attention(*inputs, **options)
    message = str(caught.value)
    assert "\n" not in message and all(w in message for w in words), message


def test_a_softcap_that_is_being_traced_is_refused():
    with pytest.raises(KernelError, match="softcap has to be known before tracing"):
        jax.jit(lambda c: flash_attention(*QKV, softcap=c))(1.0)


def test_a_table_that_is_no_matrix_of_bool_is_refused():
    with pytest.raises(KernelError, match="matrix of bool"):
        Blocks.of(np.ones((2, 2)), query=1, key=1)
