"""Batches are a pure function of (seed, step, corpus), for any number of processes, when resuming, and in mixtures."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from jaxscale import data
from jaxscale.data.mixing import BLOCK, largest_remainder
from jaxscale.errors import DataError
from tests.truth.long import short

BYTES = data.ByteTokenizer()


def same(a: data.Batch, b: data.Batch) -> bool:
    return all(np.array_equal(a[key], b[key]) and a[key].dtype == b[key].dtype for key in data.KEYS)


@pytest.mark.parametrize("readers", [1, 2, 4])
def test_any_number_of_readers_sees_one_global_batch(source, readers):
    loader = data.Loader(source, batch_size=8, seed=3)
    for step in (0, 7, 1_000_003):
        share = 8 // readers
        parts = [loader.batch_at(step, slice(r * share, (r + 1) * share)) for r in range(readers)]
        joined = {key: np.concatenate([part[key] for part in parts]) for key in data.KEYS}
        assert same(joined, loader.batch_at(step))


def test_a_batch_has_the_promised_arrays(source):
    batch = data.Loader(source, batch_size=5).batch_at(0)
    for key in data.KEYS:
        assert batch[key].shape == (5, source.seq_len)
        assert batch[key].dtype == (np.float32 if key == "weights" else np.int32)
    assert batch["tokens"].max() < source.vocab_size


def test_a_fresh_or_unpickled_loader_gives_the_same_batch(source):
    loader = data.Loader(source, batch_size=8, seed=1)
    far = loader.batch_at(500)
    for step in range(20):
        loader.batch_at(step)
    assert same(far, data.Loader(source, batch_size=8, seed=1).batch_at(500))
    assert same(far, pickle.loads(pickle.dumps(loader)).batch_at(500))


def test_a_pickle_of_a_token_file_holds_no_tokens():
    source = data.python_stdlib().source(BYTES, seq_len=128, split="train")
    assert len(pickle.dumps(source)) < len(source) * source.seq_len / 100


def test_seeds_and_epochs_give_other_orders(source):
    first, second = (data.Loader(source, len(source), seed).ids_at(0) for seed in (0, 1))
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, data.Loader(source, len(source), 0).ids_at(1))


@pytest.mark.parametrize("packing", ["stream", "fit"])
@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_every_row_is_visited_once_per_epoch(folder, packing, batch_size):
    source = data.text_files(f"{folder}/*.txt").source(BYTES, seq_len=32, split="train", packing=packing)
    loader, n = data.Loader(source, batch_size), len(source)
    ids = np.concatenate([loader.ids_at(step) for step in range(3 * n // batch_size + 1)])
    for epoch in range(3):
        assert np.array_equal(np.sort(ids[epoch * n : (epoch + 1) * n]), np.arange(n))


def mixed(*parts):
    corpora = [(data.synthetic(50, documents=d, length=30, seed=i), weight) for i, (d, weight) in enumerate(parts)]
    return data.mixture(tuple(corpora)).source(None, seq_len=16, split="train")


def test_each_part_of_a_mixture_visits_its_rows_once_per_its_own_epoch():
    source = mixed((20, 1), (60, 1), (30, 2))
    ids = data.Loader(source, 6 * BLOCK, seed=5).ids_at(0)
    ends = np.cumsum([len(part) for part in source.sources])
    for part, end in zip(source.sources, ends, strict=True):
        own = ids[(ids >= end - len(part)) & (ids < end)]
        assert len(own) > 2 * len(part)
        for start in range(0, len(own) - len(part), len(part)):
            assert np.array_equal(np.sort(own[start : start + len(part)]), np.arange(end - len(part), end))


def test_proportions_of_a_mixture_match_its_weights_in_the_long_and_the_short_run():
    source = mixed((20, 0.62), (60, 0.08), (30, 0.3))
    ids = data.Loader(source, 20 * BLOCK).ids_at(0)
    parts = np.searchsorted(np.cumsum([len(part) for part in source.sources]), ids, side="right")
    assert np.array_equal(np.bincount(parts), [12400, 1600, 6000])
    assert abs((parts[:200] == 0).mean() - 0.62) < 0.1


def test_a_mixture_may_hold_a_mixture_and_delivers_its_parts_rows():
    inner = data.mixture(((data.synthetic(50, seed=1), 1), (data.synthetic(50, seed=2), 1)))
    source = data.mixture(((inner, 1), (data.synthetic(70, seed=3), 1))).source(None, seq_len=16, split="train")
    ids = data.Loader(source, 4 * BLOCK).ids_at(0)
    parts = np.searchsorted([len(source.sources[0].sources[0]), len(source.sources[0])], ids, side="right")
    assert np.array_equal(np.bincount(parts), [BLOCK, BLOCK, 2 * BLOCK])
    last = source.sources[1]
    assert same(source.rows(len(source) - 1 - np.arange(4)), last.rows(len(last) - 1 - np.arange(4)))


@pytest.mark.parametrize("group", short(1, [2, 3]))
def test_rows_that_belong_together_stay_together_in_a_mixture(group):
    inner = data.mixture(((data.synthetic(50, seed=1), 1), (data.synthetic(50, seed=2, documents=41), 1)))
    source = data.mixture(((inner, 1), (data.synthetic(70, seed=3), 1))).source(None, seq_len=16, split="train")
    loader = data.Loader(source, 4 * BLOCK * group, group=group)
    first = np.array([0, len(source.sources[0].sources[0]), len(source.sources[0])])
    ids = loader.ids_at(0).reshape(-1, group)
    parts = np.searchsorted(first, ids, side="right") - 1
    assert (
        (np.diff(ids, axis=1) == 1).all()
        and (parts == parts[:, :1]).all()
        and ((ids[:, 0] - first[parts[:, 0]]) % group == 0).all()
    )
    assert np.array_equal(np.bincount(parts[:, 0]), [BLOCK, BLOCK, 2 * BLOCK])  # proportions are of groups
    batch = data.Loader(source, 8 * group, group=group)
    for readers in (2, 4):
        share = 8 * group // readers
        pieces = [batch.batch_at(9, slice(r * share, (r + 1) * share)) for r in range(readers)]
        assert same({key: np.concatenate([p[key] for p in pieces]) for key in data.KEYS}, batch.batch_at(9))
    heldout = np.concatenate([b["tokens"] for b in data.heldout_batches(source, 4 * group, group=group)])
    corpora = (*source.sources[0].sources, source.sources[1])
    starts = [f + np.arange(len(s) // group) * group for f, s in zip(first, corpora, strict=True)]
    whole = {tuple(source.rows(np.arange(i, i + group))["tokens"].ravel()) for i in np.concatenate(starts)}
    groups = {tuple(rows.ravel()) for rows in heldout.reshape(-1, group, 16)} - {(0,) * 16 * group}
    assert groups == whole


def test_largest_remainder_shares_out_the_total():
    assert largest_remainder([1, 1, 1], 10).tolist() == [4, 3, 3]
    assert largest_remainder([0.5, 0.25, 0.25], 1000).tolist() == [500, 250, 250]


def test_heldout_batches_cover_every_row_once_and_pad_the_last(source):
    batches = list(data.heldout_batches(source, batch_size=16))
    assert all(batch["tokens"].shape == (16, source.seq_len) for batch in batches)
    everything = source.rows(np.arange(len(source)))
    assert sum(batch["weights"].sum() for batch in batches) == everything["weights"].sum()
    assert same(batches[0], next(data.heldout_batches(source, 16, count=1)))
    assert len(list(data.heldout_batches(source, 16, count=2))) == 2
    filled = len(source) % 16
    assert not filled or not any(array[filled:].any() for array in batches[-1].values())


def test_fingerprints_tell_loaders_apart(folder):
    text = data.text_files(f"{folder}/*.txt")
    sources = [
        text.source(BYTES, seq_len=seq_len, split=split, packing=packing)
        for seq_len in (16, 32)
        for split in ("train", "heldout")
        for packing in ("stream", "fit")
    ]
    prints = {data.Loader(source, size, seed).fingerprint for source in sources for size in (4, 8) for seed in (0, 1)}
    assert len(prints) == 32
    again = text.source(BYTES, seq_len=16, split="train")
    assert data.Loader(again, 4).fingerprint == data.Loader(sources[0], 4).fingerprint


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda s: data.Loader(s, 0), "batch_size=0"),
        (lambda s: data.Loader(s, 4, seed=-1), "seed=-1"),
        (lambda s: data.Loader(s, 4).batch_at(-1), "step -1"),
        (lambda s: data.heldout_batches(s, 4, count=0), "count=0"),
        (lambda s: data.mixture(()), "no parts"),
        (lambda s: data.mixture(((data.synthetic(9), 0.0),)), "weight 0.0"),
        (lambda s: data.mixture((data.synthetic(9), 0.5)), "pair"),
        (lambda s: mixed((20, 1), (20, 1e-5)), "less than one row"),
        (lambda s: data.synthetic(1), "vocab_size=1"),
    ],
)
def test_an_impossible_request_is_refused_in_one_sentence(folder, call, words):
    source = data.text_files(f"{folder}/*.txt").source(BYTES, seq_len=16, split="train")
    with pytest.raises(DataError, match=words) as caught:
        call(source)
    assert "\n" not in str(caught.value)
