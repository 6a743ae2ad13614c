"""A round trip through every tokenizer returns the text."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from jaxscale import data
from jaxscale.errors import DataError


def random_texts(seed, count=50):
    """Unicode of one to four UTF-8 bytes, without NUL and surrogates."""
    random = np.random.default_rng(seed)
    tops = np.array([0x80, 0x800, 0xD800, 0x110000])
    for _ in range(count):
        points = random.integers(1, tops[random.integers(0, 4, random.integers(0, 60))])
        yield "".join(chr(p) for p in points if not 0xD800 <= p < 0xE000)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    pytest.importorskip("tokenizers")
    path = tmp_path_factory.mktemp("bpe") / "small" / "tokenizer.json"
    return data.train_bpe(["the cat sat on the mat, the cat", "the hat " * 20], 300, path)


@pytest.fixture(params=["bytes", "bpe"])
def tokenizer(request):
    return data.ByteTokenizer() if request.param == "bytes" else request.getfixturevalue("bpe")


def test_any_text_survives_a_round_trip(tokenizer):
    for text in [*random_texts(0), "", "def f(x):\n\treturn 'é' * x\r\n"]:
        ids = tokenizer.encode(text)
        assert ids.dtype == np.int32 and ids.ndim == 1
        assert tokenizer.decode(ids) == text
        assert not len(ids) or 0 <= ids.min() <= ids.max() < tokenizer.vocab_size
        assert tokenizer.eos_id not in ids


def test_bytes_that_are_no_text_and_ids_beyond_the_vocabulary_decode_to_a_replacement():
    assert data.ByteTokenizer().decode(np.array([104, 105, 0xE9, 300])) == "hi\ufffd\ufffd"


def test_a_trained_tokenizer_compresses_is_cached_by_content_and_cannot_be_ended_by_text(bpe, tmp_path):
    assert len(bpe.encode("the cat sat on the mat")) < 15 and bpe.vocab_size <= 300
    assert bpe.eos_id not in bpe.encode("a document that says <|endoftext|> itself")
    copy = tmp_path / "tokenizer.json"
    copy.write_text(open(bpe.path, encoding="utf-8").read(), encoding="utf-8")
    assert data.HFTokenizer(str(tmp_path)).fingerprint == bpe.fingerprint and bpe.name == "small"


def test_a_tokenizer_is_trained_on_the_train_split_of_a_corpus_and_used_with_it(folder, tmp_path):
    pytest.importorskip("tokenizers")
    corpus = data.text_files(f"{folder}/*.txt")
    tokenizer = data.train_bpe(corpus, 280, tmp_path / "t.json")
    source = corpus.source(tokenizer, seq_len=8, split="train", packing="fit")
    batch = data.Loader(source, 4).batch_at(0)
    assert batch["tokens"].max() < tokenizer.vocab_size == source.vocab_size
    assert np.any(source.rows(np.arange(len(source)))["targets"] == tokenizer.eos_id)


def test_a_missing_package_is_named_with_its_command(monkeypatch, bpe):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match=r"pip install 'jaxscale\[hf\]'"):
        data.HFTokenizer(bpe.path).encode("x")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda bpe, at: data.ByteTokenizer().encode("ab\0c"), "character 2 is NUL"),
        (lambda bpe, at: data.ByteTokenizer().encode("a\ud800"), "character 1"),
        (lambda bpe, at: data.HFTokenizer(str(at / "no.json")).encode("x"), "no.json"),
        (lambda bpe, at: data.HFTokenizer(__file__).encode("x"), "is not a tokenizer.json"),
        (lambda bpe, at: data.HFTokenizer(bpe.path, eos="<|endoftxt|>").eos_id, r"did you mean '<\|endoftext\|>'"),
        (lambda bpe, at: data.train_bpe(["x"], 100, at / "t.json"), "vocab_size=100"),
    ],
)
def test_an_unusable_tokenizer_is_refused_in_one_sentence(bpe, tmp_path, call, words):
    with pytest.raises(DataError, match=words) as caught:
        call(bpe, tmp_path)
    assert "\n" not in str(caught.value)
