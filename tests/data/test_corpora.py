"""Files to rows: splits, the cache, and errors about corpora that cannot be used."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from jaxscale import config, data
from jaxscale.data.split import heldout_mask, name_hash
from jaxscale.errors import DataError

BYTES = data.ByteTokenizer()


def text_of(source) -> set[str]:
    docs = source.documents
    return {BYTES.decode(docs.tokens[s : s + n - 1]) for s, n in zip(docs.starts, docs.lengths, strict=True)}


def split(root, which, **kwargs):
    return data.text_files(f"{root}/**/*.txt", **kwargs).source(BYTES, seq_len=4, split=which)


def write(root, count, start=0):
    for i in range(start, start + count):
        (root / f"n{i}.txt").write_text(f"document {i}")


def test_a_corpus_tells_its_token_ids_without_being_opened(tmp_path):
    text, tokens = data.text_files(f"{tmp_path}/none/*.txt"), data.synthetic(vocab_size=300)
    mixed = data.mixture(((text, 0.5), (tokens, 0.5)))
    file = data.token_file(str(tmp_path / "none"))
    assert [c.token_ids(BYTES) for c in (text, tokens, mixed, file)] == [256, 300, 300, None]


def test_adding_a_file_moves_no_other_and_both_splits_make_the_whole(tmp_path):
    write(tmp_path, 60)
    train, heldout = (text_of(split(tmp_path, which, heldout=0.2)) for which in ("train", "heldout"))
    assert len(train) + len(heldout) == 60 and not train & heldout and 4 <= len(heldout) <= 24
    write(tmp_path, 60, start=60)
    more_train, more_heldout = (text_of(split(tmp_path, which, heldout=0.2)) for which in ("train", "heldout"))
    assert train < more_train and heldout < more_heldout


def test_the_split_does_not_depend_on_where_the_files_are(tmp_path):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, 30)
    a, b = (split(tmp_path / name, "heldout", heldout=0.2) for name in ("here", "there"))
    assert text_of(a) == text_of(b) and a.fingerprint == b.fingerprint


@pytest.mark.parametrize("heldout", [1e-9, 0.5, 1 - 1e-9])
def test_two_documents_fill_both_splits(heldout):
    for i in range(20):
        hashes = np.array([name_hash(f"a{i}"), name_hash(f"b{i}")], np.uint64)
        assert heldout_mask(hashes, heldout).sum() == 1


def test_name_hashes_are_fixed_for_ever():
    assert f"{name_hash('os.py'):016x}" == "09e0ed4fa5b69df1"


def test_the_standard_library_is_real_code_and_opens_from_the_cache():
    corpus = data.python_stdlib()
    source = corpus.source(BYTES, seq_len=128, split="train")
    assert source.documents.lengths.sum() > 5_000_000
    names = [name for name, _ in corpus.files()]
    assert "argparse.py" in names and not [n for n in names if n.startswith(("test/", "site-packages/"))]
    assert corpus.source(BYTES, seq_len=128, split="train").fingerprint == source.fingerprint
    row = BYTES.decode(source.rows(np.arange(50))["tokens"].reshape(-1))
    assert "import " in row and "def " in row


def test_a_changed_file_is_prepared_again(tmp_path):
    write(tmp_path, 10)
    before = split(tmp_path, "train")
    (tmp_path / "n0.txt").write_text("something else entirely")
    after = split(tmp_path, "train", heldout=0)
    assert "something else entirely" in text_of(after) and before.fingerprint != after.fingerprint


def test_a_damaged_cache_is_prepared_again(tmp_path):
    write(tmp_path, 10)
    corpus = data.text_files(f"{tmp_path}/*.txt")
    cache = tmp_path / "cache"
    first = corpus.source(BYTES, seq_len=4, split="train", cache=cache)
    (folder,) = (cache / "tokens").iterdir()
    (folder / "tokens.bin").write_bytes(b"x")
    assert corpus.source(BYTES, seq_len=4, split="train", cache=cache).fingerprint == first.fingerprint
    assert [p.name for p in (cache / "tokens").iterdir()] == [folder.name]


def test_a_prepared_folder_is_a_corpus_of_both_splits(tmp_path):
    ids = [(f"d{i}", np.arange(1, 50)) for i in range(20)]
    data.write_token_file(tmp_path / "ready", ids, tokenizer=BYTES)
    corpus = data.token_file(str(tmp_path / "ready"), heldout=0.3)
    sizes = [len(corpus.source(BYTES, seq_len=10, split=which).documents.lengths) for which in ("train", "heldout")]
    assert sum(sizes) == 20 and min(sizes) > 0 and corpus.name == "ready"


def test_synthetic_text_is_seeded_and_learnable():
    corpus = data.synthetic(64, documents=50, length=200, seed=1)
    source = corpus.source(None, seq_len=32, split="train")
    assert source.fingerprint == corpus.source(None, seq_len=32, split="train").fingerprint
    batch = source.rows(np.arange(len(source)))
    counts = np.zeros((64, 64))
    used = batch["tokens"] > 0  # what follows the eos is drawn evenly
    np.add.at(counts, (batch["tokens"][used], batch["targets"][used]), 1)
    best = counts.max(1).sum() / counts.sum()
    assert 0.6 < best < 0.8
    assert not np.array_equal(batch["tokens"], data.synthetic(64, documents=50, length=200, seed=2).source(
        None, seq_len=32, split="train").rows(np.arange(len(source)))["tokens"])  # fmt: skip


def test_corpora_are_known_to_gin_by_their_python_names():
    known = config.registered()
    for name in ("python_stdlib", "text_files", "token_file", "synthetic", "mixture", "ByteTokenizer", "HFTokenizer"):
        assert known[name] is getattr(data, name)


def test_importing_data_imports_nothing_heavy():
    code = "import sys, jaxscale.data; print([m for m in ('tokenizers', 'rich') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(out.stdout.replace("'", '"')) == []


def make(root):
    """Write a folder of unusable files."""
    (root / "one.txt").write_text("alone")
    (root / "latin.bin").write_bytes(b"caf\xe9 au lait")
    (root / "nul.raw").write_text("a\0b")
    (root / "blocked").write_text("a file where a folder should be")
    (root / "empty.none").write_text("")
    return root


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda r: data.text_files(f"{r}/*.md").source(BYTES, seq_len=4, split="train"), r"no file matches.*\*\.md"),
        (lambda r: data.text_files(f"{r}/no/*.md").source(BYTES, seq_len=4, split="train"), "there is no folder"),
        (lambda r: data.text_files(f"{r}/*.bin").source(BYTES, seq_len=4, split="train"), r"latin\.bin is not UTF-8"),
        (lambda r: data.text_files(f"{r}/*.raw").source(BYTES, seq_len=4, split="train"), r"nul\.raw.*NUL"),
        (lambda r: data.text_files(f"{r}/*.none").source(BYTES, seq_len=4, split="train"), "no document with text"),
        (
            lambda r: data.text_files(f"{r}/*.txt").source(BYTES, seq_len=4, split="heldout"),
            "heldout split.*is empty.*train.eval_batches = 0",
        ),
        (lambda r: data.text_files(f"{r}/*.txt").source(BYTES, seq_len=4, split="trian"), "did you mean 'train'"),
        (lambda r: data.text_files(f"{r}/*.txt").source(None, seq_len=4, split="train"), "needs a tokenizer"),
        (lambda r: data.text_files(f"{r}/*.txt", 2.0).source(BYTES, seq_len=4, split="train"), "heldout=2.0"),
        (
            lambda r: data.text_files(f"{r}/*.txt").source(BYTES, seq_len=4, split="train", cache=r / "blocked"),
            "set JAXSCALE_CACHE",
        ),
        (
            lambda r: data.token_file(f"{r}/nothing").source(BYTES, seq_len=4, split="train"),
            "not a complete token file",
        ),
    ],
)
def test_an_unusable_corpus_is_refused_in_one_sentence(tmp_path, call, words):
    with pytest.raises(DataError, match=words) as caught:
        call(make(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_glob_without_files_is_answered_with_what_would_match(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.md").write_text("one")
    (tmp_path / "texts" / ".hidden.txt").write_text("a glob passes over it")

    def error_of(glob):
        with pytest.raises(DataError) as e:
            data.text_files(str(tmp_path / glob)).files()
        return str(e.value)

    assert f"did you mean '{tmp_path}/texts'?" in error_of("text/*.txt") and "give a glob" not in error_of("text/*.txt")
    assert "its files end in .md)" in error_of("texts/**/*.txt") and "give a glob" not in error_of("texts/**/*.txt")
    (tmp_path / "texts" / "deep").mkdir()
    (tmp_path / "texts" / "deep" / "b.txt").write_text("two")
    advised = error_of("texts/*.txt").split("such as '")[1].rstrip("'")
    assert [name for name, _ in data.text_files(advised).files()] == ["deep/b.txt"]
