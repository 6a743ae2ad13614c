"""Two processes with four devices each are one process with eight."""

from __future__ import annotations

import functools
import shutil
import socket
import time

import jax
import numpy as np
import pytest

import jaxscale as js
from jaxscale.cli import main
from jaxscale.infer.cache import Paged, generating
from jaxscale.infer.engine import Cached, Engine, Request
from jaxscale.infer.sampling import Sampling
from jaxscale.layout import Layout, shardings_of
from jaxscale.models import TransformerConfig
from jaxscale.nn import MixtureOfExperts, RingAttention
from jaxscale.step import describe_model
from tests.truth.compare import assert_leaves_agree
from tests.truth.layouts import assert_layouts_agree, random_batch
from tests.truth.params import random_params
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

TRAINS = """
import sys
import jaxscale as js
js.simulate_devices(4)
js.init_distributed(sys.argv[1], 2, int(sys.argv[2]))
from tests.train.test_processes import generate_all, train_all
train_all()
generate_all()
"""

Small = functools.partial(TransformerConfig, vocab=32, width=16, heads=4, kv_heads=2, head_dim=4, hidden=32, tied=True)
DENSE = Small(depth=2, attention=RingAttention())
EXPERTS = Small(depth=1, mlp=MixtureOfExperts(experts=4, hidden=8, balance_loss=0.1))
ACROSS = {
    Layout("pipeline=2,data=2,tensor=2"): DENSE,
    Layout("context=4,data=2"): DENSE,
    Layout("expert=4,data=2"): EXPERTS,
}


def train_all() -> None:
    """In each of two processes: trains on every layout of `ACROSS`, over the devices of both, and says which agree."""
    for layout, model in ACROSS.items():
        laid = layout.on(dealt())
        owners = np.vectorize(lambda d: d.process_index)(laid.device_mesh.devices)
        for axis, size in enumerate(owners.shape):
            assert size == 1 or np.diff(owners, axis=axis).any(), f"{layout}: '{laid.device_mesh.axis_names[axis]}'"
        assert_layouts_agree(model, [laid], batch=random_batch(32, seq=16))
        print("\nagrees:", layout, flush=True)


def generate_all() -> None:
    """In each of two processes: text from an engine over the devices of both is that of one device."""
    graphdef, infos = describe_model(DENSE)
    requests = [Request(tuple(range(3, 9 + i)), Sampling(max_tokens=6, temperature=0.5 * i, seed=i), i) for i in (0, 1)]

    def texts(params, layout=None):
        engine = Engine(Cached(graphdef, params, layout=layout, cache=Paged(4), rows=1, length=16, budget=16))
        for r in requests:
            engine.submit(r)
        out = {r.id: [] for r in requests}
        while engine.busy:
            for event in engine.step():
                out[event.id].append(event.token)
        return out

    layout = generating(Layout("data=2,tensor=2,context=2").on(dealt()))
    laid = jax.device_put(random_params(infos), shardings_of(infos, layout))
    assert texts(laid, layout) == texts(random_params(infos))
    print("\nagrees: texts", flush=True)


def dealt() -> list[jax.Device]:
    """The devices of two processes, so that the neighbours along every axis of a mesh of twos are in different ones."""
    of = [iter([d for d in jax.devices() if d.process_index == p]) for p in range(2)]
    return [next(of[i.bit_count() % 2]) for i in range(jax.device_count())]


def run_two(script, argv, folder):
    """Runs a script as two processes, given an address and their number; exit code, output and errors of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    started = [start(script, [a.format(address=address, process=i) for a in argv], folder) for i in range(2)]
    until = time.monotonic() + LIMIT
    try:
        texts = [p.communicate(timeout=max(until - time.monotonic(), 1)) for p in started]
    finally:
        for p in started:
            p.kill()
    ended = [(p.returncode, *t) for p, t in zip(started, texts, strict=True)]
    assert [code for code, _, _ in ended] == [0, 0], ended
    return ended


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """A run by two processes, the same by this one, and what the two processes left: exit code, output, errors."""
    folder = tmp_path_factory.mktemp("processes")
    gin = write_gin(folder / "small.gin", "import tests.truth.runs\n" + BIGRAM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXSCALE_CACHE", str(folder / "cache"))
        argv = ["train", str(gin), "--gin.train.prompt='def '", "--devices", "4", "--distributed"]
        ended = run_two(SCRIPT, [*argv, "{address},2,{process}"], folder)
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
    for line in (f"step {STEPS}/{STEPS}", "a sample, continuing 'def ':", "held-out loss"):
        assert line in first and line not in second


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
        assert "text already exists" in err
        assert err.count("exit code 2\n") == 3


def test_a_layout_that_leaves_a_process_without_devices_is_refused(together):
    for _, _, err in together[2]:
        assert "the layout data=4 (fsdp_tensor) leaves 1 of 2 processes without a device" in err
        assert "the layout None leaves 2 of 2 processes without a device; give a mesh of all 8 devices" in err


@pytest.mark.long
def test_what_is_split_across_processes_trains_and_writes_as_one_device_does(tmp_path):
    for _, out, err in run_two(TRAINS, ["{address}", "{process}"], tmp_path):
        assert err.count("JAX's compilation cache") == 1  # out of it, the experts' messages got mixed up
        agreeing = [line for line in out.splitlines() if line.startswith("agrees: ")]  # Gloo prints too
        assert agreeing == [*(f"agrees: {layout}" for layout in ACROSS), "agrees: texts"]
