"""FingerprintGuard reports replicas that differ in any bit, and never equal ones."""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxscale as js
from jaxscale.errors import ConfigError
from jaxscale.layout.tensors import path_name
from jaxscale.optim import AdamW8bit, EightBit
from jaxscale.step import blueprint_of
from jaxscale.step.guards import FingerprintGuard, FiniteGuard, SpikeGuard, StragglerGuard
from jaxscale.step.guards.fingerprint import comparer, fingerprint
from jaxscale.step.guards.stragglers import make_probe, slow
from jaxscale.train.loop import Loop
from tests.truth.errors import raises_saying
from tests.truth.runs import Bigram, assert_same_bits, bigram

LAYOUT = js.Layout("data=2,fsdp=2,tensor=2")
EIGHT_BIT = AdamW8bit(storage=EightBit(block_size=64, min_size=1, keep=(), width=8))
GUARDS = (FiniteGuard(), SpikeGuard(window=8))


def flip(x, device, word=0, bit=0):
    """Return the array with one bit of one device's copy flipped."""
    shards = []
    for shard in x.addressable_shards:
        data = np.array(shard.data)
        if shard.device.id == device:
            kind = np.dtype(f"uint{8 * data.dtype.itemsize}")
            data.reshape(-1).view(kind)[word] ^= kind.type(1 << bit)
        shards.append(jax.device_put(data, shard.device))
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)


def flipped(state, name, device, **where):
    change = lambda path, x: flip(x, device, **where) if path_name(path) == name else x  # noqa: E731
    return jax.tree_util.tree_map_with_path(change, state)


@functools.cache
def laid_out():
    """A state with many kinds of arrays on eight devices, and the function that compares its copies."""
    settings = bigram(model=Bigram(width=32), layout=LAYOUT, optimizer=EIGHT_BIT, guards=GUARDS)
    state = blueprint_of(js.TrainConfig(**settings))[0].init(0)
    return state, comparer(state, LAYOUT)


@pytest.mark.parametrize(
    ("name", "where", "odd"),
    [
        ("params/embed/weight", {"word": 3, "bit": 31}, None),
        ("params/head/weight", {"word": 0, "bit": 0}, None),
        ("step", {"bit": 7}, [5]),
        ("guards/spike_loss/last", {"word": 7, "bit": 12}, [5]),
    ],
    ids=str,
)
def test_one_flipped_bit_is_found_and_named(name, where, odd):
    state, compare = laid_out()
    (difference,) = compare(flipped(state, name, 5, **where))
    assert difference.tensor == name
    assert list(difference.odd) == (odd or [1, 5]), "of two copies nobody knows which is right"
    assert difference.processes == (0,)


def test_eight_bit_codes_are_compared_too():
    state, compare = laid_out()
    name = next(path_name(p) for p, x in jax.tree_util.tree_leaves_with_path(state) if x.dtype.itemsize == 1)
    assert [d.tensor for d in compare(flipped(state, name, 2, word=5, bit=6))] == [name]


def test_copies_that_are_equal_are_never_named():
    state, compare = laid_out()
    assert compare(state) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float16", "uint32", "bool"])
def test_any_single_word_changes_the_fingerprint(dtype):
    x = np.zeros(64, bool) if dtype == "bool" else np.asarray(jnp.arange(64).astype(dtype))
    one = jax.jit(fingerprint)
    seen = {int(one(x))}
    for word in range(64):
        changed = x.copy()
        changed.view(f"uint{8 * x.dtype.itemsize}")[word] ^= 1
        seen.add(int(one(changed)))
    assert len(seen) == 65


def test_words_that_change_places_change_the_fingerprint():
    x = np.arange(8, dtype=np.float32)
    assert int(fingerprint(x)) != int(fingerprint(x[::-1].copy()))


def test_a_run_goes_back_when_a_replica_differs(monkeypatch):
    """The bit is flipped after step 5, the copies are compared after step 6, and the checkpoint before is of step 4."""
    config = js.TrainConfig(
        **bigram(layout=js.Layout("data=8"), steps=8, checkpoint_every=4, guards=(FingerprintGuard(every=3),))
    )
    sound = js.fit(config, run="sound", quiet=True)
    take, hit = Loop._take, []

    def struck(self, state, done):
        state, metrics = take(self, state, done)
        if done + 1 == 5 and not hit:
            hit.append(done)
            state = flipped(state, "params/embed/weight", 6, word=9, bit=3)
        return state, metrics

    monkeypatch.setattr(Loop, "_take", struck)
    run = js.fit(config, run="struck", quiet=True)
    (row,) = map(json.loads, (run.path / "skipped.jsonl").read_text().splitlines())
    assert (row["back_to"], row["passed_over"]) == (4, [])
    assert "params/embed/weight on device 6 of process 0 (of 8 copies, 7 agree)" in row["why"]
    assert "after step 6" in row["why"]
    assert_same_bits(run.state, sound.state)


@pytest.mark.parametrize("guard", [FingerprintGuard, StragglerGuard])
def test_a_guard_with_nothing_to_compare_says_so(guard, caplog):
    js.fit(js.TrainConfig(**bigram(guards=(guard(),))), quiet=True)
    assert f"{guard.__name__} in train.guards has no effect" in caplog.text


def test_only_what_lies_far_above_the_others_is_slow():
    even = np.asarray([[0.01, 0.1], [0.012, 0.11], [0.011, 0.1], [0.01, 0.12]])
    assert slow(even, 1.5) == []
    uneven = even.copy()
    uneven[2, 0], uneven[1, 1] = 0.1, 0.2
    assert slow(uneven, 1.5) == [(1, 1), (2, 0)]
    assert slow(np.asarray([[1e-5, 0.1], [1e-4, 0.1]]), 1.5) == [], "microseconds are nobody's fault"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FingerprintGuard(every=0), ("FingerprintGuard.every = 0", "at least 1")),
        (lambda: StragglerGuard(every=True), ("StragglerGuard.every = True", "at least 1")),
        (lambda: StragglerGuard(factor=1.0), ("StragglerGuard.factor = 1.0", "above 1")),
    ],
    ids=["fingerprint", "every", "factor"],
)
def test_a_guard_that_cannot_be_is_refused(make, words):
    with raises_saying(ConfigError, *words):
        make()


def test_devices_are_timed_one_by_one_under_any_layout():
    with LAYOUT:
        probe = make_probe()
        assert 0 < probe() < 60
