"""Searches on analytic curves: compared with the papers' rules, and after being killed half-way."""

from __future__ import annotations

import itertools
import math
import re

import numpy as np
import pytest

from jaxscale.errors import ConfigError
from jaxscale.sweep.axes import Integers, LogIntegers, LogUniform, Uniform, Values
from jaxscale.sweep.base import FAILED, FINISHED, PAUSED, RUNNING, STOPPED, Record, Trial
from jaxscale.sweep.search import (
    ASHA,
    BOHB,
    KDE,
    Extrapolated,
    Grid,
    Hyperband,
    OptunaSearch,
    QuasiRandom,
    Random,
    SuccessiveHalving,
)
from jaxscale.sweep.search.kde import _Density
from jaxscale.sweep.search.quantile import Cube, quantile
from tests.truth.carried import carry_out
from tests.truth.errors import raises_saying

STEPS = 81
SPACE = {
    "train.lr": LogUniform(1e-5, 1e-1),
    "train.optimizer": Values(("@AdamW()", "@SGD()", "@Lion()")),
    "Transformer.depth": Integers(2, 8),
}
LISTS = {"a": Values((1, 2, 3)), "b": Values(("x", "y")), "c": Integers(4, 7)}
SEARCHES = {
    "Grid": Grid(),
    "Random": Random(),
    "QuasiRandom": QuasiRandom(),
    "KDE": KDE(),
    "SuccessiveHalving": SuccessiveHalving(),
    "ASHA": ASHA(),
    "Hyperband": Hyperband(),
    "BOHB": BOHB(),
    "ASHA-KDE-stopped": ASHA(sampler=KDE(), stopper=Extrapolated()),
    "Random-stopped": Random(stopper=Extrapolated()),
    "TPE": OptunaSearch(),
    "TPE-Median": OptunaSearch(pruner="Median"),
    "ASHA-TPE": ASHA(sampler=OptunaSearch()),
}


def curve(bindings, step):
    """A curve, lowest at learning rate 10**-2.5 and depth 5; some converge slowly, so that curves cross."""
    lr, depth = math.log10(bindings["train.lr"]), bindings["Transformer.depth"]
    end = 2 + 0.5 * (lr + 2.5) ** 2 + 0.01 * (depth - 5) ** 2 + 0.3 * (bindings["train.optimizer"] == "@SGD()")
    return end + 3 * (1 + step) ** -(0.4 + 0.1 * depth)


def lists_curve(bindings, step):
    return bindings["a"] + bindings["c"] / step + (bindings["b"] == "x")


def test_a_grid_is_every_combination_once_in_order():
    out = carry_out(Grid(), LISTS, lists_curve, 3, workers=3)
    tried = [tuple(r.trial.bindings.values()) for r in out.records]
    assert tried == list(itertools.product((1, 2, 3), ("x", "y"), (4, 5, 6, 7)))
    assert Grid().total(LISTS) == 24 and all(r.state == FINISHED for r in out.records)


@pytest.mark.parametrize("search", [Random(seed=3), KDE(seed=3)], ids=["Random", "KDE"])
def test_draws_from_lists_are_all_combinations_and_none_twice(search):
    out = carry_out(search, LISTS, lists_curve, 3, workers=3)
    tried = {tuple(r.trial.bindings.values()) for r in out.records}
    assert len(out.records) == 24 and len(tried) == 24


def test_draws_follow_from_the_seed_and_are_even_in_the_logarithm():
    nothing = Record(Trial(0, {}))
    lrs = [[Random(seed=s).draw(SPACE, [nothing] * i, STEPS)["train.lr"] for i in range(400)] for s in (0, 0, 1)]
    assert lrs[0] == lrs[1] != lrs[2]
    assert np.allclose(np.quantile(np.log10(lrs[0]), [0.1, 0.5, 0.9]), [-4.6, -3, -1.4], atol=0.25)


def test_quasi_random_draws_fill_the_cube_more_evenly():
    from scipy.stats import qmc

    space = {name: Uniform(0, 1) for name in "abcd"}

    def discrepancy(search):
        out = carry_out(search, space, lambda b, step: 0.0, 1, runs=16)
        return qmc.discrepancy([list(r.trial.bindings.values()) for r in out.records])

    assert discrepancy(QuasiRandom()) < 0.5 * discrepancy(Random())


@pytest.mark.parametrize(
    "axis",
    [
        LogUniform(1e-5, 1e-1),
        Uniform(-1, 3),
        Integers(2, 8),
        LogIntegers(1, 1000),
        Values((3, 1, 2)),
        Values((4, 2, 1)),
    ],
    ids=lambda a: type(a).__name__ + str(getattr(a, "values", "")),
)
def test_a_value_has_a_quantile_that_leads_back_to_it(axis):
    for u in np.linspace(0, 0.999, 41):
        value = axis.at(u)
        assert axis.at(quantile(axis, value)) == pytest.approx(value, rel=1e-12)
    if axis.grid() is None:
        assert quantile(axis, axis.at(0.3)) == pytest.approx(0.3)


@pytest.mark.parametrize("workers", [1, 4, 40])
@pytest.mark.parametrize("failing", [(), (0, 5, 26)], ids=["none-fail", "some-fail"])
def test_halving_continues_the_best_third_of_each_rung(workers, failing):
    out = carry_out(SuccessiveHalving(), SPACE, curve, STEPS, workers=workers, failing=failing, every=2)
    alive = set(range(27))
    for until, above, count in ((3, 9, 9), (9, 27, 3), (27, None, 1)):
        assert out.at_step(until) == alive
        measured = {i: curve(out.records[i].trial.bindings, until) for i in alive if i not in failing}
        alive = set(sorted(measured, key=measured.get)[:count])
        assert out.at_step(above) == alive
    if not failing:
        assert out.spent == 27 * 3 + 9 * 6 + 3 * 18 + 1 * 54
    assert {r.trial.id for r in out.records if r.state == FAILED} == set(failing)


@pytest.mark.parametrize("workers", [1, 5, 16])
def test_asha_continues_trials_in_the_best_third_so_far_and_keeps_all_workers_busy(workers):
    failing = (1, 7, 30)
    out = carry_out(ASHA(), SPACE, curve, STEPS, runs=60, workers=workers, failing=failing, every=2)
    below = {9: 3, 27: 9, None: 27}
    for trial, seen in out.proposed:
        if trial.until == 3:
            continue
        rung = below[trial.until]
        ends = {}
        for r in seen:
            reached = bool(r.curve) and r.curve[-1][0] >= rung
            if reached or (r.state == FAILED and r.trial.until == rung):
                ends[r.trial.id] = curve(r.trial.bindings, rung) if reached else math.inf
        best = sorted(ends, key=lambda i: (ends[i], i))[: len(ends) // 3]
        assert trial.id in best and trial.id not in failing
    ups = [(t.id, t.until) for t, _ in out.proposed]
    assert len(ups) == len(set(ups)), "nobody goes to a rung twice"
    began = max(i for i, (t, _) in enumerate(out.proposed) if t.until == 3)
    assert sum(t.until == 3 for t, _ in out.proposed) == 60
    assert all(sum(r.state == RUNNING for r in seen) < workers for _, seen in out.proposed[: began + 1])
    assert out.at_step(None), "somebody came to the last step"


def test_asha_never_waits_while_trials_may_begin():
    out = carry_out(ASHA(), SPACE, curve, STEPS, workers=7, budget=900, every=3)
    assert out.idle == 0 and len(out.records) > 60


def test_hyperband_has_the_brackets_of_its_paper():
    search = Hyperband(rungs=5)
    assert list(search.brackets()) == [(5, 81), (4, 34), (3, 15), (2, 8), (1, 5)]  # Li et al. 2018, table 1
    out = carry_out(search, SPACE, curve, STEPS, workers=4, every=3)
    firsts = [t.until for t, seen in out.proposed if t.id == len(seen)]
    assert firsts == [1] * 81 + [3] * 34 + [9] * 15 + [27] * 8 + [None] * 5
    assert len(out.records) == search.total(SPACE) == 143
    assert len(out.at_step(None)) == 1 + 1 + 1 + 2 + 5


def test_a_bracket_under_way_does_not_disturb_the_densities_of_lower_rungs():
    out = carry_out(BOHB(rounds=2), SPACE, curve, STEPS, workers=4, every=2, failing=(40, 45, 60))
    assert len(out.records) == BOHB(rounds=2).total(SPACE) == 2 * (27 + 12 + 6 + 4)
    assert sum(r.state == FINISHED for r in out.records) >= 2 * (1 + 1 + 2 + 4) - 2


@pytest.mark.parametrize("name", SEARCHES)
def test_killed_anywhere_and_started_again_it_tries_the_same(name):
    search, space = SEARCHES[name], LISTS if name == "Grid" else SPACE
    objective, options = lists_curve if name == "Grid" else curve, {"runs": 14, "every": 9}
    whole = carry_out(search, space, objective, STEPS, **options)
    parts = carry_out(search, space, objective, STEPS, killed_after=5, **options)
    for more in (7, 13):
        parts = carry_out(search, space, objective, STEPS, records=parts.records, killed_after=more, **options)
    parts = carry_out(search, space, objective, STEPS, records=parts.records, **options)
    assert parts.records == whole.records


def test_what_failed_is_never_the_best_nor_modelled_as_good():
    draw = KDE(randomly=0.0, seed=1)
    records = [_record(i, lr, 2 + (math.log10(lr) + 2) ** 2) for i, lr in enumerate(np.logspace(-4, -1, 30))]
    for record in records[18:]:
        record.state, record.curve = FAILED, []  # the best trial and those with higher learning rates
    lrs = [draw.draw({"train.lr": SPACE["train.lr"]}, records[:n], STEPS)["train.lr"] for n in range(24, 31)]
    assert np.median(lrs) < 2 * records[17].trial.bindings["train.lr"]


def test_draws_of_a_density_gather_where_good_trials_are():
    def distance(search):
        out = carry_out(search, SPACE, curve, STEPS, runs=60, every=STEPS)
        return np.median([abs(math.log10(r.trial.bindings["train.lr"]) + 2.5) for r in out.records[30:]])

    assert distance(KDE()) < 0.6 * distance(Random())


def test_a_density_is_one():
    space = {"x": Uniform(0, 1), "kind": SPACE["train.optimizer"]}
    points = np.array([[0.02, 0.1], [0.3, 0.5], [0.97, 0.5], [0.4, 0.9]])
    density = _Density.of(Cube.of(space), points, 1e-3)
    grid = (np.arange(3000) + 0.5) / 3000
    at = np.array([[x, (kind + 0.5) / 3] for kind in range(3) for x in grid])
    assert np.exp(density.log(at)).sum() / 3000 == pytest.approx(1, abs=1e-4)
    drawn = density.draw(np.random.default_rng(0), 4000, 1.0)
    truth = [np.exp(density.log(at[k * 3000 : k * 3000 + 3000])).mean() for k in range(3)]
    assert np.histogram(drawn[:, 1], 3, (0, 1))[0] / 4000 == pytest.approx(truth, abs=0.03)


def _record(id, lr, end, state=FINISHED, steps=STEPS):
    return Record(Trial(id, {"train.lr": float(lr)}), state, [(steps, float(end))])


def _power(height, slope, exponent, upto, noise=0.0, seed=0):
    random = np.random.default_rng(seed)
    return [(t, height + slope * t**-exponent + noise * random.normal()) for t in range(1, upto + 1, 2)]


def _stopper_case(curve, best_curve):
    running = Record(Trial(1, {}), RUNNING, curve)
    return Extrapolated().keeps(running, [Record(Trial(0, {}), FINISHED, best_curve), running], STEPS)


def test_a_curve_that_will_not_beat_the_best_is_stopped_and_one_that_will_is_kept():
    best = _power(2.0, 2.0, 0.7, STEPS, noise=0.005)
    assert not _stopper_case(_power(2.5, 2.0, 0.7, 35, noise=0.005, seed=1), best)
    crossing = _power(1.5, 2.6, 0.5, 35, noise=0.005, seed=1)
    assert crossing[-1][1] < _power(1.5, 2.6, 0.5, 5)[-1][1]
    assert _stopper_case(crossing, best), "above the best one's curve for now, below it at the end"
    assert _stopper_case(_power(9.0, 2.0, 0.7, 11), best), "too early to say"
    assert not _stopper_case([*_power(2.0, 2.0, 0.7, 35), (37, math.nan)], best)


def test_nothing_is_stopped_before_something_has_finished():
    running = Record(Trial(0, {}), RUNNING, _power(9.0, 2.0, 0.7, 61))
    assert Extrapolated().keeps(running, [running, Record(Trial(1, {}), PAUSED, [(9, 1.0)])], STEPS)


def test_extrapolated_chances_come_true():
    """Noisy power laws judged half-way: many have a probability above 0.95, and few of these end below."""
    random, judged = np.random.default_rng(0), []
    for seed in range(300):
        height, slope, exponent = random.uniform(1, 3), random.uniform(0.5, 3), random.uniform(0.3, 1.5)
        whole = _power(height, slope, exponent, STEPS, noise=0.02, seed=seed)
        threshold = whole[-1][1] + random.normal() * 0.3
        chance = Extrapolated().chance(whole[: len(whole) // 2], [], STEPS, threshold)
        judged.append((chance, whole[-1][1] > threshold))
    sure = [came for chance, came in judged if chance > 0.95]
    assert len(sure) > 60 and np.mean(sure) > 0.93
    unsure = [came for chance, came in judged if chance < 0.05]
    assert len(unsure) > 60 and np.mean(unsure) < 0.07


def test_stopping_saves_steps_and_the_best_is_found_all_the_same():
    whole = carry_out(Random(), SPACE, curve, STEPS, runs=40, every=3)
    stopped = carry_out(Random(stopper=Extrapolated()), SPACE, curve, STEPS, runs=40, every=3)
    assert stopped.spent < 0.6 * whole.spent and stopped.best == whole.best
    assert any(r.state == STOPPED for r in stopped.records)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Grid().total(SPACE), ["train.lr", "@Random()"]),
        (lambda: SuccessiveHalving(trials=8), ["SuccessiveHalving.trials = 8", "27"]),
        (lambda: SuccessiveHalving().total(LISTS), ["27 trials", "24 combinations", "@ASHA()"]),
        (lambda: Hyperband(rounds=None).total(LISTS), ["Hyperband", "24 combinations"]),
        (lambda: ASHA(eta=1), ["ASHA.eta = 1", "2"]),
        (lambda: ASHA(rungs=0), ["ASHA.rungs = 0", "1"]),
        (lambda: ASHA(sampler=Random(stopper=Extrapolated())), ["ASHA.sampler has a stopper", "ASHA.stopper"]),
        (lambda: ASHA(rungs=6).next(SPACE, [], STEPS), ["too few for 6 rungs with eta = 3", "set it to 5", "243"]),
        (lambda: KDE(good=15), ["KDE.good = 15"]),
        (lambda: Extrapolated(worse=0.2), ["Extrapolated.worse = 0.2"]),
        (lambda: Extrapolated(points=2), ["Extrapolated.points = 2"]),
        (
            lambda: ASHA(eta=2).next(SPACE, [Record(Trial(0, {}, until=10), PAUSED, [(20, 1.0)])] * 2, 80),
            ["step 10", "train.eval_every"],
        ),
    ],
    ids=lambda v: re.sub(r"\W+", "-", v[0]) if isinstance(v, list) else "",
)
def test_wrong_settings_are_one_sentence(make, words):
    with raises_saying(ConfigError, *words):
        make()
