"""An engine gives every text what it gets alone, whoever else is there."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.errors import ConfigError
from jaxscale.infer.cache import Contiguous, Paged, generating
from jaxscale.infer.engine import Cached, Engine, Request
from jaxscale.infer.sampling import Choices, Sampling, choose
from jaxscale.infer.stages import on_stages
from jaxscale.layout import Layout, shardings_of
from jaxscale.models import TransformerConfig
from jaxscale.nn import MixtureOfExperts
from jaxscale.step.state import describe_model
from tests.truth.compiled import nothing_is_compiled
from tests.truth.params import random_params

VOCAB, LENGTH, END = 64, 32, 5
CONFIG = TransformerConfig(depth=4, vocab=VOCAB, width=32, heads=4, kv_heads=4, hidden=64, windows=(9, None))


@functools.cache
def _model(mesh: str | None, config: TransformerConfig = CONFIG):
    graphdef, infos = describe_model(config)
    params = random_params(infos)
    if mesh is not None:
        layout = generating(Layout(mesh))
        params = on_stages(graphdef, jax.device_put(params, shardings_of(infos, layout)), infos, layout)
    return graphdef, params


@functools.cache
def _next(config: TransformerConfig):
    """Every text's next token, and the log-probabilities of all, from a pass over all of it."""
    graphdef, params = _model(None, config)

    @jax.jit
    def one(texts, lengths, how, seen):
        logits = nnx.merge(graphdef, params)(texts)
        last = jnp.take_along_axis(logits, lengths[:, None, None] - 1, axis=1)[:, 0]
        return *choose(last, how, lengths, seen), jax.nn.log_softmax(last)

    return one


@functools.cache
def _logprobs():
    """Every place's log-probabilities from a pass over a whole text."""
    return jax.jit(lambda ids: jax.nn.log_softmax(nnx.merge(*_model(None))(ids), axis=-1))


def alone(requests, config=CONFIG, batch=50):
    """Every request's tokens, their log-probabilities and everybody's, from passes over whole texts without a cache."""
    out = {}
    for first in range(0, len(requests), batch):
        some = list(requests[first : first + batch])
        padded = some + [some[0]] * (batch - len(some))
        texts, lengths = np.zeros((batch, LENGTH), np.int32), np.asarray([len(r.prompt) for r in padded])
        seen = np.zeros((batch, config.vocab), bool)
        for i, r in enumerate(padded):
            texts[i, : len(r.prompt)] = r.prompt
            seen[i, list(r.prompt)] = True
            out[r.id] = ([], [], [])
        how = Choices.of([r.sampling for r in padded], config.vocab)
        for _ in range(max(r.sampling.max_tokens for r in some)):
            tokens, logprobs, everybody = (np.asarray(x) for x in _next(config)(texts, lengths, how, seen))
            for i, r in enumerate(some):
                made, probs, whole = out[r.id]
                ended = made and made[-1] == END and not r.sampling.ignore_end
                if len(made) < r.sampling.max_tokens and not ended:
                    made.append(int(tokens[i]))
                    probs.append(float(logprobs[i]))
                    whole.append(everybody[i])
                    texts[i, lengths[i]] = tokens[i]
                    seen[i, tokens[i]] = True
                    lengths[i] += 1
    return out


def trace(n, seed=0, longest=18, vocab=VOCAB, **options):
    """Requests of any kind; some begin alike."""
    random = np.random.default_rng(seed)
    heads = [random.integers(6, vocab, 12).tolist() for _ in range(3)]
    for i in range(n):
        prompt = random.integers(6, vocab, random.integers(1, longest)).tolist()
        if random.random() < 0.4:
            prompt = heads[random.integers(3)] + prompt[: longest - 12]
        kind = random.integers(5)
        sampling = Sampling(
            max_tokens=int(random.integers(1, 14)),
            temperature=0.0 if kind < 2 else 1.2,
            top_k=7 if kind == 3 else None,
            top_p=0.8 if kind == 4 else 1.0,
            seed=i,
            ignore_end=bool(i % 7 == 0),
            **options,
        )
        yield Request(tuple(prompt), sampling, f"r{i}")


def serve(engine, requests, rate=1.5, seed=1):
    """All of them, arriving at random times."""
    random = np.random.default_rng(seed)
    waiting, out = list(requests), {r.id: ([], []) for r in requests}
    while waiting or engine.busy:
        for _ in range(random.poisson(rate)):
            if waiting:
                engine.submit(waiting.pop(0))
        for event in engine.step():
            out[event.id][0].append(event.token)
            out[event.id][1].append(event.logprob)
    return out


def agree(found, truth):
    assert {k: v[0] for k, v in found.items()} == {k: v[0] for k, v in truth.items()}
    for name, (_, logprobs, *_) in found.items():
        np.testing.assert_allclose(logprobs, truth[name][1], atol=2e-4, err_msg=name)


def engine(mesh=None, cache=None, config=CONFIG, **options):
    cache = Paged(page=4, pages=14) if cache is None else cache
    options = dict(rows=4, length=LENGTH, budget=32, end_ids=(END,)) | options
    layout = None if mesh is None else Layout(mesh)
    clock = {name: options.pop(name) for name in ("clock",) if name in options}
    return Engine(Cached(*_model(mesh, config), layout=layout, cache=cache, **options), **clock)


def run(there, requests):
    """All at once; every text's events."""
    events = {r.id: [] for r in requests}
    for r in requests:
        there.submit(r)
    while there.busy:
        for event in there.step():
            events[event.id].append(event)
    return events


def test_two_hundred_texts_under_page_shortage_get_what_they_get_alone():
    requests = list(trace(200))
    there = engine()
    agree(serve(there, requests), alone(requests))
    stats = there.stats
    assert stats.preemptions > 5 and stats.shared > 100
    assert stats.pages_used == stats.running == stats.waiting == 0
    # passes through the model against those of one text after the other, each prompt being one
    assert stats.steps < stats.tokens_out / 2


@pytest.mark.parametrize(
    ("mesh", "how", "vocab"),
    [
        pytest.param("tensor=2", Contiguous(), VOCAB, marks=pytest.mark.long),
        ("data=2,tensor=2,context=2", Paged(page=4, pages=12), VOCAB),
        ("tensor=2,pipeline=2", Paged(page=4, pages=12), 61),  # which devices do not divide
    ],
)
def test_sharded_engines_give_what_one_device_gives(mesh, how, vocab):
    config, requests = dataclasses.replace(CONFIG, vocab=vocab), list(trace(16, seed=3, vocab=vocab))
    agree(serve(engine(mesh, how, config, rows=2, budget=16), requests), alone(requests, config))


def test_experts_on_devices_of_their_own_give_what_one_device_gives():
    config = TransformerConfig(
        depth=1, vocab=VOCAB, width=32, heads=2, hidden=32, mlp=MixtureOfExperts(experts=4, top_k=2)
    )
    requests = list(trace(10, seed=4))
    there = engine("expert=2,tensor=2", Contiguous(), config, rows=2, budget=16)
    agree(serve(there, requests), alone(requests, config))


def test_a_penalty_and_the_likeliest_tokens_are_those_of_the_text_alone():
    sampling = Sampling(max_tokens=8, repetition_penalty=1.8, temperature=0.0, logprobs=3, ignore_end=True)
    requests = [Request((7, 8, 9, 7), sampling, "penalised"), Request((20, 21), Sampling(max_tokens=8, seed=2), "not")]
    events, truth = run(engine(), requests), alone(requests)
    agree({k: ([e.token for e in v], [e.logprob for e in v]) for k, v in events.items()}, truth)
    for event, everybody in zip(events["penalised"], truth["penalised"][2], strict=True):
        likeliest = np.argsort(-everybody)[:3]
        assert [i for i, _ in event.top] == likeliest.tolist()
        np.testing.assert_allclose([p for _, p in event.top], everybody[likeliest], atol=2e-4)
    assert all(e.top == () for e in events["not"])
    assert [e.finished for e in events["penalised"]] == [None] * 7 + ["length"]


def test_no_request_compiles_anything_after_the_start():
    """Each way to ask for a text, alone and all together."""
    config = dataclasses.replace(CONFIG, depth=1, windows=(None,), hidden=72)  # whose steps no other test has compiled
    there = engine(config=config, rows=2, budget=16)
    noted = []
    there.compile(lambda done, of: noted.append((done, of)))
    ways: list[dict] = [
        {},
        {"temperature": 0.0},
        {"repetition_penalty": 1.5},
        {"top_k": 1},
        {"top_k": 5, "top_p": 0.5, "min_p": 0.1},
        {"seed": 2**32 - 1, "stop": ("x",), "ignore_end": True},
        {"logprobs": 1},
        {"logprobs": 20, "repetition_penalty": 0.5},
    ]
    requests = [
        Request(tuple(range(7, 7 + 3 * n)), Sampling(**{"max_tokens": 6} | way), (n, scored), scored)
        for n, way in enumerate(ways, start=1)
        for scored in (False, True)
    ]
    with nothing_is_compiled():
        for group in (*([r] for r in requests), requests):
            assert len(run(there, group)) == len(group)
    assert [done for done, _ in noted] == list(range(noted[0][1]))


def test_shared_pages_save_work_and_change_nothing():
    head = tuple(range(10, 22))
    requests = [Request((*head, 30 + i), Sampling(max_tokens=3, seed=i, ignore_end=True), i) for i in range(3)]
    there, apart = engine(), engine()
    apart.stepper.pages.sharing = False
    seen = []
    for one in (there, apart):
        for r in requests:
            one.submit(r)
        events = []
        while one.busy:
            events += one.step()
        seen.append((one.stats.computed, {r.id: [e.token for e in events if e.id == r.id] for r in requests}))
    (computed, out), (all_computed, all_out) = seen
    assert out == all_out == {k: v[0] for k, v in alone(requests).items()}
    assert there.stats.shared == all_computed - computed == 2 * 12


@pytest.mark.parametrize(
    ("mesh", "how"),
    [
        pytest.param(None, Paged(page=4, pages=14), id="paged"),
        pytest.param(None, Contiguous(), id="contiguous"),
        pytest.param("data=2,tensor=2,context=2", Paged(page=4, pages=12), id="three axes", marks=pytest.mark.long),
        pytest.param("tensor=2,pipeline=2", Paged(page=4, pages=12), id="pipeline"),
    ],
)
def test_the_tokens_of_a_scored_prompt_get_what_a_whole_pass_gives_them(mesh, how):
    requests = list(trace(24 if mesh is None else 12, seed=5, logprobs=2))
    asked = [dataclasses.replace(r, scored=i % 3 != 0) for i, r in enumerate(requests)]
    there = engine(mesh, how, budget=20)
    events, truth = run(there, asked), alone(requests)
    agree({k: ([e.token for e in v], [e.logprob for e in v]) for k, v in events.items()}, truth)
    for r in asked:
        first, *others = events[r.id]
        assert not any(e.prompt for e in others)
        count = len(r.prompt) - 1 if r.scored else 0
        assert len(first.prompt) == count
        want = np.asarray(_logprobs()(np.pad(r.prompt, (0, LENGTH - len(r.prompt)))[None]))[0]
        for score, everybody, token in zip(first.prompt, want, r.prompt[1:], strict=False):
            np.testing.assert_allclose(score.logprob, everybody[token], atol=2e-4)
            likeliest = np.argsort(-everybody)[:2]
            assert [i for i, _ in score.top] == likeliest.tolist()
            np.testing.assert_allclose([p for _, p in score.top], everybody[likeliest], atol=2e-4)
    if mesh is None and isinstance(how, Paged):
        assert there.stats.preemptions > 0  # some prompts were begun twice


def test_every_row_of_a_contiguous_cache_is_used():
    there = engine(cache=Contiguous(), rows=4)
    for i in range(4):
        there.submit(Request((7 + i, 8), Sampling(max_tokens=4, ignore_end=True), i))
    there.step()
    assert there.stats.running == 4


def test_a_cancelled_request_frees_its_pages_and_disturbs_nobody():
    requests = [Request(tuple(range(10 + i, 18 + i)), Sampling(max_tokens=12, ignore_end=True), i) for i in range(6)]
    there = engine()
    for r in requests:
        there.submit(r)
    found = {r.id: [] for r in requests}
    for event in there.step():
        found[event.id].append(event)
    assert there.stats.running >= 2 and there.stats.waiting >= 2
    before = there.stats.pages_used
    there.cancel(1)
    assert there.stats.pages_used < before
    there.cancel(5)
    there.cancel("nobody")
    while there.busy:
        for event in there.step():
            found[event.id].append(event)
    assert found[1][-1].finished == found[5][0].finished == "cancelled" and found[5][0].token == -1
    truth = alone(requests)
    for i in (2, 3, 4):
        assert [e.token for e in found[i]] == truth[i][0]
    assert there.stats.pages_used == 0 and not there.busy
    there.submit(requests[1])  # its id is nobody's now


def test_as_many_tokens_go_through_the_model_as_there_are():
    """Rows of unlike lengths side by side fill a step: what is padded is less than padding each to the longest."""
    lengths = (16, 2, 9, 5)  # together the width of a step
    requests = [Request(tuple(range(n, 2 * n)), Sampling(max_tokens=1), n) for n in lengths]
    there = engine(cache=Paged(page=4))
    run(there, requests)
    assert there.stats.computed == there.stats.columns == sum(lengths) == 32
    assert there.stats.steps == 1


@pytest.mark.parametrize(
    "request_, says",
    [
        (Request((1, VOCAB), Sampling(), 1), f"token id {VOCAB}"),
        (Request((), Sampling(), 1), "one or more token ids"),
        (Request((1, 2), Sampling(max_tokens=LENGTH), 1), f"at most {LENGTH - 2}"),
        (Request((1, 2), Sampling(max_tokens=1), 0), "under way already"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_at_once(request_, says):
    there = engine()
    there.submit(Request((1, 2), Sampling(max_tokens=1), 0))
    with pytest.raises(ConfigError, match=says):
        there.submit(request_)


def test_an_engine_that_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="do not hold a text"):
        engine(cache=Paged(page=4, pages=7))
    with pytest.raises(ConfigError, match="budget = 3"):
        engine(budget=3)
    experts = TransformerConfig(depth=1, vocab=VOCAB, width=32, heads=2, mlp=MixtureOfExperts(capacity=1.0))
    with pytest.raises(ConfigError, match="MixtureOfExperts.capacity"):
        engine(config=experts)
