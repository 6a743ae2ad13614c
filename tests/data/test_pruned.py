"""Pruned corpora: scores are those of scikit-learn's k-means, and the same documents stay everywhere."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from jaxscale import config as gin_config
from jaxscale import data
from jaxscale.data.cache import cache_folder
from jaxscale.data.pruned import distances
from jaxscale.errors import DataError
from jaxscale.step import TrainConfig
from tests.truth.errors import raises_saying

BYTES = data.ByteTokenizer()


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """90 documents of three languages of nonsense, and 10 of random letters, which belong to none of them."""
    root, draw = tmp_path_factory.mktemp("pruned"), np.random.default_rng(0)
    words = [["".join(draw.choice(list(letters), 4)) for _ in range(30)] for letters in ("abcde", "mnopq", "uvwxy")]
    for n in range(90):
        (root / f"t{n}.txt").write_text(" ".join(draw.choice(words[n % 3], 80)))
    for n in range(10):
        (root / f"z{n}.txt").write_text("".join(draw.choice(list("abcdemnopquvwxy "), 400)))
    return data.text_files(f"{root}/*.txt", heldout=0.1)


class Wrong(data.NGrams):
    def __call__(self, documents):
        return np.zeros((2, 3))


def texts_of(corpus):
    """The texts of the training documents."""
    documents = corpus.documents(BYTES, "train")
    return [
        bytes(np.asarray(documents.tokens[np.arange(s, s + n - 1)], np.uint8)).decode()
        for s, n in zip(documents.starts, documents.lengths, strict=True)
    ]


@pytest.mark.long
def test_distances_are_those_of_scikit_learn():
    from sklearn.cluster import KMeans

    draw = np.random.default_rng(1)
    vectors = draw.normal(size=(200, 8)) + 3 * np.eye(8)[draw.integers(0, 4, 200)]
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    first = vectors[np.sort(np.random.default_rng(0).choice(200, 4, replace=False))]
    centers = KMeans(4, init=first, n_init=1, max_iter=25, tol=0, algorithm="lloyd").fit(vectors).cluster_centers_
    cosine = vectors @ (centers / np.linalg.norm(centers, axis=1, keepdims=True)).T
    np.testing.assert_allclose(distances(vectors.astype(np.float32), 4), 1 - cosine.max(1), atol=1e-6)


def test_documents_far_from_every_cluster_are_the_hardest(texts):
    hard, easy = (data.pruned(texts, keep=0.2, order=order, clusters=3) for order in ("hardest", "easiest"))
    odd = {text for text in texts_of(data.pruned(texts, keep=1.0, clusters=3)) if len(text.split()) < 70}
    assert 5 <= len(odd) <= 10 and odd <= set(texts_of(hard)) and not odd & set(texts_of(easy))
    whole = texts.prepared(BYTES).documents("heldout", 0.1)
    assert np.array_equal(hard.documents(BYTES, "heldout").starts, whole.starts), "held-out documents all stay"


def test_shares_are_exact_and_part_of_the_fingerprint(texts):
    whole = texts_of(data.pruned(texts, keep=1.0, clusters=3))
    corpora = [data.pruned(texts, keep=k, order=o, clusters=3) for k in (0.25, 0.5) for o in ("hardest", "random")]
    sources = [corpus.source(BYTES, seq_len=32, split="train") for corpus in corpora]
    assert len({source.fingerprint for source in sources}) == 4
    for corpus in corpora:
        some = texts_of(corpus)
        assert len(some) == round(corpus.keep * len(whole)) and [t for t in whole if t in set(some)] == some
    assert texts_of(corpora[0]) == [t for t in texts_of(corpora[2]) if t in set(texts_of(corpora[0]))], (
        "a quarter is in the half"
    )
    again = pickle.loads(pickle.dumps(sources[0]))
    assert again.fingerprint == sources[0].fingerprint
    assert all(np.array_equal(again.rows(np.arange(3))[k], sources[0].rows(np.arange(3))[k]) for k in data.KEYS)


def test_scores_are_computed_once_and_again_after_damage(texts, tmp_path):
    calls = []

    class Counting(data.NGrams):
        def __call__(self, documents):
            calls.append(len(documents.lengths))
            return super().__call__(documents)

    corpus = data.pruned(texts, clusters=3, embed=Counting())
    documents = texts.prepared(BYTES, tmp_path).documents("train", 0.1)
    first = corpus.scores(documents, tmp_path)
    assert np.array_equal(corpus.scores(documents, tmp_path), first) and len(calls) == 1
    (file,) = cache_folder(tmp_path).with_name("scores").iterdir()
    for damaged in (b"", file.read_bytes()[:200]):
        file.write_bytes(damaged)
        assert np.array_equal(corpus.scores(documents, tmp_path), first)
    assert len(calls) == 3


def test_a_config_names_the_corpus_inside(texts):
    corpus = data.pruned(texts, keep=0.5, clusters=3, embed=data.NGrams(length=2))
    text = gin_config.dumps("train", TrainConfig(data=corpus).values())
    assert "/text_files()" in text and "/NGrams.length = 2" in text
    with gin_config.isolated():
        gin_config.load([], [text])
        assert gin_config.call("train").data == corpus


def test_what_cannot_be_pruned_is_named(texts):
    for make, words in (
        (lambda: data.pruned(data.mixture(((texts, 1.0),))), ("mixture", "prune the parts")),
        (lambda: data.pruned(texts, keep=0), ("pruned.keep = 0", "at most 1")),
        (lambda: data.pruned(texts, keep=True), ("pruned.keep = True",)),
        (lambda: data.pruned(texts, order="hard"), ("pruned.order", "did you mean 'hardest'?")),
        (lambda: data.pruned(texts, clusters=0), ("pruned.clusters = 0",)),
        (lambda: data.pruned(texts, seed=-1), ("pruned.seed = -1",)),
        (lambda: data.pruned(texts, embed=None), ("pruned.embed = None", "NGrams()")),
        (lambda: data.pruned(texts, embed=lambda documents: 0), ("pruned.embed", "dataclass")),
        (lambda: texts_of(data.pruned(texts, clusters=3, embed=Wrong())), ("an array (2, 3)", "a row for each")),
        (lambda: data.NGrams(dimensions=100), ("NGrams.dimensions = 100", "power of two")),
        (lambda: texts_of(data.pruned(texts, clusters=1000)), ("pruned.clusters = 1000", "use fewer")),
    ):
        with raises_saying(DataError, *words):
            make()
