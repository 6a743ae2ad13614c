"""Progress lines of a sweep."""

from __future__ import annotations

import dataclasses

import pytest

from jaxscale.sweep import sweep_of
from tests.truth.sweeps import LR, Scripted, text

pytestmark = pytest.mark.usefixtures("no_waiting")


def test_a_search_that_leaves_trials_at_a_rung_says_that_it_is_over(capsys):
    more = LR + "sweep.search = @ASHA()\nASHA.rungs = 2\n"
    whole = text(more)
    sweep = dataclasses.replace(sweep_of(whole), runner=Scripted(lambda bindings, step: bindings["train.lr"]))
    sweep.run("sweep", whole)
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first == "sweeping in sweep: 0 of 3 runs done"
    over = "1 run finished, 2 left at a rung; the search is over"
    assert last.startswith(f"sweep · {over} · best eval_loss 0.0100 (001: train.lr = 0.01); the table is in")
    sweep.run("sweep", whole)
    assert capsys.readouterr().out.splitlines()[0] == f"continuing in sweep: {over}"


def test_a_grid_says_how_many_are_done(capsys):
    whole = text(LR)
    dataclasses.replace(sweep_of(whole), runner=Scripted()).run("sweep", whole)
    assert capsys.readouterr().out.splitlines()[-1].startswith("sweep · 3 of 3 runs done · best")
