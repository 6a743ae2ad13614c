"""Tuning of stored codes and scales: the gain of a move, the loss of every step, and the run that is written."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxscale as js
from jaxscale.convert.quantize import quantize
from jaxscale.convert.recipes import RoundToNearest
from jaxscale.convert.tune import PVTuning, next_numbers, tune
from jaxscale.errors import ConfigError, DataError
from jaxscale.models import TransformerConfig
from jaxscale.nn import Rounded
from jaxscale.nn.formats import StatsQ, Stored, StoredWeight
from jaxscale.run import Run
from jaxscale.step.state import describe_model
from tests.truth.errors import raises_saying
from tests.truth.long import short

MODEL = TransformerConfig(depth=1, vocab=64, width=16, heads=2, hidden=32)
SETTINGS = dict(
    data=js.data.synthetic(documents=40, length=60, vocab_size=64), layout=None, batch_size=8, seq_len=16,
    eval_batches=0, quiet=True, steps=2,
)  # fmt: skip


@pytest.mark.parametrize("weights", short(2, [Stored("int3"), Stored("nf4", group=4), StatsQ(), Stored("kmeans2")]))
def test_the_next_number_is_the_neighbour_against_the_gradient_and_its_gain_the_products(weights):
    random = np.random.default_rng(0)
    kernel, gradient = random.normal(size=(2, 16, 4)).astype(np.float32)
    weight = weights.encode(jnp.asarray(kernel), (-2,))
    moved, gain = next_numbers(weight, jnp.asarray(gradient))
    now, codes = np.asarray(weight.dense()), np.asarray(weight.unpacked())
    packed = StoredWeight.of(moved, weight.numbers, weight.axis).codes
    after = np.asarray(dataclasses.replace(weight, codes=packed).dense())
    for place, g in np.ndenumerate(gradient):
        changed = after[place] - now[place]
        assert changed * g <= 0 and gain[place] == pytest.approx(-g * changed, rel=1e-5)
        assert (moved[place] == codes[place]) == (changed == 0)
        others = np.unique(now[:, place[1]]) if weights.group is None else [now[place]]
        assert not [v for v in others if min(now[place], after[place]) < v < max(now[place], after[place])]


def test_the_loss_of_a_quadratic_never_rises_and_falls_below_rounding():
    random = np.random.default_rng(0)
    x, kernel = random.normal(size=(64, 16)).astype(np.float32), random.normal(size=(16, 8)).astype(np.float32)
    x[:, 1:] += 2 * x[:, :1]  # correlated inputs, for which rounding to nearest is not best
    batches = [{"x": x[:32]}, {"x": x[32:]}]
    weight = Stored("int2", group=8).encode(jnp.asarray(kernel), (-2,))

    def loss(params, batch):
        return jnp.mean((batch["x"] @ (params["w"].dense() - kernel)) ** 2)

    params, losses = PVTuning(steps=10).tuned(loss, {"w": weight}, batches)
    assert all(b <= a for a, b in zip(losses, losses[1:], strict=False))
    assert losses[-1] < 0.5 * losses[0]
    stored = np.mean((x.astype(np.float64) @ (np.asarray(params["w"].dense(), np.float64) - kernel)) ** 2)
    assert stored == pytest.approx(losses[-1], rel=1e-4)
    assert params["w"].codes.dtype == jnp.uint8 and np.any(params["w"].codes != weight.codes)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    weights = Stored("int2", group=8, scale="bfloat16")
    model = dataclasses.replace(MODEL, products=Rounded(weights))
    base = js.fit(model=model, run=folder / "base", **SETTINGS)
    return quantize(base, folder / "int2", RoundToNearest(weights=weights), say=lambda _: None)


@pytest.mark.long
def test_a_run_trained_with_rounded_weights_is_quantised_to_the_function_that_was_trained(quantized):
    base, (graphdef, _) = Run(quantized.path.parent / "base"), describe_model(quantized.config.model)
    tokens = jnp.arange(32, dtype=jnp.int32).reshape(2, 16)
    hidden = [nnx.merge(graphdef, run.weights()).hidden(tokens) for run in (base, quantized)]
    np.testing.assert_allclose(*hidden, atol=1e-5)
    unrounded, _ = describe_model(MODEL)
    assert np.abs(nnx.merge(unrounded, base.weights()).hidden(tokens) - hidden[0]).max() > 0.01


@pytest.mark.long
def test_a_tuned_run_is_stored_in_the_same_format_and_has_the_loss_it_says(quantized, tmp_path, capsys):
    from jaxscale.cli import main

    out = tmp_path / "tuned"
    assert main(["tune", str(quantized.path), str(out), "--steps", "2", "--rows", "16"]) == 0
    assert "before" in capsys.readouterr().out
    tuned = Run(out)
    losses = tuned.info["tuned"]["losses"]
    assert losses[0] >= losses[1] >= losses[2] and losses[2] < losses[0]
    assert tuned.config.stored == quantized.config.stored
    assert jax.tree.structure(tuned.weights()) == jax.tree.structure(quantized.weights())
    again = tune(tuned, tmp_path / "again", PVTuning(steps=1), rows=16, say=lambda _: None)
    assert again.info["tuned"]["losses"][0] == pytest.approx(losses[-1], rel=1e-5)


@pytest.mark.long
def test_runs_without_codes_and_rows_that_do_not_exist_are_refused(quantized, tmp_path):
    base = Run(quantized.path.parent / "base")
    with raises_saying(ConfigError, "plain arrays", "jaxscale quantize"):
        tune(base, tmp_path / "a")
    with raises_saying(ConfigError, "batches of 8", "multiple of 8"):
        tune(quantized, tmp_path / "b", rows=12)
    with raises_saying(DataError, "rows", "use at most"):
        tune(quantized, tmp_path / "c", rows=8000)


def test_settings_of_tuning_are_checked():
    with raises_saying(ConfigError, "PVTuning.codes", "at most 1"):
        PVTuning(codes=2.0)
    with raises_saying(ConfigError, "PVTuning.steps", "from 1"):
        PVTuning(steps=0)
