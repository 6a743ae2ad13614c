"""The table of a sweep: its columns and its best row."""

from __future__ import annotations

import csv
import json
import math

import pytest

from jaxscale.errors import RunError
from tests.truth.errors import raises_saying
from tests.truth.sweeps import Scripted, run

pytestmark = pytest.mark.usefixtures("no_waiting")


def test_the_table_has_a_column_per_binding_then_what_was_measured():
    axes = 'sweep.axes = {"train.lr, train.batch_size": [(1e-2, 8), (2e-2, 16)], "WIDTH": [4], "train.seed": [0, 1]}'
    result = run(axes)
    rows = list(csv.DictReader((result.path / "results.csv").open()))
    bound = ["train.lr", "train.batch_size", "WIDTH", "train.seed"]
    first = ["state", "steps", "tokens", "parameters", "flops", "loss", "eval_loss"]
    assert list(rows[0]) == [*bound, *first, "seconds", "error", "run"]
    assert [[row[name] for name in bound] for row in rows] == [
        ["0.01", "8", "4", "0"],
        ["0.01", "8", "4", "1"],
        ["0.02", "16", "4", "0"],
        ["0.02", "16", "4", "1"],
    ]
    assert [row["run"] for row in rows] == ["000", "001", "002", "003"]
    assert {row["parameters"] for row in rows} == {str(2 * 32 * 4)}


def test_the_table_is_derived_from_the_folders():
    result = run()
    before = (result.path / "results.csv").read_text()
    (result.path / "results.csv").unlink()
    run()
    assert (result.path / "results.csv").read_text() == before


def test_references_stay_as_they_are_written():
    result = run('sweep.axes = {"train.optimizer": [@SGD(), @fast/AdamW()], "train.lr": [1e-2]}\nfast/AdamW.b1 = 0.5\n')
    assert [row["train.optimizer"] for row in result.table()] == ["@SGD()", "@fast/AdamW()"]
    line = json.loads((result.path / "trials.jsonl").read_text().splitlines()[1])
    assert line["bindings"] == {"train.optimizer": "@fast/AdamW()", "train.lr": "0.01"}


def test_the_best_is_the_lowest_finite_one_that_did_not_fail():
    def loss(bindings, step):
        if bindings["train.lr"] == 1e-2:
            raise RuntimeError("no memory")
        return {2e-2: math.nan, 3e-2: 2.0, 4e-2: 3.0}[bindings["train.lr"]]

    result = run('sweep.axes = {"train.lr": [1e-2, 2e-2, 3e-2, 4e-2]}', Scripted(loss))
    assert result.best()["train.lr"] == 3e-2
    assert result.table()[0]["error"] == "no memory"


def test_the_best_of_a_shared_sweep_may_be_another_machines(own_folder):
    pytest.importorskip("optuna")
    url = f"journal://{own_folder}/storage"
    first = run(runner=Scripted(lambda bindings, step: bindings["train.lr"]), folder="first", storage=url)
    second = run(folder="second", storage=url)  # no trials are left for it
    assert second.done() and [row["eval_loss"] for row in second.table()] == [1e-2, 2e-2, 3e-2]
    assert second.run().path.samefile(first.run().path)


def test_no_best_where_nothing_was_measured():
    def loss(bindings, step):
        raise RuntimeError("no memory")

    with raises_saying(RunError, "no trial of sweep", "eval_loss"):
        run(runner=Scripted(loss)).best()
