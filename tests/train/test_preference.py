"""Preference objectives: values of the papers' formulas in float64, gradients, layouts, cached references."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.special import expit, log_softmax

import jaxscale as js
from jaxscale.errors import ConfigError
from jaxscale.models import TransformerConfig
from jaxscale.nn import Bidirectional
from jaxscale.step import DPO, IPO, KTO, ORPO, SimPO, TrainConfig, describe_model
from jaxscale.step.objective import terms_of
from jaxscale.step.objectives.answers import CACHED
from jaxscale.testing import assert_layouts_agree, check_objective, random_batch, random_params
from tests.truth.errors import raises_saying
from tests.truth.long import short

MODEL = TransformerConfig(vocab=32, depth=1, width=16, heads=2)
ROWS, SEQ = 8, 12
OBJECTIVES = [DPO(0.3), DPO(0.5, label_smoothing=0.1), IPO(0.4), SimPO(2.0, 0.7), ORPO(0.6), KTO(0.3, 1.5, 0.5)]


def log_sigmoid(x):
    return -np.logaddexp(0, -x)


@functools.cache
def batch_of():
    """Prompts of 2 tokens, answers of 3 to 9, and one pair that only pads the batch."""
    random = np.random.default_rng(5)
    batch = random_batch(32, rows=ROWS, seq=SEQ)
    ends = random.integers(5, SEQ, ROWS)
    at = np.arange(SEQ)
    batch["weights"] = ((at >= 2) & (at < ends[:, None])).astype(np.float32)
    batch["weights"][-2:] = 0
    batch["desirable"] = np.repeat(np.array([1, 0, 0, 1], np.float32), 2)
    batch["rows"] = np.arange(ROWS, dtype=np.int32)
    return batch


@functools.cache
def models():
    graphdef, infos = describe_model(MODEL)
    return graphdef, *(jax.tree.map(jnp.asarray, random_params(infos, seed=s)) for s in (1, 2))


@functools.cache
def token_logprobs(which):
    """float64 log-probabilities of the targets, from the model's logits."""
    graphdef, *both = models()
    logits = jax.jit(nnx.merge(graphdef, both[which]))(batch_of()["tokens"])
    every = log_softmax(np.asarray(logits, np.float64), axis=-1)
    return np.take_along_axis(every, batch_of()["targets"][..., None], 2)[..., 0]


def value_of(objective, params, reference):
    batch = batch_of()
    model, base = (nnx.merge(models()[0], p) for p in (params, reference))
    terms = terms_of(objective, model, batch, reference=base)
    totals = terms | objective.weights(batch, 1)
    return objective.value(totals), objective.metrics(totals)


def by_formula(objective, ours, theirs):
    weights = np.asarray(batch_of()["weights"], np.float64)[:-2]
    tokens = weights.sum(1)
    sums, gain = (ours[:-2] * weights).sum(1), ((ours - theirs)[:-2] * weights).sum(1)
    first, second = slice(0, None, 2), slice(1, None, 2)
    match objective:
        case DPO(beta=beta, label_smoothing=wrong):
            margin = beta * (gain[first] - gain[second])
            return np.mean(-(1 - wrong) * log_sigmoid(margin) - wrong * log_sigmoid(-margin))
        case IPO(beta=beta):
            each = gain / tokens
            return np.mean((each[first] - each[second] - 1 / (2 * beta)) ** 2)
        case SimPO(beta=beta, gamma=gamma):
            each = beta * sums / tokens
            return np.mean(-log_sigmoid(each[first] - each[second] - gamma))
        case ORPO(beta=beta):
            odds = np.exp(sums / tokens) / (1 - np.exp(sums / tokens))
            nats = -sums[first].sum() / tokens[first].sum()
            return nats + beta * np.mean(-log_sigmoid(np.log(odds[first] / odds[second])))
        case KTO(beta=beta, desirable_weight=good, undesirable_weight=bad, baseline=baseline):
            z0 = max(gain[second].mean(), 0) if baseline else 0
            desirable = np.asarray(batch_of()["desirable"])[:-2][first] == 1
            loss = good * (1 - expit(beta * (gain[first] - z0))), bad * (1 - expit(beta * (z0 - gain[first])))
            return np.mean(np.where(desirable, *loss))


@pytest.mark.parametrize("swapped", [False, True], ids=["", "swapped"])
@pytest.mark.parametrize("objective", [*OBJECTIVES, KTO(0.3, baseline=False)], ids=str)
def test_values_are_those_of_the_papers(objective, swapped):
    _, *both = models()
    which = (1, 0) if swapped else (0, 1)  # the mean gain is above 0 in one of the two
    value, metrics = jax.jit(functools.partial(value_of, objective))(*(both[i] for i in which))
    want = by_formula(objective, *(token_logprobs(i) for i in which))
    np.testing.assert_allclose(value, want, rtol=2e-5)
    np.testing.assert_allclose(metrics["loss"], want, rtol=2e-5)


@pytest.mark.parametrize("objective", short(3, OBJECTIVES), ids=str)
def test_gradients_are_the_slopes_of_the_papers_formulas(objective):
    """By the chain rule: the formula's slopes by central differences in float64, the log-probabilities' by JAX."""
    graphdef, params, reference = models()
    batch, ours, theirs = batch_of(), token_logprobs(0), token_logprobs(1)
    slopes = np.zeros(ours.shape)
    fixed = None
    if isinstance(objective, KTO):  # z0 has no gradient
        gain = ((ours - theirs) * batch["weights"])[1:-2:2].sum(1).mean()
        assert gain > 0, "the test needs a baseline above 0"
        fixed = gain
    for at in np.argwhere(batch["weights"] > 0):
        sides = []
        for h in (1e-5, -1e-5):
            moved = ours.copy()
            moved[tuple(at)] += h
            if fixed is not None and at[0] % 2:
                moved = ours
            sides.append(by_formula(objective, moved, theirs))
        slopes[tuple(at)] = (sides[0] - sides[1]) / 2e-5

    def linear(params):
        every = jax.nn.log_softmax(nnx.merge(graphdef, params)(batch["tokens"]))
        return jnp.sum(jnp.take_along_axis(every, batch["targets"][..., None], 2)[..., 0] * jnp.asarray(slopes))

    want = jax.jit(jax.grad(linear))(params)
    got = jax.jit(jax.grad(lambda p: value_of(objective, p, reference)[0]))(params)
    norm = np.sqrt(sum(float(jnp.sum(x**2)) for x in jax.tree.leaves(want)))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert float(jnp.linalg.norm(a - b)) < 1e-4 * norm


@pytest.mark.parametrize("objective", short(3, OBJECTIVES), ids=str)
def test_parts_add_up_and_the_value_is_linear(objective):
    config = TrainConfig(model=MODEL, layout=None, seq_len=SEQ, objective=objective, batch_size=ROWS, segments=False)
    check_objective(config, batch_of())


@pytest.mark.parametrize("objective", short(2, [KTO(0.3, cached=True), ORPO(0.6), DPO(0.3, cached=True)]), ids=str)
def test_training_gives_the_same_numbers_on_every_layout(objective):
    cached = np.random.default_rng(3).normal(size=(ROWS, SEQ)).astype(np.float32)
    used = {k: x for k, x in batch_of().items() if k not in ("rows", "desirable")} | {CACHED: cached}
    if isinstance(objective, KTO):
        used["desirable"] = batch_of()["desirable"]
        return _kto_on_layouts(objective, used)
    layouts = [js.Layout("data=2,fsdp=2,tensor=2"), js.Layout("context=2,tensor=2")]
    assert_layouts_agree(MODEL, layouts, batch=used, objective=objective, accumulate=2)
    return None


def _kto_on_layouts(objective, batch):
    from jaxscale.step import blueprint_of, make_loss_and_grads

    results = []
    for layout in (None, js.Layout("data=4,tensor=2")):
        config = TrainConfig(model=MODEL, layout=layout, seq_len=SEQ, objective=objective, batch_size=ROWS, guards=())
        blueprint, _ = blueprint_of(config)
        step = jax.jit(make_loss_and_grads(blueprint, objective=objective, accumulate=1))
        if layout is None:
            results.append(step(models()[1], batch, jax.random.key(0), {}))
        else:
            with layout:
                results.append(step(models()[1], batch, jax.random.key(0), {}))
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("objective", [DPO(0.3), IPO(0.4), KTO(0.3)], ids=str)
def test_cached_log_probabilities_are_those_of_the_reference(objective):
    graphdef, params, reference = models()
    cached = dataclasses.replace(objective, cached=True)
    assert objective.reference and not cached.reference
    batch = {**batch_of(), CACHED: token_logprobs(1).astype(np.float32)}
    terms = terms_of(cached, nnx.merge(graphdef, params), batch, reference=None)
    value = cached.value(terms | cached.weights(batch, 1))
    np.testing.assert_allclose(value, value_of(objective, params, reference)[0], rtol=1e-5)
    assert CACHED in cached.inputs(TrainConfig(seq_len=SEQ)) and CACHED not in objective.inputs(TrainConfig())


def test_padding_rows_have_no_gradient_and_no_nan():
    """A row of padding has the log-probability 0, whose odds are infinite."""
    graphdef, params, reference = models()
    batch = {**batch_of(), "weights": np.zeros((ROWS, SEQ), np.float32)}
    for objective in OBJECTIVES:

        def value(p, objective=objective):
            terms = terms_of(objective, nnx.merge(graphdef, p), batch, reference=nnx.merge(graphdef, reference))
            return objective.value(terms | objective.weights(batch, 1))

        loss, grads = jax.jit(jax.value_and_grad(value))(params)
        assert loss == 0 and not any(np.any(x) for x in jax.tree.leaves(grads)), objective


@pytest.mark.parametrize(
    "make,words",
    [
        (lambda: DPO(beta=0), ("DPO.beta = 0", "above 0")),
        (lambda: DPO(beta="0.1"), ("DPO.beta = '0.1'", "above 0 and finite")),
        (lambda: DPO(label_smoothing=0.5), ("DPO.label_smoothing = 0.5", "below 0.5")),
        (lambda: IPO(beta=float("nan")), ("IPO.beta = nan", "above 0")),
        (lambda: SimPO(gamma=-1.0), ("SimPO.gamma = -1.0", "at least 0")),
        (lambda: ORPO(beta=float("inf")), ("ORPO.beta = inf", "finite")),
        (lambda: KTO(undesirable_weight=-1), ("KTO.undesirable_weight = -1", "at least 0")),
        (lambda: ORPO(loss=DPO), ("ORPO.loss must be a loss such as AutoLoss()",)),
        (lambda: TrainConfig(objective=DPO(), batch_size=5), ("DPO needs groups of 2 rows", "that does is 4")),
        (lambda: TrainConfig(objective=KTO(), accumulate=2), ("KTO needs all rows of a batch", "accumulate")),
        (
            lambda: TrainConfig(model=TransformerConfig(vocab=8, attention=Bidirectional()), objective=ORPO()),
            ("ORPO needs a causal model",),
        ),
    ],
)  # fmt: skip
def test_wrong_settings_are_refused(make, words):
    with raises_saying(ConfigError, *words):
        make()
