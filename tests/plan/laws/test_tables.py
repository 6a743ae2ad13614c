"""Tables: reading them, and errors on tables that cannot determine a law."""

from __future__ import annotations

import numpy as np
import pytest
from rich.console import Console

from jaxscale.errors import ConfigError
from jaxscale.plan.laws import (
    BODY,
    Chinchilla,
    Farseer,
    Fit,
    IsoFLOP,
    OutOfDistribution,
    StepLaw,
    held_out,
    read_table,
    write_rows,
)
from jaxscale.train.run import read_config, write_config
from tests.truth import planted
from tests.truth.errors import raises_saying
from tests.truth.runs import transformer, write_text

GRID = planted.surface_runs(planted.chinchilla_loss, seed=0)
BOWLS = planted.steplaw_runs(seed=0)
OOD = planted.ood_runs(seed=0, seeds=1)
LINE = [row | {"tokens": 20 * row["parameters"]} for row in GRID]
FALLING = [row | {"eval_loss": row["train.lr"] ** -0.1} for row in BOWLS]
SMALL = [row for row in GRID if row["parameters"] < 1e8]
SHORT = [row for row in GRID if row["tokens"] < 3e8]
HALF = planted.surface_runs(planted.chinchilla_loss, 0, sizes=4, budgets=4)[::2]
LARGE = [row for row in planted.isoflop_runs(0) if row["parameters"] > 3e9]

CASES = {
    "two sizes": (Chinchilla(), SMALL, ("2 sizes", "'parameters'", "3 or more", "grid of 4")),
    "one budget": (Chinchilla(), SHORT, ("1 token budget (", "'tokens'", "3 or more")),
    "few budgets": (Farseer(), HALF, ("2 token budgets", "4 or more")),
    "on a line": (Chinchilla(), LINE, ("'tokens' is determined by 'parameters'", "several token budgets")),
    "no valley": (IsoFLOP(), LARGE, ("three sizes or more", "needs 2", "5 sizes")),
    "no grid": (StepLaw(), BOWLS[::7], ("fewer than 8", "N = ", "4 learning rates by 4 batches")),
    "at the end": (StepLaw(), FALLING, ("inside of their grid", "add larger learning rates at N = ")),
    "one exponent": (OutOfDistribution(), OOD[:2], ("2 values of 'parameters'", "needs 3")),
    "floor": (OutOfDistribution(floor=True), OOD[:3], ("3 values", "a floor need 4")),
    "no other corpus": (OutOfDistribution(), GRID, ("no loss out of distribution", "train.evaluate_on")),
    "no column": (Chinchilla(parameters=BODY), GRID, (f"no column '{BODY}'", "did you mean 'parameters'")),
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_table_lacks_is_named(case):
    law, rows, phrases = CASES[case]
    with raises_saying(ConfigError, *phrases):
        law.fit(read_table(rows), samples=5)


def test_more_cannot_be_held_out_than_there_is():
    with raises_saying(ConfigError, "5 values of 'parameters'", "use 1 to 4"):
        held_out(Chinchilla(), read_table(GRID), "parameters", 5)


def test_valleys_are_not_judged_by_runs_that_show_none():
    fit = IsoFLOP().fit(read_table(planted.isoflop_runs(0)), samples=0)
    with raises_saying(ConfigError, "none of the FLOP budgets", "three sizes or more"):
        fit.errors(read_table(LARGE))


def test_rows_that_failed_or_never_ended_are_left_out_and_counted():
    rows = [
        *GRID,
        {**GRID[0], "state": "failed"},
        {**GRID[0], "eval_loss": float("nan")},
        {**GRID[0], "eval_loss": None},
    ]
    table = read_table(rows)
    assert len(table) == len(GRID) and table.dropped == 3


def test_the_batch_is_tokens_a_step_where_a_table_has_no_such_column():
    table = read_table([{"eval_loss": 1.0, "tokens": 4096.0, "steps": 8.0}])
    assert table["batch"].tolist() == [512.0]


def test_parameters_without_the_vocabularys_are_counted_from_a_sweeps_runs(tmp_path):
    run = tmp_path / "000"
    run.mkdir()
    config = transformer(write_text(tmp_path / "text"))
    write_config(run, config, 0)
    write_rows([{"state": "finished", "eval_loss": 1.0, "run": "000"}], tmp_path / "results.csv")
    vocabulary = 2 * config.model.vocab * config.model.width  # an embedding, and a head that is not tied to it
    assert read_table(tmp_path, body=read_config)[BODY].tolist() == [config.model.param_count() - vocabulary]


def test_a_table_that_is_not_there_is_named(tmp_path):
    with raises_saying(ConfigError, "there is no", "results.csv"):
        read_table(tmp_path)


@pytest.mark.parametrize("content", [b"\xff\xfea,b\n", b"a,b\n" + b"x" * 200_000 + b",1\n"])
def test_a_table_that_is_no_csv_is_one_sentence(tmp_path, content):
    (tmp_path / "results.csv").write_bytes(content)
    with raises_saying(ConfigError, "results.csv cannot be read as CSV"):
        read_table(tmp_path)


def test_a_parameter_that_the_runs_do_not_determine_is_marked(capsys):
    facts = {"name": "grid", "runs": 9, "dropped": 0, "columns": {"parameters": "parameters"}, "freedom": None}
    samples = np.array([[2.0, 1.0, 1e-2, 0.3, 0.4], [2.0, 2.0, 1e5, -0.3, 0.5]])
    law = Chinchilla()
    Console(width=150).print(Fit(law, law.names, samples[0], samples.repeat(20, axis=0), 0.9, facts))
    output = capsys.readouterr().out
    marked = [name for name in law.names if f"{name} *" in output]
    assert marked == ["E", "B"] and "* not determined by these runs" in output


def test_farseers_names_are_mapped_to_its_formula(capsys):
    facts = {"name": "grid", "runs": 9, "dropped": 0, "columns": {"parameters": "parameters"}, "freedom": None}
    law = Farseer()
    Console(width=300).print(Fit(law, law.names, np.ones(9), np.zeros((0, 9)), 0.9, facts))
    output = capsys.readouterr().out
    assert "log A(N) = log_A + A_slope (x^A_curve - 1) / A_curve" in output and "not determined" not in output
