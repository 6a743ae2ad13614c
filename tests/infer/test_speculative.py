"""With a draft, text is the large model's own: identical for greedy decoding, distributed alike for sampling."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxscale as js
from jaxscale.errors import ConfigError
from jaxscale.infer.drafters import distribution
from jaxscale.infer.engine import Engine, Request
from jaxscale.infer.loaded import Loaded
from jaxscale.infer.sampling import Sampling, SamplingArrays
from jaxscale.infer.speculative import WithDraft
from jaxscale.infer.speculative_round import verify
from jaxscale.layout import shardings_of
from jaxscale.step import describe_model
from tests.truth.compiled import nothing_is_compiled
from tests.truth.errors import raises_saying
from tests.truth.long import short
from tests.truth.params import random_params

LARGE = js.models.Transformer.Config(depth=2, vocab=64, width=32, heads=4, kv_heads=4, hidden=64)
# fewer ids than the texts contain
SMALL = js.models.Transformer.Config(depth=1, vocab=60, width=16, heads=4, kv_heads=4, hidden=32)
LENGTH = 96


def _loaded(config, layout=None, seed=0):
    graphdef, infos = describe_model(config)
    params, shardings = random_params(infos, seed=seed), shardings_of(infos, layout)
    return Loaded(graphdef, params if shardings is None else jax.device_put(params, shardings), layout, 0)


@pytest.fixture(scope="module")
def large():
    return _loaded(LARGE)


@pytest.fixture(scope="module")
def small():
    return _loaded(SMALL, seed=1)


def _generate(target, draft, prompts, settings, **options):
    """Tokens and log-probabilities of each, and the engine."""
    engine = Engine(WithDraft(target, draft, **{"length": LENGTH, "rows": 6, **options}))
    for i, (prompt, s) in enumerate(zip(prompts, settings, strict=True)):
        engine.submit(Request(tuple(prompt), s, i))
    out = collections.defaultdict(list)
    while engine.busy:
        for event in engine.step():
            out[event.id].append(event)
    return [out[i] for i in range(len(prompts))], engine


@functools.cache
def _logits(graphdef):
    return jax.jit(lambda params, ids: nnx.merge(graphdef, params)(ids))


def _plain(target, prompt, n, penalty=1.0):
    """The likeliest tokens, each from a pass over the whole text."""
    logits = _logits(target.graphdef)
    ids, logprobs = list(prompt), []
    for _ in range(n):
        row = np.zeros((1, LENGTH), np.int32)
        row[0, : len(ids)] = ids
        x = np.asarray(logits(target.params, row)[0, len(ids) - 1], np.float64)
        seen = np.isin(np.arange(len(x)), ids)
        shaped = np.where(seen, np.where(x > 0, x / penalty, x * penalty), x)
        ids.append(int(np.argmax(shaped)))
        logprobs.append(x[ids[-1]] - np.log(np.exp(x).sum()))
    return ids[len(prompt) :], logprobs


PROMPTS = [[1], [5, 6, 7], np.random.default_rng(0).integers(0, 64, 70).tolist(), [9] * 20, [3, 4], [62]]


def test_greedy_text_is_that_of_the_large_model_alone(large, small):
    lengths, penalties = [20, 1, 13, 7, 2, 16], [1.0, 1.3, 1.2, 1.0, 1.5, 1.4]
    each = list(zip(lengths, penalties, strict=True))
    settings = [Sampling(max_tokens=n, temperature=0, repetition_penalty=x) for n, x in each]
    results, engine = _generate(large, small, PROMPTS, settings)
    for prompt, (n, x), events in zip(PROMPTS, each, results, strict=True):
        tokens, logprobs = _plain(large, prompt, n, x)
        assert [e.token for e in events] == tokens
        np.testing.assert_allclose([e.logprob for e in events], logprobs, atol=1e-4)
        assert [e.finished for e in events] == [None] * (n - 1) + ["length"]
    assert 0 < engine.stats.accepted < engine.stats.proposed  # so that both acceptance and rejection are tested


@pytest.mark.long
def test_a_model_accepts_all_of_its_own_proposals(large):
    settings = [Sampling(max_tokens=11, temperature=t) for t in (0, 1, 0.5, 0, 2, 1)]
    _, engine = _generate(large, large, PROMPTS, settings)
    assert engine.stats.acceptance == 1 and engine.stats.tokens_out == 66


@pytest.mark.long
def test_a_layout_changes_no_greedy_text(large, small):
    layout = js.Layout("data=2,tensor=2,context=2")
    settings = [Sampling(max_tokens=9, temperature=0)] * 3
    expected, _ = _generate(large, small, PROMPTS[:3], settings)
    results, _ = _generate(_loaded(LARGE, layout), _loaded(SMALL, layout, seed=1), PROMPTS[:3], settings)
    assert [[e.token for e in x] for x in results] == [[e.token for e in x] for x in expected]


def test_an_end_ends_a_text_within_a_round(large, small):
    tokens, _ = _plain(large, [1], 20)
    end = tokens[6]
    (events,), _ = _generate(large, small, [[1]], [Sampling(max_tokens=20, temperature=0)], end_ids=[end])
    assert [e.token for e in events] == tokens[: tokens.index(end) + 1] and events[-1].finished == "stop"
    on = Sampling(max_tokens=20, temperature=0, ignore_end=True, logprobs=3)
    (events,), _ = _generate(large, small, [[1]], [on], end_ids=[end])
    assert [e.token for e in events] == tokens
    assert all(e.top[0] == (e.token, pytest.approx(e.logprob)) and len(e.top) == 3 for e in events)


def test_a_cancelled_sequence_frees_its_slot(large, small):
    engine = Engine(WithDraft(large, small, length=LENGTH, rows=6))
    for i in range(8):
        engine.submit(Request((1 + i,), Sampling(max_tokens=30 if i in (0, 6) else 3, temperature=0), i))
    while not [e for e in engine.step() if e.id == 0]:
        pass
    engine.cancel(0), engine.cancel(7)
    events = []
    while engine.busy:
        events += engine.step()
    ends = {e.id: e.finished for e in events if e.finished}
    assert (ends[0], ends[7], ends[6]) == ("cancelled", "cancelled", "length")
    assert [e.token for e in events if e.id == 6] == _plain(large, [7], 30)[0]


@pytest.mark.long
def test_no_request_compiles_anything_after_the_first():
    """Every kind of request, alone and all together."""
    models = [_loaded(dataclasses.replace(c, hidden=40)) for c in (LARGE, SMALL)]  # that no other test has compiled
    engine = Engine(WithDraft(*models, length=LENGTH, rows=4, draft_tokens=2))
    ways: list[dict] = [
        {"temperature": 0.0},
        {"repetition_penalty": 1.5},
        {"top_k": 5, "top_p": 0.5, "min_p": 0.1, "seed": 2**32 - 1},
        {"logprobs": 20, "repetition_penalty": 0.5, "ignore_end": True},
    ]

    def run(requests):
        for request in requests:
            engine.submit(request)
        while engine.busy:
            engine.step()

    run([Request((5, 6, 7), Sampling(max_tokens=4), -1)])
    requests = [Request((5, 6, 7), Sampling(**{"max_tokens": 4} | way), n) for n, way in enumerate(ways)]
    with nothing_is_compiled():
        for group in (*([r] for r in requests), requests):
            run(group)
    assert engine.stats.tokens_out == 4 * 9


# --- distribution -----------------------------------------------------------------------------------------------------


def _draws(p, q, n=200_000):
    """The token after verifying one proposal from q against p, and whether the proposal was accepted, n times."""
    seeds = jnp.arange(n, dtype=jnp.uint32)
    key = lambda s: jax.random.fold_in(jax.random.key(7), s)  # noqa: E731
    proposed = jax.vmap(lambda s: jax.random.categorical(key(s), jnp.log(q)))(seeds)[:, None].astype(jnp.int32)
    wide = lambda x, m: jnp.broadcast_to(x, (n, m, len(x)))  # noqa: E731
    at = jnp.zeros(n, jnp.int32)
    accepted, token = verify(wide(p, 2), wide(q, 1), proposed, at + 1, seeds, at)
    return np.asarray(jnp.where(accepted > 0, proposed[:, 0], token)), np.asarray(accepted)


def test_a_verified_token_is_distributed_as_the_large_models_and_accepted_as_often_as_the_two_agree():
    p, q = np.array([0.5, 0.0, 0.2, 0.3], np.float32), np.array([0.1, 0.4, 0.2, 0.3], np.float32)
    tokens, accepted = _draws(jnp.asarray(p), jnp.asarray(q))
    counts = np.bincount(tokens, minlength=4)
    assert counts[1] == 0
    np.testing.assert_allclose(counts / len(tokens), p, atol=5 * np.sqrt(0.25 / len(tokens)))
    np.testing.assert_allclose(accepted.mean(), np.minimum(p, q).sum(), atol=5 * np.sqrt(0.25 / len(tokens)))


def _joint(target, prompt, n, s):
    """Probability of each continuation of n tokens, by enumeration."""
    vocab = target.params["head"]["weight"].shape[0]
    texts = list(itertools.product(range(vocab), repeat=n))
    ids = np.asarray([[*prompt, *t] for t in texts], np.int32)
    logits = _logits(target.graphdef)(target.params, ids)
    sampling = SamplingArrays.of([s] * len(ids), vocab)
    total = np.ones(len(ids))
    for i in range(n):
        p = np.asarray(distribution(logits[:, len(prompt) - 1 + i], sampling, None), np.float64)
        total *= p[np.arange(len(ids)), ids[:, len(prompt) + i]]
    return dict(zip(texts, total, strict=True))


@pytest.mark.long
@pytest.mark.parametrize("own", [False, pytest.param(True, marks=pytest.mark.long)])
def test_texts_are_distributed_as_the_large_models(own):
    """Every text of three tokens of a vocabulary of five, drawn 6000 times, against its probability."""
    few = dict(depth=1, vocab=5, width=16, heads=2, hidden=16, multi_token=int(own))
    target, draft = (_loaded(js.models.Transformer.Config(**few), seed=seed) for seed in (3, 4))
    draft = None if own else draft
    n, options = 6000, {"temperature": 3.0, "top_k": 4}
    s = Sampling(max_tokens=3, **options)
    joint = _joint(target, [1, 2], 3, s)
    settings = [Sampling(max_tokens=3, seed=i, **options) for i in range(n)]
    results, engine = _generate(target, draft, [[1, 2]] * n, settings, rows=n, length=8, draft_tokens=2)
    counts = collections.Counter(tuple(e.token for e in events) for events in results)
    likely = [t for t, p in joint.items() if p * n >= 5]
    other = n - sum(counts[t] for t in likely)
    expected = np.array([*(joint[t] * n for t in likely), n - sum(joint[t] * n for t in likely) + 1e-9])
    observed = np.array([*(counts[t] for t in likely), other])
    chi = np.sum((observed - expected)[expected > 1] ** 2 / expected[expected > 1])
    freedom = np.sum(expected > 1) - 1
    assert chi < freedom + 5 * np.sqrt(2 * freedom)
    assert all(joint[t] > 0 for t in counts)
    assert 0.2 < engine.stats.acceptance < 0.98


def test_a_text_depends_on_its_seed_and_not_on_its_company(large, small):
    s = [Sampling(max_tokens=12, seed=i) for i in range(6)]
    together, _ = _generate(large, small, PROMPTS, s)
    for i in (0, 2, 5):
        (alone,), _ = _generate(large, small, PROMPTS[i : i + 1], s[i : i + 1])
        assert [e.token for e in alone] == [e.token for e in together[i]]
    other, _ = _generate(large, small, PROMPTS[:1], [Sampling(max_tokens=12, seed=77)])
    assert [e.token for e in other[0]] != [e.token for e in together[0]]


def test_wrong_requests_and_sizes_are_errors(large, small):
    engine = Engine(WithDraft(large, small, length=8, rows=1))
    engine.submit(Request((1,), Sampling(max_tokens=2)))
    for request, words in [
        (Request((1,), Sampling(max_tokens=2)), ["request id 0", "another id"]),
        (Request((1, 2, 3), Sampling(max_tokens=6), 1), ["3 tokens", "at most 5"]),
        (Request((64,), Sampling(max_tokens=2), 1), ["token id 64", "from 0 to 63"]),
    ]:
        with raises_saying(ConfigError, *words):
            engine.submit(request)
    with raises_saying(ConfigError, "draft_tokens = 0"):
        WithDraft(large, small, draft_tokens=0)
    dropping = dataclasses.replace(SMALL, mlp=js.nn.MixtureOfExperts(experts=4, capacity=1.0))
    with raises_saying(ConfigError, "capacity = 1.0 drops tokens"):
        WithDraft(large, _loaded(dropping))


# of few ids, so that many proposals of random modules are right
FEW = [[1], [1, 2, 3], np.random.default_rng(0).integers(0, 4, 70).tolist(), [0, 3], [2, 2]]
GREEDY = [Sampling(max_tokens=n, temperature=0) for n in (20, 13, 17, 1, 18)]


def _accepted(target, texts, prompts, most):
    """How many proposals are accepted, by the modules on whole texts."""
    model, accepted = nnx.merge(target.graphdef, target.params), 0
    for text, prompt in zip(texts, prompts, strict=True):
        ids, n = jnp.asarray([[*prompt, *text]], jnp.int32), len(prompt)
        ahead, _ = model.hidden_ahead(model.hidden(ids), [jnp.roll(ids, -k, axis=1) for k in range(1, most + 1)])
        likeliest = [np.argmax(np.asarray(x[0] @ model.head_weight().T), axis=-1) for x in ahead]
        while n < ids.shape[1]:
            right = 0
            while n > 1 and right < min(most, ids.shape[1] - n - 1) and likeliest[right][n - 2] == ids[0, n + right]:
                right += 1
            accepted, n = accepted + right, n + right + 1
    return accepted


@pytest.mark.long
@pytest.mark.parametrize("modules", short(1, [2, 1]))
def test_own_modules_propose_what_they_predict_of_whole_texts(modules):
    target = _loaded(dataclasses.replace(LARGE, vocab=4, multi_token=modules), seed=5)
    results, engine = _generate(target, None, FEW, GREEDY, draft_tokens=modules)
    texts = [[e.token for e in events] for events in results]
    assert texts == [_plain(target, p, s.max_tokens)[0] for p, s in zip(FEW, GREEDY, strict=True)]
    assert 0 < engine.stats.accepted == _accepted(target, texts, FEW, modules) < engine.stats.proposed


@pytest.mark.long
@pytest.mark.parametrize(
    ("modules", "most", "mixer", "mesh"),
    short(
        1,
        [
            (1, 3, None, "data=2,tensor=2,context=2"),
            (2, 1, None, None),
            (2, 4, js.nn.GatedDeltaNet(heads=2), None),
            (1, 3, js.nn.GatedDeltaNet(heads=2), "data=2,tensor=2"),
        ],
    ),
)
def test_own_modules_change_no_greedy_text(modules, most, mixer, mesh):
    config = dataclasses.replace(LARGE, vocab=4, multi_token=modules)
    if mixer is not None:
        config = dataclasses.replace(config, blocks=(js.models.BlockConfig(), js.models.BlockConfig(mixer=mixer)))
    target = _loaded(config, None if mesh is None else js.Layout(mesh), 5)
    results, engine = _generate(target, None, FEW, GREEDY, draft_tokens=most)
    for prompt, s, events in zip(FEW, GREEDY, results, strict=True):
        assert [e.token for e in events] == _plain(_loaded(config, None, 5), prompt, s.max_tokens)[0]
    assert 0 < engine.stats.accepted < engine.stats.proposed


def test_a_model_without_such_modules_does_not_draft(large):
    with raises_saying(ConfigError, "draft = 'mtp'", "Transformer.multi_token = 1", "smaller model"):
        WithDraft(large, None)
    with raises_saying(ConfigError, "draft = 'mtp'", "pipeline"):
        WithDraft(_loaded(dataclasses.replace(LARGE, multi_token=1), js.Layout("pipeline=2")), None)
