"""A sweep from its text to its table: rows, what goes wrong, what is refused, and going on."""

from __future__ import annotations

import csv
import dataclasses
import fcntl
import json
import math
import signal
from pathlib import Path

import pytest

import jaxscale as js
from jaxscale.cli import main
from jaxscale.config import Text
from jaxscale.errors import ConfigError, JaxscaleError, RunError
from jaxscale.sweep import Job, Prepared, Result, Sweep, Trial, sweep_of
from jaxscale.sweep.configs import Base
from jaxscale.sweep.jobs import run_job
from jaxscale.sweep.journal import held, job_file, run_folder, try_again
from jaxscale.sweep.outcomes import Outcome
from jaxscale.sweep.search import Grid
from jaxscale.train.metrics import MetricsFile
from tests.truth.errors import raises_saying
from tests.truth.runs import bigram, losses
from tests.truth.sweeps import BASE, Told, text

LR = 'sweep.axes = {"train.lr": [1e-2, 2e-2, 3e-2]}\n'


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr("jaxscale.sweep.coordinator.LOOK", 0.0)


def run(
    more: str = LR,
    runner: Told | None = None,
    folder: str = "sweep",
    base: str = BASE,
    retry_failed: bool = False,
    **changes,
) -> Result:
    """Runs a text's sweep on a runner that is told its losses."""
    whole = text(more, base)
    sweep = js.sweep.Sweep(**{**vars(sweep_of(whole)), **changes, "runner": runner or Told()})
    return sweep.run(folder, whole, quiet=True, retry_failed=retry_failed)


def states(result: Result) -> list[str]:
    return [row["state"] for row in result.table()]


# --- real runs --------------------------------------------------------------------------------------------------------


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


def test_a_run_that_fails_is_a_row_and_the_sweep_goes_on(tmp_path):
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


def test_a_run_that_cannot_be_described_is_a_row_too(monkeypatch):
    whole = Base.job_text

    def job_text(self, bindings):
        if bindings["train.lr"] == 2e-2:
            raise ValueError("no such width")  # of somebody's own class
        return whole(self, bindings)

    monkeypatch.setattr(Base, "job_text", job_text)
    result = run()
    assert states(result) == ["finished", "failed", "finished"]
    assert result.table()[1]["error"] == "ValueError: no such width"


def test_what_failed_is_tried_again_when_asked_for_and_nothing_else_is_touched():
    full = [True]

    def loss(bindings, step):
        if full[0] and step == 3 and bindings["train.lr"] > 1e-2:
            raise RuntimeError("no space left on device")
        return 1 / step

    assert states(run(runner=Told(loss))) == ["finished", "failed", "failed"]
    before = {p: p.read_bytes() for p in Path("sweep/000").rglob("*")}
    full[0], again = False, Told(loss)
    assert states(run(runner=again)) == ["finished", "failed", "failed"] and not again.started
    assert states(run(runner=again, retry_failed=True)) == ["finished"] * 3
    assert [id for id, _ in again.started] == [1, 2]
    assert {p: p.read_bytes() for p in Path("sweep/000").rglob("*")} == before
    assert json.loads(Path("sweep/jobs/001.failed-1.json").read_text())["error"] == "no space left on device"


def test_what_fails_again_is_kept_beside_what_it_failed_with_before():
    def loss(bindings, step):
        raise RuntimeError(f"reason {len(list(Path('sweep').rglob('*.failed-*.json')))}")

    run('sweep.axes = {"train.lr": [1e-2]}', Told(loss))
    for _ in range(2):
        result = run('sweep.axes = {"train.lr": [1e-2]}', Told(loss), retry_failed=True)
    assert result.table()[0]["error"] == "reason 2"
    kept = [json.loads(Path(f"sweep/jobs/000.failed-{n}.json").read_text())["error"] for n in (1, 2)]
    assert kept == ["reason 0", "reason 1"]


def test_what_is_tried_again_goes_on_from_its_checkpoint():
    def fails(config, **how):
        js.fit(config, **{**how, "until": 2})
        raise OSError("no space left on device")

    job = Job(Trial(0, {"train.lr": 1e-2}), Path("sweep/000"), Base(text(LR)).job_text({"train.lr": 1e-2}))
    run_job(job, fails)
    failed = Outcome.read(job.folder)
    try_again(job.folder)
    starts = []
    run_job(job, lambda config, **how: starts.append(js.fit(config, **how)))
    ended = Outcome.read(job.folder)
    assert (failed.state, ended.state, ended.steps) == ("failed", "finished", 4)
    assert ended.seconds > failed.seconds > 0
    alone = js.fit(js.TrainConfig(**bigram(eval_batches=1, lr=1e-2)), quiet=True)
    assert losses(starts[0]) == losses(alone)


def test_the_command_tries_again_what_failed(own_folder, capsys):
    Path("text").mkdir()
    data = 'train.data = @text_files()\ntext_files.glob = "text/*.txt"\ntext_files.heldout = 0.5\n'
    lines = [line for line in BASE.splitlines() if not line.startswith(("synthetic", "train.data"))]
    Path("lr.gin").write_text("\n".join([*lines, "TestBigram.vocab = 256", data, 'sweep.axes = {"train.lr": [1e-2]}']))
    assert main(["sweep", "lr.gin", "--run", "lr", "--quiet"]) == 0
    assert states(Result("lr")) == ["failed"]
    for name, words in (("a", "abc "), ("b", "cba ")):
        Path(f"text/{name}.txt").write_text(words * 400)
    assert main(["sweep", "lr.gin", "--run", "lr", "--retry-failed"]) == 0
    assert "trying again what failed: 000" in capsys.readouterr().out
    [row] = Result("lr").table()
    assert row["state"] == "finished"
    assert "no file matches" in json.loads(Path("lr/jobs/000.failed-1.json").read_text())["error"]
    assert main(["sweep", "lr.gin", "--retry-failed"]) == 2
    assert "name its folder with --run DIR" in capsys.readouterr().err


# --- the table --------------------------------------------------------------------------------------------------------


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
    kept = json.loads((result.path / "trials.jsonl").read_text().splitlines()[1])
    assert kept["bindings"] == {"train.optimizer": "@fast/AdamW()", "train.lr": "0.01"}


def test_objects_and_settings_of_python_do_as_well():
    values = [js.optim.SGD(momentum=0.5), js.optim.AdamW(b1=0.5)]
    seen = []
    runner = Told(lambda bindings, step: seen.append(bindings) or 1.0)
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


def test_the_best_is_the_lowest_finite_one_that_did_not_fail():
    def loss(bindings, step):
        if bindings["train.lr"] == 1e-2:
            raise RuntimeError("no room")
        return {2e-2: math.nan, 3e-2: 2.0, 4e-2: 3.0}[bindings["train.lr"]]

    result = run('sweep.axes = {"train.lr": [1e-2, 2e-2, 3e-2, 4e-2]}', Told(loss))
    assert result.best()["train.lr"] == 3e-2
    assert result.table()[0]["error"] == "no room"


def test_the_best_of_a_shared_sweep_may_be_another_machines(own_folder):
    pytest.importorskip("optuna")
    url = f"journal://{own_folder}/storage"
    first = run(runner=Told(lambda bindings, step: bindings["train.lr"]), folder="first", storage=url)
    second = run(folder="second", storage=url)  # there is nothing left for it
    assert second.done() and [row["eval_loss"] for row in second.table()] == [1e-2, 2e-2, 3e-2]
    assert second.run().path.samefile(first.run().path)


def test_no_best_where_nothing_was_measured():
    def loss(bindings, step):
        raise RuntimeError("no room")

    with raises_saying(RunError, "no trial of sweep", "eval_loss"):
        run(runner=Told(loss)).best()


# --- going on ---------------------------------------------------------------------------------------------------------


def test_a_trial_is_written_down_before_it_starts(own_folder):
    def loss(bindings, step):
        lines = [json.loads(line) for line in (own_folder / "sweep/trials.jsonl").read_text().splitlines()]
        assert {"train.lr": repr(bindings["train.lr"])} in [line["bindings"] for line in lines]
        return 1.0

    assert states(run(runner=Told(loss))) == ["finished"] * 3


def test_what_is_done_is_not_touched_again():
    result = run()
    runs = [p for p in result.path.rglob("*") if p.parent != result.path]
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in runs if p.is_file()}
    again = Told()
    run(runner=again)
    assert again.started == []
    assert {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in before} == before


def test_more_runs_go_on_in_the_same_folder():
    run(runs=2)
    again = Told()
    assert states(run(runner=again)) == ["finished"] * 3
    assert again.started == [(2, None)]


def test_a_signal_stops_what_runs_and_the_same_sweep_goes_on():
    def loss(bindings, step):
        if (bindings["train.lr"], step) == (2e-2, 2):
            signal.raise_signal(signal.SIGINT)
        return 1.0

    stopped = run(runner=Told(loss, at_once=1))
    assert states(stopped) == ["finished", "waiting"]
    assert 0 < stopped.table()[1]["steps"] < 4
    again = Told()
    assert states(run(runner=again)) == ["finished"] * 3
    assert again.started == [(1, None), (2, None)]


@dataclasses.dataclass
class _Dies:
    """A handle on what ended without a word, `steps` further than before."""

    job: Job
    steps: int

    def __post_init__(self) -> None:
        file = MetricsFile(self.job.folder / "metrics.jsonl")
        for step in range(1, self.steps + 1):
            file.write({"step": step, "loss": 1.0, "eval_loss": 1.0})
        file.close()

    def alive(self) -> bool:
        return False

    def why(self) -> str:
        return "ended by SIGKILL"


class Deadly(Told):
    """The second trial's process dies, each time after so many steps."""

    reached = [1, 2, 2, 2, 2]

    def start(self, jobs):
        handle = super().start(jobs)
        return _Dies(jobs[0], self.reached.pop(0)) if jobs[0].trial.id == 1 and self.reached else handle


def test_a_trial_whose_process_dies_is_tried_again_until_it_gets_no_further():
    result = run(runner=Deadly(), folder="often")
    assert states(result) == ["finished", "failed", "finished"]
    assert result.table()[1]["error"] == "its process ended by SIGKILL, 3 times at the same step"
    assert Deadly.reached == [2]  # which is one death more
    assert states(run(runner=Deadly(), folder="once")) == ["finished"] * 3


class Rungs(Grid):
    """Two steps of each, then the rest of those that are asked for again."""

    def next(self, space, records, steps):
        trial = super().next(space, records, steps)
        if trial is not None:
            return Trial(trial.id, trial.bindings, 2)
        paused = [r.trial for r in records if r.state == "paused"]
        return Trial(paused[0].id, paused[0].bindings) if len(paused) == len(records) else None


def test_a_paused_trial_goes_on_when_asked_for_again():
    runner = Told()
    result = run(runner=runner, search=Rungs())
    assert states(result) == ["finished", "paused", "paused"]
    assert runner.started == [(0, 2), (1, 2), (2, 2), (0, None)]
    assert [row["steps"] for row in result.table()] == [4, 2, 2]


class Impatient(Grid):
    """Gives up what is above 1."""

    def keeps(self, record, records, steps):
        return record.curve[-1][1] <= 1


def test_a_trial_that_is_given_up_is_stopped_for_good():
    result = run(runner=Told(lambda bindings, step: 1 + (bindings["train.lr"] == 2e-2)), search=Impatient())
    assert states(result) == ["finished", "stopped", "finished"]
    assert result.table()[1]["steps"] < 4
    again = Told()
    assert states(run(runner=again, search=Impatient())) == ["finished", "stopped", "finished"]
    assert again.started == []


def test_who_looks_whether_a_trial_runs_does_not_hold_it(tmp_path):
    lock = job_file(run_folder(tmp_path, 0), "lock")
    lock.parent.mkdir()
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # another process, which looks as well
        assert not held(tmp_path, 0)
        fcntl.flock(file, fcntl.LOCK_EX)
        assert held(tmp_path, 0)


def test_one_process_at_a_time_has_a_sweep():
    def loss(bindings, step):
        with raises_saying(RunError, "being swept by another process"):
            js.sweep.journal.Journal(Path("sweep"), "eval_loss")
        return 1.0

    run(runner=Told(loss))


# --- what is refused --------------------------------------------------------------------------------------------------


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
    with raises_saying(RunError, "mine is there already and holds no sweep"):
        run(folder="mine")
    assert [p.name for p in Path("mine").iterdir()] == ["run.json"]


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
        ("train.lr = 1e-3", ["nothing binds sweep.axes"]),
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
            ["Grid.stopper", "train.eval_every = 0 of 4 steps", "set it to 1"],
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
def test_what_does_not_fit_is_said_before_anything_starts(more, words):
    with raises_saying(JaxscaleError, *words):
        run(more)
    assert not Path("sweep").exists()


def test_a_value_that_has_no_words_in_gin_is_refused():
    with raises_saying(ConfigError, "sweep.axes", "gin"):
        Sweep({"train.lr": [1e-2], "train.tokenizer": [object()]}).run("sweep", js.TrainConfig(**bigram()))


def test_a_search_that_leaves_trials_at_a_rung_says_that_it_is_over(capsys):
    more = LR + "sweep.search = @ASHA()\nASHA.rungs = 2\n"
    whole = text(more)
    sweep = dataclasses.replace(sweep_of(whole), runner=Told(lambda bindings, step: bindings["train.lr"]))
    sweep.run("sweep", whole)
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first == "sweeping in sweep: 0 of 3 runs done"
    over = "1 run finished, 2 left at a rung; the search is over"
    assert last.startswith(f"sweep · {over} · best eval_loss 0.0100 (001: train.lr = 0.01); the table is in")
    sweep.run("sweep", whole)
    assert capsys.readouterr().out.splitlines()[0] == f"going on in sweep: {over}"


def test_a_grid_says_how_many_are_done(capsys):
    whole = text(LR)
    dataclasses.replace(sweep_of(whole), runner=Told()).run("sweep", whole)
    assert capsys.readouterr().out.splitlines()[-1].startswith("sweep · 3 of 3 runs done · best")


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_lists_what_it_would_do_and_writes_nothing(own_folder, capsys):
    (own_folder / "lr.gin").write_text(BASE + LR)
    assert main(["sweep", "lr.gin", "--dry-run", "--gin.train.steps=10"]) == 0
    said = capsys.readouterr().out
    for words in ("0.01", "0.02", "0.03", "3 runs", "30", "3,840", "Grid"):
        assert words in said
    assert [p.name for p in own_folder.iterdir()] == ["lr.gin"]


def test_a_dry_run_looks_into_the_storage(own_folder, capsys):
    (own_folder / "lr.gin").write_text(BASE + LR)
    pytest.importorskip("optuna")
    assert main(["sweep", "lr.gin", "--dry-run", "--storage", "journal:///nowhere/at/all/file"]) == 2
    assert "there is no folder /nowhere/at/all" in capsys.readouterr().err
    assert main(["sweep", "lr.gin", "--dry-run", "--storage", f"journal://{own_folder}/log"]) == 0
    assert (own_folder / "log").read_text() == "", "no study"


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
        f"{binding.replace('=', ' = ')} has no effect: it is an axis of the sweep; leave it out"
        in capsys.readouterr().err
    )


def test_a_value_of_python_may_be_gin_text():
    base = js.TrainConfig(**bigram(eval_batches=1))
    result = Sweep({"train.optimizer": [Text("@SGD()")]}, runner=Told()).run("sweep", base, quiet=True)
    assert result.table()[0]["train.optimizer"] == "@SGD()"
