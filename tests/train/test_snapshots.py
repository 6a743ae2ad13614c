"""Snapshots in memory: any processes that may be lost are lost, and every bit of the state comes back."""

from __future__ import annotations

import functools
import itertools
import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.errors import CheckpointError, ConfigError
from jaxscale.layout import make_mesh
from jaxscale.step import Snapshots
from jaxscale.train.snapshots import Code, Keeper, load, newest

COUNT = 4
"""Machines, of two of the eight devices each."""


def machine_of(device):
    return device.id // 2


class Meeting:
    """Of threads, each of which stands for a machine."""

    def __init__(self, count):
        self.count, self._barrier, self._said = count, threading.Barrier(count, timeout=60), [""] * count

    def seen_by(self, me):
        one = Meeting.__new__(Meeting)
        one.__dict__ = self.__dict__ | {"me": me}
        return one

    def gather(self, text):
        self._said[self.me] = text
        self._barrier.wait()
        texts = list(self._said)
        self._barrier.wait()
        return texts

    def host(self):
        return "127.0.0.1"


def together(what, count=COUNT):
    """Calls `what(meeting)` on every machine at once."""
    meeting = Meeting(count)
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(what, [meeting.seen_by(me) for me in range(count)]))


def state(mesh, step=0):
    """Arrays laid out in several ways, of several kinds."""
    rng = np.random.default_rng(step)
    spec = functools.partial(jax.sharding.NamedSharding, make_mesh(mesh))
    across = jax.sharding.PartitionSpec(("data", "fsdp"))
    values = {
        "cut": (rng.normal(size=(16, 24)).astype(np.float32), across),
        "cut both ways": (rng.normal(size=(8, 8)).astype(jnp.bfloat16), jax.sharding.PartitionSpec("fsdp", "data")),
        "whole": (rng.integers(0, 99, 7), jax.sharding.PartitionSpec()),
        "step": (np.int32(step), jax.sharding.PartitionSpec()),
    }
    return {name: jax.device_put(value, spec(where)) for name, (value, where) in values.items()}


overwrite = jax.jit(lambda arrays: {k: x + 1 for k, x in arrays.items()}, donate_argnums=0)


def took(root, meeting, parity, steps=3, overlap=False):
    """One machine's part of taking the snapshots of `steps` steps."""
    keeper = Keeper(root / f"machine-{meeting.me}", parity, meeting, machine_of)
    keeper.begin(state("data=2,fsdp=4"), {})
    for step in range(steps):
        arrays = state("data=2,fsdp=4", step)
        keeper.take(step, arrays, overlap=overlap)
        overwrite(arrays)
    keeper.wait()
    meeting.gather("all whole")
    keeper.close(forget=False)
    return keeper


def restored(root, meeting, mesh="data=2,fsdp=4"):
    """What one machine gets back: the step and the arrays' bytes, or nothing."""
    keeper = Keeper(root / f"machine-{meeting.me}", 1, meeting, machine_of)
    left = newest(keeper.root, keeper.peers, meeting)
    if left is None:
        return None
    like = state(mesh)
    arrays = load(left, like, {k: x.sharding for k, x in like.items()}, meeting)
    meeting.gather("all read")
    return left.step, {k: np.asarray(x).tobytes() for k, x in arrays.items()}


def bits(step):
    return step, {k: np.asarray(x).tobytes() for k, x in state("data=2,fsdp=4", step).items()}


@pytest.mark.parametrize("count, parity", [(2, 1), (3, 1), (4, 2), (5, 3)], ids=str)
def test_every_loss_that_is_tolerated_is_made_good(count, parity):
    code, rng = Code(count, parity), np.random.default_rng(0)
    size = code.piece_size(1000)
    blobs = rng.integers(0, 256, (count, code.pieces, size), dtype=np.uint8)
    piece = lambda p, stripe: blobs[p, code.stripes(p).index(stripe)]  # noqa: E731
    parities = np.zeros((count, parity, size), np.uint8)
    for stripe, row in itertools.product(range(count), range(parity)):
        for p in code.givers(stripe):
            code.fold(parities[stripe, row], piece(p, stripe), row, p)
    for lost in itertools.combinations(range(count), parity):
        parity_of = lambda stripe, row: None if code.holders(stripe)[row] in lost else parities[stripe, row]  # noqa: B023, E731
        back = list(code.recover(set(lost), piece, parity_of))
        assert len(back) == len(lost) * code.pieces
        assert all((data == piece(p, stripe)).all() for p, stripe, data in back)


@pytest.mark.parametrize("parity, overlap", [(1, False), (2, True)])
def test_machines_are_lost_with_all_they_held_and_every_bit_comes_back(tmp_path, parity, overlap):
    together(lambda meeting: took(tmp_path, meeting, parity, overlap=overlap))
    for machine in range(1, 1 + parity):
        shutil.rmtree(tmp_path / f"machine-{machine}")
    assert together(lambda meeting: restored(tmp_path, meeting)) == [bits(2)] * COUNT


def test_more_machines_than_tolerated_are_not_made_up(tmp_path):
    together(lambda meeting: took(tmp_path, meeting, 1))
    for machine in (1, 2):
        shutil.rmtree(tmp_path / f"machine-{machine}")
    assert together(lambda meeting: restored(tmp_path, meeting)) == [None] * COUNT


def test_fewer_machines_and_another_layout_get_the_same_bits(tmp_path):
    together(lambda meeting: took(tmp_path, meeting, 1))
    shutil.rmtree(tmp_path / "machine-3")
    (tmp_path / "machine-2").rename(tmp_path / "moved")  # to where one of the two processes finds it
    shutil.copytree(tmp_path / "moved", tmp_path / "machine-0", dirs_exist_ok=True)
    assert together(lambda meeting: restored(tmp_path, meeting, "data=4,fsdp=2"), 2) == [bits(2)] * 2


def test_a_snapshot_that_was_not_whole_is_passed_over_for_the_one_before(tmp_path):
    together(lambda meeting: took(tmp_path, meeting, 1))
    path = next(tmp_path.glob("machine-0/*/0/state.json"))
    slots = json.loads(path.read_text())
    path.write_text(json.dumps([{k: v for k, v in s.items() if s["step"] != 2 or k == "step"} for s in slots]))
    shutil.rmtree(tmp_path / "machine-1")
    assert together(lambda meeting: restored(tmp_path, meeting)) == [bits(1)] * COUNT


def test_a_run_that_goes_back_is_not_given_what_it_left(tmp_path):
    def goes_back(meeting):
        keeper = Keeper(tmp_path / f"machine-{meeting.me}", 1, meeting, machine_of)
        keeper.begin(state("data=2,fsdp=4"), {})
        for step in (5, 6):
            keeper.take(step, state("data=2,fsdp=4", step))
        keeper.forget()
        meeting.gather("all went back")
        before = newest(keeper.root, keeper.peers, meeting)
        keeper.take(3, state("data=2,fsdp=4", 3))
        keeper.wait()
        meeting.gather("all whole")
        return before, newest(keeper.root, keeper.peers, meeting).step

    assert together(goes_back) == [(None, 3)] * COUNT


def test_a_flipped_bit_in_memory_is_not_loaded(tmp_path):
    together(lambda meeting: took(tmp_path, meeting, 1))
    for path in tmp_path.glob("machine-0/*/0/own-*"):
        data = np.memmap(path, np.uint8, "r+")
        data[5] ^= 1
    with pytest.raises(CheckpointError, match="the snapshot of step 2 of process 0 is not what was taken"):
        together(lambda meeting: restored(tmp_path, meeting))


def test_memory_is_twice_the_share_and_its_parity(tmp_path):
    keepers = together(lambda meeting: took(tmp_path, meeting, 1))
    whole = sum(x.nbytes for x in state("data=2,fsdp=4").values())
    share = max(k.table.blob() for k in keepers)
    assert whole / COUNT <= share < whole / COUNT * 1.5  # replicas are dealt: no byte is kept by two
    padding = 64 * 3
    assert all(k.shelf.nbytes <= 2 * (share + padding) * (1 + 1 / 3) for k in keepers)


def test_what_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="Snapshots.folder = '/nowhere' does not exist"):
        Snapshots(folder="/nowhere")
    with pytest.raises(ConfigError, match="Snapshots.parity = -1"):
        Snapshots(parity=-1)
