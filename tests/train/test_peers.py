"""PeerDiLoCo: peers over TCP are the replicas of DiLoCo on a mesh; real processes are killed, join, and are refused."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
import signal

import jax
import numpy as np
import pytest

import jaxscale as js
from jaxscale.cli import main
from jaxscale.errors import ConfigError, RunError
from jaxscale.layout import Layout
from jaxscale.optim import OnHost, ScheduleFreeSGD
from jaxscale.parallel import Float32Wire, IntegerWire, SignWire, Wire
from jaxscale.peers import PeerRefused
from jaxscale.plan.slow_links import peer_bytes
from jaxscale.step import DiLoCo, PeerDiLoCo, WeightEMA, check, prepare
from jaxscale.train.peers import Group, digest
from jaxscale.train.replay import replay
from tests.truth.compare import assert_leaves_agree
from tests.truth.errors import raises_saying
from tests.truth.layouts import in_force
from tests.truth.peers import coordinator, together, until
from tests.truth.replicas import config, host, trained
from tests.truth.runs import BIGRAM, start, write_gin

TWO = PeerDiLoCo(shares=2, every=2)
# A step takes a moment, so that processes that wait for another leave the processor to it.
COMMAND = """
import sys, time
import tests.truth.runs
from jaxscale.cli import main
from jaxscale.train.loop import Loop

place = Loop._place
Loop._place = lambda self, done: time.sleep(0.02) or place(self, done)
sys.exit(main(sys.argv[1:]))
"""


def peer(of, name="run", *, algorithm=TWO, before=lambda step, state: state, **changes):
    """A peer's loop without files: the state after all steps, and metrics of its exchanges."""
    algorithm = dataclasses.replace(algorithm, coordinator="{}:{}".format(*of.address))
    one = config(algorithm=algorithm, **{"batch_size": 4} | changes)
    prepared = prepare(one)
    meeting, rows = algorithm.meeting(prepared.blueprint), []
    group = Group(meeting, one, name, lambda line: None, lambda: False)
    with in_force(one.layout):
        step = prepared.step_of(one)
        prepared, state = group.join(prepared, prepared.blueprint.init(one.seed))
        for i in range(int(state.step), one.steps):
            state, metrics = step(before(i, state), prepared.place(prepared.loader, i))
            jax.block_until_ready(metrics)
            if group.due(i + 1):
                state, row = group.exchange(i + 1, state)
                rows.append(row)
    group.leave(finished=True)
    return state, rows


@pytest.mark.parametrize(
    "wire",
    [
        Float32Wire(),
        IntegerWire(),
        *(pytest.param(w, marks=pytest.mark.long) for w in (IntegerWire(bits=4), SignWire())),
    ],
    ids=str,
)
def test_two_peers_are_two_replicas_on_a_mesh(wire):
    """With the same rows, errors of rounding included; and they send the bytes that are stated."""
    algorithm = dataclasses.replace(TWO, wire=wire)
    with coordinator() as one:
        (a, rows), (b, _) = together(*(lambda: peer(one, algorithm=algorithm),) * 2)
    mesh = trained(None, algorithm=DiLoCo(replicas=2, every=2, wire=wire))
    for k in ("outer", "outer_state"):
        assert digest(host(a.extra[k])) == digest(host(b.extra[k]))
    got, want = host(a.extra["outer"]), host(mesh.extra["outer"])
    if wire == Float32Wire():
        assert_leaves_agree(got, want, gradient_norm=0.0)
    for k in got:  # a number at the middle of two codes may be rounded to either
        apart = np.abs(got[k]["weight"] - want[k]["weight"])
        assert np.mean(apart > 2e-6) < 0.01 and apart.max() < 1e-2, (k, apart.max())
    floats = 2 * 32 * 8
    codes = {Float32Wire(): None, IntegerWire(): 8, IntegerWire(bits=4): 4, SignWire(): 1}[wire]
    sent = 4 * floats if codes is None else floats * codes // 8 + 4 * 64
    blueprint = prepare(config(algorithm=algorithm)).blueprint
    assert [r["outer_bytes_sent"] for r in rows] == [sent] * 3 and peer_bytes(algorithm.meeting(blueprint), 2) == sent


@pytest.mark.long
def test_peers_with_different_meshes_have_the_same_bits():
    with coordinator(least=3) as one:
        layouts = (None, Layout("fsdp=2,tensor=2"), Layout("data=4"))
        algorithm = dataclasses.replace(TWO, shares=3)
        ends = together(*(lambda x=x: peer(one, algorithm=algorithm, layout=x) for x in layouts))
    assert len({digest(host(state.extra)) for state, _ in ends}) == 1
    assert len({tuple(r["shared_digest"] for r in rows) for _, rows in ends}) == 1
    params = [host(state.params) for state, _ in ends]
    assert len({digest(p) for p in params}) == 1, "after an exchange all have the shared parameters"


@pytest.mark.long
def test_a_peer_whose_parameters_differ_by_a_bit_is_refused_and_the_others_go_on():
    def flip(step, state):
        if step != 3:
            return state
        extra = host(state.extra)
        extra["outer"]["head"]["weight"].view(np.int32)[0, 0] ^= 1
        return state.replace(extra=jax.device_put(extra))

    with coordinator(least=3) as one:
        algorithm = dataclasses.replace(TWO, shares=3)

        def wrong():
            with raises_saying(PeerRefused, "odd (peer", "digest of its shared parameters at round 1"):
                peer(one, "odd", algorithm=algorithm, before=flip)

        ends = together(*(lambda: peer(one, algorithm=algorithm),) * 2, wrong)
    assert [r["peers"] for r in ends[0][1]] == [3, 2, 2]


def test_what_does_not_fit_is_refused():
    for changes, words in (
        ({"shares": 0}, ("PeerDiLoCo.shares = 0", "at least 1")),
        ({"shares": 513}, ("PeerDiLoCo.shares = 513", "at most 512")),
        ({"every": 0}, ("PeerDiLoCo.every = 0", "at least 1")),
        ({"outer_lr": 0}, ("PeerDiLoCo.outer_lr = 0", "such as 0.7")),
        ({"outer": "sgd"}, ("PeerDiLoCo.outer = 'sgd'", "SGD(0.9, nesterov=True)")),
        ({"wire": Wire()}, ("PeerDiLoCo.wire = ", "IntegerWire()")),
        ({"coordinator": "29400"}, ("PeerDiLoCo.coordinator = '29400'", "HOST:PORT")),
    ):
        with raises_saying(ConfigError, *words):
            PeerDiLoCo(**changes)
    with raises_saying(ConfigError, "does not divide train.steps = 6", "set train.steps = 8"):
        check(config(algorithm=PeerDiLoCo(every=4)))
    check(config(algorithm=PeerDiLoCo(every=4), steps=8))
    with raises_saying(ConfigError, "PeerDiLoCo.outer does not work with OnHost"):
        check(config(algorithm=dataclasses.replace(TWO, outer=OnHost(js.optim.SGD()))))
    with raises_saying(ConfigError, "PeerDiLoCo does not work with ScheduleFreeSGD", "use AdamW()"):
        check(config(algorithm=TWO, optimizer=ScheduleFreeSGD()))
    with raises_saying(ConfigError, "PeerDiLoCo is part of WeightEMA", "@PeerDiLoCo()"):
        check(config(algorithm=WeightEMA(inner=TWO)))


def test_commands_say_what_is_wrong(tmp_path, capsys):
    gin = write_gin(tmp_path / "small.gin", "import tests.truth.runs\n" + BIGRAM)
    small = ["train", str(gin), "--gin.PeerDiLoCo.every=2", "--run", str(tmp_path / "run")]
    for words, message in (
        ([*small, "--peers", "29400"], "write HOST:PORT, such as 127.0.0.1:29400"),
        ([*small[:2], "--gin.train.algorithm=@DiLoCo()", "--peers", "127.0.0.1:1"], "DiLoCo does not exchange"),
        ([*small, "--peers", "127.0.0.1:1"], "start it with jaxscale peers"),
        ([*small, "--peers", "192.0.2.1:29400"], "JAXSCALE_PEERS_TOKEN"),
        (["peers", "--host", "0.0.0.0", "--port", "0"], "JAXSCALE_PEERS_TOKEN"),
        (["peers", "--port", "99999"], "choose another port"),
        (["peers", "--least", "0"], "--least 0: must be at least 1"),
    ):
        assert main(words) in (2, 70)
        err = capsys.readouterr().err
        assert message in err, err
    assert not (tmp_path / "run").exists(), "nothing is written before the run has joined"


def test_two_runs_stop_and_go_on_with_the_same_bits_and_their_steps_can_be_replayed(tmp_path):
    def fit(of, name, **more):
        algorithm = dataclasses.replace(TWO, coordinator="{}:{}".format(*of.address))
        one = config(algorithm=algorithm, batch_size=4, checkpoint_every=1)
        return js.fit(one, run=tmp_path / name, quiet=True, **more)

    with coordinator() as one:
        together(*(functools.partial(fit, one, name, until=3) for name in "ab"))
    with coordinator() as one:
        runs = together(*(functools.partial(fit, one, name, resume=True) for name in "ab"))
    assert len({digest(host(run.state.extra)) for run in runs}) == 1
    assert len({digest(host(run.params())) for run in runs}) == 1
    assert list(digests(runs[0].path)) == [2, 4, 6] and digests(runs[0].path) == digests(runs[1].path)
    for run in runs:
        replayed = replay(run, 6)
        assert replayed.same and replayed.recorded and replayed.checkpoint == 5
    for run in runs:
        for step in (4, 5):
            shutil.rmtree(next((run.path / "checkpoints").glob(f"*{step}")))
    with raises_saying(RunError, "step 6 of", "other processes"):
        replay(runs[0], 6)


def digests(run):
    """The digest after each exchange of a run, by step, and the number of peers."""
    file = run / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {r["step"]: (r["shared_digest"], int(r["peers"])) for r in rows if "shared_digest" in r}


@pytest.mark.long
def test_real_processes_one_is_killed_and_one_joins(tmp_path):
    """The others go on; who joins has the same bits, and so has who is killed, resumed."""
    gin = write_gin(tmp_path / "small.gin", "import tests.truth.runs\n" + BIGRAM)
    runs = {name: tmp_path / name for name in ("a", "b", "killed", "late")}
    with coordinator(least=3, silence=30.0) as one:
        address = "{}:{}".format(*one.address)

        def train(*words, mesh="data=1"):
            more = ["--mesh", mesh, *(["--devices", "2"] if mesh != "data=1" else [])]
            words = [*words, "--peers", address, "--quiet", *more]
            return start(COMMAND, words, tmp_path)

        # more steps than are taken
        settings = ["--gin.train.steps=500000", "--gin.PeerDiLoCo.every=10", "--gin.train.checkpoint_every=10"]
        settings += ["--gin.PeerDiLoCo.shares=4", "--gin.train.keep=2", "--gin.train.eval_batches=0"]
        started = {n: train("train", str(gin), *settings, "--run", str(runs[n])) for n in ("a", "b", "killed")}
        try:
            written = lambda: [p.parent.name for p in runs["killed"].glob("checkpoints/*/manifest.json")]  # noqa: E731
            until(lambda: one.round >= 2 and any(map(str.isdigit, written())), limit=300)
            started["killed"].send_signal(signal.SIGKILL)
            until(lambda: len(one.members()) == 2, limit=30)
            round = one.round
            until(lambda: one.round > round, limit=300)
            started["late"] = train("train", str(gin), *settings, "--run", str(runs["late"]), mesh="fsdp=2")
            until(lambda: len(one.members()) == 3, limit=300)
            started["again"] = train("train", "--resume", str(runs["killed"]))
            until(lambda: len(one.members()) == 4, limit=300)
            until(lambda: sum(digests(runs["a"]).get(s, (0, 0))[1] == 4 for s in digests(runs["late"])) >= 2, limit=300)
            for name in ("late", "again", "b"):
                started[name].send_signal(signal.SIGTERM)
            until(lambda: len(one.members()) == 1, limit=300)
            started["a"].send_signal(signal.SIGTERM)
            ended = {n: (p.communicate(timeout=300), p.returncode) for n, p in started.items()}
        except AssertionError as e:
            for p in started.values():
                p.kill()
            raise AssertionError(f"{one.lines} {[(n, p.communicate()) for n, p in started.items()]}") from e
        finally:
            for p in started.values():
                p.kill()
    codes = {name: code for name, (_, code) in ended.items()}
    assert codes == {"a": 143, "b": 143, "late": 143, "again": 143, "killed": -signal.SIGKILL}, ended
    of = {name: digests(run) for name, run in runs.items()}
    for name, own in of.items():
        same = own.keys() & of["a"].keys()
        assert len(same) >= 2 and all(own[s] == of["a"][s] for s in same), (name, own, of["a"])
    assert {peers for _, peers in of["a"].values()} >= {2, 3, 4}
    losses = [r["loss"] for r in js.Run(runs["a"]).metrics()]
    assert np.mean(losses[-20:]) < np.mean(losses[:20]) - 0.5
