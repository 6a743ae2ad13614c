"""Two processes with four devices each are one process with eight."""

from __future__ import annotations

import shutil
import socket
import time

import jax
import numpy as np
import pytest

import jaxscale as js
from jaxscale.cli import main
from tests.truth.compare import assert_leaves_agree
from tests.truth.runs import BIGRAM, STEPS, losses, start, write_gin

LIMIT = 200
"""Seconds after which processes that wait for each other are ended."""

# All commands in one process, since starting one is most of the time: first mistakes, then what was meant.
SCRIPT = """
import sys
from jaxscale.cli import main
for mistake in (["--run", "text"], ["--mesh", "data=4"], ["--gin.train.layout=None"]):
    print("exit code", main([*sys.argv[1:], *mistake]), file=sys.stderr)
sys.exit(main([*sys.argv[1:], "--run", "two"]))
"""


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """A run by two processes, the same by this one, and what the two processes left: exit code, output, errors."""
    folder = tmp_path_factory.mktemp("processes")
    gin = write_gin(folder / "small.gin", "import tests.truth.runs\n" + BIGRAM)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXSCALE_CACHE", str(folder / "cache"))
        argv = ["train", str(gin), "--gin.train.prompt='def '", "--devices", "4", "--distributed"]
        started = [start(SCRIPT, [*argv, f"{address},2,{i}"], folder) for i in range(2)]
        until = time.monotonic() + LIMIT
        try:
            texts = [p.communicate(timeout=max(until - time.monotonic(), 1)) for p in started]
        finally:
            for p in started:
                p.kill()
        ended = [(p.returncode, *t) for p, t in zip(started, texts, strict=True)]
        assert [code for code, _, _ in ended] == [0, 0], ended
        assert main(["train", str(gin), "--quiet", "--run", str(folder / "one")]) == 0
    return js.Run(folder / "two"), js.Run(folder / "one"), ended


def test_the_losses_are_those_of_one_process(together):
    two, one, _ = together
    assert_leaves_agree(losses(two), losses(one))


def test_the_held_out_loss_is_that_of_one_process(together):
    two, one = (run.metrics()[-1]["eval_loss"] for run in together[:2])
    assert two == pytest.approx(one, rel=1e-5)


def test_metrics_are_written_once(together):
    assert (together[0].path / "metrics.jsonl").read_text().count("\n") == STEPS


def test_the_first_process_alone_prints(together):
    first, second = (out for _, out, _ in together[2])
    for said in (f"step {STEPS}/{STEPS}", "a sample, continuing 'def ':", "held-out loss"):
        assert said in first and said not in second


def test_the_run_says_that_there_were_two(together):
    info = together[0].info
    assert (info["status"], info["hardware"]["processes"], info["hardware"]["devices"]) == ("finished", 2, 8)


def test_one_process_reads_the_checkpoint_of_two(together):
    two, one = (run.params() for run in together[:2])
    # Adam turns the rounding of a gradient near zero into a part of a step, so this is no equality of gradients
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), two, one)


def test_one_process_resumes_what_two_began(together, tmp_path):
    copy = shutil.copytree(together[0].path, tmp_path / "copy")
    assert main(["train", "--resume", str(copy), f"--gin.train.steps={STEPS + 1}", "--quiet"]) == 0
    assert js.load(copy).info["step"] == STEPS + 1


def test_a_mistake_is_said_by_every_process_and_none_waits(together):
    for _, _, err in together[2]:
        assert "text is there already" in err
        assert err.count("exit code 2\n") == 3


def test_a_layout_that_leaves_a_process_without_devices_is_refused(together):
    for _, _, err in together[2]:
        assert "the layout data=4 (fsdp_tensor) leaves 1 of 2 processes without a device" in err
        assert "the layout None leaves 2 of 2 processes without a device; give a mesh of all 8 devices" in err
