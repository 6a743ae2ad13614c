"""fit, as it is called from Python: what it makes of settings, and what it says of those that do not fit."""

from __future__ import annotations

import dataclasses
import logging
import signal
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxscale as js
from jaxscale.commands import serve
from jaxscale.commands.launch import _Signals
from jaxscale.errors import ConfigError, DataError, LayoutError, RunError
from jaxscale.nn import dot_product_attention
from jaxscale.train.signals import stop_signals
from tests.truth.compare import assert_leaves_agree
from tests.truth.errors import raises_saying
from tests.truth.runs import MESH, STEPS, assert_same_bits, bigram, losses, stop_after, transformer, write_text


def fit(run=None, **changes):
    """A quiet run of the smallest model; `fit`'s own arguments beside its settings."""
    quiet = changes.pop("quiet", True)
    return js.fit(js.TrainConfig(**bigram(**changes)), run=run, quiet=quiet)


def test_the_loss_goes_down():
    seen = losses(fit(steps=40, lr=0.1))
    assert seen[-1] < seen[0] - 0.5


def test_the_state_in_memory_has_taken_every_step(finished_run):
    assert int(finished_run.state.step) == STEPS


def test_parameters_live_where_the_layout_says(finished_run):
    weight = finished_run.state.params["embed"]["weight"]
    assert weight.sharding == finished_run.config.layout.sharding(("vocab", "embed"))


def test_no_layout_is_one_device():
    state = fit(layout=None).state
    assert {d for x in jax.tree.leaves(state) for d in x.devices()} == {jax.devices()[0]}


def test_the_default_layout_is_every_device():
    assert fit(layout=js.Layout()).state.params["embed"]["weight"].sharding.num_devices == 8


def test_the_same_seed_gives_the_same_bits():
    assert_same_bits(fit().state, fit().state)


def test_another_seed_gives_another_run():
    assert losses(fit(seed=1))[0] != losses(fit())[0]


def test_a_run_on_a_mesh_equals_one_on_one_device():
    assert_leaves_agree(losses(fit(layout=js.Layout())), losses(fit(layout=None)))


def test_micro_batches_change_nothing_but_memory():
    assert_leaves_agree(losses(fit(accumulate=4)), losses(fit()))


@pytest.mark.long
def test_a_bfloat16_model_trains(tmp_path):
    config = transformer(write_text(tmp_path / "text"), eval_batches=0, steps=20)
    model = dataclasses.replace(config.model, dtype="bfloat16")
    run = js.fit(dataclasses.replace(config, model=model), quiet=True)
    assert losses(run)[-1] < losses(run)[0] - 1
    assert run.state.params["embed"]["weight"].dtype == jnp.float32


def test_an_optimizer_of_optax_is_used_as_it_is():
    plain = fit(optimizer=optax.sgd(1e-2), clip_norm=None)
    ours = fit(optimizer=js.optim.SGD(), lr=1e-2, clip_norm=None)
    assert_same_bits(plain.state.params, ours.state.params)


def test_an_optimizer_of_optax_has_no_learning_rate_to_record():
    assert all("lr" not in row for row in fit(optimizer=optax.sgd(1e-2)).metrics())


@pytest.mark.parametrize("setting", [{"lr": 0.1}, {"schedule": js.optim.WSD()}], ids=["lr", "schedule"])
def test_a_learning_rate_beside_an_optimizer_of_optax_is_refused(setting):
    with raises_saying(ConfigError, "has its own learning rate", f"leave out {next(iter(setting))}", "AdamW()"):
        js.fit(optimizer=optax.sgd(1e-2), **setting)


def test_warm_up_stable_decay_is_followed():
    rates = [row["lr"] for row in fit(schedule=js.optim.WSD(warmup=2, decay=4), lr=1.0, steps=10).metrics()]
    assert rates == pytest.approx([0.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25])


def test_settings_by_name_change_those_of_a_config():
    config = js.TrainConfig(**bigram(steps=2))
    assert len(js.fit(config, steps=3, quiet=True).metrics()) == 3


def test_an_unknown_setting_is_named_with_the_nearest():
    with raises_saying(ConfigError, "'batchsize'", "did you mean 'batch_size'"):
        js.fit(batchsize=3)


def test_a_batch_that_does_not_divide_is_refused_before_anything_is_written():
    with raises_saying(LayoutError, "the batch", "4 does not divide 6", "4 or 8"):
        fit(layout=js.Layout(MESH), batch_size=6)
    assert not Path("runs").exists()


def test_micro_batches_that_do_not_divide_are_refused():
    with raises_saying(LayoutError, "the batch", "8 does not divide 2"):
        fit(layout=js.Layout("data=8"), batch_size=8, accumulate=4)


def test_a_model_with_too_few_ids_for_the_data_is_refused():
    with raises_saying(ConfigError, "33 token ids", "32", "set the model's vocab to 33"):
        fit(data=js.data.synthetic(33))


def test_a_prompt_that_the_model_cannot_read_is_refused_before_training():
    with raises_saying(ConfigError, "token id 102", "below 32"):
        fit(prompt="def ")
    assert not Path("runs").exists()


def test_an_unknown_packing_is_named_with_the_nearest():
    with raises_saying(DataError, "'strem'", "did you mean 'stream'"):
        fit(packing="strem")


def test_one_document_cannot_be_trained_on_and_held_out():
    with raises_saying(DataError, "heldout split", "1 document", "at least two"):
        fit(data=js.data.synthetic(32, documents=1), eval_batches=2)


def test_one_document_is_enough_without_evaluation():
    assert len(fit(data=js.data.synthetic(32, documents=1), eval_batches=0).metrics()) == STEPS


def test_a_profile_covers_its_window():
    run = js.fit(**bigram(), quiet=True, profile=(2, 3))
    assert list((run.path / "profile").rglob("*.xplane.pb"))


def test_a_profile_ends_with_the_run_that_stops_inside_its_window(monkeypatch):
    stop_after(monkeypatch, 2)
    run = js.fit(**bigram(), quiet=True, profile=(1, STEPS))
    assert list((run.path / "profile").rglob("*.xplane.pb"))


@pytest.mark.parametrize("window", [(0, 1), (3, 2), (2, STEPS + 1)])
def test_a_profile_outside_of_the_run_is_refused(window):
    with raises_saying(ConfigError, f"{window[0]}:{window[1]}", f"1 to {STEPS}"):
        js.fit(**bigram(), profile=window)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_after_the_step_with_a_checkpoint(monkeypatch, number):
    stop_after(monkeypatch, 2, number)
    run = fit(run="here")
    assert (int(run.state.step), run.last_step(), run.info["status"]) == (2, 2, "stopped")


@pytest.mark.usefixtures("interruptible")
def test_a_stopped_run_says_why(monkeypatch, capfd):
    stop_after(monkeypatch, 2, signal.SIGTERM)
    fit(quiet=False)
    assert "stopped by SIGTERM after step 2" in capfd.readouterr().out


@pytest.mark.usefixtures("interruptible")
def test_a_second_interrupt_acts_at_once(monkeypatch):
    def impatient(self, done):
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("jaxscale.train.loop.Loop._place", impatient)
    with pytest.raises(KeyboardInterrupt):
        fit(run="here")
    assert js.Run("here").info["status"] == "failed"


@pytest.mark.usefixtures("interruptible")
def test_a_signal_that_was_ignored_stays_ignored():
    """As in the background of a script, where Ctrl-C is for another program; SIGTERM is heard all the same."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with stop_signals() as received:
        signal.raise_signal(signal.SIGINT)
        assert received == {}
        signal.raise_signal(signal.SIGTERM)
        assert received == {"signal": "SIGTERM"}
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    with _Signals() as launched:
        signal.raise_signal(signal.SIGINT)
        assert launched.received == 0
    stop = serve._Signals()
    signal.raise_signal(signal.SIGINT)
    assert stop.times == 0


def test_signals_are_as_before_after_a_run():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    fit(steps=1)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_run_may_be_on_another_thread():
    runs = []
    thread = threading.Thread(target=lambda: runs.append(fit()))
    thread.start()
    thread.join(60)
    assert runs and runs[0].info["status"] == "finished"


def test_a_run_that_fails_says_so_in_its_folder(monkeypatch):
    def broken(self, step):
        raise OSError("the disk is gone")

    monkeypatch.setattr("jaxscale.train.loop.Loop._place", broken)
    with pytest.raises(OSError, match="the disk is gone"):
        fit(run="here")
    info = js.Run("here").info
    assert (info["status"], info["error"]) == ("failed", "OSError: the disk is gone")


def test_a_run_that_fails_keeps_the_checkpoint_it_was_writing(monkeypatch):
    place = js.train.loop.Loop._place
    monkeypatch.setattr("jaxscale.train.loop.Loop._place", lambda self, n: place(self, n) if n < 2 else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fit(run="here", checkpoint_every=2)
    assert (js.Run("here").info["step"], js.Run("here", js.TrainConfig(**bigram())).last_step()) == (2, 2)


def test_numbers_that_are_not_finite_are_written_and_read():
    run = fit(lr=1e38, steps=6, clip_norm=None, optimizer=js.optim.SGD())
    assert not all(abs(x) < 1e30 for x in losses(run))
    assert run.info["status"] == "finished"


def test_a_python_only_value_is_said_to_be_lost(capfd, tmp_path):
    config = transformer(write_text(tmp_path / "text"), eval_batches=0, steps=1)
    model = dataclasses.replace(config.model, attention=lambda *a, **k: dot_product_attention(*a, **k))
    js.fit(config, model=model, run="here")
    assert "train.model.attention came from Python" in capfd.readouterr().out
    with raises_saying(RunError, "train.model.attention", "resume=True", "run='here'"):
        _ = js.Run("here").config


def test_a_quiet_run_prints_nothing(capfd):
    fit()
    assert capfd.readouterr().out == ""


def test_a_mesh_smaller_than_the_machine_is_said_once(caplog):
    with caplog.at_level(logging.WARNING, "jaxscale"):
        fit(layout=js.Layout("data=2"))
    assert [r.message for r in caplog.records].count("mesh 'data=2' uses the first 2 of 8 devices") == 1


def test_a_pause_leaves_the_curve_as_it_was():
    """The schedule stays that of all steps, and the pause has an evaluation and a checkpoint of its own."""
    settings = bigram(steps=6, schedule=js.optim.WarmupCosine(warmup=2), eval_batches=1)
    whole = js.fit(js.TrainConfig(**settings), quiet=True)
    paused = js.fit(js.TrainConfig(**settings), run="paused", until=3, quiet=True)
    assert paused.info["status"] == "paused" and paused.last_step() == 3
    assert "eval_loss" in paused.metrics()[-1]
    again = js.fit(js.TrainConfig(**settings), run="paused", resume=True, quiet=True)
    assert again.info["status"] == "finished"
    assert [(r["loss"], r["lr"]) for r in again.metrics()] == [(r["loss"], r["lr"]) for r in whole.metrics()]
    with raises_saying(RunError, "already taken 6 of 4 steps", "raise until"):
        js.fit(js.TrainConfig(**settings), run="paused", resume=True, until=4, quiet=True)


def test_a_pause_beyond_the_last_step_is_refused():
    with raises_saying(ConfigError, "until = 7", "1 to 6"):
        js.fit(js.TrainConfig(**bigram(steps=6)), until=7, quiet=True)


def test_whoever_is_asked_after_every_step_may_stop_a_run():
    calls = []
    run = js.fit(js.TrainConfig(**bigram(steps=6)), stop=lambda: calls.append(1) or len(calls) == 2, quiet=True)
    assert run.info["status"] == "stopped" and run.last_step() == 2


def test_a_run_killed_before_its_first_step_begins_again_in_its_folder():
    Path("early").mkdir()
    Path("early/.lock").touch()  # what is there first
    assert js.fit(js.TrainConfig(**bigram()), run="early", resume="newest", quiet=True).last_step() == STEPS
