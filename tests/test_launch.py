"""`jaxscale launch`: processes are watched and restarted."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import pytest

import jaxscale as js
from jaxscale.cli import main
from jaxscale.commands.launch import supervise
from tests.truth.runs import BIGRAM, environment, write_gin

pytestmark = pytest.mark.once

FAULT = """
import os, signal
import jax
import tests.truth.runs
from jaxscale.train.loop import Loop
place = Loop._place

def placed(self, done):
    if done + 1 == 6 and jax.process_index() == 1:
        self.snapshots.keeper.wait()  # until that of step 5 is whole
        os.kill(os.getpid(), signal.SIGKILL)
    return place(self, done)

Loop._place = placed
"""


def scripts(tell, text):
    """Commands that run `text` with `count`, `process` and `attempt` defined; each logs that it started."""

    def command(count, process, address, attempt):
        say = f"open({str(tell)!r}, 'a').write(f'{attempt}:{process}/{count} ')"
        return [sys.executable, "-S", "-c", f"count, process, attempt = {count, process, attempt}\n{say}\n{text}"]

    return command


@pytest.fixture
def log(tmp_path):
    """The file in which processes log that they started."""
    return tmp_path / "told"


def began(log):
    return sorted(log.read_text().split())


KILLED = "import os, signal\nif attempt == 0 and process == 1: os.kill(os.getpid(), signal.SIGKILL)"


def test_all_begin_again_when_one_is_killed(log, capsys):
    assert supervise(scripts(log, KILLED), 2, restarts=1, fewer=False) == 0
    assert began(log) == ["0:0/2", "0:1/2", "1:0/2", "1:1/2"]
    assert "process 1 was killed by SIGKILL; restart 1 of 1 with 2 processes" in capsys.readouterr().err


def test_fewer_begin_again_until_they_fit(log):
    odd = f"{KILLED}\nif count == 3: raise SystemExit(2)"
    assert supervise(scripts(log, odd), 4, restarts=1, fewer=True) == 0
    assert {one.partition("/")[2] for one in began(log)} == {"4", "3", "2"}


def test_a_mistake_is_not_made_again(log):
    assert supervise(scripts(log, "raise SystemExit(2)"), 2, restarts=3, fewer=False) == 2
    assert began(log) == ["0:0/2", "0:1/2"]


def test_one_that_does_not_end_after_another_failed_is_killed(log, capsys):
    stuck = "import time\nif process == 0: time.sleep(100)\nraise SystemExit(70)"
    begin = time.monotonic()
    assert supervise(scripts(log, stuck), 2, restarts=0, fewer=False, grace=0.5) == 70
    assert time.monotonic() - begin < 50
    assert "process 0 did not end and was killed" in capsys.readouterr().err


@pytest.mark.parametrize("code", [130, 143])
def test_a_run_that_a_signal_stopped_is_not_begun_again(log, code):
    assert supervise(scripts(log, f"raise SystemExit({code})"), 2, restarts=3, fewer=False) == code
    assert began(log) == ["0:0/2", "0:1/2"]


@pytest.mark.usefixtures("interruptible")
def test_a_signal_is_passed_on_and_nothing_begins_again(log):
    def send():
        while not log.exists() or len(began(log)) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send).start()
    assert supervise(scripts(log, "import time\ntime.sleep(100)"), 2, restarts=3, fewer=False) == 128 + signal.SIGTERM
    assert began(log) == ["0:0/2", "0:1/2"]


@pytest.mark.parametrize(
    "words, message",
    {
        "no-command": (["--nproc", "2"], "jaxscale launch runs train, not ''"),
        "other-command": (["--nproc", "2", "--", "plan", "x.gin"], "jaxscale launch runs train, not 'plan'"),
        "no-process": (["--nproc", "0", "--", "train", "x.gin"], "--nproc 0: must be at least 1"),
        "distributed": (["--nproc", "2", "--", "train", "x.gin", "--distributed"], "passes --distributed"),
        "binding": (["--nproc", "2", "--gin.train.lr=1", "--", "train", "x.gin"], "options after --"),
    }.values(),
    ids=["no-command", "other-command", "no-process", "distributed", "binding"],
)
def test_mistakes_are_one_sentence(words, message, capsys):
    assert main(["launch", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.long
def test_a_run_goes_on_with_fewer_processes_where_one_was_killed(tmp_path, monkeypatch, capfd):
    (tmp_path / "fault.py").write_text(FAULT)
    gin = write_gin(tmp_path / "small.gin", "import fault\n" + BIGRAM)
    monkeypatch.chdir(tmp_path)
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    settings = ["--gin.train.steps=8", "--gin.train.checkpoint_every=2", "--gin.Layout.mesh=data=-1", "--run", "run"]
    snapshots = ["--gin.train.snapshots=@Snapshots()", f"--gin.Snapshots.folder='{tmp_path}'", "--devices", "2"]
    assert main(["launch", "--nproc", "2", "--fewer", "--", "train", str(gin), *settings, *snapshots]) == 0
    out, errors = capfd.readouterr()
    reports = [line for line in errors.splitlines() if " jaxscale: " in line]
    assert len(reports) == 1 and reports[0].startswith("[0] jaxscale: process 1 disconnected in step 6"), errors
    assert "the last finished checkpoint is of step" in errors  # of 2, or of 4, which was being written
    assert "restart 1 of 3 with 1 process" in errors
    assert "continuing from the snapshot of step 5 in host memory" in out  # newer than any checkpoint
    run = js.Run(tmp_path / "run")
    assert run.info["status"] == "finished"
    assert [row["step"] for row in run.metrics()] == list(range(1, 9))
