"""Recurrent layers beside attention: what is generated is what passes over whole texts give."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxscale as js
from experiments.bring_your_own.recurrence import GatedRecurrence
from jaxscale.infer.cache import Contiguous, Paged, cache_bytes, generating, init_cache
from jaxscale.infer.engine import Cached, Engine, Request
from jaxscale.infer.loaded import Loaded, dropless
from jaxscale.infer.sampling import Sampling
from jaxscale.infer.serve import Server, engine_of, served_by
from jaxscale.infer.speculative import WithDraft
from jaxscale.infer.stages import on_stages
from jaxscale.layout import Layout, shardings_of
from jaxscale.models import BlockConfig, TransformerConfig
from jaxscale.nn import DSA, GatedDeltaNet, MixtureOfExperts
from jaxscale.step.state import TrainState, describe_model
from tests.truth.long import short
from tests.truth.params import random_params
from tests.truth.serving import call

VOCAB, LENGTH = 64, 24
LINEAR, DELTA, FULL = BlockConfig(mixer=GatedRecurrence()), BlockConfig(mixer=GatedDeltaNet(heads=2)), BlockConfig()
MIXED = TransformerConfig(
    depth=4, vocab=VOCAB, width=16, heads=4, kv_heads=4, head_dim=8, hidden=32, blocks=(LINEAR, LINEAR, LINEAR, FULL)
)


def model_of(mesh=None, config=MIXED):
    graphdef, infos = describe_model(config)
    params = random_params(infos)
    if mesh is not None:
        layout = generating(Layout(mesh))
        params = on_stages(graphdef, jax.device_put(params, shardings_of(infos, layout)), infos, layout)
    return graphdef, params


def requests_of(n):
    """Prompts of one to fourteen tokens, of which some begin alike."""
    random = np.random.default_rng(0)
    head = random.integers(0, VOCAB, 8).tolist()
    for i in range(n):
        prompt = (head if i % 3 == 0 else []) + random.integers(0, VOCAB, 1 + i % 6).tolist()
        yield Request(tuple(prompt), Sampling(max_tokens=9 - i % 4, temperature=0.0), i)


def greedy(requests, config=MIXED):
    """The likeliest tokens, each from a pass over the whole text."""
    graphdef, params = model_of(None, config)
    logits = jax.jit(lambda texts: nnx.merge(graphdef, params)(texts))
    texts, ends = np.zeros((len(requests), LENGTH), np.int32), np.asarray([len(r.prompt) for r in requests])
    for row, r in enumerate(requests):
        texts[row, : ends[row]] = r.prompt
    for _ in range(max(r.sampling.max_tokens for r in requests)):
        rows = np.flatnonzero(ends < LENGTH)
        texts[rows, ends[rows]] = np.argmax(logits(texts)[rows, ends[rows] - 1], axis=-1)
        ends[rows] += 1
    return {r.id: texts[i, len(r.prompt) :][: r.sampling.max_tokens].tolist() for i, r in enumerate(requests)}


def served(engine, requests):
    out = {r.id: [] for r in requests}
    for r in requests:
        engine.submit(r)
    while engine.busy:
        for event in engine.step():
            out[event.id].append(event.token)
    return out


@pytest.mark.parametrize(
    ("mesh", "cache", "per_page"),
    short(
        1,
        [
            (None, Paged(page=2, pages=14), False),
            ("data=2,tensor=2,context=2", Paged(page=2, pages=14), True),
            ("tensor=2,pipeline=2", Paged(page=2, pages=14), False),
            pytest.param("data=2,tensor=2,context=2", Contiguous(), False, marks=pytest.mark.long),
            pytest.param(None, Paged(page=2, pages=14), True, marks=pytest.mark.long),
        ],
    ),
    ids=str,
)
def test_a_mixed_stack_generates_what_passes_over_whole_texts_give(mesh, cache, per_page):
    layout = None if mesh is None else Layout(mesh)
    staged = layout is not None and layout.stages > 1  # two copies of a shorter pattern
    linear = BlockConfig(mixer=GatedRecurrence(per_page=per_page))
    config = dataclasses.replace(MIXED, blocks=(linear, FULL) if staged else (linear, linear, linear, FULL))
    requests = list(requests_of(14))
    engine = Engine(Cached(*model_of(mesh, config), layout=layout, cache=cache, rows=4, length=LENGTH, budget=16))
    assert served(engine, requests) == greedy(requests, config)
    assert (engine.stats.shared > 0) == per_page  # else there is no state of a beginning that texts have in common
    assert mesh is not None or engine.stats.preemptions > 0


@pytest.mark.long
def test_a_stack_with_states_that_are_matrices_generates_what_passes_over_whole_texts_give():
    config = dataclasses.replace(MIXED, blocks=(DELTA, DELTA, FULL), depth=3)
    mesh, cache = "data=2,tensor=2", Paged(page=2, pages=14)
    requests = list(requests_of(14))
    engine = Engine(Cached(*model_of(mesh, config), layout=Layout(mesh), cache=cache, rows=4, length=LENGTH, budget=16))
    assert served(engine, requests) == greedy(requests, config)


@pytest.mark.long
@pytest.mark.parametrize("mesh", [None, "data=2,tensor=2", "context=2,tensor=2"])
def test_tokens_that_an_indexer_selects_are_those_of_a_pass_over_the_whole_text(mesh):
    sparse = DSA(kv_rank=8, q_rank=8, plain_dim=8, rotary_dim=4, value_dim=8, index_heads=4, index_dim=8, top_k=5)
    config = dataclasses.replace(MIXED, depth=2, blocks=(), kv_heads=None, head_dim=None, attention_layer=sparse)
    requests, cache = list(requests_of(14)), Paged(page=2, pages=14)
    layout = None if mesh is None else Layout(mesh)
    engine = Engine(Cached(*model_of(mesh, config), layout=layout, cache=cache, rows=4, length=LENGTH, budget=16))
    assert served(engine, requests) == greedy(requests, config)
    assert engine.stats.shared > 0
    assert mesh is not None or engine.stats.preemptions > 0


@pytest.mark.long
@pytest.mark.parametrize("linear", short(1, [LINEAR, DELTA]), ids=["vectors", "matrices"])
def test_a_round_of_speculation_goes_back_to_the_last_token_that_stands(linear):
    requests = list(requests_of(6))
    mixed = dataclasses.replace(MIXED, blocks=(linear, linear, linear, FULL))
    small = dataclasses.replace(MIXED, depth=1, blocks=(linear,))
    models = [Loaded(*model_of(None, config), None, 0) for config in (mixed, small)]
    engine = Engine(WithDraft(*models, draft_tokens=3, rows=4, length=LENGTH))
    assert served(engine, requests) == greedy(requests, mixed)
    assert 0 < engine.stats.accepted < engine.stats.proposed


@pytest.mark.long
def test_the_server_answers_with_a_mixed_stack_as_the_run_generates(tmp_path):
    model = dataclasses.replace(MIXED, vocab=256, depth=2, blocks=(LINEAR, FULL))
    state = TrainState(jnp.int32(0), random_params(describe_model(model)[1]), {}, jax.random.key(0))
    run = js.Run(tmp_path, js.TrainConfig(model=model, layout=None, seq_len=LENGTH), state)
    prompts = ["def ", "a", "def f(x)", "return"]
    want = [run.generate(p, max_tokens=8, temperature=0) for p in prompts]
    assert len({tuple(text.ids) for text in want}) > 1  # else any state would do
    of = served_by(run)
    with Server(port=0) as server:
        server.open(of, engine_of(run, of, rows=2, budget=4, page=4))
        bodies = [dict(prompt=p, max_tokens=8, temperature=0, stream=s) for p in prompts for s in (False, True)]
        with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
            answers = list(pool.map(lambda body: call(server, body=body, timeout=60), bodies))
    texts = [a[2]["choices"][0]["text"] for a in answers[::2]]
    lines = [a[2].replace("data: [DONE]", "").split("data: ")[1:] for a in answers[1::2]]
    streamed = ["".join(c["text"] for part in parts for c in json.loads(part)["choices"]) for parts in lines]
    assert texts == streamed == [text.text for text in want]


def test_experts_of_blocks_take_all_their_tokens_where_a_text_is_generated():
    limited, roomy = (MixtureOfExperts(experts=4, capacity=c) for c in (2.0, None))
    config = dataclasses.replace(MIXED, blocks=(LINEAR, BlockConfig(mlp=limited)))
    assert dropless(config) == dataclasses.replace(MIXED, blocks=(LINEAR, BlockConfig(mlp=roomy)))
    assert dropless(MIXED) is MIXED


def test_a_recurrent_state_has_the_same_size_however_long_the_text():
    model = nnx.merge(*model_of(None, dataclasses.replace(MIXED, blocks=(LINEAR,))))
    for length, back in ((8, 0), (800, 0), (8, 3)):
        made = jax.tree.leaves(init_cache(model, Contiguous(), 2, 3, length, back=back))
        assert sum(x.nbytes for x in made) == cache_bytes(model, Contiguous(), 2, 3, length, back=back)
        assert cache_bytes(model, Contiguous(), 2, 3, length, back=back) == 4 * 2 * 3 * (back + 1) * 16 * 4
