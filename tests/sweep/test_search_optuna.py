"""Optuna as a search: compared with a live study of Optuna's, and errors for what is not supported."""

from __future__ import annotations

import functools
import importlib.util
import math
import sys

import pytest

from jaxscale.errors import ConfigError
from jaxscale.sweep.axes import Choice, Integers, LogIntegers, LogUniform, Uniform, Values
from jaxscale.sweep.base import FAILED, FINISHED, RUNNING, Record, Trial
from jaxscale.sweep.search import OptunaSearch
from jaxscale.sweep.search.as_optuna import display_code, sampler_code
from tests.truth.carried import carry_out
from tests.truth.errors import raises_saying

optuna = pytest.importorskip("optuna")
pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
D = optuna.distributions
SPACE = {"lr": LogUniform(1e-5, 1e-1), "depth": Integers(2, 8), "kind": Values(("a", "b", "c"))}
STEPS = 12


def curve(bindings, step):
    return (math.log10(bindings["lr"]) + 3) ** 2 + 0.1 * bindings["depth"] + (bindings["kind"] == "b") + 4 / step


@pytest.mark.parametrize(
    "axis, people, sampler",
    [
        (Uniform(0, 2), D.FloatDistribution(0, 2), D.FloatDistribution(0, 2)),
        (LogUniform(1e-4, 1), D.FloatDistribution(1e-4, 1, log=True), D.FloatDistribution(1e-4, 1, log=True)),
        (Integers(2, 8), D.IntDistribution(2, 8), D.IntDistribution(2, 8)),
        (LogIntegers(1, 64), D.IntDistribution(1, 64, log=True), D.IntDistribution(1, 64, log=True)),
        (Values((1, 4, 16)), D.CategoricalDistribution((1, 4, 16)), D.IntDistribution(0, 2)),
        (Choice(("x", "y")), D.CategoricalDistribution(("x", "y")), D.CategoricalDistribution(("x", "y"))),
        (
            Values(((1, 2), (3, 4))),
            D.CategoricalDistribution(("(1, 2)", "(3, 4)")),
            D.CategoricalDistribution(("(1, 2)", "(3, 4)")),
        ),
    ],
    ids=["uniform", "log", "integers", "log-integers", "numbers", "choice", "tuples"],
)
def test_an_axis_is_the_distribution_that_optuna_has_for_it(axis, people, sampler):
    assert (display_code(axis).distribution, sampler_code(axis).distribution) == (people, sampler)
    for code in (display_code(axis), sampler_code(axis)):
        for u in (0.0, 0.4, 0.9):
            assert code.decode(code.encode(axis.at(u))) == axis.at(u)


@pytest.mark.parametrize("sampler", ["TPE", "Random", "QMC", "NSGAII"])
def test_a_sampler_draws_new_trials_that_follow_from_the_records(sampler):
    search = OptunaSearch(sampler=sampler, options={"population_size": 4} if sampler == "NSGAII" else {}, seed=5)
    records = carry_out(search, SPACE, curve, STEPS, runs=12, every=STEPS).records
    assert len({repr(r.trial.bindings) for r in records}) > 8
    assert search.draw(SPACE, records, STEPS) == search.draw(SPACE, records, STEPS)
    for n in (0, 5, 11):
        assert search.draw(SPACE, records[:n], STEPS) == records[n].trial.bindings


def test_qmc_draws_are_those_of_a_live_study():
    space = {"x": Uniform(0, 1), "y": LogUniform(1e-3, 1)}
    mine = carry_out(OptunaSearch(sampler="QMC"), space, lambda b, step: b["x"], 1, runs=9).records
    live = optuna.create_study(sampler=optuna.samplers.QMCSampler(seed=0))
    live.optimize(lambda t: t.suggest_float("x", 0, 1) + t.suggest_float("y", 1e-3, 1, log=True), 9)
    assert [r.trial.bindings for r in mine[1:]] == [t.params for t in live.trials[1:]]  # the first is random


def test_tpe_learns_from_the_records():
    records = carry_out(OptunaSearch(), SPACE, curve, STEPS, runs=40, every=STEPS).records
    off = [abs(math.log10(r.trial.bindings["lr"]) + 3) for r in records]
    assert sorted(off[25:])[7] < 0.5 * sorted(off[:10])[5]
    assert sum(r.trial.bindings["kind"] == "b" for r in records[25:]) <= 2


@pytest.mark.parametrize(
    "pruner, options",
    [
        ("Median", {"n_startup_trials": 2}),
        ("Percentile", {"percentile": 25.0, "n_startup_trials": 2}),
        ("SuccessiveHalving", {"min_resource": 2, "reduction_factor": 2}),
        ("Hyperband", {"min_resource": 2, "max_resource": STEPS, "reduction_factor": 2}),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_pruner_stops_what_it_would_stop_in_a_live_study(pruner, options):
    search = OptunaSearch(sampler="Random", pruner=pruner, pruner_options=options)
    records = carry_out(search, SPACE, curve, STEPS, runs=14).records
    live = optuna.create_study(
        study_name="sweep",
        sampler=optuna.samplers.RandomSampler(seed=0),
        pruner=getattr(optuna.pruners, f"{pruner}Pruner")(**options),
    )
    lengths = []
    for record in records:
        trial = live.ask()
        for step in range(1, STEPS + 1):
            trial.report(curve(record.trial.bindings, step), step)
            if trial.should_prune() and step < STEPS:
                live.tell(trial, state=optuna.trial.TrialState.PRUNED)
                break
        else:
            live.tell(trial, curve(record.trial.bindings, STEPS))
        lengths.append(step)
    assert [len(r.curve) for r in records] == lengths
    assert min(lengths) < STEPS == max(lengths)


def test_what_failed_or_still_runs_does_not_disturb():
    records = [Record(Trial(i, {"lr": 10.0**-i, "depth": 3, "kind": "a"}), FINISHED, [(12, 1.0)]) for i in range(2, 5)]
    records[0].state, records[0].curve = FAILED, []
    records[1].curve = [(6, 1.0), (12, math.nan)]
    records[2].state, records[2].curve = RUNNING, [(6, 2.0)]
    records = [Record(Trial(i, r.trial.bindings), r.state, r.curve) for i, r in enumerate(records)]
    assert set(OptunaSearch().draw(SPACE, records, STEPS)) == set(SPACE)
    assert OptunaSearch(pruner="Median").keeps(records[2], records, STEPS)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: OptunaSearch(sampler="TPEE"), ["OptunaSearch.sampler = 'TPEE'", "'TPE'"]),
        (lambda: OptunaSearch(pruner="Medium"), ["OptunaSearch.pruner = 'Medium'", "'Median'"]),
        (lambda: OptunaSearch(options={"multivariat": True}), ["OptunaSearch.sampler", "multivariat"]),
        (lambda: OptunaSearch(sampler=optuna.samplers.TPESampler()), ["TPESampler", "OptunaSearch.options"]),
        (lambda: OptunaSearch(pruner=optuna.pruners.MedianPruner()), ["MedianPruner", "OptunaSearch.pruner_options"]),
        (lambda: OptunaSearch(options={"with_margin": True}, sampler="CmaEs"), ["with_margin"]),
    ],
    ids=["sampler", "pruner", "option", "made-sampler", "made-pruner", "margin"],
)
def test_what_optuna_does_not_have_is_one_sentence(make, words):
    with raises_saying(ConfigError, *words):
        make()


def test_a_class_or_a_function_that_takes_a_seed_is_a_sampler():
    make = functools.partial(optuna.samplers.TPESampler, n_startup_trials=3)
    assert OptunaSearch(sampler=make).draw(SPACE, [], STEPS) == OptunaSearch().draw(SPACE, [], STEPS)


@pytest.mark.parametrize("sampler, module", [("CMA-ES", "cmaes"), ("GP", "torch")])
def test_a_sampler_without_its_package_names_it(sampler, module, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == module else find_spec(name))
    with raises_saying(ConfigError, sampler, f"pip install {module}"):
        OptunaSearch(sampler=sampler)


def test_without_optuna_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with raises_saying(ConfigError, "OptunaSearch", "pip install 'jaxscale[sweep]'"):
        OptunaSearch()
