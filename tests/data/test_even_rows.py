"""Rows of a step ordered for equal work: counts against the batches' own segments, sums of blocks, and messages."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxscale.data import Loader, text_files
from jaxscale.data.array_rows import ArrayRows
from jaxscale.data.even_rows import even_order
from jaxscale.data.mixing import MixtureSource
from jaxscale.data.packing import Documents, pack
from jaxscale.errors import ConfigError, DataError
from jaxscale.layout import Layout
from jaxscale.models import TransformerConfig
from jaxscale.step import TrainConfig, prepare
from tests.truth.errors import raises_saying

SEQ = 64


def _documents(seed=0, count=400):
    lengths = np.minimum(1 + np.random.default_rng(seed).pareto(0.8, count).astype(np.int64) * 4, 3 * SEQ)
    starts = 1 + np.cumsum(lengths) - lengths
    tokens = np.arange(1 + lengths.sum(), dtype=np.int32) % 250
    return Documents(f"documents {seed}", f"{seed}", 256, 0, tokens, starts, lengths)


def _sources():
    stream, fit = pack(_documents(), "stream", SEQ), pack(_documents(1), "fit", SEQ)
    return {"stream": stream, "fit": fit, "mixture": MixtureSource([stream, fit], [1, 2], "both")}


@pytest.mark.parametrize("name", ["stream", "fit", "mixture"])
def test_pairs_are_those_of_the_rows_segments(name):
    source = _sources()[name]
    ids = np.random.default_rng(2).permutation(len(source))[:40]
    segments = source.rows(ids)["segment_ids"]
    same = (segments[:, :, None] == segments[:, None, :]) & (segments != 0)[:, None, :]
    np.testing.assert_array_equal(source.pairs(ids), np.tril(same).sum(axis=(1, 2)))


@pytest.mark.parametrize("name", ["stream", "fit", "mixture"])
def test_devices_have_nearly_equal_work_in_the_rows_of_the_same_step(name):
    source = _sources()[name]
    plain, even = (Loader(source, 48, seed=3, even=even) for even in (None, (2, 1)))
    assert plain.fingerprint != even.fingerprint

    def slowest(loader, step, devices):
        """Work of the slowest device, summed over micro-batches, in those of all devices alike."""
        pairs = source.pairs(loader.ids_at(step)).reshape(-1, 2).T.reshape(2, devices, -1).sum(axis=2)
        return devices * pairs.max(axis=1).sum() / pairs.sum()

    for devices in (2, 4, 8):
        was, now = (np.mean([slowest(loader, s, devices) for s in range(4)]) for loader in (plain, even))
        assert now - 1 < (was - 1) / 2, (devices, was, now)
    for step in range(4):
        assert sorted(plain.ids_at(step)) == sorted(even.ids_at(step))
        rows = slice(6, 12)
        for array, want in even.batch_at(step).items():
            np.testing.assert_array_equal(even.batch_at(step, rows)[array], want[rows])


def test_micro_batches_have_rows_of_like_work_and_groups_stay_together():
    pairs = np.random.default_rng(0).permutation(24)
    of_micro = pairs[even_order(pairs, 3)].reshape(-1, 3).T
    assert (of_micro.min(axis=1)[:-1] > of_micro.max(axis=1)[1:]).all()
    assert np.ptp(of_micro.reshape(3, 4, 2).sum(axis=2), axis=1).max() <= 2
    stages = pairs[even_order(pairs, 2, 3)].reshape(-1, 3, 2)  # rows, micro-batches of the pipeline, of the step
    assert stages[..., 0].min() > stages[..., 1].max() and np.ptp(stages.sum(axis=0), axis=0).max() <= 2
    ids = Loader(pack(_documents(), "stream", SEQ), 24, group=2, even=(1, 1)).ids_at(0).reshape(-1, 2)
    np.testing.assert_array_equal(ids[:, 0] + 1, ids[:, 1])


def test_a_run_orders_rows_for_its_micro_batches_and_those_of_its_pipeline(tmp_path):
    (tmp_path / "a.txt").write_text("some words, and more of them\n" * 400)
    config = TrainConfig(
        model=TransformerConfig(depth=2, width=16, heads=2, vocab=256), data=text_files(str(tmp_path / "*.txt")),
        batch_size=16, seq_len=16, accumulate=2, eval_batches=0, layout=Layout("pipeline=2", pipeline="1f1b:4"),
    )  # fmt: skip
    for layout, even in ((config.layout, (2, 4)), (Layout("data=2"), (2, 1)), (None, (2, 1))):
        assert prepare(dataclasses.replace(config, layout=layout, even_rows=True)).loader.even == even
    assert prepare(config).loader.even is None


def test_rows_without_documents_and_settings_without_effect_are_refused():
    rows = ArrayRows("rows of mine", [{"tokens": np.zeros(4, np.int32)}] * 8, "train", 0.0, 1, "mine", 4)
    for source in (rows, MixtureSource([pack(_documents(), "fit", SEQ), rows], [1, 1], "both")):
        with raises_saying(DataError, "train.even_rows", "'rows of mine'", "train.even_rows = False"):
            Loader(source, 4, even=(1, 1))
    with raises_saying(ConfigError, "train.segments = False", "equal work"):
        dataclasses.replace(TrainConfig(), even_rows=True, segments=False)
