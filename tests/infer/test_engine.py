"""An engine gives every sequence what it gets alone, whatever else is in the batch."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.errors import ConfigError
from jaxscale.infer.cache import Contiguous, Paged, generating
from jaxscale.infer.engine import Cached, Engine, Request
from jaxscale.infer.sampling import Sampling, SamplingArrays, choose
from jaxscale.infer.stages import on_stages
from jaxscale.layout import Layout, nearest, shardings_of, tree_moved
from jaxscale.models import TransformerConfig
from jaxscale.nn import MixtureOfExperts
from jaxscale.step.state import describe_model
from tests.truth.compiled import nothing_is_compiled
from tests.truth.long import short
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
    """Every sequence's next token, and the log-probabilities of all, from a pass over all of it."""
    graphdef, params = _model(None, config)

    @jax.jit
    def one(sequences, lengths, sampling, seen):
        logits = nnx.merge(graphdef, params)(sequences)
        last = jnp.take_along_axis(logits, lengths[:, None, None] - 1, axis=1)[:, 0]
        return *choose(last, sampling, lengths, seen), jax.nn.log_softmax(last)

    return one


@functools.cache
def _logprobs():
    """Log-probabilities of every position from a pass over a whole sequence."""
    return jax.jit(lambda ids: jax.nn.log_softmax(nnx.merge(*_model(None))(ids), axis=-1))


def alone(requests, config=CONFIG, batch=50):
    """Every request's tokens, their log-probabilities, and those of all ids, from passes over whole sequences."""
    out = {}
    for first in range(0, len(requests), batch):
        some = list(requests[first : first + batch])
        padded = some + [some[0]] * (batch - len(some))
        sequences, lengths = np.zeros((batch, LENGTH), np.int32), np.asarray([len(r.prompt) for r in padded])
        seen = np.zeros((batch, config.vocab), bool)
        for i, r in enumerate(padded):
            sequences[i, : len(r.prompt)] = r.prompt
            seen[i, list(r.prompt)] = True
            out[r.id] = ([], [], [])
        sampling = SamplingArrays.of([r.sampling for r in padded], config.vocab)
        for _ in range(max(r.sampling.max_tokens for r in some)):
            tokens, logprobs, all_logprobs = (np.asarray(x) for x in _next(config)(sequences, lengths, sampling, seen))
            for i, r in enumerate(some):
                made, probs, whole = out[r.id]
                ended = made and made[-1] == END and not r.sampling.ignore_end
                if len(made) < r.sampling.max_tokens and not ended:
                    made.append(int(tokens[i]))
                    probs.append(float(logprobs[i]))
                    whole.append(all_logprobs[i])
                    sequences[i, lengths[i]] = tokens[i]
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


def serve(make_engine, requests, rate=1.5, seed=1):
    """All of them, arriving at random times."""
    random = np.random.default_rng(seed)
    waiting, out = list(requests), {r.id: ([], []) for r in requests}
    while waiting or make_engine.busy:
        for _ in range(random.poisson(rate)):
            if waiting:
                make_engine.submit(waiting.pop(0))
        for event in make_engine.step():
            out[event.id][0].append(event.token)
            out[event.id][1].append(event.logprob)
    return out


def agree(results, truth):
    assert {k: v[0] for k, v in results.items()} == {k: v[0] for k, v in truth.items()}
    for name, (_, logprobs, *_) in results.items():
        np.testing.assert_allclose(logprobs, truth[name][1], atol=2e-4, err_msg=name)


def make_engine(mesh=None, cache=None, config=CONFIG, **options):
    cache = Paged(page=4, pages=14) if cache is None else cache
    options = dict(rows=4, length=LENGTH, budget=32, end_ids=(END,)) | options
    layout = None if mesh is None else Layout(mesh)
    clock = {name: options.pop(name) for name in ("clock",) if name in options}
    return Engine(Cached(*_model(mesh, config), layout=layout, cache=cache, **options), **clock)


def run(engine, requests):
    """Submit all at once; return every request's events."""
    events = {r.id: [] for r in requests}
    for r in requests:
        engine.submit(r)
    while engine.busy:
        for event in engine.step():
            events[event.id].append(event)
    return events


@pytest.mark.long
def test_two_hundred_texts_under_page_shortage_get_what_they_get_alone():
    requests = list(trace(200))
    engine = make_engine()
    agree(serve(engine, requests), alone(requests))
    stats = engine.stats
    assert stats.preemptions > 5 and stats.shared > 100
    assert stats.pages_used == stats.running == stats.waiting == 0
    # fewer passes than one sequence after the other, each prompt being one pass
    assert stats.steps < stats.tokens_out / 2


@pytest.mark.parametrize(
    ("mesh", "cache", "vocab"),
    short(
        1,
        [
            pytest.param("tensor=2", Contiguous(), VOCAB, marks=pytest.mark.long),
            ("data=2,tensor=2,context=2", Paged(page=4, pages=12), VOCAB),
            ("tensor=2,pipeline=2", Paged(page=4, pages=12), 61),  # which devices do not divide
        ],
    ),
)
def test_sharded_engines_give_what_one_device_gives(mesh, cache, vocab):
    config, requests = dataclasses.replace(CONFIG, vocab=vocab), list(trace(16, seed=3, vocab=vocab))
    agree(serve(make_engine(mesh, cache, config, rows=2, budget=16), requests), alone(requests, config))


@pytest.mark.long
def test_experts_on_devices_of_their_own_give_what_one_device_gives():
    config = TransformerConfig(
        depth=1, vocab=VOCAB, width=32, heads=2, hidden=32, mlp=MixtureOfExperts(experts=4, top_k=2)
    )
    requests = list(trace(10, seed=4))
    engine = make_engine("expert=2,tensor=2", Contiguous(), config, rows=2, budget=16)
    agree(serve(engine, requests), alone(requests, config))


@pytest.mark.long
def test_a_penalty_and_the_likeliest_tokens_are_those_of_the_text_alone():
    sampling = Sampling(max_tokens=8, repetition_penalty=1.8, temperature=0.0, logprobs=3, ignore_end=True)
    requests = [Request((7, 8, 9, 7), sampling, "penalised"), Request((20, 21), Sampling(max_tokens=8, seed=2), "not")]
    events, truth = run(make_engine(), requests), alone(requests)
    agree({k: ([e.token for e in v], [e.logprob for e in v]) for k, v in events.items()}, truth)
    for event, all_logprobs in zip(events["penalised"], truth["penalised"][2], strict=True):
        likeliest = np.argsort(-all_logprobs)[:3]
        assert [i for i, _ in event.top] == likeliest.tolist()
        np.testing.assert_allclose([p for _, p in event.top], all_logprobs[likeliest], atol=2e-4)
    assert all(e.top == () for e in events["not"])
    assert [e.finished for e in events["penalised"]] == [None] * 7 + ["length"]


def test_no_request_compiles_anything_after_the_start():
    """Every kind of request, alone and all together."""
    config = dataclasses.replace(CONFIG, depth=1, windows=(None,), hidden=72)  # whose steps no other test has compiled
    engine = make_engine(config=config, rows=2, budget=16)
    noted = []
    engine.compile(lambda done, of: noted.append((done, of)))
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
            assert len(run(engine, group)) == len(group)
    assert [done for done, _ in noted] == list(range(noted[0][1]))


def test_shared_pages_save_work_and_change_nothing():
    head = tuple(range(10, 22))
    requests = [Request((*head, 30 + i), Sampling(max_tokens=3, seed=i, ignore_end=True), i) for i in range(3)]
    engine, apart = make_engine(), make_engine()
    apart.stepper.pages.sharing = False
    seen = []
    for one in (engine, apart):
        for r in requests:
            one.submit(r)
        events = []
        while one.busy:
            events += one.step()
        seen.append((one.stats.computed, {r.id: [e.token for e in events if e.id == r.id] for r in requests}))
    (computed, out), (all_computed, all_out) = seen
    assert out == all_out == {k: v[0] for k, v in alone(requests).items()}
    assert engine.stats.shared == all_computed - computed == 2 * 12


@pytest.mark.long
@pytest.mark.parametrize(
    ("mesh", "cache"),
    short(
        1,
        [
            pytest.param(None, Paged(page=4, pages=14), id="paged"),
            pytest.param(None, Contiguous(), id="contiguous"),
            pytest.param("data=2,tensor=2,context=2", Paged(page=4, pages=12), id="three axes", marks=pytest.mark.long),
            pytest.param("tensor=2,pipeline=2", Paged(page=4, pages=12), id="pipeline"),
        ],
    ),
)
def test_the_tokens_of_a_scored_prompt_get_what_a_whole_pass_gives_them(mesh, cache):
    requests = list(trace(24 if mesh is None else 12, seed=5, logprobs=2))
    requested = [dataclasses.replace(r, scored=i % 3 != 0) for i, r in enumerate(requests)]
    engine = make_engine(mesh, cache, budget=20)
    events, truth = run(engine, requested), alone(requests)
    agree({k: ([e.token for e in v], [e.logprob for e in v]) for k, v in events.items()}, truth)
    for r in requested:
        first, *others = events[r.id]
        assert not any(e.prompt for e in others)
        count = len(r.prompt) - 1 if r.scored else 0
        assert len(first.prompt) == count
        want = np.asarray(_logprobs()(np.pad(r.prompt, (0, LENGTH - len(r.prompt)))[None]))[0]
        for score, all_logprobs, token in zip(first.prompt, want, r.prompt[1:], strict=False):
            np.testing.assert_allclose(score.logprob, all_logprobs[token], atol=2e-4)
            likeliest = np.argsort(-all_logprobs)[:2]
            assert [i for i, _ in score.top] == likeliest.tolist()
            np.testing.assert_allclose([p for _, p in score.top], all_logprobs[likeliest], atol=2e-4)
    if mesh is None and isinstance(cache, Paged):
        assert engine.stats.preemptions > 0  # some prompts were begun twice


def test_every_row_of_a_contiguous_cache_is_used():
    engine = make_engine(cache=Contiguous(), rows=4)
    for i in range(4):
        engine.submit(Request((7 + i, 8), Sampling(max_tokens=4, ignore_end=True), i))
    engine.step()
    assert engine.stats.running == 4


def test_a_cancelled_request_frees_its_pages_and_disturbs_nobody():
    requests = [Request(tuple(range(10 + i, 18 + i)), Sampling(max_tokens=12, ignore_end=True), i) for i in range(6)]
    engine = make_engine()
    for r in requests:
        engine.submit(r)
    results = {r.id: [] for r in requests}
    for event in engine.step():
        results[event.id].append(event)
    assert engine.stats.running >= 2 and engine.stats.waiting >= 2
    before = engine.stats.pages_used
    engine.cancel(1)
    assert engine.stats.pages_used < before
    engine.cancel(5)
    engine.cancel("nobody")
    while engine.busy:
        for event in engine.step():
            results[event.id].append(event)
    assert results[1][-1].finished == results[5][0].finished == "cancelled" and results[5][0].token == -1
    truth = alone(requests)
    for i in (2, 3, 4):
        assert [e.token for e in results[i]] == truth[i][0]
    assert engine.stats.pages_used == 0 and not engine.busy
    engine.submit(requests[1])  # its id is nobody's now


def test_as_many_tokens_go_through_the_model_as_there_are():
    """Rows of unlike lengths side by side fill a step: what is padded is less than padding each to the longest."""
    lengths = (16, 2, 9, 5)  # together the width of a step
    requests = [Request(tuple(range(n, 2 * n)), Sampling(max_tokens=1), n) for n in lengths]
    engine = make_engine(cache=Paged(page=4))
    run(engine, requests)
    assert engine.stats.computed == engine.stats.columns == sum(lengths) == 32
    assert engine.stats.steps == 1


@pytest.mark.parametrize(
    "request_, words",
    [
        (Request((1, VOCAB), Sampling(), 1), f"token id {VOCAB}"),
        (Request((), Sampling(), 1), "one or more token ids"),
        (Request((1, 2), Sampling(max_tokens=LENGTH), 1), f"at most {LENGTH - 2}"),
        (Request((1, 2), Sampling(max_tokens=1), 0), "unfinished request"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_at_once(request_, words):
    engine = make_engine()
    engine.submit(Request((1, 2), Sampling(max_tokens=1), 0))
    with pytest.raises(ConfigError, match=words):
        engine.submit(request_)


def test_an_engine_that_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="do not hold a sequence"):
        make_engine(cache=Paged(page=4, pages=7))
    with pytest.raises(ConfigError, match="budget = 3"):
        make_engine(budget=3)
    experts = TransformerConfig(depth=1, vocab=VOCAB, width=32, heads=2, mlp=MixtureOfExperts(capacity=1.0))
    with pytest.raises(ConfigError, match="MixtureOfExperts.capacity"):
        make_engine(config=experts)


@pytest.mark.long
def test_expert_parallelism_grows_and_shrinks_while_an_engine_answers():
    config = TransformerConfig(
        depth=1, vocab=VOCAB, width=32, heads=2, hidden=32, mlp=MixtureOfExperts(experts=8, top_k=2)
    )
    requests = list(trace(24, seed=5))
    engine, layout = make_engine("expert=2", config=config, rows=2), Layout("expert=2")
    _, infos = describe_model(config)
    out, meshes = {r.id: ([], []) for r in requests}, iter(("expert=4", "expert=8", "expert=4"))
    for step in itertools.count():
        for request in requests[step : step + 1]:
            engine.submit(request)
        if step in (6, 12, 18):
            assert engine.stats.running > 1
            new = Layout(next(meshes))
            params = engine.stepper._params
            arrays = jax.tree.leaves(params)
            place = lambda layout: jax.tree.leaves(shardings_of(infos, generating(layout)))  # noqa: E731
            layout = nearest(new, arrays, place, jax.devices()[:8])
            params, received = tree_moved(params, shardings_of(infos, generating(layout)))
            assert 0 < received
            engine.move(engine.stepper.on(params, layout))
        if step >= len(requests) and not engine.busy:
            break
        for event in engine.step():
            out[event.id][0].append(event.token)
            out[event.id][1].append(event.logprob)
    agree(out, alone(requests, config))
    stats = engine.stats
    assert layout.sizes["expert"] == 4 and engine.slots == 8
    assert stats.tokens_out == sum(len(tokens) for tokens, _ in out.values()) and stats.computed > stats.tokens_in


def test_a_stepper_of_another_model_or_for_shorter_sequences_cannot_go_on():
    engine = make_engine()
    with pytest.raises(ConfigError, match="another vocab"):
        engine.move(make_engine(config=dataclasses.replace(CONFIG, vocab=61)).stepper)
    with pytest.raises(ConfigError, match="length is 16, and requests were accepted for 32"):
        engine.move(make_engine(length=16).stepper)


class Still:
    """A stepper that takes no step."""

    vocab, length, slots, end_ids, scores, prefix = VOCAB, LENGTH, 1, frozenset(), True, ()

    def counts(self):
        return {}


def test_waiting_requests_forget_pages_of_another_size_and_want_their_scores():
    engine, other = Engine(Still()), Still()
    engine.submit(Request((6, 7, 8), Sampling(max_tokens=1), "r", scored=True))
    [waiting] = engine._queue
    waiting.digests = [b"of a page"]
    other.scores = False
    with pytest.raises(ConfigError, match="Still gives no log-probabilities of a prompt"):
        engine.move(other)
    engine.move(Still())
    assert waiting.digests == []
