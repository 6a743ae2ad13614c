"""The runner of benchmarks loses only the row that ends a process; the benchmarks here are scripts of a few lines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "experiments" / "benchmarks"
pytestmark = pytest.mark.once

SCRIPT = """
import argparse, os, sys
from time import sleep
from os import kill
sys.path.insert(0, {folder!r})
import record
parser = argparse.ArgumentParser()
record.options(parser)
args = parser.parse_args()
def run(what):
    if what == "crash": os._exit(3)
    if what == "hang": sleep(60)
    if what == "broken":
        os.environ["BROKEN_IN"] = str(os.getpid())
        raise RuntimeError("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS")
    if os.environ.get("BROKEN_IN") == str(os.getpid()): raise RuntimeError("no context")
    if what == "raise": raise ValueError("no such kernel")
    ratio = dict(median=2.0, low=1.9, high=2.1, rounds=3)
    verdict = record.judge(ratio, 1.5, None, {device!r})
    line = record.Line(what, "kernel", "ms", 1.0, {{"xla": 2.0}}, {{}}, ratio, "xla", 1.5, verdict=verdict)
    return dict(timings=[1.0]), [line]
results = record.Results("fake", {device!r}, args)
results.each([(what, what) for what in {rows!r}], run)
"""


@pytest.fixture
def run_all(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import run_all

    yield run_all
    for name in ("run_all", "record", "measure"):
        sys.modules.pop(name, None)


def ran(run_all, tmp_path, text, *, row_seconds=30.0, minutes=1.0, resume=False):
    """Return the results of a benchmark whose script is `text`."""
    (tmp_path / "fake.py").write_text(text)

    class Fake(run_all.Job):
        def command(self, into, seconds):
            command = super().command(into, seconds)
            return [command[0], str(tmp_path / "fake.py"), *command[2:]]

    results = run_all.earlier(tmp_path, resume)
    return run_all.run([Fake("fake", 1.0, row_seconds)], tmp_path, minutes, results)


def rows(*names, device="NVIDIA H200"):
    return SCRIPT.format(folder=str(FOLDER), rows=names, device=device)


def verdicts(run_all, results):
    return {line["what"]: line["verdict"] for line in run_all.lines_of(results)}


@pytest.mark.parametrize("bad", ["crash", "hang"])
def test_a_row_that_ends_its_process_or_hangs_costs_that_row_alone(run_all, tmp_path, bad):
    results = ran(run_all, tmp_path, rows("first", bad, "last"), row_seconds=3.0)
    assert verdicts(run_all, results) == {"first": "met", bad: "its process ended or hung", "last": "met"}


def test_a_row_that_raises_says_why(run_all, tmp_path):
    results = ran(run_all, tmp_path, rows("raise", "last"))
    assert verdicts(run_all, results) == {"raise": "ValueError: no such kernel", "last": "met"}


def test_a_row_that_breaks_the_gpu_costs_that_row_alone(run_all, tmp_path):
    """Later rows in the same process would fail too."""
    results = ran(run_all, tmp_path, rows("first", "broken", "last"))
    expected = "RuntimeError: INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS"
    assert verdicts(run_all, results) == {"first": "met", "broken": expected, "last": "met"}


def test_results_are_on_disk_when_the_time_is_over(run_all, tmp_path):
    ran(run_all, tmp_path, rows("first", "hang"), minutes=0.12)
    on_disk = json.loads((tmp_path / "results.json").read_text())
    assert verdicts(run_all, on_disk) == {"first": "met", "hang": "no time left"}


@pytest.mark.long
def test_a_folder_with_results_is_continued_or_left_alone(run_all, tmp_path):
    ran(run_all, tmp_path, rows("first", "hang"), minutes=0.12)
    with pytest.raises(SystemExit, match="is of a run on NVIDIA H200: --resume continues it"):
        run_all.earlier(tmp_path, resume=False)
    results = ran(run_all, tmp_path, rows("first", "hang").replace("sleep(60)", "sleep(0)"), resume=True)
    assert verdicts(run_all, results) == {"first": "met", "hang": "met"}


def test_results_of_another_commit_are_not_continued(run_all, tmp_path, monkeypatch):
    ran(run_all, tmp_path, rows("first"))
    monkeypatch.setattr(run_all.measure, "commit", lambda: "another")
    with pytest.raises(SystemExit, match="and this is another: choose another folder"):
        run_all.earlier(tmp_path, resume=True)


def test_a_benchmark_that_time_did_not_reach_is_named(run_all, tmp_path):
    results = run_all.run([run_all.Job("softmax", 1.0)], tmp_path, 0.01)
    assert verdicts(run_all, results) == {"softmax": "no time left"}


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_row_is_measured_when_the_run_continues(run_all, tmp_path):
    (tmp_path / "fake.py").write_text(rows("first", "hang").replace("sleep(60)", "kill(os.getpid(), 2)"))
    file = tmp_path / "fake.json"
    command = [sys.executable, str(tmp_path / "fake.py"), "--json", str(file)]
    env = run_all.measure.environment()
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.stderr.strip() == f"interrupted in 'hang'; {file} has the rows before it, and --resume continues"
    content = json.loads(file.read_text())
    assert (list(content["rows"]), content["running"]) == (["first"], None)


def test_rows_that_had_no_time_are_measured_when_there_is_more(run_all, tmp_path):
    (tmp_path / "fake.py").write_text(rows("first", "last"))
    file = tmp_path / "fake.json"
    command = [sys.executable, str(tmp_path / "fake.py"), "--json", str(file), "--resume"]
    for more, expected in (["--seconds", "-1"], ["no time left"] * 2), ([], ["met"] * 2):
        subprocess.run([*command, *more], check=True, env=run_all.measure.environment())
        assert list(verdicts(run_all, {"fake": json.loads(file.read_text())}).values()) == expected


def test_a_benchmark_that_does_not_start_is_recorded_with_its_last_words(run_all, tmp_path):
    results = ran(run_all, tmp_path, "raise SystemExit('no module named so')")
    assert verdicts(run_all, results) == {"fake": "did not start: no module named so"}


def test_no_target_applies_to_other_devices(run_all, tmp_path):
    results = ran(run_all, tmp_path, rows("first", device="cpu"))
    assert verdicts(run_all, results) == {"first": ""}


def test_figures_of_another_device_are_not_published(run_all, tmp_path):
    ran(run_all, tmp_path, rows("first", device="cpu"))
    with pytest.raises(SystemExit, match="is of cpu; only results of H100 or H200 are published"):
        run_all.publish(tmp_path)


def test_figures_of_each_device_stand_in_all_readmes(run_all, tmp_path, monkeypatch):
    root = tmp_path / "root"
    readmes = [root / name for name in ("README.md", "experiments/benchmarks/README.md", "pallas_kernels/README.md")]
    for readme in readmes:
        readme.parent.mkdir(parents=True, exist_ok=True)
        readme.write_text((FOLDER.parents[1] / readme.relative_to(root)).read_text())
    for name, path in {"ROOT": root, "FOLDER": readmes[1].parent, "RESULTS": readmes[1].parent / "results"}.items():
        monkeypatch.setattr(run_all.measure, name, path)
    for device in ("NVIDIA H100 80GB HBM3", "NVIDIA H200"):
        (out := tmp_path / device).mkdir()
        ran(run_all, out, rows("first", device=device))
        file = out / "results.json"
        file.write_text(file.read_text().replace("uncommitted", "0123abc"))  # a checkout without its history
        run_all.publish(out)
    for readme in readmes:
        text = readme.read_text()
        assert "No figure of a GPU" not in text and "nothing has been measured" not in text
        if readme != readmes[2]:
            assert "on one NVIDIA H100 80GB HBM3" in text and "on one NVIDIA H200" in text


def test_rows_of_an_earlier_run_stay_until_they_are_measured_again(run_all, tmp_path):
    first = ran(run_all, tmp_path, rows("first", "second"))
    for one in first.values():
        one["commit"] = "older"
    (tmp_path / "again").mkdir()
    again = ran(run_all, tmp_path / "again", rows("first", "raise"))
    for one in again.values():
        one["commit"] = "newer"
    one = run_all.merged(first, again)["fake"]
    assert one["commit"] == "newer" and list(one["rows"]) == ["first", "second", "raise"]
    assert "commit" not in one["rows"]["first"] and one["rows"]["second"]["commit"] == "older"
    lost = json.loads(json.dumps(again))
    lost["fake"]["rows"]["first"]["lines"][0]["ours"] = None
    assert run_all.merged(first, lost)["fake"]["rows"]["first"]["commit"] == "older"


@pytest.mark.parametrize(
    ("words", "expected"),
    [(["--only", "atention"], "did you mean attention?"), (["--corectness"], "did you mean --correctness?")],
)
def test_a_misspelt_word_gets_the_nearest_one(run_all, tmp_path, monkeypatch, capsys, words, expected):
    monkeypatch.setattr(sys, "argv", ["run_all.py", "--out", str(tmp_path / "out"), *words])
    with pytest.raises(SystemExit):
        run_all.main()
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_summary_counts_verdicts_and_names_the_ends(run_all, tmp_path):
    results = ran(run_all, tmp_path, rows("first", "raise"))
    expected = "2 of xla, target 1.5 (first)"
    assert run_all.summary(results) == [("fake", "1", "0", "0", "1", expected, expected)]
