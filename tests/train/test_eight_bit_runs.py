"""Runs with 8-bit optimizer state: they train, resume elsewhere, and change precision on the way."""

from __future__ import annotations

import dataclasses
import shutil

import jax
import numpy as np
import pytest

import jaxscale as js
from jaxscale import optim
from jaxscale.errors import CheckpointError, ConfigError, LayoutError
from jaxscale.optim import is_quantized
from jaxscale.plan import explain
from jaxscale.step import blueprint_of
from jaxscale.train import read_config
from jaxscale.train.checkpoints import Checkpoints, flatten
from jaxscale.train.checkpoints.chunks import to_host
from jaxscale.train.checkpoints.manifest import leaves_of
from pallas_kernels.blockwise import dequantize_blockwise
from tests.truth.errors import raises_saying
from tests.truth.long import short
from tests.truth.runs import STEPS, assert_same_bits, losses, transformer, write_text

pytestmark = pytest.mark.once

EIGHT = optim.AdamW8bit(storage=optim.EightBit(min_size=1024, width=16))
ELSEWHERE = js.Layout("data=4,tensor=2")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("eight") / "text")


@pytest.fixture(scope="module")
def run(text, tmp_path_factory):
    """A finished run whose moments take 8 bits, its state in memory."""
    return js.fit(transformer(text, optimizer=EIGHT), run=tmp_path_factory.mktemp("eight") / "run", quiet=True)


def quantized(state):
    return [q for q in jax.tree.leaves(state.opt_state, is_leaf=is_quantized) if is_quantized(q)]


def restored(run, **changes):
    """The state of a run's checkpoint, as a run with other settings reads it."""
    config = js.TrainConfig(**run.config.values() | changes)
    blueprint, _ = blueprint_of(config)
    return run.checkpoints.restore(STEPS, blueprint.abstract_state(), blueprint.shardings())


def test_it_trains_sharded(run):
    assert len(quantized(run.state)) == 2 * 8  # head, q, k, v, out, gate, up, down
    assert losses(run)[-1] < losses(run)[0]


@pytest.mark.parametrize("layout", short(1, [ELSEWHERE, js.Layout("fsdp=2"), None]), ids=str)
def test_its_checkpoint_is_restored_onto_any_layout_bit_for_bit(run, layout):
    assert_same_bits(restored(run, layout=layout), run.state)


@pytest.mark.long
def test_a_run_resumes_on_another_layout(run, text, tmp_path):
    folder = shutil.copytree(run.path, tmp_path / "copy")
    changed = transformer(text, optimizer=EIGHT, layout=ELSEWHERE, steps=STEPS + 2)
    again = js.fit(changed, run=folder, resume=True, quiet=True)
    assert int(again.state.step) == STEPS + 2 and np.isfinite(losses(again)).all()


@pytest.mark.parametrize("layout", [ELSEWHERE, None], ids=str)
def test_its_checkpoint_converts_to_32_bits(run, layout):
    wide = restored(run, optimizer=optim.AdamW(), layout=layout)
    q, exact = run.state.opt_state[1].mu, wide.opt_state[1].mu
    got = exact["runs"][0]["blocks"][0]["mlp"]["up"]["kernel"]
    want = dequantize_blockwise(q["runs"][0]["blocks"][0]["mlp"]["up"]["kernel"])
    np.testing.assert_array_equal(got, np.asarray(want))
    assert not quantized(wide)


@pytest.mark.parametrize("layout", [ELSEWHERE, None], ids=str)
def test_a_32_bit_checkpoint_converts_to_8_bits(finished_run, layout):
    narrow = restored(finished_run, optimizer=EIGHT, layout=layout)
    exact, q = finished_run.state.opt_state[1].nu, narrow.opt_state[1].nu
    want = np.asarray(exact["head"]["weight"])
    got = np.asarray(dequantize_blockwise(q["head"]["weight"]))
    assert 0 < np.abs(got - want).max() < 0.02 * want.max()
    assert_same_bits(narrow.params, finished_run.state.params)


def test_blocks_of_another_size_convert(run):
    other = optim.AdamW8bit(storage=optim.EightBit(min_size=1024, block_size=128, width=16, format="linear"))
    got = restored(run, optimizer=other)
    assert {q.format for q in quantized(got)} == {"linear"}


def test_another_optimizers_checkpoint_is_refused(run):
    with raises_saying(CheckpointError, "does not fit this model and optimizer", "nu"):
        restored(run, optimizer=optim.Lion8bit(storage=EIGHT.storage))


def test_the_optimizer_of_a_run_is_changed_from_the_command_line(run):
    assert read_config(run.path, ["train.optimizer = @AdamW()"]).optimizer == optim.AdamW()
    with raises_saying(ConfigError, "reads the binding EightBit.width"):
        read_config(run.path, ["train.optimizer = @AdamW()", "EightBit.width = 4"])


def test_a_change_of_precision_is_said(run, text, tmp_path):
    messages = []
    blueprint, _ = blueprint_of(js.TrainConfig(**run.config.values() | {"optimizer": optim.AdamW()}))
    folder = shutil.copytree(run.path, tmp_path / "copy")
    js.Run(folder, run.config).checkpoints.restore(
        STEPS, blueprint.abstract_state(), blueprint.shardings(), messages.append
    )  # fmt: skip
    assert len(messages) == 1 and "another precision" in messages[0]


def test_second_moments_that_an_older_version_rounded_to_zero_are_raised(run, tmp_path):
    blueprint, _ = blueprint_of(run.config)
    arrays, infos = to_host(flatten(run.state)), blueprint.infos
    some = lambda codes: codes * (codes % 3 > 0)  # noqa: E731
    for name, leaf in leaves_of(run.state, arrays, infos).items():
        if not leaf.get("quantized", {"signed": True})["signed"]:
            pieces = {region: some(piece) for region, piece in arrays[name].pieces.items()}
            arrays[name] = dataclasses.replace(arrays[name], pieces=pieces)
    for version, least in (("new", 0), ("old", 1)):
        leaves, messages = leaves_of(run.state, arrays, infos), []
        for leaf in leaves.values() if version == "old" else ():
            leaf.get("quantized", {}).pop("positive", None)
        checkpoints = Checkpoints(tmp_path / version)
        checkpoints.save_host(STEPS, arrays, {"leaves": leaves})
        checkpoints.wait()
        got = checkpoints.restore(STEPS, blueprint.abstract_state(), blueprint.shardings(), messages.append)
        assert ["second moments to 0" in sentence for sentence in messages] == [True] * least
        for a, b in zip(quantized(got), quantized(run.state), strict=True):
            codes = np.asarray(b.codes) if b.signed else np.maximum(some(np.asarray(b.codes)), least)
            np.testing.assert_array_equal(a.codes, codes)
            assert b.signed or codes.min() == least


def test_explain_says_what_keeps_32_bits(run):
    text = str(explain(run))
    assert "embed/weight keeps 32-bit optimizer state" in text and "EightBit.keep" in text


def test_explain_names_the_storage_that_fits_as_training_does(text):
    config = transformer(text, optimizer=optim.AdamW8bit(storage=optim.EightBit(min_size=1024)))
    words = ("head/weight", "a device holds (128, 16)", "EightBit(width=16)", "EightBit.width = 16")
    for ask in (explain, js.step.prepare):
        with raises_saying(LayoutError, *words):
            ask(config)


@pytest.mark.long
def test_moments_of_bfloat16_parameters_convert_both_ways(text, tmp_path):
    model = js.models.Transformer.Config(depth=1, width=32, heads=2, hidden=64, param_dtype="bfloat16")
    settings = dict(model=model, layout=None, eval_batches=0)
    for i, (a, b) in enumerate([(EIGHT, optim.AdamW()), (optim.AdamW(), EIGHT)]):
        run = js.fit(transformer(text, optimizer=a, **settings), run=tmp_path / str(i), quiet=True)
        got = restored(run, optimizer=b)
        blueprint, _ = blueprint_of(js.TrainConfig(**run.config.values() | {"optimizer": b}))
        want = blueprint.abstract_state().opt_state
        assert jax.tree.map(lambda x: x.dtype, got.opt_state) == jax.tree.map(lambda x: x.dtype, want)
