"""A training session: the bits of `fit`, exact sums over calls, samples of the present parameters, and resuming."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxscale as js
from jaxscale.errors import ConfigError, DataError, RunError
from jaxscale.models import TransformerConfig
from jaxscale.step import LocalSteps, NextToken
from tests.truth.compare import assert_leaves_agree

MODEL = TransformerConfig(depth=1, vocab=258, width=16, heads=2, head_dim=8, hidden=16)


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for i in range(8):
        Path(f"{i}.txt").write_text(f"Text {i} of a corpus whose words are few. " * 8)
    return js.TrainConfig(
        model=MODEL, data=js.data.text_files("*.txt"), steps=4, batch_size=4, seq_len=16, eval_batches=0,
        layout=js.Layout("data=2"),
    )  # fmt: skip


def _params(state):
    return jax.tree.map(np.asarray, state.params)


def _train(s, steps):
    for step in range(s.step, steps):
        s.forward_backward(s.batch(step))
        row = s.optim_step()
    return row


@pytest.mark.parametrize("accumulate", [1, pytest.param(2, marks=pytest.mark.long)])
def test_the_same_calls_give_the_bits_of_fit(config, accumulate):
    config = dataclasses.replace(config, accumulate=accumulate, steps=2)
    run = js.fit(config, quiet=True)
    with js.session(config) as s:
        row = _train(s, 2)
        s.save()
        assert all(jax.tree.leaves(jax.tree.map(np.array_equal, _params(run.state), _params(s.state))))
    want = run.metrics()[-1]
    assert {k: row[k] for k in ("step", "loss", "grad_norm", "lr")} == {
        k: want[k] for k in ("step", "loss", "grad_norm", "lr")
    }
    assert s.run.info["status"] == "finished" and [m["loss"] for m in s.run.metrics()] == [
        m["loss"] for m in run.metrics()
    ]


@pytest.mark.long
def test_parts_of_a_batch_add_up_and_a_resumed_session_goes_on_alike(config):
    with js.session(config, folder="whole") as s:
        _train(s, 2)
        s.save()
    halves_of = lambda b: [{k: v[i : i + 2] for k, v in b.items()} for i in (0, 2)]  # noqa: E731
    with js.session(config, folder="parts") as s:
        for step in range(2):
            halves = halves_of(s.batch(step))
            weights = s.weights(halves)
            losses = [s.forward_backward(half, weights=weights)["loss"] for half in halves]
            assert s.optim_step()["loss"] == pytest.approx(sum(losses), rel=1e-6)
        assert_leaves_agree(_params(s.state), js.load("whole").params())
    with js.session("whole") as s:
        assert s.step == 2
        _train(s, 4)
        resumed = _params(s.state)
        with pytest.raises(RunError, match="being trained by another process"), js.session("whole"):
            pass
    with js.session(config, folder="through") as s:
        _train(s, 4)
        assert all(jax.tree.leaves(jax.tree.map(np.array_equal, resumed, _params(s.state))))


@pytest.mark.long
def test_samples_and_log_probabilities_are_of_the_parameters_as_they_are_now(config):
    prompt = list(range(1, 20))  # longer than a page of the prefix cache, which a step must empty
    with js.session(dataclasses.replace(config, lr=0.1, layout=js.Layout("data=1"))) as s:
        for step in range(2):
            s.forward_backward(s.batch(step))
            s.optim_step()
            made = s.sample([prompt, prompt], max_tokens=8, ignore_end=True, seed=3, temperature=1.0)[1]
            s.config = dataclasses.replace(s.config, seq_len=64)  # so that one window holds it all
            mine = s.logprobs([[*prompt, *made.ids]])[0][len(prompt) - 1 :]
            np.testing.assert_allclose(made.logprobs, mine, atol=1e-4)


def test_mistakes_are_one_sentence(config):
    with pytest.raises(ConfigError, match="which LocalSteps.*does not; set train.algorithm"):
        js.session(dataclasses.replace(config, algorithm=LocalSteps(replicas=2), layout=js.Layout("replica=2")))
    with pytest.raises(ConfigError, match="pass folder= and resume= with settings only"):
        js.session("whole", folder="other")
    with js.session(config) as s:
        with pytest.raises(RunError, match="call forward_backward first"):
            s.optim_step()
        with pytest.raises(DataError, match="needs an array 'targets', and the batch has none"):
            s.forward_backward({"tokens": np.zeros((2, 16), np.int32)})
        wrong = {**s.batch(0), "tokens": np.zeros((4, 16), np.float32)}
        with pytest.raises(DataError, match="needs 'tokens' of shape .* int32, and the batch has .* float32"):
            s.forward_backward(wrong, NextToken())
        broken = {**s.batch(0), "weights": np.full((4, 16), np.nan, np.float32)}
        before = _params(s.state)
        s.forward_backward(broken)
        assert s.optim_step()["skipped"] == "finite"
        s.skip_step("the reward raised an error", {"reward": 0.0})
        assert s.run.metrics()[-1]["skipped"] == "the reward raised an error" and s.step == 2
        assert all(jax.tree.leaves(jax.tree.map(np.array_equal, before, _params(s.state))))
