"""Guards: a refused step changes nothing and is recorded, and a resumed run continues with the guards' memory.

Faults are put into live buffers: a batch's weights, the arrays of a state, gradients as they come out of a model.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxscale as js
from jaxscale.errors import ConfigError, RunError
from jaxscale.optim import AdamW8bit, EightBit, OnHost
from jaxscale.step import blueprint_of, jit_step, make_loss_and_grads, make_step
from jaxscale.step.guards import FiniteGuard, SpikeGuard, memory_of
from jaxscale.train.loop import Loop
from jaxscale.train.replay import replay
from jaxscale.train.saved import Saved
from tests.truth.errors import raises_saying
from tests.truth.layouts import in_force, random_batch
from tests.truth.runs import Bigram, assert_same_bits, bigram, losses, on_host

LAYOUT = js.Layout("data=2,fsdp=2,tensor=2")
FINITE = (FiniteGuard(),)
OPTIMIZERS = {
    "adamw": js.optim.AdamW(),
    "8bit": AdamW8bit(storage=EightBit(block_size=64, min_size=1, keep=(), width=8)),
    "host": OnHost(),
    "sgd": js.optim.SGD(momentum=0.9),
}
BATCH = random_batch(32, rows=8, seq=16)
POISON = 31
"""A token that makes a gradient NaN if it is the first of a batch."""


@functools.cache
def stepper(optimizer="adamw", guards=FINITE, layout=LAYOUT):
    """Return a blueprint and its jitted step, whose gradients have a NaN if the first token is `POISON`."""
    settings = bigram(model=Bigram(width=32), layout=layout, optimizer=OPTIMIZERS[optimizer], guards=guards)
    blueprint, schedule = blueprint_of(js.TrainConfig(**settings))
    sound = make_loss_and_grads(blueprint)

    def loss_and_grads(params, batch, key, frozen):
        metrics, grads = sound(params, batch, key, frozen)
        hole = jnp.where(batch["tokens"][0, 0] == POISON, jnp.nan, 0.0)
        weight = grads["head"]["weight"]
        return metrics, {**grads, "head": {"weight": weight.at[0, 0].add(hole)}}  # lies in one shard

    with in_force(layout):
        return blueprint, jit_step(make_step(loss_and_grads, blueprint.tx, schedule, guards), blueprint, None)


def stepped(batch, optimizer="adamw", change=lambda state: state):
    """Return the states before and after a step, on the host, and the step's metrics."""
    blueprint, step = stepper(optimizer)
    with in_force(LAYOUT):
        state = blueprint.init(0)
        for _ in range(2):
            state, _ = step(state, BATCH)
        state = change(state)
        before = jax.tree.map(np.asarray, on_host(state))
        state, metrics = step(state, batch)
        return before, on_host(state), jax.device_get(metrics)


def assert_unchanged(before, after):
    """Check that two states are equal except for the step and the guards' counts."""
    for name, x in before.items():
        if name == "step":
            assert after[name] == x + 1
        elif not name.startswith("guards/"):
            assert after[name].tobytes() == x.tobytes(), name


def in_optimizer(value):
    """Return a function that sets one element of a state's first moment."""

    def change(state):
        leaves, tree = jax.tree.flatten(state.opt_state)
        at = next(i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating) and x.ndim == 2)
        leaves[at] = jax.device_put(leaves[at].at[0, 0].set(value), leaves[at].sharding)
        return dataclasses.replace(state, opt_state=jax.tree.unflatten(tree, leaves))

    return change


def weighing(value):
    """Return a batch in which one target has this weight."""
    weights = BATCH["weights"].copy()
    weights[-1, -1] = value
    return {**BATCH, "weights": weights}


def poisoned():
    tokens = BATCH["tokens"].copy()
    tokens[0, 0] = POISON
    return {**BATCH, "tokens": tokens}


FAULTS = {
    "loss-nan": lambda: (weighing(np.nan), lambda s: s),
    "loss-inf": lambda: (weighing(np.inf), lambda s: s),
    "a-shard-of-a-gradient": lambda: (poisoned(), lambda s: s),
    "optimizer-nan": lambda: (BATCH, in_optimizer(np.nan)),
    "optimizer-inf": lambda: (BATCH, in_optimizer(np.inf)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_step_that_is_not_finite_leaves_the_state_bit_for_bit(fault):
    batch, change = FAULTS[fault]()
    before, after, metrics = stepped(batch, change=change)
    assert_unchanged(before, after)
    assert metrics["refused_by_finite"] == after["guards/finite/in_a_row"] == 1


def test_one_bad_copy_of_a_number_stops_the_step_on_every_device():
    """Only one of two copies is NaN: if devices took different branches, they would wait for each other forever."""

    def change(state):
        leaves, tree = jax.tree.flatten(state.opt_state)
        at = next(i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating) and x.ndim == 2)
        shards = [np.array(s.data) for s in leaves[at].addressable_shards]
        shards[-1][0, 0] = np.nan
        placed = [jax.device_put(x, s.device) for x, s in zip(shards, leaves[at].addressable_shards, strict=True)]
        leaves[at] = jax.make_array_from_single_device_arrays(leaves[at].shape, leaves[at].sharding, placed)
        return dataclasses.replace(state, opt_state=jax.tree.unflatten(tree, leaves))

    before, after, _ = stepped(BATCH, change=change)
    assert_unchanged(before, after)


@pytest.mark.parametrize("optimizer", ["8bit", "host", "sgd"])
def test_whatever_the_optimizer_a_refused_step_leaves_its_state(optimizer):
    assert_unchanged(*stepped(weighing(np.nan), optimizer)[:2])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_finite_step_is_taken(optimizer):
    before, after, metrics = stepped(BATCH, optimizer)
    changed = {k.split("/")[0] for k in before if before[k].tobytes() != after[k].tobytes()}
    assert changed == {"step", "params", "opt_state"}
    assert metrics["refused_by_finite"] == 0


def test_a_guarded_step_takes_no_more_memory():
    """`cond` updates in place; `where` would need memory for old and new state."""
    sizes = []
    for guards in ((), (FiniteGuard(),)):
        blueprint, step = stepper("adamw", guards, None)
        sizes.append(step.lower(blueprint.abstract_state(), BATCH).compile().memory_analysis())
    state = sum(x.nbytes for k, x in on_host(blueprint.init(0)).items() if k != "rng")
    assert sizes[1].alias_size_in_bytes >= sizes[0].alias_size_in_bytes > 0.9 * state
    assert sizes[1].temp_size_in_bytes - sizes[0].temp_size_in_bytes < 0.2 * state


def robust_z(value, window):
    median = np.median(window)
    return (value - median) / (1.4826 * np.median(np.abs(window - median)))


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_a_spike_is_refused_from_its_robust_z_score_on(factor):
    """Compare with a score computed in NumPy."""
    guard = SpikeGuard(z=5.0, window=16)
    memory = memory_of([guard])[guard.name]
    window = np.random.default_rng(0).normal(3.0, 0.1, 16).astype(np.float32)
    for x in window:
        metrics = {"loss": jnp.asarray(x), "grad_norm": jnp.asarray(1.0)}
        assert not guard.refuses(memory, None, metrics), "not before the window is full"
        memory = {**memory, **guard.remember(memory, metrics, jnp.asarray(True))}
    deviation = 1.4826 * np.median(np.abs(window - np.median(window)))
    value = np.median(window) + 5.0 * factor * deviation
    assert (robust_z(value, window) > 5.0) == (factor > 1)
    assert bool(guard.refuses(memory, None, {"loss": jnp.asarray(value, jnp.float32)})) == (factor > 1)
    again = guard.remember(memory, {"loss": jnp.asarray(value)}, jnp.asarray(factor < 1))
    assert (np.sort(again["last"]).tobytes() == np.sort(window).tobytes()) == (factor > 1), "statistics stay clean"


def test_equal_numbers_make_no_spike_of_a_rounding():
    guard = SpikeGuard(z=3.0, window=4)
    memory = {"last": jnp.full(4, 2.0), "taken": jnp.asarray(4), "in_a_row": jnp.asarray(0)}
    assert not guard.refuses(memory, None, {"loss": jnp.asarray(2.0001)})
    assert guard.refuses(memory, None, {"loss": jnp.asarray(2.1)})


# --- in a run ---------------------------------------------------------------------------------------------------------


def fit(run, resume=False, **changes):
    settings = bigram(**{"steps": 12, "checkpoint_every": 4} | changes)
    return js.fit(js.TrainConfig(**settings), run=run, resume=resume, quiet=True)


@pytest.fixture
def bad_batches(monkeypatch):
    """Return a function that sets one weight of the batches of these steps (from 1) to `value`."""

    def make(*steps, value=np.nan):
        place = Loop._place

        def placed(self, done):
            batch = place(self, done)
            if done + 1 in steps:
                batch["weights"] = jax.device_put(batch["weights"].at[0, 0].set(value), batch["weights"].sharding)
            return batch

        monkeypatch.setattr(Loop, "_place", placed)

    return make


def skipped(run):
    return [json.loads(line) for line in (run.path / "skipped.jsonl").read_text().splitlines()]


def test_a_skipped_step_is_written_down_with_its_rows(bad_batches):
    bad_batches(3)
    run = fit("here")
    (row,) = skipped(run)
    assert (row["step"], row["guard"]) == (3, "finite")
    assert row["rows"] == [int(i) for i in np.asarray(row["rows"])] and len(row["rows"]) == 8
    assert [r["step"] for r in run.metrics() if "skipped" in r] == [3]
    assert int(run.state.step) == 12
    assert np.isfinite(losses(run)[3:]).all()


def test_a_skipped_step_is_as_if_its_batch_had_not_been(bad_batches):
    """A run whose record says to skip that step ends with the same bits."""
    bad_batches(3)
    run = fit("here")
    other = js.fit(js.TrainConfig(**bigram(steps=2)), run="other", quiet=True)
    (other.path / "skipped.jsonl").write_text('{"back_to": 0, "passed_over": [3]}\n')
    got = js.fit(js.TrainConfig(**bigram(steps=12)), run="other", resume=True, quiet=True)
    assert_same_bits(got.state, run.state)


def test_after_too_many_in_a_row_the_run_goes_back_and_passes_over_them(bad_batches):
    bad_batches(6, 7, 8)
    run = fit("here")
    last = skipped(run)[-1]
    assert (last["back_to"], last["passed_over"]) == (4, [6, 7, 8])
    assert "3 in a row (FiniteGuard.patience)" in last["why"]
    assert (int(run.state.step), run.info["status"]) == (12, "finished")
    assert [r["step"] for r in run.metrics() if r.get("skipped") == "passed over"] == [6, 7, 8]


@pytest.mark.long
def test_the_state_that_is_left_behind_is_gone_before_the_older_one_is_read(bad_batches, monkeypatch):
    restore, live = Saved.restore, []

    def watched(self):
        gc.collect()
        live.append(sum(x.nbytes for x in jax.live_arrays() if x.shape == (4096, 8)))
        return restore(self)

    monkeypatch.setattr(Saved, "restore", watched)
    bad_batches(6, 7, 8)
    fit("here", model=Bigram(vocab=4096))
    assert live == [0]


def test_a_run_that_went_back_is_resumed_bit_for_bit(bad_batches):
    """The guards' memory is resumed, too."""
    bad_batches(2, 3, 4)
    guards = (FiniteGuard(), SpikeGuard(window=3, z=100.0))
    whole = fit("whole", steps=8, guards=guards)
    fit("parts", steps=6, guards=guards)
    assert_same_bits(fit("parts", resume=True, steps=8, guards=guards).state, whole.state)
    assert int(whole.state.guards["spike_loss"]["taken"]) == 5


def test_what_breaks_the_state_itself_is_undone(monkeypatch):
    """After a NaN in the optimizer's state every step is refused, whatever its batch."""
    sound, hit = fit("sound"), []
    take = Loop._take

    def struck(self, state, done):
        if done == 5 and not hit:
            hit.append(done)
            state = in_optimizer(np.nan)(state)
        return take(self, state, done)

    monkeypatch.setattr(Loop, "_take", struck)
    run = fit("struck")
    assert skipped(run)[-1]["back_to"] == 4
    assert_same_bits({k: v for k, v in on_host(run.state).items() if k == "rng"}, {"rng": on_host(sound.state)["rng"]})
    assert all(np.isfinite(x).all() for k, x in on_host(run.state).items())
    assert run.checkpoints.steps() == [4, 8, 12]


def test_a_state_that_is_not_finite_is_never_saved(monkeypatch):
    take, hit = Loop._take, []

    def struck(self, state, done):
        state, metrics = take(self, state, done)
        if done + 1 == 8 and not hit:
            hit.append(done)
            state = in_optimizer(np.nan)(state)
        return state, metrics

    monkeypatch.setattr(Loop, "_take", struck)
    run = fit("struck")
    assert "after step 8 is not finite, and must not be saved" in skipped(run)[-1]["why"]
    assert_same_bits(run.state, fit("sound").state)


def test_a_run_that_goes_back_again_and_again_gives_up(bad_batches):
    bad_batches(*range(5, 30))
    with raises_saying(RunError, "rolled back 3 times", "jaxscale replay here --step 5"):
        fit("here", steps=30)


def test_a_spike_is_skipped_in_a_run(bad_batches):
    bad_batches(10, value=1e4)
    run = fit("here", guards=(SpikeGuard(z=20.0, window=6, metric="grad_norm"),), lr=1e-4)
    assert [r["step"] for r in skipped(run)] == [10]
    assert "guards/spike_grad_norm/last" in run.checkpoints.manifest(12)["leaves"]


def test_a_resumed_run_may_have_other_guards():
    fit("here", steps=4)
    run = fit("here", resume=True, steps=8, guards=(SpikeGuard(window=4),))
    assert set(run.state.guards) == {"spike_loss"}
    assert set(fit("here", resume=True, steps=12, guards=()).state.guards) == set()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FiniteGuard(patience=0), ("FiniteGuard.patience = 0", "at least 1")),
        (lambda: SpikeGuard(window=2), ("SpikeGuard.window = 2", "at least 3")),
        (lambda: SpikeGuard(z=0.0), ("SpikeGuard.z = 0.0", "above 0")),
        (lambda: SpikeGuard(metric="los"), ("'los'", "did you mean 'loss'")),
        (lambda: js.TrainConfig(guards=FiniteGuard()), ("train.guards must be a tuple",)),
        (lambda: js.TrainConfig(guards=(FiniteGuard(), FiniteGuard(4))), ("two guards named 'finite'",)),
    ],
    ids=["patience", "window", "z", "metric", "no-tuple", "twice"],
)
def test_a_guard_that_cannot_be_is_refused(make, words):
    with raises_saying(ConfigError, *words):
        make()


def test_a_run_that_stays_at_nan_says_so_in_five_lines_and_names_a_step_to_replay(own_folder, capsys):
    with pytest.raises(RunError) as caught:
        js.fit(**bigram(lr=1e30, steps=16, clip_norm=None), run="nan")
    out = capsys.readouterr().out
    assert [line.partition(" (")[0] for line in out.splitlines() if line.startswith("warning: ")] == [
        "warning: step 2 is not finite",
        "warning: step 4 is not finite",
        "warning: step 7 is not finite",
        "warning: step 10 is not finite",
    ]
    assert out.count("compiling the step") == 1
    advice = "got no further than step 2. .* jaxscale replay nan --step 2, or start a run with a train.lr below 1e"
    assert re.search(advice, str(caught.value))
    assert replay(js.Run("nan"), 2).origin is not None
