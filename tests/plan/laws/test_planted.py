"""Laws recover the parameters that planted tables were made with, within their intervals.

experiments/scaling_law/coverage.py measures how often, over many tables.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from scipy.optimize import minimize

from jaxscale.plan.laws import (
    LAWS,
    Chinchilla,
    Cost,
    Farseer,
    IsoFLOP,
    OutOfDistribution,
    StepLaw,
    held_out,
    load_fit,
    optimum,
    read_table,
)
from tests.truth import planted

SHARE = planted.CHINCHILLA["alpha"] + planted.CHINCHILLA["beta"]
VALLEYS = {"a": planted.CHINCHILLA["beta"] / SHARE, "b": planted.CHINCHILLA["alpha"] / SHARE}
EXPONENTS = {f"alpha({loss})": alpha for loss, (_, alpha) in planted.OOD.items()}


@pytest.fixture(scope="module")
def grid():
    return read_table(planted.surface_runs(planted.chinchilla_loss, seed=1))


@pytest.fixture(scope="module")
def chinchilla(grid):
    return Chinchilla().fit(grid, samples=100, level=0.98)


@pytest.fixture(scope="module")
def bowls():
    return read_table(planted.steplaw_runs(seed=0))


@pytest.fixture(scope="module")
def steplaw(bowls):
    return StepLaw().fit(bowls, samples=30, level=0.98)


@pytest.mark.parametrize("name", planted.CHINCHILLA)
def test_chinchillas_parameters_are_recovered(chinchilla, name):
    assert planted.CHINCHILLA[name] in chinchilla.parameters[name]


@pytest.mark.parametrize("name", VALLEYS)
def test_exponents_of_the_valleys_are_recovered(name):
    fit = IsoFLOP().fit(read_table(planted.isoflop_runs(seed=1)), samples=50, level=0.98)
    assert VALLEYS[name] in fit.parameters[name]
    assert fit.values[name] == pytest.approx(VALLEYS[name], abs=0.02)


@pytest.mark.parametrize("name", planted.STEPLAW)
def test_the_step_law_is_recovered(steplaw, name):
    assert planted.STEPLAW[name] in steplaw.parameters[name]


def test_the_loss_at_the_step_laws_prediction_is_near_the_lowest(steplaw, bowls):
    errors = steplaw.errors(bowls)
    assert len(errors["loss"]) == 9
    assert np.all((errors["loss"] >= 0) & (errors["loss"] < 1e-3))


@pytest.mark.parametrize("name", EXPONENTS)
def test_exponents_on_every_corpus_are_recovered(name):
    fit = OutOfDistribution().fit(read_table(planted.ood_runs(seed=2)), samples=100, level=0.98)
    assert EXPONENTS[name] in fit.parameters[name]


def test_an_interval_of_a_difference_of_exponents_excludes_zero():
    fit = OutOfDistribution().fit(read_table(planted.ood_runs(seed=2)), samples=100)
    assert fit.parameters["alpha(eval_loss/far) - alpha(eval_loss)"].high < -0.05


def test_runs_that_do_not_count_leave_exponents_and_their_intervals_alone():
    rows = planted.ood_runs(seed=2, seeds=1)
    more = [row | {"tokens": row["tokens"] / n, "eval_loss": n * row["eval_loss"]} for row in rows for n in (2, 4, 8)]
    alone, among = (OutOfDistribution().fit(read_table(table), samples=50) for table in (rows, rows + more))
    assert among.parameters == alone.parameters


def test_farseers_published_numbers_come_back_from_runs_without_noise():
    table = read_table(planted.surface_runs(planted.farseer_loss, seed=0, noise=0.0, sizes=6))
    fit = Farseer().fit(table, samples=0)
    assert fit.law.published(fit.values) == pytest.approx(planted.FARSEER, rel=1e-3)


def test_farseer_predicts_held_out_larger_models_better_than_chinchilla():
    table = read_table(planted.surface_runs(planted.farseer_loss, seed=0, noise=0.0, sizes=6))
    ours, other = (held_out(law, table, "parameters", 1).mean["eval_loss"] for law in (Farseer(), Chinchilla()))
    assert ours < 1e-3 < other


def test_the_fit_is_no_worse_than_scipys_from_the_true_parameters(grid, chinchilla):
    """The objective of Hoffmann et al. 2022, implemented a second time."""
    n, d, measured = (np.log(grid[c]) for c in ("parameters", "tokens", "eval_loss"))

    def objective(p):
        left = np.logaddexp(np.logaddexp(p[0], p[1] - p[3] * n), p[2] - p[4] * d) - measured
        size = np.abs(left)
        return 1e6 * np.where(size <= 1e-3, 0.5 * size**2, 1e-3 * (size - 0.5e-3)).sum()

    def search(values):
        return np.array([np.log(values[k]) for k in "EAB"] + [values["alpha"], values["beta"]])

    other = minimize(objective, search(planted.CHINCHILLA), method="Nelder-Mead", options={"maxiter": 4000})
    assert objective(search(chinchilla.values)) <= other.fun * 1.001


def test_the_bootstrap_draws_all_seeds_of_a_setting_together():
    table = read_table(planted.surface_runs(planted.chinchilla_loss, seed=1, sizes=3, seeds=4))
    from jaxscale.plan.laws.base import _draws

    drawn = _draws(Chinchilla(), table, 20, seed=0).reshape(20, -1, 4)
    assert (drawn == drawn[:, :, :1]).all()
    assert drawn.max() > 1


def test_the_optimum_of_a_budget_is_the_closed_form(chinchilla):
    p, flops = chinchilla.values, 1e21
    size = (p["alpha"] * p["A"] / (p["beta"] * p["B"])) ** (1 / (p["alpha"] + p["beta"]))
    size *= (flops / 6) ** (p["beta"] / (p["alpha"] + p["beta"]))
    best = optimum(chinchilla, flops, Cost())
    assert best.parameters.value == pytest.approx(size, rel=1e-3)
    assert best.tokens.value == pytest.approx(flops / 6 / size, rel=1e-3)
    assert best.loss.low < best.loss.value < best.loss.high


def test_a_budget_is_in_flops_as_the_runs_models_count_them(grid, chinchilla):
    assert chinchilla.cost.per_token == pytest.approx(6) and chinchilla.cost.power == pytest.approx(1)
    doubled = {**grid.columns, "flops": 2 * grid.columns["flops"]}
    fit = Chinchilla().fit(type(grid)(doubled), samples=0)
    assert optimum(fit, 2e21).parameters.value == pytest.approx(optimum(chinchilla, 1e21).parameters.value, rel=0.01)


@pytest.mark.parametrize("name", ["chinchilla", "steplaw"])
def test_a_fit_comes_back_from_its_file(name, request, tmp_path):
    fit = request.getfixturevalue(name)
    again = load_fit(str(fit.write(tmp_path / "fit.json")))
    assert again.law == fit.law
    assert again.predict(parameters=1e9, tokens=2e10) == fit.predict(parameters=1e9, tokens=2e10)
    assert json.loads((tmp_path / "fit.json").read_text())["law"] == name


@pytest.mark.parametrize("name", LAWS)
def test_every_law_has_a_formula_in_a_line(name):
    assert "=" in LAWS[name].formula or "^" in LAWS[name].formula
