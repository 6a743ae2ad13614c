"""Dry run of a sweep."""

from __future__ import annotations

import types

import pytest

from jaxscale.cli import main
from tests.truth.sweeps import BASE, LR


def test_the_command_lists_what_it_would_do_and_writes_nothing(own_folder, capsys):
    (own_folder / "lr.gin").write_text(BASE + LR)
    assert main(["sweep", "lr.gin", "--dry-run", "--gin.train.steps=10"]) == 0
    output = capsys.readouterr().out
    for words in ("0.01", "0.02", "0.03", "3 runs", "30", "3,840", "Grid"):
        assert words in output
    assert [p.name for p in own_folder.iterdir()] == ["lr.gin"]


def test_a_dry_run_looks_into_the_storage(own_folder, capsys):
    (own_folder / "lr.gin").write_text(BASE + LR)
    pytest.importorskip("optuna")
    assert main(["sweep", "lr.gin", "--dry-run", "--storage", "journal:///nowhere/at/all/file"]) == 2
    assert "the folder /nowhere/at/all does not exist" in capsys.readouterr().err
    assert main(["sweep", "lr.gin", "--dry-run", "--storage", f"journal://{own_folder}/log"]) == 0
    assert (own_folder / "log").read_text() == "", "no study"


@pytest.mark.parametrize(("stopped_by", "code"), [("SIGINT", 130), ("SIGTERM", 143), (None, 130)])
def test_a_sweep_that_a_signal_stopped_has_the_exit_code_of_the_signal(own_folder, monkeypatch, stopped_by, code):
    stopped = types.SimpleNamespace(done=lambda: False, stopped_by=stopped_by)
    monkeypatch.setattr("jaxscale.sweep.Prepared.run", lambda *_, **__: stopped)
    (own_folder / "lr.gin").write_text(BASE + LR)
    assert main(["sweep", "lr.gin"]) == code
