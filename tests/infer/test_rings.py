"""Layers with a window store its tokens only: the same texts as with all tokens stored, in bytes that do not grow."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from jaxscale.errors import ConfigError
from jaxscale.infer.cache import Contiguous, Paged, cache_bytes, init_cache
from jaxscale.infer.engine import Cached, Engine
from jaxscale.infer.engine.device import steps_of
from jaxscale.infer.engine.packing import Shape, Sizes, pack
from jaxscale.infer.loaded import Loaded
from jaxscale.infer.speculative import WithDraft
from jaxscale.layout import Layout
from jaxscale.models import BlockConfig, TransformerConfig
from jaxscale.nn import CrossDecoderAttention, Lizard, MultiHeadLatent
from tests.infer.test_mixed_stacks import LENGTH, VOCAB, greedy, model_of, requests_of, served
from tests.truth.errors import raises_saying
from tests.truth.layouts import QUICKLY
from tests.truth.long import short

NEAR = TransformerConfig(depth=4, vocab=VOCAB, width=16, heads=4, kv_heads=4, head_dim=8, hidden=32, windows=(4, None))
LATENT = MultiHeadLatent(kv_rank=8, plain_dim=4, rotary_dim=4, value_dim=8)
SIZES = dict(page=2, pages=20, ring=8)


def _engine(config, cache, mesh=None):
    layout = None if mesh is None else Layout(mesh)
    return Engine(Cached(*model_of(mesh, config), layout=layout, cache=cache, rows=4, length=LENGTH, budget=16))


@pytest.mark.long
@pytest.mark.parametrize(
    ("changes", "cache", "mesh"),
    short(
        1,
        [
            ({}, Paged(page=2, pages=20, ring=8), None),
            (dict(windows=(4,), kv_heads=1, depth=2), Contiguous(ring=4), None),
            ({}, Paged(page=2, pages=20, ring=8), "tensor=2,pipeline=2"),
            (dict(attention_layer=Lizard(reach=4), windows=(None,)), Paged(page=2, pages=20, ring=8), None),
            (dict(attention_layer=LATENT, kv_heads=None, head_dim=None), Paged(page=4, ring=8), None),
            ({}, Contiguous(ring=4), "data=2,tensor=2,context=2"),
            ({}, Paged(page=2, pages=20, ring=8), "data=2,tensor=2,context=2"),
        ],
    ),
    ids=str,
)
def test_texts_are_those_of_passes_over_whole_texts(changes, cache, mesh):
    config = dataclasses.replace(NEAR, **changes)
    requests = list(requests_of(14))
    engine = _engine(config, cache, mesh)
    assert any("ring_k" in block for run in engine.stepper._states for block in run)
    assert served(engine, requests) == greedy(requests, config)
    assert engine.stats.shared == 0  # a ring has lost the beginning that texts have in common
    if mesh is None and cache == Paged(page=2, pages=20, ring=8):
        assert engine.stats.preemptions > 0


@pytest.mark.long
def test_numbers_of_8_bits_in_rings_give_the_texts_of_those_in_pages():
    requests = list(requests_of(8))
    rings, pages = (_engine(NEAR, Paged(page=2, numbers="int8", ring=n)) for n in (8, None))
    assert served(rings, requests) == served(pages, requests)
    assert pages.stats.shared > 0


@pytest.mark.long
def test_a_round_of_speculation_goes_back_in_rings():
    requests = list(requests_of(6))
    small = dataclasses.replace(NEAR, depth=1, windows=(3,))
    models = [Loaded(*model_of(None, config), None, 0) for config in (NEAR, small)]
    engine = Engine(WithDraft(*models, draft_tokens=3, rows=4, length=LENGTH, ring=4))
    assert served(engine, requests) == greedy(requests, NEAR)
    assert 0 < engine.stats.accepted < engine.stats.proposed


@pytest.mark.parametrize("cache", [Paged(page=4, ring=6), Contiguous(ring=6)], ids=str)
def test_bytes_do_not_grow_with_the_length(cache):
    model = nnx.merge(*model_of(None, dataclasses.replace(NEAR, windows=(4,))))

    def size(length, back=0):
        made = init_cache(model, cache, 2, 3, length, back=back)
        total = sum(x.nbytes for x in jax.tree.leaves(made))
        assert total == cache_bytes(model, cache, 2, 3, length, back=back)
        return total

    page = cache.in_pages().page
    pages = -(-(4 + 6) // page) + 1  # the window, the ring's tokens, and one page more
    assert size(400) == size(4000) == 4 * 2 * 3 * pages * page * 2 * 4 * 8 * 4
    assert size(400, back=page) == (pages + 1) * size(400) // pages
    assert size(8) == cache_bytes(model, dataclasses.replace(cache, ring=None), 2, 3, 8)  # smaller than the ring


@pytest.mark.parametrize("cache", short(1, [Contiguous(ring=6), Paged(page=16, ring=32)]), ids=str)
def test_a_compiled_step_holds_no_more_bytes_at_a_million_tokens(cache):
    graphdef, params = model_of(None, dataclasses.replace(NEAR, windows=(4,)))
    model = nnx.merge(graphdef, params)

    def held(length):
        entries = length // cache.page if isinstance(cache, Paged) else 0
        sizes = Sizes(shards=1, slots=2, budget=16, entries=entries)
        inputs, _ = pack((), Shape(2, 0), sizes, VOCAB, np.asarray([-1], np.int32))
        states = jax.eval_shape(lambda: init_cache(model, cache, 1, 2, length))
        one, _ = steps_of(graphdef, cache, 1)
        memory = one.lower(params, states, inputs).compile(QUICKLY).memory_analysis()
        return memory.argument_size_in_bytes, memory.temp_size_in_bytes

    assert held(2**12) == held(2**20)


def test_what_rings_do_not_do_is_one_sentence():
    reader = BlockConfig(mixer=CrossDecoderAttention())
    config = dataclasses.replace(NEAR, windows=(None,), blocks=(BlockConfig(window=4), reader))
    with raises_saying(ConfigError, "CrossAttention", "leave out the cache's ring"):
        served(_engine(config, Paged(**SIZES)), list(requests_of(1)))
    with raises_saying(ConfigError, "PagedCache.ring = 0", "at least 1"):
        Paged(ring=0)
