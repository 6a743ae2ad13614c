"""Errors in a sweep are reported before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxscale.cli import main
from jaxscale.errors import JaxscaleError
from tests.truth.errors import raises_saying
from tests.truth.sweeps import BASE, LR, run


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ('sweep.axes = {"train.lrr": [1e-3]}', ["'train' has no parameter 'lrr'", "did you mean 'lr'"]),
        ('sweep.axes = {"trian.lr": [1e-3]}', ["'trian'", "did you mean 'train'"]),
        ('sweep.axes = {"WIDHT": [4]}', ["no macro 'WIDHT'", "did you mean 'WIDTH'"]),
        ('sweep.axes = {"train.lr": []}', ["'train.lr'", "no values"]),
        ('sweep.axes = {"train.lr": [1e-3, "fast"]}', ["train.lr must be float, not 'fast'"]),
        ('sweep.axes = {"train.batch_size": [8, 0]}', ["train.batch_size = 0"]),
        ('sweep.axes = {"train.batch_size": [8, 10], "train.accumulate": [1, 4]}', ["does not divide", "= 10"]),
        (
            'sweep.axes = {"train.lr": [1e-3], "AdamW.b1": [0.5, 2]}\ntrain.optimizer = @SGD()',
            ["no trial reads", "'AdamW.b1'"],
        ),
        ("train.lr = 1e-3", ["sweep.axes is not set"]),
        (LR + 'sweep.objective = "eval_los"', ["'eval_los'", "did you mean 'eval_loss'"]),
        (LR + "train.eval_batches = 0", ["sweep.objective = 'eval_loss'", "train.eval_batches = 0"]),
        (LR + "sweep.runs = 0", ["sweep.runs = 0"]),
        (
            'sweep.axes = {"train.lr": [1e-2, 2e-2, 3e-2]}\nsweep.search = @SuccessiveHalving()\nsweep.runs = 2\n'
            "SuccessiveHalving.trials = 3\nSuccessiveHalving.rungs = 2",
            ["sweep.runs = 2", "SuccessiveHalving", "set it to 3", "@ASHA()"],
        ),
        (
            LR + "sweep.search = @Grid()\nGrid.stopper = @Extrapolated()",
            ["Grid.stopper", "train.eval_every = 0 with 4 steps", "set it to 1"],
        ),
        ('sweep.axes = {"train.layout": [@Layout()]}\nLayout.mesh = "data=3"', ["data=3"]),
    ],
    ids=[
        "parameter",
        "name",
        "macro",
        "no values",
        "type",
        "value",
        "not together",
        "nobody reads it",
        "no axes",
        "objective",
        "not measured",
        "no runs",
        "a rung that never fills",
        "no curve",
        "layout",
    ],
)
def test_wrong_settings_are_reported_before_anything_starts(more, words):
    with raises_saying(JaxscaleError, *words):
        run(more)
    assert not Path("sweep").exists()


@pytest.mark.parametrize(
    "more, binding",
    [
        (LR, "train.lr=0.5"),
        ('sweep.axes = {"WIDTH, train.lr": [(8, 1e-2)]}\n', "WIDTH=4"),
        (f"{LR}sweep.seeds = 2\n", "train.seed=1"),
    ],
    ids=["binding", "macro", "seed"],
)
def test_a_binding_of_the_command_line_that_is_an_axis_is_refused(own_folder, capsys, more, binding):
    (own_folder / "lr.gin").write_text(BASE + more)
    assert main(["sweep", "lr.gin", "--dry-run", f"--gin.{binding}"]) == 2
    assert (
        f"{binding.replace('=', ' = ')} has no effect: it is an axis of the sweep; remove this binding"
        in capsys.readouterr().err
    )
