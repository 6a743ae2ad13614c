"""Callbacks are called at their places, and `jaxscale.log` adds metrics from them and from objectives."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxscale as js
from jaxscale.errors import ConfigError, RunError
from jaxscale.step import NextToken
from jaxscale.train import read_config
from tests.truth.errors import raises_saying
from tests.truth.runs import bigram


def fit(callback=None, **changes):
    callbacks = () if callback is None else (callback,)
    options = {name: changes.pop(name) for name in ("run", "until", "resume") if name in changes}
    return js.fit(js.TrainConfig(**bigram(callbacks=callbacks, **changes)), quiet=True, **options)


@js.config.register
@dataclasses.dataclass(frozen=True)
class Calls:
    """Collects its calls.

    Args:
      stop_at: the step at which it requests a stop.
    """

    stop_at: int = 0
    calls: list = dataclasses.field(default_factory=list, init=False, repr=False, compare=False)

    def on_step(self, step, row, run):
        self.calls.append(("step", step, row["loss"], run.step))
        if step == self.stop_at:
            run.stop()

    def on_evaluation(self, step, row, run):
        self.calls.append(("evaluation", step, row["eval_loss"], run.step))

    def on_checkpoint(self, step, row, run):
        self.calls.append(("checkpoint", step, jax.device_get(run.params), run.step))

    def on_end(self, step, row, run):
        self.calls.append(("end", step, row["loss"], run.step))


def test_calls_come_in_order_with_the_rows_and_parameters_of_their_steps():
    run = fit(callback := Calls(), eval_every=2, eval_batches=1, checkpoint_every=2)
    order = [(name, step) for name, step, *_ in callback.calls]
    assert order == [
        ("step", 1), ("step", 2), ("evaluation", 2), ("checkpoint", 2), ("step", 3), ("step", 4), ("evaluation", 4),
        ("checkpoint", 4), ("end", 4),
    ]  # fmt: skip
    assert all(step == at for _, step, _, at in callback.calls)
    assert [loss for name, _, loss, _ in callback.calls if name == "step"] == [r["loss"] for r in run.metrics()]
    for saved in (2, 4):
        (params,) = [x for name, step, x, _ in callback.calls if (name, step) == ("checkpoint", saved)]
        jax.tree.map(np.testing.assert_array_equal, params, jax.device_get(run.trained(saved)))
    assert read_config(run.path).callbacks == (Calls(),)


@pytest.mark.long
def test_a_callback_stops_the_run_and_it_resumes():
    run = fit(Calls(stop_at=1), run="here", steps=6)
    assert run.info["status"] == "stopped" and run.last_step() == 2
    assert fit(Calls(), run="here", steps=6, resume=True).last_step() == 6


def test_an_error_in_a_callback_ends_the_run_and_names_it():
    class Broken:
        def on_step(self, step, row, run):
            row["mine"] = 1

    with pytest.raises(TypeError) as e:
        fit(Broken(), run="here")
    assert e.value.__notes__ == ["raised by the callback Broken, in on_step of step 1"]
    info = js.Run("here").info
    assert info["status"] == "failed" and info["error"].endswith("raised by the callback Broken, in on_step of step 1")


def test_parameters_are_not_available_after_the_call():
    class Keeps:
        def on_step(self, step, row, run):
            self.run = run

    fit(keeps := Keeps(), steps=1)
    with raises_saying(RunError, "used after the call; copy what you need with jax.device_get"):
        _ = keeps.run.params


class Misspelt:
    def on_eval(self, step, row, run): ...


class Other:
    def on_step(self, state): ...


@pytest.mark.parametrize(
    "value, message",
    [
        (Calls(), "must be a tuple of callbacks"),
        ((Calls,), "has the class Calls; write Calls()"),
        ((Misspelt(),), "Misspelt.on_eval is never called; did you mean 'on_evaluation'"),
        ((Other(),), "it is called as (step, row, run)"),
        (("x",), "has no method of a callback; define one of on_step, on_evaluation, on_checkpoint, on_end"),
    ],
)
def test_what_is_no_callback_is_an_error(value, message):
    with raises_saying(ConfigError, message):
        js.TrainConfig(callbacks=value)


class Logs:
    def __init__(self, **values):
        self.values = values

    def on_step(self, step, row, run):
        js.log(self.values)


def test_a_callback_logs_numbers():
    run = fit(Logs(mine=2.5, whole=jnp.int32(3)), steps=2)
    assert [(row["mine"], row["whole"]) for row in run.metrics()] == [(2.5, 3.0)] * 2


@pytest.mark.parametrize(
    "values, message",
    [
        ({"loss": 1.0}, "the metric 'loss' is one that training writes itself"),
        ({"eval_x": 1.0}, "the metric 'eval_x' is one that training writes itself"),
        ({"saving_seconds": 1.0}, "the metric 'saving_seconds' is one that training writes itself"),
        ({"x": "high"}, "the metric 'x' is 'high'; log a real scalar"),
        ({"x": np.zeros(3)}, "log a real scalar"),
        ({"x": 1j}, "log a real scalar"),
    ],
)
def test_metrics_that_cannot_be_logged_are_errors(values, message):
    with raises_saying(ConfigError, message):
        fit(Logs(**values), steps=1)


def test_logging_twice_or_nowhere_or_too_late_is_an_error():
    with raises_saying(RunError, "jaxscale.log works in a callback, and in Objective.terms"):
        js.log({"x": 1.0})
    config = js.TrainConfig(**bigram(callbacks=(Logs(x=1.0), Logs(x=2.0))))
    with raises_saying(ConfigError, "the step has a metric 'x' already"):
        js.fit(config, quiet=True)

    class Late:
        def on_end(self, step, row, run):
            js.log({"x": 1.0})

    with raises_saying(ConfigError, "jaxscale.log in on_end is too late"):
        fit(Late())


@dataclasses.dataclass(frozen=True)
class Mean(NextToken):
    name: str = "mean_id"

    def terms(self, model, batch, *, key=None, reference=None):
        js.log({self.name: jnp.mean(batch["targets"])})
        return super().terms(model, batch, key=key)


@pytest.mark.parametrize(
    "changes",
    [
        {"accumulate": 2, "layout": js.Layout("data=4")},
        pytest.param({}, marks=pytest.mark.long),
        pytest.param({"algorithm": js.step.LocalSteps(2, every=2), "layout": js.Layout("replica=2,data=2")},
                     marks=pytest.mark.long),
    ],
    ids=["accumulate, data=4", "one device", "local steps"],
)  # fmt: skip
def test_an_objective_logs_the_mean_over_the_batch(changes):
    config = js.TrainConfig(**bigram(objective=Mean(), steps=2, eval_batches=1) | changes)
    rows = js.fit(config, quiet=True).metrics()
    loader = js.step.prepare(config).loader
    means = [np.mean(loader.batch_at(step)["targets"]) for step in range(2)]
    assert [row["mean_id"] for row in rows] == [pytest.approx(mean, rel=1e-6) for mean in means]


def test_an_objective_that_logs_is_refused_on_pipeline_stages():
    model = js.models.Transformer.Config(vocab=32, depth=2, width=16, heads=2, hidden=32)
    with raises_saying(ConfigError, "Mean.terms calls jaxscale.log, but", "pipeline stages, which do not call terms"):
        fit(objective=Mean(), model=model, layout=js.Layout("pipeline=2", pipeline="gpipe:2"))


@pytest.mark.long
def test_logging_changes_no_gradient():
    losses = [[r["loss"] for r in js.fit(js.TrainConfig(**bigram(objective=o)), quiet=True).metrics()]
              for o in (NextToken(), Mean())]  # fmt: skip
    assert losses[0] == losses[1]


@pytest.mark.parametrize("name", ["loss", "tokens_per_second"])
def test_an_objective_cannot_log_a_metric_of_training(name):
    with raises_saying(ConfigError, f"the metric '{name}' is one that training writes itself"):
        js.fit(js.TrainConfig(**bigram(objective=Mean(name=name))), quiet=True, run="here")
    assert not js.Run("here").path.exists()
