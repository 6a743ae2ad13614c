"""Mixtures whose weights change at steps: exact shares, no row lost or repeated at a change, random access."""

from __future__ import annotations

import hashlib
import pickle

import numpy as np
import pytest

from jaxscale import config, data
from jaxscale.data.mixing import BLOCK
from jaxscale.errors import DataError
from jaxscale.models import TransformerConfig
from jaxscale.step import TrainConfig, blueprint_of
from jaxscale.step.effects import without_effect


def mixed(*parts, schedule=()):
    corpora = [(data.synthetic(50, documents=d, length=30, seed=i), weight) for i, (d, weight) in enumerate(parts)]
    return data.mixture(tuple(corpora), schedule).source(None, seq_len=16, split="train")


def parts_of(source, ids):
    return np.searchsorted(np.cumsum([len(part) for part in source.sources]), ids, side="right")


SCHEDULE = ((30, (0, 1, 1)), (31, (1, 0, 3)), (90, (0.25, 0.5, 0.25)))


def test_a_mixture_without_a_schedule_has_the_order_and_fingerprint_of_older_versions():
    source = mixed((20, 0.62), (60, 0.08), (30, 0.3))  # digests of the version before schedules
    assert source.fingerprint == "674cac002063a0d83cc1cbc6f239eeb94833c914204b1962b827525d1a7ff08d"
    for group, expected in {1: "879e576b443a1ec7", 2: "7de31fdfc4985584"}.items():
        loader = data.Loader(source, 3000, seed=5, group=group)
        ids = loader.ids_at(0).tobytes() + loader.ids_at(7).tobytes()
        assert hashlib.sha256(ids).hexdigest()[:16] == expected


@pytest.mark.parametrize("batch_size", [100, 250])
def test_weights_change_at_their_step_at_every_batch_size(batch_size):
    source = mixed((20, 1), (60, 0), (30, 1), schedule=SCHEDULE)
    loader = data.Loader(source, batch_size, seed=3)
    parts = np.stack([parts_of(source, loader.ids_at(step)) for step in range(130)])
    assert set(parts[:30].ravel()) == {0, 2} and set(parts[30]) == {1, 2} and set(parts[31:90].ravel()) == {0, 2}
    for first, shares in {0: (0.5, 0, 0.5), 31: (0.25, 0, 0.75), 90: (0.25, 0.5, 0.25)}.items():
        block = parts[first : first + BLOCK // batch_size]
        assert np.array_equal(np.bincount(block.ravel(), minlength=3), np.multiply(shares, BLOCK))


@pytest.mark.parametrize("group", [1, 2])
def test_each_part_goes_on_with_its_next_row_when_weights_change(group):
    source = mixed((20, 1), (60, 0), (30, 1), schedule=SCHEDULE)
    loader = data.Loader(source, 100, seed=5, group=group)
    ids = np.concatenate([loader.ids_at(step) for step in range(130)])
    ends = np.cumsum([len(part) for part in source.sources])
    for part, end in zip(source.sources, ends, strict=True):
        first = end - len(part)
        own, epoch = ids[(ids >= first) & (ids < end)], len(part) // group * group
        assert len(own) > 2 * epoch
        for start in range(0, len(own) - epoch, epoch):
            assert np.array_equal(np.sort(own[start : start + epoch]), first + np.arange(epoch))


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("packing", data.PACKINGS)
def test_readers_and_resuming_give_the_same_global_batches(packing, group):
    corpora = [data.synthetic(50, documents=d, length=30, seed=d) for d in (20, 60, 30)]
    inner = data.mixture(((corpora[0], 1), (corpora[1], 2)))
    corpus = data.mixture(((inner, 1), (corpora[2], 0)), ((3, (1, 1)), (1000, (0, 1))))
    source = corpus.source(None, seq_len=16, split="train", packing=packing)
    loader = data.Loader(source, 8, seed=5, group=group)
    for step in range(5):
        loader.batch_at(step)
    for step in (0, 3, 999, 1000, 10**6):
        again = data.Loader(pickle.loads(pickle.dumps(source)), 8, seed=5, group=group)
        whole = loader.batch_at(step)
        for readers in (1, 2, 4):
            pieces = [again.batch_at(step, slice(r * 8 // readers, (r + 1) * 8 // readers)) for r in range(readers)]
            for key in data.KEYS:
                assert np.array_equal(np.concatenate([piece[key] for piece in pieces]), whole[key])


def test_the_schedule_is_part_of_the_fingerprint():
    schedules = ((), ((5, (1, 1)),), ((6, (1, 1)),), ((5, (1, 2)),))
    assert len({mixed((20, 1), (20, 2), schedule=schedule).fingerprint for schedule in schedules}) == 4


def test_a_schedule_survives_gin_text():
    text = """
mixture.parts = ((@synthetic(), 1), (@b/synthetic(), 0))
mixture.schedule = ((10, (0.5, 0.5)),)
synthetic.vocab_size = 50
b/synthetic.seed = 7
"""
    with config.isolated():
        snapshot = config.load(bindings=[text])
        corpus = config.call("mixture")
        config.load(bindings=[snapshot])
        assert config.call("mixture") == corpus
    assert corpus == data.mixture(
        ((data.synthetic(50), 1), (data.synthetic(50, seed=7), 0)), schedule=((10, (0.5, 0.5)),)
    )


@pytest.mark.parametrize(
    ("parts", "schedule", "words"),
    [
        ((1, 1), ((0, (1, 1)),), "has the step 0; use whole numbers from 1 .* are those in mixture.parts"),
        ((1, 1), ((2.5, (1, 1)),), "has the step 2.5"),
        ((1, 1), ((5, (1, 1)), (5, (1, 2))), "step 5 after step 5; put steps in ascending order"),
        ((1, 1), ((5, (1,)),), r"has 1 weight\(s\) at step 5, but the mixture has 2"),
        ((1, 1), (5, (1, 1)), r"has 5, not a \(step, weights\) pair; write \(\(10000, \(0.5, 0.5\)\),\)"),
        ((1, 1), 7, "is not a tuple"),
        ((1, 1), ((5, (1, -1)),), "has weight -1; use a number of at least 0"),
        ((1, 1), ((5, (1, "2")),), "has weight '2'; use a number"),
        ((1, 1e200), (), "at most 1e.100"),
        ((1, 1), ((5, (1, float("nan"))),), "has weight nan"),
        ((1, 1), ((5, (0, 0)),), "all weights of the mixture are 0 from step 5"),
        ((1, 0), ((5, (1, 0)),), "has weight 0; use one above 0 or leave it out"),
        ((0, 0), ((5, (1, 1)),), "all weights of the mixture are 0 from step 0"),
        ((1, 1), ((5, (1, 1e-9)),), "less than one row in 1000"),
    ],
)
def test_an_impossible_schedule_is_refused_in_one_sentence(parts, schedule, words):
    with pytest.raises(DataError, match=words) as caught:
        mixed(*((20, weight) for weight in parts), schedule=schedule)
    assert "\n" not in str(caught.value)


def test_numbers_of_numpy_are_weights_and_steps():
    plain = mixed((20, 1), (20, 0.5), schedule=((5, (1, 2)),))
    numpy = mixed((20, np.int64(1)), (20, np.float32(0.5)), schedule=((np.int64(5), np.array([1.0, 2.0])),))
    assert plain.fingerprint == numpy.fingerprint
    with pytest.raises(DataError, match="'a.txt' is not a corpus"):
        data.mixture((("a.txt", 1),))


def test_a_change_after_the_last_step_is_named():
    corpora = ((data.synthetic(16), 1), (data.synthetic(16, seed=1), 0))
    corpus = data.mixture(corpora, ((7, (1, 1)), (8, (1, 2))))
    model = TransformerConfig(vocab=16, width=8, depth=1, heads=2)
    for steps, late in {9: [], 8: ["((8, (1, 2)),)"], 7: ["((7, (1, 1)), (8, (1, 2)))"]}.items():
        config = TrainConfig(model=model, data=corpus, steps=steps, batch_size=2, seq_len=8)
        notes = [s for s in without_effect(config, blueprint_of(config)[0]) if "mixture.schedule" in s]
        ends = f"has no effect: the run ends after train.steps = {steps}"
        assert notes == [f"mixture.schedule = {entries} {ends}" for entries in late]


def test_a_mixture_with_a_schedule_is_no_part_of_another_and_the_advice_works():
    corpora = [data.synthetic(50, documents=20, length=30, seed=i) for i in range(3)]
    inner = data.mixture(((corpora[0], 1), (corpora[1], 1)), ((5, (1, 3)),))
    with pytest.raises(DataError, match="name its corpora in the outer mixture"):
        data.mixture(((inner, 1), (corpora[2], 1)))
    outer = data.mixture(((corpora[0], 1), (corpora[1], 1), (corpora[2], 2)), ((5, (1, 3, 4)),))
    source = outer.source(None, seq_len=16, split="train")
    assert data.Loader(source, 4).batch_at(7)["tokens"].shape == (4, 16)
    with pytest.raises(DataError, match="so it needs a batch size; read it by a Loader"):
        source.order(np.arange(4), 0)
