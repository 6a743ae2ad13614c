"""Killed sweeps: no trial is lost or run twice, and results equal those of an undisturbed sweep."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import pytest

from jaxscale.sweep import Job, Result, Trial
from jaxscale.sweep.configs import Base
from jaxscale.sweep.outcomes import Outcome
from jaxscale.sweep.programs import environment as pool_environment
from jaxscale.sweep.runners.pool import Worker
from jaxscale.sweep.sweep import open_folder
from jaxscale.train.checkpoints import Checkpoints
from jaxscale.train.folders import is_new, new_folder
from tests.truth.runs import ROOT, environment
from tests.truth.sweeps import BASE

pytestmark = pytest.mark.once

STEPS = 24
SWEEP = f"""
train.steps = {STEPS}
train.checkpoint_every = 8
sweep.axes = {{"train.lr": [1e-2, 2e-2]}}
"""

# Imports take longest and happen once: each sweep is a fork of a process that has imported all and has no threads.
FORKS = """
import os, sys
import jaxscale.sweep, tests.truth.sweeps, matplotlib.pyplot
from jaxscale import config
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        try:
            text = config.load(["lr.gin"])
            jaxscale.sweep.sweep_of(text).run(line.strip(), text, quiet=True)
            os._exit(0)
        except BaseException:
            os._exit(99)
    print(child, flush=True)
    print(os.waitpid(child, 0)[1], flush=True)
"""


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory) -> Iterator[Callable[..., None]]:
    """Start a sweep in a process of its own, and wait for its end or kill it."""
    folder = tmp_path_factory.mktemp("killed")
    (folder / "lr.gin").write_text(BASE + SWEEP)
    process = subprocess.Popen(
        [sys.executable, "-c", FORKS],
        cwd=folder,
        env=environment(PYTHONPATH=str(ROOT)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None

    def sweep(run: str, until: Callable[[], bool] | None = None) -> int:
        process.stdin.write(run + "\n")
        process.stdin.flush()
        child = int(process.stdout.readline())
        if until is not None:
            while not until() and not select.select([process.stdout], [], [], 0.002)[0]:  # or until it ends by itself
                pass
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        return int(process.stdout.readline())

    sweep.folder = folder
    yield sweep
    process.stdin.close()
    process.wait()


def steps_written(folder: Path) -> int:
    """Number of steps written by all trials, repeated steps included."""
    return sum(len(p.read_bytes().splitlines()) for p in folder.glob("*/metrics.jsonl"))


def curves(folder: Path) -> list[list[float]]:
    result = Result(folder)
    return [[row["loss"] for row in result.run(row).metrics()] for row in result.table()]


@pytest.mark.long
def test_a_sweep_killed_at_any_moment_continues(sweeps):
    assert sweeps("whole") == 0
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    moments = random.Random(seed)
    folder, kills = sweeps.folder / "sweep", 0
    for by_time in (True, False, False):
        more = steps_written(folder) + moments.randrange(1, STEPS // 4)
        late = time.monotonic() + moments.uniform(0, 0.5)

        def due(by_time: bool = by_time, more: int = more, late: float = late) -> bool:
            return time.monotonic() > late if by_time else steps_written(folder) >= more

        kills += sweeps("sweep", until=due) == signal.SIGKILL
    assert sweeps("sweep") == 0
    assert kills == 3
    assert [row["state"] for row in Result(folder).table()] == ["finished"] * 2
    assert curves(folder) == curves(sweeps.folder / "whole")
    ids = [json.loads(line)["id"] for line in (folder / "trials.jsonl").read_text().splitlines()]
    assert ids == [0, 1]
    assert {row["run"] for row in Result(folder).table()} == {"000", "001"}


@pytest.mark.long
def test_a_sweep_killed_while_it_wrote_its_first_file_begins_anew(sweeps):
    """`sweep.gin` and a run's `config.gin` are written under a temporary name and then renamed."""
    folder = sweeps.folder / "first"
    folder.mkdir()
    (folder / "sweep.gin.partial").write_text("sw")
    assert is_new(folder) and open_folder(folder, "sweep.x = 1\n", "s") == folder
    assert not is_new(folder) and open_folder(folder, "sweep.x = 1\n", "s") == folder
    run = sweeps.folder / "run"
    run.mkdir()
    (run / "config.gin.partial").write_text("tr")
    assert new_folder(run) == run


@pytest.mark.long
def test_a_process_of_a_pool_calculates_as_this_one_does():
    with jax.default_matmul_precision("highest"), jax.default_prng_impl("rbg"):
        pool_variables = pool_environment()
    what = "import jax; print(jax.config.jax_default_matmul_precision, jax.config.jax_default_prng_impl)"
    command = [sys.executable, "-c", what]
    assert subprocess.check_output(command, env=pool_variables, text=True).split() == ["highest", "rbg"]


@pytest.mark.long
def test_a_process_of_a_pool_takes_one_trial_after_another_and_ends_with_its_parent(own_folder):
    """When its parent dies, its input ends; its trial then stops and can be continued."""
    shorter, longer = BASE, BASE + "train.steps = 100000\n"
    jobs = [
        Job(Trial(i, {}), own_folder / f"sweep/00{i}", Base(text).job_text({}), ("tests.truth.sweeps",))
        for i, text in enumerate([shorter, longer])
    ]
    worker = Worker()
    first = worker.start(jobs[0])
    while first.alive():
        time.sleep(0.01)
    assert Outcome.read(jobs[0].folder).state == "finished"
    second = worker.start(jobs[1])
    while not steps_written(own_folder / "sweep") > 6:
        assert second.alive()
        time.sleep(0.01)
    worker.process.stdin.close()
    assert worker.process.wait(60) == 0
    outcome = Outcome.read(jobs[1].folder)
    assert outcome.state == "stopped" and Checkpoints(jobs[1].folder / "checkpoints").steps() == [outcome.steps]
