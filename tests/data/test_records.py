"""Records of objects with __len__ and __getitem__: rows of arrays, token ids, texts."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest

from experiments.bring_your_own.digits import Classify
from experiments.bring_your_own.vit import ViT
from jaxscale import config as gin
from jaxscale import data
from jaxscale.config import register
from jaxscale.errors import ConfigError, DataError
from jaxscale.step import TrainConfig
from jaxscale.step.prepare import prepare

BYTES = data.ByteTokenizer()


class Images:
    """Record i is made from i."""

    def __init__(self, size=101, dtype=np.float32, edited=()):
        self.size, self.dtype, self.edited = size, dtype, dict(edited)

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        return self.edited.get(i, {"image": np.full((8, 8), i, self.dtype), "label": i % 10})


def opened(records, split="train", tokenizer=BYTES, **settings):
    return records.source(tokenizer, seq_len=16, split=split, **settings)


def texts(n=60):
    random = np.random.default_rng(0)
    return [chr(ord("0") + i) * int(random.integers(1, 90)) for i in range(n)]


def ids(n=60, end=()):
    return [np.array([*text.encode(), *end], np.int64) for text in texts(n)]


def as_grain(values):
    grain = pytest.importorskip("grain")
    source = grain.MapDataset.source(values).map(lambda x: x)
    assert isinstance(source, grain.sources.RandomAccessDataSource)
    return source


def documents_in(source):
    d = source.documents
    return [d.tokens[s : s + n].tolist() for s, n in zip(d.starts, d.lengths, strict=True)]


KINDS = {
    "rows": lambda: data.records(Images(), heldout=0.2, group=2),
    "grain": lambda: data.records(as_grain([Images()[i] for i in range(101)]), heldout=0.2, group=2),
    "texts": lambda: data.records(texts(), heldout=0.2),
    "ids": lambda: data.records(ids(), heldout=0.2),
}


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("packing", data.PACKINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_readers_groups_and_resuming_give_the_same_global_batches(kind, packing, group):
    loader = data.Loader(opened(KINDS[kind](), packing=packing), 8, seed=5, group=group)
    if kind == "grain":
        again = data.Loader(opened(KINDS[kind](), packing=packing), 8, seed=5, group=group)
    else:
        again = pickle.loads(pickle.dumps(loader))
    assert again.fingerprint == loader.fingerprint
    for step in (0, 11, 10**6):
        whole = loader.batch_at(step)
        for readers in (2, 4):
            parts = [again.batch_at(step, slice(r * 8 // readers, (r + 1) * 8 // readers)) for r in range(readers)]
            for key in whole:
                assert np.array_equal(np.concatenate([part[key] for part in parts]), whole[key])


def test_rows_are_the_records_once_an_epoch_and_groups_stay_in_one_split():
    records = data.records(Images(), heldout=0.2, group=2)
    labels = []
    for split in ("train", "heldout"):
        source = opened(records, split)
        batch = source.rows(np.arange(len(source)))
        assert batch["image"].dtype == np.float32 and batch["label"].dtype == np.int32
        numbers = batch["image"][:, 0, 0].astype(int)
        assert np.array_equal(batch["label"], numbers % 10)
        assert np.array_equal(numbers[0::2] + 1, numbers[1::2]) and not (numbers[0::2] % 2).any()
        labels.append(numbers)
    assert sorted(np.concatenate(labels)) == list(range(100)) and 5 < len(labels[1]) < 40


@pytest.mark.parametrize("wrapped", [list, as_grain, data.records])
def test_texts_and_token_ids_are_documents_with_one_eos(wrapped):
    expected = [[*text.encode(), 0] for text in texts()]
    for values in (texts(), [text.encode() for text in texts()], ids(), ids(end=[0])):
        corpus = data.as_corpus(wrapped(values))
        parts = [documents_in(opened(corpus, split)) for split in ("train", "heldout")]
        assert sorted(parts[0] + parts[1]) == sorted(expected) and all(parts)


def test_a_field_and_other_ids_and_held_out_records_of_their_own():
    train, heldout = ([{"t": x, "n": 1} for x in some] for some in (ids(20, [99]), ids(5)))
    corpus = data.records(train, heldout=heldout, field="t", vocab_size=200, eos=99)
    assert documents_in(opened(corpus, tokenizer=None)) == [[*x.tolist()] for x in ids(20, [99])]
    assert documents_in(opened(corpus, "heldout", None)) == [[*x.tolist(), 99] for x in ids(5)]
    assert corpus.token_ids(BYTES) == opened(corpus).vocab_size == 200


def test_the_fingerprint_follows_the_records_or_is_the_objects_own():
    prints = {opened(data.records(Images(size, dtype))).fingerprint for size in (64, 65) for dtype in ("f4", "u1")}
    assert len(prints) == 4
    assert opened(data.records(Images(64))).fingerprint == opened(data.records(Images(64, "f8"))).fingerprint
    other = Images(64)
    other.fingerprint = "version 2"
    assert opened(data.records(other)).fingerprint not in prints
    texts_of = [opened(data.records(some)).fingerprint for some in (texts(), texts()[::-1], texts())]
    assert texts_of[0] == texts_of[2] != texts_of[1]


def config(records, **settings):
    model = ViT(width=8, heads=1, depth=1)
    return TrainConfig(model=model, data=records, objective=Classify(), layout=None, batch_size=4, steps=1, **settings)


def test_any_object_with_records_is_data_and_is_compared_with_the_objective_before_compiling():
    assert isinstance(config(Images()).data, data.records)
    assert prepare(config(Images(), evaluate_on={"more": Images(40)})).loader.batch_at(0)["label"].shape == (4,)
    with pytest.raises(DataError, match=r"needs 'image' of shape \(8, 8\) float32 a row, but .* has \(8, 8\) uint8"):
        prepare(config(Images(dtype=np.uint8)))
    with pytest.raises(DataError, match="needs an array 'image', but the corpus 'records' has none"):
        prepare(config([{"imag": np.zeros((8, 8)), "label": 1}] * 20))
    for wrong in ("text", {"a": 1}, Images):
        with pytest.raises(ConfigError, match="train.data must be a corpus"):
            config(wrong)


@register(name="NumberedImages")
@dataclasses.dataclass(frozen=True)
class Numbered:
    """Image i is filled with `scale * i`."""

    scale: int = 1

    def __len__(self):
        return 64

    def __getitem__(self, i):
        return {"image": np.full((8, 8), self.scale * i, np.float32), "label": np.int32(i % 10)}


def test_a_registered_object_is_data_by_reference_and_lists_are_left_out_of_the_config_that_a_run_writes():
    text = gin.dumps("train", {"data": config(Numbered(3)).data})
    with gin.isolated():
        gin.load(bindings=[text])
        written = gin.call("train", model=ViT(width=8, heads=1, depth=1), objective=Classify(), layout=None).data
    assert opened(written).fingerprint == opened(data.records(Numbered(3))).fingerprint
    assert opened(written).fingerprint != opened(data.records(Numbered())).fingerprint
    text = gin.dumps("train", {"data": config([Numbered()[i] for i in range(30)]).data})
    assert "# train.data.data = list of 30 records: not expressible" in text


PIXELS = np.zeros((8, 8), np.float32)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: data.records([]), "is empty"),
        (lambda: data.records(5), "has no records by number"),
        (lambda: data.records(texts(), heldout="x"), "records.heldout = 'x' has no records"),
        (lambda: data.records(as_grain(texts()).repeat()), "is endless"),
        (lambda: data.records(texts(), eos=3), "belong together"),
        (lambda: data.records([{"a": "x"}] * 9), "set records.field = 'a'"),
        (lambda: data.records([{"a": "x"}] * 9, field="b"), "has no 'b'; "),
        (lambda: data.records(texts(), field="b"), "is a str, not a dict"),
        (lambda: data.records([*texts(9), ids(1)[0]]), "record 9 .* is not text, as record 0 is"),
        (lambda: data.records([np.array([1, 300])] * 9), "has id 300"),
        (lambda: data.records([1.5] * 9), "a record is 1.5; give"),
        (lambda: data.records([[[1], 2]] * 9), r"a record is \[\[1\], 2\]; give"),
        (lambda: data.records([b"\xff"] * 9), "not UTF-8"),
        (lambda: data.records(Images(edited={100: {"image": PIXELS}})), "record 100 has no 'label'"),
        (lambda: data.records(Images(edited={100: {"image": PIXELS[1:], "label": 1}})), "of record 100 has shape .7,"),
        (lambda: data.records(Images(edited={0: {"image": PIXELS, "label": 2**40}})), "does not fit in 32 bits"),
        (lambda: data.records(Images(edited={0: {"image": [[1], [1, 2]], "label": 1}})), "is not an array"),
        (lambda: data.records(Images(edited={0: {"image": None, "label": 1}})), "is a NoneType, not an array"),
        (lambda: data.records(Images(2), group=3), "a group has 3"),
    ],
)
def test_unusable_records_are_refused_in_one_sentence(make, words):
    with pytest.raises(DataError, match=words) as caught:
        opened(make())
    assert "\n" not in str(caught.value)


def test_a_record_that_is_unlike_the_first_is_an_error_when_it_is_read():
    image = {"image": PIXELS, "label": 1.5}
    source = opened(data.records(Images(10_000, edited={4321: image}), heldout=0))
    with pytest.raises(DataError, match="'label' of record 4321 has shape .* and dtype float32, but of the first"):
        source.rows(np.array([4321]))
