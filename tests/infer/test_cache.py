"""A model that keeps keys and values says what it says of the whole text at once, under any layout."""

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
from jaxscale.infer.forward import forward, logits_at, one_row_a_lane
from jaxscale.layout import Layout, shardings_of
from jaxscale.models import TransformerConfig
from jaxscale.nn import Group, LongRopeScaling, MultiHeadLatent, Packed, Rotary, YarnScaling
from jaxscale.step.state import describe_model
from tests.truth.errors import raises_saying
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


def _tables(how, layout):
    """Every row's pages, dealt out to devices in turn."""
    if not isinstance(how, Paged):
        return None
    per, devices = how.per_row(LENGTH), 1 if layout is None else layout.split("pages")
    dealt = np.arange(per).reshape(devices, -1).T.reshape(-1)
    return jnp.broadcast_to(jnp.asarray(dealt, jnp.int32), (2, per))


def _combinations(layouts, *repeated):
    """Every cache on every layout; the repeated ones by `make test-all` alone."""
    marks = lambda pair: pytest.mark.long if pair in repeated else ()  # noqa: E731
    return [pytest.param(how, where, marks=marks((how, where))) for where in layouts for how in CACHES]


@pytest.mark.parametrize(("how", "where"), _combinations(LAYOUTS, ("contiguous", "mixed"), ("paged", "tensor=4")))
def test_chunks_and_single_tokens_give_the_whole_texts_logits(how, where):
    np.testing.assert_allclose(_in_chunks(CONFIG, how, where), _whole(CONFIG, TOKENS), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("how", "where"),
    [pytest.param("contiguous", "none", marks=pytest.mark.long), ("contiguous", "tensor=4"), ("paged", "mixed")],
)
def test_latents_that_are_kept_give_the_logits_of_the_keys_and_values_they_stand_for(how, where):
    """The absorbed form of multi-head latent attention against the plain one."""
    np.testing.assert_allclose(_in_chunks(LATENT, how, where), _whole(LATENT, TOKENS), atol=2e-5, rtol=1e-4)


def _in_chunks(config, how, where):
    layout, how = generating(LAYOUTS[where]), CACHES[how]
    with layout or contextlib.nullcontext():
        graphdef, params = _model(config, layout)
        tables = _tables(how, layout)
        states = init_cache(nnx.merge(graphdef, params), how, 2, 1, LENGTH)

        @functools.partial(jax.jit, static_argnames="width")
        def run(params, states, tokens, starts, counts, width):
            model = nnx.merge(graphdef, params)
            step = one_row_a_lane(starts, counts, width, tables)
            hidden, states = forward(model, tokens, step, how, states)
            columns = jnp.broadcast_to(jnp.arange(width), tokens.shape)
            return logits_at(model, hidden, columns), states

        out = np.zeros((2, LENGTH, 64), np.float32)
        starts = np.zeros(2, np.int32)
        while starts.min() < LENGTH:
            width = 5 if starts.max() < 10 else 1
            # rows are not at the same place: the second one lags behind
            counts = np.minimum([width, max(1, width - 2)], LENGTH - starts).astype(np.int32)
            chunk = np.zeros((2, width), np.int32)
            for b, (start, n) in enumerate(zip(starts, counts, strict=True)):
                chunk[b, :n] = TOKENS[b, start : start + n]
            logits, states = run(params, states, chunk, starts, counts, width)
            for b, (start, n) in enumerate(zip(starts, counts, strict=True)):
                out[b, start : start + n] = logits[b, :n]
            starts = starts + counts
    return out


@pytest.mark.parametrize(("how", "where"), _combinations(["none", "mixed"], ("paged", "none"), ("contiguous", "mixed")))
def test_tokens_of_many_texts_share_a_lane(how, where):
    """Two lanes of three rows: a chunk of one text beside single tokens of the others, in any order of columns."""
    layout, how = generating(LAYOUTS[where]), CACHES[how]
    random, lanes, rows = np.random.default_rng(1), 2, 3
    texts = random.integers(1, 64, (lanes, rows, LENGTH)).astype(np.int32)
    tables = None
    if isinstance(how, Paged):
        # device d of n holds a lane's pages from d * 12 / n, and gives entry i of each row one of them when i % n == d
        devices, per = 1 if layout is None else layout.split("pages"), how.per_row(LENGTH)
        free = [list(range(d * rows * per // devices, (d + 1) * rows * per // devices)) for d in range(devices)]
        tables = jnp.asarray([[[free[i % devices].pop() for i in range(per)] for _ in range(rows)]] * lanes, jnp.int32)
    with layout or contextlib.nullcontext():
        graphdef, params = _model(CONFIG, layout)
        states = init_cache(nnx.merge(graphdef, params), how, lanes, rows, LENGTH)

        @jax.jit
        def run(params, states, tokens, step):
            model = nnx.merge(graphdef, params)
            hidden, states = forward(model, tokens, step, how, states)
            return logits_at(model, hidden, jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)), states

        out = np.zeros((lanes, rows, LENGTH, 64), np.float32)
        starts = np.zeros((lanes, rows), int)
        while starts.min() < LENGTH:
            s, chunk = 7, 4
            tokens, row_of, at = np.zeros((lanes, s), np.int32), np.full((lanes, s), -1), np.full((lanes, s), -1)
            single, many = np.full((lanes, rows, 1), s), np.full((lanes, 1, chunk), s)
            long = np.zeros((lanes, 1), np.int32)
            for lane in range(lanes):
                columns = iter(random.permutation(s))
                behind = int(np.argmin(starts[lane]))
                long[lane] = behind
                for row in range(rows):
                    n = min(chunk if row == behind else 1, LENGTH - starts[lane, row])
                    for i in range(n):
                        c = next(columns)
                        tokens[lane, c] = texts[lane, row, starts[lane, row] + i]
                        row_of[lane, c], at[lane, c] = row, starts[lane, row] + i
                        (many[lane, 0] if row == behind else single[lane, row])[i] = c
            as_int = lambda x: jnp.asarray(x, jnp.int32)  # noqa: E731
            groups = Group(as_int(single)), Group(as_int(many), as_int(long))
            step = Packed(as_int(row_of), as_int(at), groups, tables)
            logits, states = run(params, states, tokens, step)
            for lane, c in np.argwhere(row_of >= 0):
                out[lane, row_of[lane, c], at[lane, c]] = logits[lane, c]
                starts[lane, row_of[lane, c]] = max(starts[lane, row_of[lane, c]], at[lane, c] + 1)
    whole = _whole(CONFIG, texts.reshape(-1, LENGTH)).reshape(out.shape)
    np.testing.assert_allclose(out, whole, atol=2e-5, rtol=1e-4)


def test_bytes_are_those_of_the_arrays():
    graphdef, infos = describe_model(CONFIG)
    model = nnx.merge(graphdef, infos)
    for how in (Contiguous(), Paged(page=4), Paged(page=3, pages=7)):
        made = sum(x.nbytes for x in jax.tree.leaves(init_cache(model, how, 2, 3, LENGTH)))
        assert cache_bytes(model, how, 2, 3, LENGTH) == made
    assert cache_bytes(model, Contiguous(), 2, 3, LENGTH) == 2 * 3 * LENGTH * 3 * 2 * 32 * 4
    latent = nnx.merge(*describe_model(LATENT))
    assert cache_bytes(latent, Contiguous(), 2, 3, LENGTH) == 2 * 3 * LENGTH * 3 * (16 + 4) * 4


def test_a_cache_that_outgrows_the_factors_its_keys_were_turned_by_is_refused():
    scaling = LongRopeScaling((1.0,) * 4, (2.0,) * 4, original_length=LENGTH)
    make = lambda s: nnx.merge(*describe_model(dataclasses.replace(CONFIG, positions=Rotary(scaling=s))))  # noqa: E731
    init_cache(make(scaling), Contiguous(), 1, 1, LENGTH)
    with raises_saying(ConfigError, "LongRopeScaling.length = 17", "at most 16"):
        init_cache(make(scaling), Contiguous(), 1, 1, LENGTH + 1)
    init_cache(make(dataclasses.replace(scaling, length=17)), Contiguous(), 1, 1, LENGTH + 1)


def test_four_devices_share_two_key_heads():
    config = TransformerConfig(
        depth=1, vocab=64, width=32, heads=4, kv_heads=2, positions=Rotary(theta=100.0), logit_softcap=5.0
    )
    layout = generating(Layout("tensor=4"))
    with layout:
        graphdef, params = _model(config, layout)
        states = init_cache(nnx.merge(graphdef, params), Contiguous(), 2, 1, LENGTH)
        step = one_row_a_lane(jnp.zeros(2, jnp.int32), jnp.full(2, LENGTH), LENGTH)

        @jax.jit
        def run(params, states):
            model = nnx.merge(graphdef, params)
            hidden, _ = forward(model, TOKENS, step, Contiguous(), states)
            return logits_at(model, hidden, jnp.broadcast_to(jnp.arange(LENGTH), TOKENS.shape))

        found = np.asarray(run(params, states))
    np.testing.assert_allclose(found, _whole(config, TOKENS), atol=2e-5, rtol=1e-4)
