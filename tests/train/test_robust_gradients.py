"""Robust aggregation: Flag, median and mean as in NumPy, on every mesh, and with a corrupted replica."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxscale as js
from jaxscale.errors import ConfigError
from jaxscale.layout import Layout
from jaxscale.optim import SGD
from jaxscale.step import RobustGradients, check, prepare
from jaxscale.step.algorithms import Aggregate, Flag, Mean, Median
from tests.truth.errors import raises_saying
from tests.truth.replicas import config, crossing, local_gradients, trained
from tests.truth.runs import assert_same_bits

LAYOUT = Layout("replica=4,fsdp=2")


@dataclasses.dataclass(frozen=True)
class Corrupted(Aggregate):
    """The first replica sends its gradient times -10."""

    inner: Aggregate

    def __call__(self, grads):
        return self.inner(jax.tree.map(lambda g: g.at[0].multiply(-10.0), grads))


def flag(x, dimensions, iterations=4, eps=1e-6):
    """Flag Aggregator of columns (n, replicas) by singular value decompositions, in float64."""
    norms = np.linalg.norm(x, axis=0)
    unit = x / norms
    y = np.linalg.svd(unit, full_matrices=False)[0][:, :dimensions]
    for _ in range(iterations):
        weights = (np.maximum(1 - np.sum((y.T @ unit) ** 2, 0), 0) + eps) ** -0.25
        y = np.linalg.svd(unit * weights, full_matrices=False)[0][:, :dimensions]
    return y @ (y.T @ unit).mean(1) * np.median(norms)


@pytest.mark.parametrize("dimensions", [1, 3])
def test_flag_is_that_of_singular_value_decompositions(dimensions):
    rng = np.random.default_rng(0)
    common = rng.normal(size=(60, 1)) + 0.7 * rng.normal(size=(60, 8))
    common[:, :2] *= -10
    tree = {"a": common[:20].T.reshape(8, 4, 5), "b": common[20:].T}
    got = jax.jit(Flag(dimensions))(jax.tree.map(np.float32, tree))
    want = flag(common, dimensions)
    np.testing.assert_allclose(np.concatenate([np.ravel(got["a"]), got["b"]]), want, rtol=2e-3, atol=2e-4)
    honest = common[:, 2:].mean(1)

    def cosine(x):
        return x @ honest / np.linalg.norm(x) / np.linalg.norm(honest)

    assert cosine(want) > 0.9 and cosine(common.mean(1)) < -0.5


@pytest.mark.parametrize("aggregate", [Median(), Flag()], ids=str)
def test_a_replica_that_sends_nan_or_infinity_does_not_spoil_the_others(aggregate):
    rows = np.ones((4, 3), np.float32)
    for wrong in (np.nan, np.inf):
        np.testing.assert_allclose(
            aggregate({"a": np.vstack([rows, np.full((1, 3), wrong, np.float32)])})["a"], 1, atol=0.25
        )


@pytest.mark.parametrize(
    ("aggregate", "wrong"),
    [
        (Flag(), 1),
        (Mean(), 1),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((Median(), 1), (Median(), 4))),
    ],
    ids=str,
)
def test_a_replica_whose_loss_is_nan_does_not_stop_training(aggregate, wrong):
    """Its rows have weights that are NaN, so that loss and gradients are; `FiniteGuard` is in force."""
    prepared = prepare(one := config(algorithm=RobustGradients(4, aggregate), layout=Layout("replica=2"), steps=2))
    with one.layout:
        state, step = prepared.blueprint.init(0), prepared.step_of(one)
        before = jax.tree.map(np.array, state.params)
        batch = prepared.loader.batch_at(0)
        healthy = step(jax.tree.map(jnp.copy, state), prepared.place(lambda i: batch, 0))[1]
        damaged = {**batch, "weights": batch["weights"].copy()}
        damaged["weights"][: 2 * wrong] = np.nan
        state, metrics = step(state, prepared.place(lambda i: damaged, 0))
    moved = any(map(lambda a, b: not np.array_equal(a, b), *map(jax.tree.leaves, (before, state.params))))
    trains = aggregate != Mean() and wrong < 4
    assert moved == trains == bool(np.isfinite(metrics["loss"]) and np.isfinite(metrics["grad_norm"]))
    assert metrics["replicas_not_finite"] == wrong and healthy["replicas_not_finite"] == 0
    if wrong == 1:
        assert abs(metrics["loss"] - healthy["loss"]) < 0.1 * healthy["loss"], "the mean of the other three"
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))


@pytest.mark.parametrize("aggregate", [Mean(), Median(), Flag(2)], ids=str)
@pytest.mark.parametrize(
    "layout", [LAYOUT, *(pytest.param(x, marks=pytest.mark.long) for x in (Layout("replica=2"), None))], ids=str
)
def test_a_step_uses_the_aggregated_gradient(aggregate, layout):
    algorithm = RobustGradients(replicas=4, aggregate=Corrupted(aggregate))
    params, gradient = local_gradients()
    grads = [gradient(r, 0, params, rows=2) for r in range(4)]
    grads[0] = {k: -10 * g for k, g in grads[0].items()}
    columns = np.stack([np.concatenate([g[k].ravel() for k in params]) for g in grads], 1)
    one = {Mean(): columns.mean(1), Median(): np.median(columns, 1), Flag(2): flag(columns, 2)}[aggregate]
    state = trained(layout, 1, algorithm=algorithm, optimizer=SGD(), lr=1.0, clip_norm=None)
    for (k, first), end in zip(params.items(), np.split(one, 2), strict=True):
        moved = first - np.asarray(state.params[k]["weight"])
        assert np.linalg.norm(moved - end.reshape(first.shape)) < 1e-3 * np.linalg.norm(end)


def test_the_bytes_stated_are_those_of_the_program_and_of_an_all_reduce():
    exchanged, stated = crossing(Layout("replica=4,tensor=2"), algorithm=RobustGradients(replicas=4))
    large = [c for c in exchanged if c.payload >= 256]  # without the inner products of 4 gradients
    assert sum(c.sent for c in large) == stated == 2 * (2 * 32 * 8 * 4 // 2) * 3 // 4
    assert {c.kind for c in large} == {"all-to-all", "all-gather"}


@pytest.mark.long
def test_a_run_that_stops_and_goes_on_has_the_same_bits(tmp_path):
    one = config(algorithm=RobustGradients(replicas=4), layout=Layout("replica=2"))
    js.fit(one, run=tmp_path / "run", until=3, quiet=True)
    run = js.fit(run=tmp_path / "run", resume=True, quiet=True)
    assert_same_bits(run.state, trained(one.layout, algorithm=one.algorithm))


def test_what_does_not_fit_is_refused():
    with raises_saying(ConfigError, "RobustGradients.aggregate = 'median'", "Median()"):
        RobustGradients(aggregate="median")
    with raises_saying(ConfigError, "Flag.dimensions = 4", "below RobustGradients.replicas = 4"):
        RobustGradients(replicas=4, aggregate=Flag(4))
    with raises_saying(ConfigError, "Flag.eps = 0"):
        Flag(eps=0.0)
    with raises_saying(ConfigError, "train.batch_size = 8", "set it to 16"):
        check(config(algorithm=RobustGradients(replicas=16)))
