"""What disks, clocks, signals and other runs do to a run: a sentence, and nothing lost."""

from __future__ import annotations

import ast
import os
import pickle
import resource
import signal
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxscale as js
from jaxscale.errors import CheckpointError, RunError
from jaxscale.train.checkpoints.digest import DIGESTS, sealed, unsealed
from tests.truth.errors import raises_saying
from tests.truth.runs import ROOT, Bigram, assert_same_bits, bigram


def fit(run="here", resume=False, **changes):
    return js.fit(js.TrainConfig(**bigram(**changes)), run=run, resume=resume, quiet=True)


def whole(run):
    """Steps whose checkpoints are what was written."""
    return [step for step in run.checkpoints.steps() if not list(run.checkpoints.arrays(step).faults())]


def when(condition, act):
    """Calls `act` once, as soon as a condition holds, from another thread."""

    def watch():
        while not condition():
            time.sleep(0.0005)
        act()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def writing(step):
    """Whether a checkpoint is being written."""
    return list(Path("here/checkpoints").glob(f"{step}.partial-*"))


def test_a_failed_save_fails_the_run_within_a_save_and_says_why():
    fit(steps=2)
    Path("here/checkpoints/4").touch()  # by whom?
    with raises_saying(CheckpointError, "could not write checkpoint 4", "already exists", "are unchanged: 2"):
        fit(resume=True, steps=1000, checkpoint_every=2)
    run = js.Run("here", js.TrainConfig(**bigram()))
    assert run.metrics()[-1]["step"] < 8
    assert (run.info["status"], whole(run)) == ("failed", [2])


def test_a_full_disk_is_a_sentence_and_older_checkpoints_stay():
    fit(steps=2, model=Bigram(vocab=512, width=256))  # 512 KiB an array
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    lines = lambda: Path("here/metrics.jsonl").read_text().count("\n")  # noqa: E731
    # once it is compiled: the compile cache is not to be cut short with it, nor thousands of lines of metrics
    when(lambda: lines() > 2, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, before[1])))
    try:
        with raises_saying(CheckpointError, "could not write checkpoint", "File too large", "are unchanged: 2"):
            fit(resume=True, steps=100_000, checkpoint_every=100, model=Bigram(vocab=512, width=256))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert whole(js.Run("here", js.TrainConfig(**bigram()))) == [2]
    again = fit(resume=True, steps=4, model=Bigram(vocab=512, width=256))
    assert whole(again) == [2, 4]
    assert sorted(p.name for p in again.checkpoints.folder.iterdir()) == ["2", "4", "writer"]


def test_a_folder_that_cannot_be_written_is_refused_before_training():
    with raises_saying(RunError, "cannot make the run folder /sys/jaxscale"):
        fit(run=Path("/sys/jaxscale"))


def test_checkpoints_that_cannot_be_written_there_fail_the_run():
    fit(steps=2)
    Path("here/checkpoints").rename("elsewhere")
    os.symlink("/sys/kernel", "here/checkpoints")  # nobody writes there, not even root
    (Path("here") / "metrics.jsonl").unlink()
    with raises_saying(CheckpointError, "could not write checkpoint 2 into"):
        fit(run=Path("here"), resume="newest", steps=2)


@pytest.mark.usefixtures("interruptible")
def test_a_signal_during_a_save_loses_nothing():
    thread = when(lambda: writing(2), lambda: os.kill(os.getpid(), signal.SIGTERM))
    run = fit(steps=100_000, checkpoint_every=2, keep=2)
    thread.join(10)
    last = int(run.state.step)
    assert run.info["status"] == "stopped" and run.checkpoints.steps()[-1] == last
    assert whole(run) == run.checkpoints.steps()


def test_a_clock_that_jumps_changes_nothing(monkeypatch):
    straight = fit("straight", steps=6, checkpoint_every=2)
    now, calls = time.time, [0]

    def jumping():
        calls[0] += 1
        return now() + (-1) ** calls[0] * 3e8  # ten years to and fro

    monkeypatch.setattr(time, "time", jumping)
    fit(steps=4, checkpoint_every=2)
    again = fit(resume=True, steps=6, checkpoint_every=2)
    assert whole(again) == [2, 4, 6]
    assert_same_bits(again.state, straight.state)
    assert [r["step"] for r in again.metrics()] == [1, 2, 3, 4, 5, 6]


def test_of_two_runs_in_one_folder_the_first_stops_when_a_lock_did_not_hold():
    thread = when(lambda: writing(4), lambda: Path("here/checkpoints/writer").write_text("deadbeef"))
    with raises_saying(CheckpointError, "another run has begun to write into", "a folder of its own"):
        fit(steps=100_000, checkpoint_every=2)
    thread.join(10)
    run = js.Run("here", js.TrainConfig(**bigram()))
    assert whole(run) == run.checkpoints.steps() != []


def test_nothing_of_ours_can_run_what_a_file_says():
    """No module of ours imports, or calls, what executes or unpickles data."""
    forbidden = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
    calls = {"eval", "exec"}
    pipes = {ROOT / "jaxscale/data/workers.py"}  # pickles objects for its own child processes, through a pipe
    for path in [*(ROOT / "jaxscale").rglob("*.py"), *(ROOT / "pallas_kernels").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert path in pipes or not {n.partition(".")[0] for n in names} & forbidden, path
            if isinstance(node, ast.Call):
                called = node.func.id if isinstance(node.func, ast.Name) else ""
                assert called not in calls, f"{path}:{node.lineno}"
                assert "allow_pickle" not in {k.arg for k in node.keywords}, f"{path}:{node.lineno}"


class Poison:
    def __reduce__(self):
        return (Path.touch, (Path("poisoned").absolute(),))


def test_a_poisoned_file_is_bytes_and_no_more():
    """A pickle that acts when it is loaded, in place of an array, with every digest made to fit."""
    run = fit(steps=2)
    at = run.checkpoints.folder / "2"
    body = unsealed((at / "manifest.json").read_text())
    data = pickle.dumps(Poison()).ljust(1024, b"\0")
    (at / "tensors/params/embed/weight/c.0.0").write_bytes(data)
    body["leaves"]["params/embed/weight"]["files"]["c.0.0"] = DIGESTS[body["digest"]](np.frombuffer(data, np.uint8))
    (at / "manifest.json").write_text(sealed(body))
    assert np.asarray(run.params(2)["embed"]["weight"]).tobytes() == data
    assert not Path("poisoned").exists()
    pickle.loads(data)
    assert Path("poisoned").exists(), "it would have acted"


def test_time_to_digest_is_not_counted_twice(monkeypatch):
    """Each chunk is digested once, from the memory that is written."""
    seen = []
    for name, digest in list(DIGESTS.items()):
        monkeypatch.setitem(DIGESTS, name, lambda data, digest=digest: seen.append(data.nbytes) or digest(data))
    run = fit(steps=2)
    held = sum(x.nbytes for x in jax.tree.leaves(run.state) if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key))
    assert sum(seen) == held + 8  # and the key's two words


@pytest.mark.parametrize("name", sorted(DIGESTS))
def test_a_digest_is_of_every_bit(name):
    data = np.random.default_rng(0).integers(0, 256, 1000, np.uint8)
    want = DIGESTS[name](data)
    for bit in range(0, 8000, 97):
        other = data.copy()
        other[bit // 8] ^= 1 << (bit % 8)
        assert DIGESTS[name](other) != want
