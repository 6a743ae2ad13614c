"""Time to result, compared with results by hand and by SciPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats

from jaxscale.errors import ConfigError
from jaxscale.sweep.comparing import read_runs
from jaxscale.sweep.time_to_result import (
    Attempt,
    Tuning,
    Workload,
    attempts_of,
    beats,
    first_reached,
    kendall_tau,
    profile,
    rank,
    score,
    stability,
    tune,
)
from tests.sweep.test_comparing import write_run
from tests.truth.errors import raises_saying

TUNING = Tuning(settings=2)


def field(**costs):
    """Attempts with each entrant's steps at seeds 1, 2, ...; tuning at seed 0 chooses the setting 0.1 for all."""
    out = []
    for name, steps in costs.items():
        out += [Attempt(name, "w", 0.1, 0, 50), Attempt(name, "w", 0.2, 0, 60)]
        out += [Attempt(name, "w", 0.1, s + 1, float(n), n * 0.5) for s, n in enumerate(steps)]
    return out


def test_a_target_is_reached_by_a_measurement_and_not_between_two():
    curve = [(10, 3.0), (20, math.nan), (30, 2.0), (40, 2.5), (50, 1.0)]
    assert [first_reached(curve, t) for t in (3.0, 2.4, 2.0, 0.5)] == [10, 30, 30, math.inf]


def test_tuning_takes_the_fastest_setting_and_of_those_that_never_get_there_the_lowest():
    never = math.inf
    attempts = [Attempt("a", "w", lr, 0, steps, final=end) for lr, steps, end in [(1, 90, 2.0), (2, 70, 2.1)]]
    attempts += [Attempt("b", "w", lr, 0, never, final=end) for lr, end in [(1, 2.9), (2, math.inf)]]
    attempts += [Attempt("a", "w", 1, 1, 10)]  # a lucky run whose seed is not one for tuning
    assert tune(attempts, TUNING) == {("w", "a"): 2, ("w", "b"): 1}


@pytest.mark.parametrize("settings", [1, 3])
def test_every_entrant_spends_the_same_on_tuning(settings):
    with raises_saying(ConfigError, "a tried 2 settings at w", f"is {settings}"):
        rank(field(a=[1, 2, 3]), Tuning(settings=settings), "w")


def test_entrants_are_ranked_by_their_median_over_seeds():
    placed = rank(
        field(slow=[90, 80, 100], fast=[10, 20, 30], never=[math.inf] * 3, half=[40, math.inf, 50]), TUNING, "w"
    )
    assert [(p.entrant, p.cost, p.rank) for p in placed] == [
        ("fast", 20, 1),
        ("half", 50, 2),
        ("slow", 90, 3),
        ("never", math.inf, 4),
    ]
    assert [p.reached for p in placed] == [(3, 3), (2, 3), (3, 3), (0, 3)]
    assert (
        placed[0].first == 1 and placed[0].ranks == (1, 1) and placed[3].ranks == (3.5, 4)
    )  # bootstrap draws in which entrant "half" never reaches the target


def test_the_interval_of_three_seeds_is_that_of_all_their_draws():
    """In 27 draws of three seeds, the median is the lowest value 7 times, the middle 13 times, the highest 7 times."""
    (placed,) = rank(field(a=[10, 20, 30]), TUNING, "w", draws=4000)
    assert placed.interval == (10, 30)
    first, second = rank(field(a=[10, 20, 30], b=[20, 20, 20]), TUNING, "w", draws=4000)
    assert first.first == pytest.approx(7 / 27 + 13 / 27 / 2, abs=0.03)
    assert second.first == pytest.approx(7 / 27 + 13 / 27 / 2, abs=0.03)
    assert first.rank == second.rank == 1.5


def test_ranking_by_seconds_takes_the_time_of_the_steps():
    attempts = (
        field(a=[10, 20, 30])
        + [Attempt("quick", "w", s, 0, 50) for s in (1, 2)]
        + [Attempt("quick", "w", 1, s, 40, 2.0) for s in (1, 2, 3)]
    )
    assert [p.entrant for p in rank(attempts, TUNING, "w")] == ["a", "quick"]
    assert [(p.entrant, p.cost) for p in rank(attempts, TUNING, "w", cost="seconds")] == [("quick", 2.0), ("a", 10.0)]


def test_how_probably_one_beats_another_is_mann_whitneys_u():
    rng = np.random.default_rng(0)
    a, b = rng.integers(5, 15, 7), rng.integers(7, 17, 7)
    got = beats(field(a=a, b=b), TUNING, "w")
    u = scipy.stats.mannwhitneyu(b, a).statistic / 49
    assert got["a"]["b"] == pytest.approx(u) and got["b"]["a"] == pytest.approx(1 - u)


@pytest.mark.parametrize("ties", [False, True], ids=["no ties", "ties"])
def test_kendalls_tau_is_scipys(ties):
    rng = np.random.default_rng(2)
    for _ in range(20):
        a, b = rng.integers(0, 4 if ties else 1000, (2, 9)).astype(float)
        assert kendall_tau(a, b) == pytest.approx(scipy.stats.kendalltau(a, b).statistic, nan_ok=True)


def test_a_ranking_that_every_seed_agrees_on_is_stable():
    assert stability(field(a=[1, 2, 3], b=[10, 20, 30], c=[11, 21, math.inf]), TUNING, "w") == 1
    assert stability(field(a=[1, 2], b=[2, 1]), TUNING, "w") == -1


def test_a_profile_counts_workloads_within_a_ratio_of_the_best():
    costs = {"x": {"a": 10, "b": 15}, "y": {"a": 40, "b": 20}, "z": {"a": math.inf, "b": math.inf}}
    assert profile(costs, [1, 1.5, 2]) == {"a": [1 / 3, 1 / 3, 2 / 3], "b": [1 / 3, 2 / 3, 2 / 3]}


def test_the_score_is_the_area_under_the_profile():
    rng = np.random.default_rng(3)
    costs = {w: {e: float(rng.choice([rng.uniform(1, 6), math.inf])) for e in "abc"} for w in "uvwxyz"}
    taus = np.linspace(1, 4, 3001)
    want = {name: np.mean(line) for name, line in profile(costs, taus).items()}
    assert score(costs) == pytest.approx(want, abs=1e-3)


def test_runs_become_attempts(tmp_path):
    write_run(tmp_path / "a", [5, 4, 3, 2], {2: 4.0, 4: 2.0}, lr=0.1, seed=3, optimizer="Lion")
    write_run(tmp_path / "b", [5, 4], lr=0.2)
    first, second = attempts_of(read_runs(tmp_path), Workload("tiny", target=2.5))
    assert (first.entrant, first.setting, first.seed, first.steps, first.final) == ("@optimizer/Lion()", 0.1, 3, 4, 2.0)
    assert first.seconds == pytest.approx(4 * 8 * 16 / 1280)
    assert second.steps == second.seconds == second.final == math.inf


def test_a_run_that_failed_before_it_had_times_takes_forever(tmp_path):
    write_run(tmp_path / "a", [5], lr=0.1)
    (attempt,) = attempts_of(read_runs(tmp_path), Workload("tiny", target=2.5))
    assert attempt.seconds == math.inf


@pytest.mark.parametrize(
    "seed, message", [(0, "seeds [0, 0], but the budget is one with each of [0]"), (2, "has seeds [1, 2, 2, 3]")]
)
def test_a_seed_that_an_entrant_has_twice_is_refused(seed, message):
    with raises_saying(ConfigError, "a at w", message):
        rank([*field(a=[1, 2, 3]), Attempt("a", "w", 0.1, seed, 5)], TUNING, "w")


def test_entrants_with_other_seeds_are_refused():
    attempts = [a for a in field(a=[1, 2, 3], b=[1, 2, 3]) if (a.entrant, a.seed) != ("b", 2)]
    with raises_saying(ConfigError, "b at w with 0.1 has seeds [1, 3]", "a has [1, 2, 3]"):
        rank(attempts, TUNING, "w")
