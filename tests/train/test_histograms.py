"""Histograms of parameters and gradients: the counts are NumPy's, on any layout, and each tracker gets them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxscale as js
from jaxscale.errors import ConfigError
from jaxscale.step import Histograms, TrackedRun, Tracker, Tracking, histograms, make_loss_and_grads
from jaxscale.step.histograms import count, on_host
from jaxscale.train import read_config
from jaxscale.train.plot import plot_histograms
from jaxscale.train.tracking import Trackers
from tests.truth.errors import raises_saying
from tests.truth.runs import bigram

RANDOM = np.random.default_rng(0)
NORMAL = RANDOM.standard_normal((8, 6, 4)).astype(np.float32)
BROKEN = np.where(RANDOM.random(NORMAL.shape) < 0.1, np.float32(np.nan), NORMAL)
BROKEN[0, 0, :3] = np.inf, -np.inf, np.nan
TENSORS = {
    "normal": NORMAL,
    "near one": 1 + NORMAL * np.float32(2e-7),
    "largest": np.clip(NORMAL, -1, 1) * np.float32(3.4e38),
    "equal": np.full((8, 4), 0.25, np.float32),
    "zeros": np.zeros((8,), np.float32),
    "broken": BROKEN,
    "nothing finite": np.full((8, 2), np.nan, np.float32),
    "bfloat16": NORMAL.astype(jnp.bfloat16),
    "scalar": np.float32(3),
}


@js.config.register(name="TestKept")
@dataclasses.dataclass(frozen=True)
class Kept(Tracker):
    """Keeps histograms.

    Args:
      fails: whether each raises.
    """

    fails: bool = False
    steps = {}

    def start(self, run):
        return Steps(self)


class Steps(Tracking):
    def __init__(self, tracker):
        self.tracker = tracker

    def log(self, step, row):
        pass

    def histograms(self, step, histograms):
        if self.tracker.fails:
            raise OSError("no network")
        self.tracker.steps[step] = dict(histograms)


@pytest.fixture(autouse=True)
def no_steps():
    Kept.steps.clear()


def by_numpy(x, edges):
    x = np.asarray(x, np.float32)
    return np.histogram(x[np.isfinite(x)], bins=edges)[0]


def counted(x, bins=16):
    return jax.device_get(jax.jit(lambda x: count(x, bins))(x))


@pytest.mark.parametrize("name", TENSORS)
def test_counts_are_those_of_numpy(name):
    x = TENSORS[name]
    one = on_host({name: counted(x)})[name]
    finite = np.asarray(x, np.float32)[np.isfinite(np.asarray(x, np.float32))]
    np.testing.assert_array_equal(one.counts, by_numpy(x, one.edges))
    assert one.counts.sum() == finite.size and one.nonfinite == np.size(x) - finite.size
    with np.errstate(over="ignore"):
        edges = np.histogram_bin_edges(finite.astype(np.float64), 16) if finite.size else np.linspace(-0.5, 0.5, 17)
    np.testing.assert_allclose(one.edges, edges, rtol=3e-7, atol=3e-7 * np.abs(edges).max())


def test_counts_do_not_depend_on_the_layout_and_no_tensor_is_gathered():
    mesh = jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4])
    whole, cut = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in ((), ("a", "b")))
    tensors = {name: x for name, x in TENSORS.items() if np.ndim(x) == 3}
    program = jax.jit(lambda t: jax.tree.map(lambda x: count(x, 16), t), out_shardings=whole)
    program = program.lower(jax.device_put(tensors, cut)).compile()
    sharded, alone = program(jax.device_put(tensors, cut)), {name: counted(x) for name, x in tensors.items()}
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(sharded), alone)
    text = program.as_text()
    assert "all-reduce" in text and not [c for c in ("all-gather", "all-to-all", "collective-permute") if c in text]


def test_counts_of_a_large_tensor_are_summed_on_the_host(monkeypatch):
    expected = on_host({"x": counted(BROKEN)})["x"]
    monkeypatch.setattr(histograms, "LARGE", 100)
    parts = counted(BROKEN)
    assert parts["counts"].shape == (8, 16) and parts["nonfinite"].shape == (8,)
    summed = on_host({"x": parts})["x"]
    np.testing.assert_array_equal(summed.counts, expected.counts)
    assert summed.nonfinite == expected.nonfinite > 0


def test_a_run_sends_histograms_of_the_named_tensors():
    chosen = Histograms(params=("embed",), grads=("he*",), every=1, bins=16)
    config = js.TrainConfig(**bigram(trackers=(Kept(),), histograms=chosen, steps=2))
    run = js.fit(config, run="here", quiet=True, resume="newest")
    assert [(step, set(of)) for step, of in Kept.steps.items()] == [
        (step, {"params/embed/weight", "grads/head/weight"}) for step in (1, 2)
    ]
    prepared = js.step.prepare(config)
    batch, params = prepared.place(prepared.loader, 0), prepared.blueprint.init(config.seed).params
    grads = jax.jit(make_loss_and_grads(prepared.blueprint))(params, batch, jax.random.key(0))[1]
    for step, name, tensor in (
        (1, "grads/head/weight", grads["head"]["weight"]),
        (2, "params/embed/weight", run.trained()["embed"]["weight"]),
    ):
        one = Kept.steps[step][name]
        np.testing.assert_array_equal(one.counts, by_numpy(tensor, one.edges))
    assert read_config(run.path) == run.config


@pytest.mark.long
def test_gradients_that_are_not_finite_are_counted():
    class Broken(js.step.NextToken):
        def value(self, sums):
            return super().value(sums) * jnp.nan

    js.config.register(Broken)
    chosen = Histograms(params=(), grads=("*",), every=1)
    js.fit(run="here", quiet=True, **bigram(trackers=(Kept(),), histograms=chosen, objective=Broken(), steps=1))
    one = Kept.steps[1]["grads/head/weight"]
    assert one.nonfinite == 32 * 8 and one.counts.sum() == 0


@pytest.mark.long
@pytest.mark.parametrize("algorithm, mesh", [(js.step.WeightEMA(), "fsdp=2"), (js.step.LocalSteps(), "replica=2")])
def test_other_algorithms_have_histograms_on_any_layout(algorithm, mesh):
    more = dict(algorithm=algorithm, layout=js.Layout(mesh), histograms=Histograms(grads=("*",), every=4))
    js.fit(run="here", quiet=True, **bigram(trackers=(Kept(),), **more))
    copies = getattr(algorithm, "replicas", 1)
    assert {k: h.counts.sum() for k, h in Kept.steps[4].items()} == dict.fromkeys(
        ("params/embed/weight", "params/head/weight", "grads/embed/weight", "grads/head/weight"), 32 * 8 * copies
    )


def test_a_name_that_matches_nothing_is_an_error_before_training():
    with raises_saying(ConfigError, "Histograms.grads has 'hed', which no trained parameter matches", "'head'"):
        js.fit(run="here", **bigram(trackers=(Kept(),), histograms=Histograms(grads=("hed",))))
    assert not js.Run("here").path.exists()


def test_gradients_of_an_algorithm_without_any_are_an_error_before_training():
    chosen = Histograms(grads=("head",))
    with raises_saying(ConfigError, "Histograms.grads: the algorithm of this run", "remove Histograms.grads"):
        js.fit(run="here", **bigram(trackers=(Kept(),), histograms=chosen, algorithm=js.step.MeZO()))
    assert not js.Run("here").path.exists()
    js.step.check(js.TrainConfig(**bigram(trackers=(Kept(),), histograms=Histograms(), algorithm=js.step.MeZO())))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"params": "embed"}, "Histograms.params = 'embed': must be a tuple of names"),
        ({"params": ()}, "Histograms.params and Histograms.grads are empty"),
        ({"every": 0}, "Histograms.every = 0: must be a whole number of at least 1"),
        ({"bins": 513}, "Histograms.bins = 513: must be a whole number of at least 1, and at most 512"),
        ({"bins": 2.5}, "Histograms.bins = 2.5: must be a whole number"),
    ],
)
def test_settings_of_a_wrong_type_or_range_are_errors(settings, message):
    with raises_saying(ConfigError, message):
        Histograms(**settings)


def test_what_is_not_histograms_is_an_error():
    with raises_saying(ConfigError, "train.histograms must be Histograms() or None, not the class Histograms"):
        js.TrainConfig(histograms=Histograms)


def test_histograms_without_trackers_are_a_warning(caplog):
    js.step.check(js.TrainConfig(**bigram(histograms=Histograms())))
    assert "train.histograms = " in caplog.text and "there are no trackers (train.trackers)" in caplog.text


def test_a_tracker_that_raises_loses_its_histograms_and_no_other_does(tmp_path):
    run, warnings = TrackedRun("0123456789abcdef", "run", tmp_path), []
    trackers = Trackers((Kept(fails=True), Kept()), run, warnings.append)
    for step in (2, 4):
        trackers.histograms(step, on_host({"x": counted(NORMAL)}))
    trackers.finish("finished")
    assert list(Kept.steps) == [2, 4]
    assert warnings[0].startswith("Kept failed to take the histograms of step 2 (OSError: no network)")
    assert warnings[1:] == ["the histograms of 2 steps did not reach Kept; metrics.jsonl has all rows"]


def test_histograms_are_drawn():
    drawn = plot_histograms(on_host({name: counted(x) for name, x in TENSORS.items()}), "step 1")
    assert drawn.dtype == np.uint8 and drawn.ndim == 3 and drawn.std() > 10
