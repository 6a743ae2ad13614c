"""Sweeps that are killed: no trial is lost, none is made twice, and what comes out is what comes out undisturbed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jaxscale.sweep import Result
from tests.truth.runs import ROOT, environment
from tests.truth.sweeps import BASE

STEPS = 30
SWEEP = f"""
train.steps = {STEPS}
train.checkpoint_every = 3
sweep.axes = {{"train.lr": [1e-2, 2e-2, 3e-2]}}
"""

# Importing takes longest, and happens once: each sweep is a copy of a process that has done it and has no threads yet.
FORKS = """
import os, sys
import jaxscale.sweep, tests.truth.sweeps
from jaxscale.cli import main
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        try:
            os._exit(main(line.split()))
        except BaseException:
            os._exit(99)
    print(child, flush=True)
    print(os.waitpid(child, 0)[1], flush=True)
"""


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory) -> Iterator[Callable[..., None]]:
    """Starts the command in a process of its own, and waits for its end or kills it."""
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

    def sweep(*words: str, until: Callable[[], bool] | None = None) -> int:
        process.stdin.write(" ".join(["sweep", "lr.gin", "--quiet", *words]) + "\n")
        process.stdin.flush()
        child = int(process.stdout.readline())
        if until is not None:
            while not until():
                time.sleep(0.002)
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        return int(process.stdout.readline())

    sweep.folder = folder
    yield sweep
    process.stdin.close()
    process.wait()


def steps_written(folder: Path) -> int:
    """Of all trials together, repeated ones counted each time."""
    return sum(len(p.read_bytes().splitlines()) for p in folder.glob("*/metrics.jsonl"))


def curves(folder: Path) -> list[list[float]]:
    result = Result(folder)
    return [[row["loss"] for row in result.run(row).metrics()] for row in result.table()]


def test_a_sweep_killed_at_any_moment_goes_on(sweeps):
    assert sweeps("--run", "whole") == 0
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    moments = random.Random(seed)
    folder, kills = sweeps.folder / "sweep", 0
    for _ in range(4):
        more = steps_written(folder) + moments.randrange(STEPS)
        late = time.monotonic() + moments.uniform(0, 0.1)

        def there(more: int = more, late: float = late) -> bool:
            return time.monotonic() > late and steps_written(folder) >= more or is_done(folder)

        kills += sweeps("--run", "sweep", until=there) == signal.SIGKILL
    assert sweeps("--run", "sweep") == 0
    assert kills >= 3
    assert [row["state"] for row in Result(folder).table()] == ["finished"] * 3
    assert curves(folder) == curves(sweeps.folder / "whole")
    asked = [json.loads(line)["id"] for line in (folder / "trials.jsonl").read_text().splitlines()]
    assert asked == [0, 1, 2]
    assert {row["run"] for row in Result(folder).table()} == {"000", "001", "002"}


def is_done(folder: Path) -> bool:
    return len(list(folder.glob("*/outcome.json"))) == 3


def test_a_worker_of_a_pool_that_is_killed_is_replaced_and_its_trial_goes_on(sweeps, own_folder):
    """And one whose parent is killed ends by itself."""
    pool = [
        "--run",
        "pool",
        "--gin.sweep.runner=@Pool()",
        "--gin.Pool.workers=1",
        "--import",
        "tests.truth.sweeps",
    ]
    folder, killed = sweeps.folder / "pool", []

    def kill_the_worker_then_the_sweep() -> bool:
        workers = processes_that_hold(folder)
        if workers and steps_written(folder) >= 5 and not killed:
            killed.extend(workers)
            os.kill(workers[0], signal.SIGKILL)
        return bool(killed and workers and workers != killed and steps_written(folder) > STEPS)

    assert sweeps(*pool, until=kill_the_worker_then_the_sweep) == signal.SIGKILL
    assert sweeps("--run", "pool") == 0  # here, as soon as the worker of the other is gone
    assert curves(folder) == curves(sweeps.folder / "whole")


def processes_that_hold(folder: Path) -> list[int]:
    """Those that have a file of a trial's open."""
    found = []
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if process.name.isdecimal() and any(
                str(folder / "jobs") in os.readlink(f) and f.resolve().suffix == ".lock"
                for f in (process / "fd").iterdir()
            ):
                found.append(int(process.name))
    return found
