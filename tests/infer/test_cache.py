"""Decoding with a cache gives the logits of a pass over the whole sequence, under any layout."""

from __future__ import annotations

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.errors import ConfigError
from jaxscale.infer.cache import Contiguous, Paged, cache_bytes, generating, init_cache
from jaxscale.infer.forward import forward, logits_at, one_per_batch_row
from jaxscale.layout import Layout, shardings_of
from jaxscale.models import TransformerConfig
from jaxscale.nn import Group, LongRopeScaling, MultiHeadLatent, Packed, Rotary, YarnScaling
from jaxscale.step.state import describe_model
from tests.truth.errors import raises_saying
from tests.truth.long import short
from tests.truth.params import random_params

CONFIG = TransformerConfig(depth=3, vocab=64, width=32, heads=4, kv_heads=4, hidden=64, windows=(6, None))
LATENT = TransformerConfig(
    depth=3,
    vocab=64,
    width=32,
    heads=4,
    hidden=64,
    windows=(6, None),
    attention_layer=MultiHeadLatent(kv_rank=16, q_rank=12, plain_dim=8, rotary_dim=4, value_dim=6),
    positions=Rotary(scaling=YarnScaling(4.0, original_length=64, mscale_all_dim=1.0)),
)
LENGTH = 16
TOKENS = np.random.default_rng(0).integers(1, 64, (2, LENGTH)).astype(np.int32)
LAYOUTS = {"none": None, "tensor=4": Layout("tensor=4"), "mixed": Layout("data=2,tensor=2,context=2")}
CACHES = {"contiguous": Contiguous(), "paged": Paged(page=4)}


def _model(config, layout):
    graphdef, infos = describe_model(config)
    params = random_params(infos)
    shardings = shardings_of(infos, layout)
    return graphdef, params if shardings is None else jax.device_put(params, shardings)


def _whole(config, tokens):
    graphdef, params = _model(config, None)
    return np.asarray(jax.jit(lambda p, t: nnx.merge(graphdef, p)(t))(params, tokens))


def _tables(cache, layout):
    """Every sequence's pages, entry i on device i modulo their number."""
    if not isinstance(cache, Paged):
        return None
    per, devices = cache.per_slot(LENGTH), 1 if layout is None else layout.split("pages")
    dealt = np.arange(per).reshape(devices, -1).T.reshape(-1)
    return jnp.broadcast_to(jnp.asarray(dealt, jnp.int32), (2, per))


def _combinations(layouts, *repeated):
    """Every cache on every layout; those in `repeated` only in `make test-all`."""
    marks = lambda pair: pytest.mark.long if pair in repeated else ()  # noqa: E731
    return [pytest.param(cache, mesh, marks=marks((cache, mesh))) for mesh in layouts for cache in CACHES]


@pytest.mark.parametrize(
    ("cache", "mesh"), short(1, _combinations(LAYOUTS, ("contiguous", "mixed"), ("paged", "tensor=4")))
)
def test_chunks_and_single_tokens_give_the_whole_texts_logits(cache, mesh):
    np.testing.assert_allclose(_in_chunks(CONFIG, cache, mesh), _whole(CONFIG, TOKENS), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("cache", "mesh"),
    short(
        1, [pytest.param("contiguous", "none", marks=pytest.mark.long), ("contiguous", "tensor=4"), ("paged", "mixed")]
    ),
)
def test_cached_latents_give_the_logits_of_the_keys_and_values_they_stand_for(cache, mesh):
    """The absorbed form of multi-head latent attention against the plain one."""
    np.testing.assert_allclose(_in_chunks(LATENT, cache, mesh), _whole(LATENT, TOKENS), atol=2e-5, rtol=1e-4)


def _in_chunks(config, cache, mesh):
    layout, cache = generating(LAYOUTS[mesh]), CACHES[cache]
    with layout or contextlib.nullcontext():
        graphdef, params = _model(config, layout)
        tables = _tables(cache, layout)
        states = init_cache(nnx.merge(graphdef, params), cache, 2, 1, LENGTH)

        @functools.partial(jax.jit, static_argnames="width")
        def run(params, states, tokens, starts, counts, width):
            model = nnx.merge(graphdef, params)
            step = one_per_batch_row(starts, counts, width, tables)
            hidden, states = forward(model, tokens, step, cache, states)
            columns = jnp.broadcast_to(jnp.arange(width), tokens.shape)
            return logits_at(model, hidden, columns), states

        out = np.zeros((2, LENGTH, 64), np.float32)
        starts = np.zeros(2, np.int32)
        while starts.min() < LENGTH:
            width = 5 if starts.max() < 10 else 1
            # sequences are at different positions: the second one lags behind
            counts = np.minimum([width, max(1, width - 2)], LENGTH - starts).astype(np.int32)
            chunk = np.zeros((2, width), np.int32)
            for b, (start, n) in enumerate(zip(starts, counts, strict=True)):
                chunk[b, :n] = TOKENS[b, start : start + n]
            logits, states = run(params, states, chunk, starts, counts, width)
            for b, (start, n) in enumerate(zip(starts, counts, strict=True)):
                out[b, start : start + n] = logits[b, :n]
            starts = starts + counts
    return out


@pytest.mark.parametrize(
    ("cache", "mesh"), _combinations(["none", "mixed"], ("paged", "none"), ("contiguous", "mixed"))
)
def test_tokens_of_many_sequences_share_a_batch_row(cache, mesh):
    """Two batch rows of three slots: a chunk of one sequence beside tokens of the others, in any order of columns."""
    layout, cache = generating(LAYOUTS[mesh]), CACHES[cache]
    random, batch, slots = np.random.default_rng(1), 2, 3
    sequences = random.integers(1, 64, (batch, slots, LENGTH)).astype(np.int32)
    tables = None
    if isinstance(cache, Paged):
        # device d of n holds the pages from d * 12 / n, and entry i of a slot is on the device i % n
        devices, per = 1 if layout is None else layout.split("pages"), cache.per_slot(LENGTH)
        free = [list(range(d * slots * per // devices, (d + 1) * slots * per // devices)) for d in range(devices)]
        tables = jnp.asarray([[[free[i % devices].pop() for i in range(per)] for _ in range(slots)]] * batch, jnp.int32)
    with layout or contextlib.nullcontext():
        graphdef, params = _model(CONFIG, layout)
        states = init_cache(nnx.merge(graphdef, params), cache, batch, slots, LENGTH)

        @jax.jit
        def run(params, states, tokens, step):
            model = nnx.merge(graphdef, params)
            hidden, states = forward(model, tokens, step, cache, states)
            return logits_at(model, hidden, jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)), states

        out = np.zeros((batch, slots, LENGTH, 64), np.float32)
        starts = np.zeros((batch, slots), int)
        while starts.min() < LENGTH:
            s, chunk = 7, 4
            tokens, slot_of, at = np.zeros((batch, s), np.int32), np.full((batch, s), -1), np.full((batch, s), -1)
            single, many = np.full((batch, slots, 1), s), np.full((batch, 1, chunk), s)
            long = np.zeros((batch, 1), np.int32)
            for batch_row in range(batch):
                columns = iter(random.permutation(s))
                longest = int(np.argmin(starts[batch_row]))
                long[batch_row] = longest
                for slot in range(slots):
                    n = min(chunk if slot == longest else 1, LENGTH - starts[batch_row, slot])
                    for i in range(n):
                        c = next(columns)
                        tokens[batch_row, c] = sequences[batch_row, slot, starts[batch_row, slot] + i]
                        slot_of[batch_row, c], at[batch_row, c] = slot, starts[batch_row, slot] + i
                        (many[batch_row, 0] if slot == longest else single[batch_row, slot])[i] = c
            as_int = lambda x: jnp.asarray(x, jnp.int32)  # noqa: E731
            groups = Group(as_int(single)), Group(as_int(many), as_int(long))
            step = Packed(as_int(slot_of), as_int(at), groups, tables)
            logits, states = run(params, states, tokens, step)
            for batch_row, c in np.argwhere(slot_of >= 0):
                out[batch_row, slot_of[batch_row, c], at[batch_row, c]] = logits[batch_row, c]
                start = starts[batch_row, slot_of[batch_row, c]]
                starts[batch_row, slot_of[batch_row, c]] = max(start, at[batch_row, c] + 1)
    whole = _whole(CONFIG, sequences.reshape(-1, LENGTH)).reshape(out.shape)
    np.testing.assert_allclose(out, whole, atol=2e-5, rtol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize(
    ("config", "numbers", "most"),
    [
        (CONFIG, "int8", 0.01),
        pytest.param(CONFIG, "fp8", 0.05, marks=pytest.mark.long),
        pytest.param(LATENT, "int8", 0.03, marks=pytest.mark.long),
        pytest.param(LATENT, "fp8", 0.1, marks=pytest.mark.long),
    ],
)
def test_a_cache_of_8_bits_is_near_and_the_same_on_a_mesh(monkeypatch, config, numbers, most):
    monkeypatch.setitem(CACHES, "paged", Paged(page=4, numbers=numbers))
    whole, mixed = _whole(config, TOKENS), _in_chunks(config, "paged", "mixed")
    assert 1e-3 < np.linalg.norm(mixed - whole) / np.linalg.norm(whole) < most
    # a key in the middle between two codes may become the other one on a mesh
    monkeypatch.setitem(CACHES, "contiguous", Contiguous(numbers))
    one = _in_chunks(config, "contiguous", "none")
    assert np.linalg.norm(one - mixed) < 0.05 * most * np.linalg.norm(whole)


def test_bytes_are_those_of_the_arrays():
    graphdef, infos = describe_model(CONFIG)
    model = nnx.merge(graphdef, infos)
    eight = Contiguous("int8"), Paged(page=4, numbers="fp8")
    for cache in (Contiguous(), Paged(page=4), Paged(page=3, pages=7), *eight):
        made = sum(x.nbytes for x in jax.tree.leaves(init_cache(model, cache, 2, 3, LENGTH)))
        assert cache_bytes(model, cache, 2, 3, LENGTH) == made
    assert cache_bytes(model, Contiguous(), 2, 3, LENGTH) == 2 * 3 * LENGTH * 3 * 2 * 32 * 4
    assert cache_bytes(model, eight[0], 2, 3, LENGTH) == 2 * 3 * LENGTH * 3 * 2 * (32 + 4 * 4)
    with raises_saying(ConfigError, "PagedCache.numbers = 'int4'", "did you mean 'int8'"):
        Paged(numbers="int4")
    latent = nnx.merge(*describe_model(LATENT))
    assert cache_bytes(latent, Contiguous(), 2, 3, LENGTH) == 2 * 3 * LENGTH * 3 * (16 + 4) * 4


def test_a_cache_that_outgrows_the_factors_its_keys_were_turned_by_is_refused():
    scaling = LongRopeScaling((1.0,) * 4, (2.0,) * 4, original_length=LENGTH)
    model_of = lambda s: nnx.merge(*describe_model(dataclasses.replace(CONFIG, positions=Rotary(scaling=s))))  # noqa: E731
    init_cache(model_of(scaling), Contiguous(), 1, 1, LENGTH)
    with raises_saying(ConfigError, "LongRopeScaling.length = 17", "at most 16"):
        init_cache(model_of(scaling), Contiguous(), 1, 1, LENGTH + 1)
    init_cache(model_of(dataclasses.replace(scaling, length=17)), Contiguous(), 1, 1, LENGTH + 1)


def test_four_devices_share_two_key_heads():
    config = TransformerConfig(
        depth=1, vocab=64, width=32, heads=4, kv_heads=2, positions=Rotary(theta=100.0), logit_softcap=5.0
    )
    layout = generating(Layout("tensor=4"))
    with layout:
        graphdef, params = _model(config, layout)
        states = init_cache(nnx.merge(graphdef, params), Contiguous(), 2, 1, LENGTH)
        step = one_per_batch_row(jnp.zeros(2, jnp.int32), jnp.full(2, LENGTH), LENGTH)

        @jax.jit
        def run(params, states):
            model = nnx.merge(graphdef, params)
            hidden, _ = forward(model, TOKENS, step, Contiguous(), states)
            return logits_at(model, hidden, jnp.broadcast_to(jnp.arange(LENGTH), TOKENS.shape))

        logits = np.asarray(run(params, states))
    np.testing.assert_allclose(logits, _whole(config, TOKENS), atol=2e-5, rtol=1e-4)
