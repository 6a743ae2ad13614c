"""Every gin file of the repository, runs and sweeps, loads, resolves to what it did before, and makes a step.

The dry run checks the run as `fit` does, traces one whole training step (loss, gradients, guards, optimizer) on the
file's own mesh, abstract where it is larger than this machine, and lowers it for the CPU; no compiler runs, since that
takes seconds a file and, for a mesh of 1,024 devices, these devices: `python -m tests.truth.gin_compiles` does it, and
leaves a table, in which each file has to be. Data is not opened.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from jaxscale import config
from jaxscale.cli import main
from jaxscale.data.records import UserRecords
from jaxscale.plan import dry_run
from jaxscale.sweep import sweep_of
from tests.truth import gin_compiles, golden
from tests.truth.long import short

pytestmark = pytest.mark.once

FILES = golden.gin_files()
each = pytest.mark.parametrize("file", FILES, ids=str)


def test_every_gin_file_has_a_resolved_form_and_every_resolved_form_a_file():
    stored = {path.relative_to(golden.GOLDEN) for path in golden.GOLDEN.rglob("*.gin")}
    assert FILES
    assert sorted(stored) == FILES, f"run: {golden.COMMAND}"


def test_the_table_of_compiled_steps_has_every_gin_file_and_each_compiled():
    result = gin_compiles.rows(gin_compiles.TABLE.read_text())
    assert sorted(result) == sorted(map(str, FILES)), "run: python -m tests.truth.gin_compiles FILE for a new one"
    assert not [row for row in result.values() if not row[1].replace(",", "").isdigit()], "these do not compile"


@each
def test_a_gin_file_resolves_to_what_it_did(file: Path):
    stored = golden.GOLDEN / file
    assert stored.exists(), f"{file} has no resolved form; run: {golden.COMMAND}"
    changed = golden.changes(stored.read_text(), golden.resolved(file))
    assert not changed, "\n  ".join([f"{file} changed; if it is meant to, run: {golden.COMMAND}", *changed])


@each
def test_a_resolved_form_is_the_same_run_and_sweep(file: Path):
    run, sweep, _ = golden.load(file)
    text = golden.resolved(file)
    config.load(bindings=[text])
    again = config.call("train")
    if isinstance(run.data, UserRecords):  # equal to itself only, since an object of records may be anything
        assert vars(again.data) == vars(run.data)
        again = dataclasses.replace(again, data=run.data)
    assert again == run
    assert sweep is None or sweep_of(text) == sweep


@pytest.mark.parametrize("file", short(8, FILES), ids=str)
def test_a_gin_file_makes_a_step(file: Path):
    run, sweep, text = golden.load(file)
    if sweep is not None:
        *_, run = golden.trials(sweep, text)  # every value fits; the last of every axis makes a step
    result = dry_run(run)
    assert result.operations > 500
    assert result.parameter_bytes * result.devices >= 4 * result.parameters


def test_a_dry_run_says_what_a_step_is_and_writes_nothing(tmp_path, monkeypatch, capsys):
    """On 64 devices each parameter is 4 bytes on one of them, and its two moments 8 more."""
    monkeypatch.chdir(tmp_path)
    assert main(["train", str(golden.ROOT / "experiments/llama3_8b.gin"), "--dry-run"]) == 0
    output = capsys.readouterr().out
    for words in ("fsdp=64", "64 devices", "8,030,261,248 parameters", "2,097,152 tokens", "1.41 GiB", "480 MiB"):
        assert words in output
    assert not list(tmp_path.iterdir())


def test_a_setting_that_changed_is_named():
    was, now = "train.lr = 0.1\ntrain.steps = 3\n", "train.lr = 0.2\ntrain.new = None\n"
    assert golden.changes(was, now) == [
        "train.lr: 0.1 -> 0.2",
        "train.new: not there -> None",
        "train.steps: 3 -> not there",
    ]
