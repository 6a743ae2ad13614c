"""Sweeps from gin text and from Python, with real runs; folders of other sweeps are refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import jaxscale as js
from jaxscale.config import Text
from jaxscale.errors import ConfigError, RunError
from jaxscale.sweep import Prepared, Sweep, sweep_of
from jaxscale.sweep.dry import planned
from tests.truth.errors import raises_saying
from tests.truth.runs import bigram, losses
from tests.truth.sweeps import BASE, LR, Scripted, run, text

pytestmark = pytest.mark.usefixtures("no_waiting")


def test_a_trial_is_the_run_that_its_settings_make_alone():
    whole = text('sweep.axes = {"train.lr": [1e-2, 2e-2]}')
    result = sweep_of(whole).run("sweep", whole, quiet=True)
    row = result.table()[1]
    alone = js.fit(js.TrainConfig(**bigram(eval_batches=1, lr=2e-2)), quiet=True)
    assert losses(result.run(row)) == losses(alone)
    assert row["eval_loss"] == alone.metrics()[-1]["eval_loss"]
    assert (row["state"], row["steps"], row["tokens"]) == ("finished", 4, 4 * 8 * 16)
    assert (row["parameters"], row["flops"]) == (2 * 32 * 8, 4 * 8 * 16 * 32 * 8 * 6)
    assert result.run(row).config.lr == 2e-2
    assert row["goodput"] == result.run(row).info["goodput"]["share"] > 0 and "stepping_seconds" not in row


def test_a_run_that_fails_is_a_row_and_the_sweep_continues(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.txt").write_text("abc " * 400)
    base = BASE.replace("@synthetic()", "@text_files()").replace("%WIDTH", "8\nTestBigram.vocab = 256")
    base += "text_files.heldout = 0.5\n"
    data = 'sweep.axes = {"text_files.glob": ["none/*.txt", "text/*.txt"], "train.eval_batches": [1]}'
    base = "\n".join(line for line in base.splitlines() if not line.startswith(("synthetic", "WIDTH")))
    (tmp_path / "text/b.txt").write_text("cba " * 400)
    whole = text(data, base + '\ntext_files.glob = "text/*.txt"\n')
    result = sweep_of(whole).run("sweep", whole, quiet=True)
    first, second = result.table()
    assert (first["state"], second["state"]) == ("failed", "finished")
    assert "none/*.txt" in first["error"] and "\n" not in first["error"]
    assert result.best() == second


def test_adapters_are_checked_with_the_model_of_the_run_that_trials_start_from(finished_run):
    start = js.train.FromRun(str(finished_run.path))
    base = js.TrainConfig(start=start, adapters=js.step.LoRA(), data=finished_run.config.data, seq_len=16, steps=2)
    # MixLoRA makes experts of that model's feed-forward layers
    sweep = Sweep({"train.adapters": [js.step.LoRA(), js.step.MixLoRA(experts=2)], "train.lr": [1e-2]})
    lora, _ = planned(Prepared(sweep, base))
    assert lora.flops == 2 * js.step.model_flops(dataclasses.replace(base, model=finished_run.config.model))
    with raises_saying(ConfigError, "has 'absent', which no projection of the model matches"):
        Prepared(Sweep({"train.adapters": [js.step.LoRA(targets=("absent",))], "train.lr": [1e-2]}), base)


def test_objects_and_settings_of_python_do_as_well():
    values = [js.optim.SGD(momentum=0.5), js.optim.AdamW(b1=0.5)]
    seen = []
    runner = Scripted(lambda bindings, step: seen.append(bindings) or 1.0)
    base = js.TrainConfig(**bigram(eval_batches=1))
    sweep = Sweep({"train.optimizer": values, "TestBigram.width": [4, 8], "train.lr": [1e-2]}, runner=runner)
    prepared = Prepared(sweep, base)
    points = [
        dict(zip(prepared.space, (o, w, 1e-2), strict=True))
        for o in prepared.space["train.optimizer"].grid()
        for w in (4, 8)
    ]
    configs = [prepared.base.bind(point)[0] for point in points]
    assert [(c.optimizer, c.model.width) for c in configs] == [(o, w) for o in values for w in (4, 8)]
    assert len(sweep.run("sweep", base, quiet=True).table()) == 4 and len(seen) == 16


def test_a_value_of_python_may_be_gin_text():
    base = js.TrainConfig(**bigram(eval_batches=1))
    result = Sweep({"train.optimizer": [Text("@SGD()")]}, runner=Scripted()).run("sweep", base, quiet=True)
    assert result.table()[0]["train.optimizer"] == "@SGD()"


def test_a_value_that_has_no_words_in_gin_is_refused():
    with raises_saying(ConfigError, "sweep.axes", "gin"):
        Sweep({"train.lr": [1e-2], "train.tokenizer": [object()]}).run("sweep", js.TrainConfig(**bigram()))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (LR.replace("3e-2", "4e-2"), ["holds another sweep", "sweep.axes was", "0.03", "0.04"]),
        (LR + "train.steps = 5", ["train.steps was 4 and is 5"]),
        (LR + "train.clip_norm = None", ["train.clip_norm was not bound and is None"]),
        (
            LR + "train.steps = 5\ntrain.batch_size = 4",
            ["train.batch_size was 8 and is 4, train.steps was 4 and is 5;"],
        ),
    ],
    ids=["axes", "run", "new", "several"],
)
def test_a_sweep_whose_text_changed_is_refused(changed, words):
    before = {p: p.read_bytes() for p in run().path.rglob("*") if p.is_file()}
    with raises_saying(RunError, *words):
        run(changed)
    assert {p: p.read_bytes() for p in Path("sweep").rglob("*") if p.is_file()} == before


def test_where_runs_go_may_change():
    run()
    run(LR + "sweep.runner = @Pool()\nPool.workers = 3")


def test_a_folder_of_something_else_is_refused():
    Path("mine").mkdir()
    Path("mine/run.json").write_text("{}")
    with raises_saying(RunError, "mine already exists and holds no sweep"):
        run(folder="mine")
    assert [p.name for p in Path("mine").iterdir()] == ["run.json"]
