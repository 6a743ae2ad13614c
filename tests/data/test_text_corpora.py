"""JSON lines, Parquet files and data sets of Hugging Face: files of other programs are read as these wrote them."""

from __future__ import annotations

import bz2
import gzip
import json
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from jaxscale import data
from jaxscale.data import lines
from jaxscale.errors import DataError

BYTES = data.ByteTokenizer()
TEXTS = [f"document {i}: " + chr(97 + i % 26) * (i * 7 % 90) + "é\n" for i in range(60)]


def rows_of(texts=TEXTS):
    return [{"id": f"n{i}", "text": text, "other": i} for i, text in enumerate(texts)]


def jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def documents(corpus, tokenizer=BYTES):
    """The documents of the token file, as text, in order."""
    file = corpus.prepared(tokenizer)
    spans = zip(file.offsets[:-1], file.offsets[1:] - 1, strict=True)
    return [tokenizer.decode(file.tokens[start:end]) for start, end in spans]


def zstd(content, **options):
    return zstandard.ZstdCompressor(**options).compress(content)


FRAMES = {
    "plain": lambda x: x,
    "gz": gzip.compress,
    "gz of two members": lambda x: gzip.compress(x[:1000]) + gzip.compress(x[1000:]),
    "zst": zstd,
    "zst of two frames": lambda x: zstd(x[:1000]) + zstd(x[1000:]),
    "zst with a frame to skip": lambda x: b"\x50\x2a\x4d\x18\x04\0\0\0abcd" + zstd(x),
    "zst with a long window": lambda x: _long(x),
}


def _long(content):
    parameters = zstandard.ZstdCompressionParameters(window_log=28)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    return compressor.compress(content) + compressor.flush()


@pytest.mark.parametrize("kind", FRAMES)
def test_lines_are_read_whatever_compressed_them(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(lines, "PIECE", 700)
    monkeypatch.setattr(lines, "_READ", 100)
    path = tmp_path / "a.jsonl"
    path.write_bytes(FRAMES[kind](jsonl(rows_of())))
    corpus = data.jsonl_files(str(path))
    assert documents(corpus) == TEXTS
    names = [name for name, _ in corpus.documents()]
    assert names[0] == "a.jsonl#1" and len(set(names)) == 60
    assert len(list(corpus.pieces())) > 5 or kind.startswith("zst")  # of which a block is decompressed at once


def test_compressing_a_file_moves_no_document(tmp_path):
    for folder, name, content in (("a", "x.jsonl", jsonl), ("b", "x.jsonl.zst", lambda r: zstd(jsonl(r)))):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_bytes(content(rows_of()))
    heldout = [list(data.jsonl_files(f"{tmp_path}/{f}/*.jsonl*", heldout=0.2).texts("heldout")) for f in "ab"]
    assert heldout[0] == heldout[1] and 4 < len(heldout[0]) < 20


def parquet(path, texts=TEXTS, group=7, **columns):
    columns = {"text": pa.array(texts), "id": pa.array(range(len(texts))), **columns}
    pq.write_table(pa.table(columns), path, row_group_size=group)
    return path


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]
)
def test_row_groups_are_read_whatever_holds_the_texts(tmp_path, kind):
    parquet(tmp_path / "a.parquet", text=pa.array(TEXTS).cast(kind))
    corpus = data.parquet_files(f"{tmp_path}/*.parquet")
    assert documents(corpus) == TEXTS and [n for n, _ in corpus.documents()][:2] == ["a.parquet#0", "a.parquet#1"]
    assert sum(piece.size for piece in corpus.pieces()) <= corpus.total()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder that `datasets` has saved, one of splits, and one of its JSON lines."""
    datasets = pytest.importorskip("datasets")
    root = tmp_path_factory.mktemp("hf")
    rows = datasets.Dataset.from_list(rows_of())
    rows.save_to_disk(str(root / "saved"))
    datasets.DatasetDict({"train": rows, "test": rows.select(range(5))}).save_to_disk(str(root / "splits"))
    (root / "plain").mkdir()
    (root / "plain" / "train.jsonl").write_bytes(jsonl(rows_of()))
    return root


@pytest.fixture(autouse=True)
def _offline(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))


def test_a_data_set_is_read_saved_streamed_or_as_files(saved):
    for name, options in (("saved", {}), ("splits", {}), ("plain", {}), ("plain", {"streaming": True})):
        corpus = data.hf_dataset(str(saved / name), **options)
        assert documents(corpus) == TEXTS, (name, options)
        assert [name for name, _ in corpus.documents()][-1] == "train#59"
    assert documents(data.hf_dataset(str(saved / "splits"), split="test")) == TEXTS[:5]


def test_a_named_column_decides_the_split_in_all_of_them(saved, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl(reversed(rows_of())))
    parquet(tmp_path / "a.parquet", id=pa.array([f"n{i}" for i in range(60)]))
    corpora = [
        data.jsonl_files(f"{tmp_path}/*.jsonl", id="id", heldout=0.3),
        data.parquet_files(f"{tmp_path}/*.parquet", id="id", heldout=0.3),
        data.hf_dataset(str(saved / "saved"), id="id", heldout=0.3),
    ]
    first, *others = [sorted(corpus.texts("heldout")) for corpus in corpora]
    assert 5 < len(first) < 40 and all(other == first for other in others)


def test_a_tokenizer_may_be_trained_on_them(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl(rows_of()))
    tokenizer = data.train_bpe(data.jsonl_files(f"{tmp_path}/*.jsonl"), 300, tmp_path / "t.json")
    assert documents(data.jsonl_files(f"{tmp_path}/*.jsonl"), tokenizer) == TEXTS


def bad(path, content):
    path.write_bytes(content)
    return data.jsonl_files(str(path))


GOOD = jsonl(rows_of())
LINES = [
    (lambda r: bad(r / "a.jsonl", b""), r"a\.jsonl is empty; remove it"),
    (lambda r: bad(r / "a.jsonl.gz", gzip.compress(b"")), r"a\.jsonl\.gz has no line; remove it"),
    (lambda r: bad(r / "a.jsonl.gz", gzip.compress(GOOD)[:-20]), r"a\.jsonl\.gz is damaged or truncated after line"),
    (lambda r: bad(r / "a.jsonl.gz", gzip.compress(GOOD)[:99] + b"x" * 50), r"a\.jsonl\.gz is damaged.*line 0"),
    (lambda r: bad(r / "a.jsonl.zst", zstd(GOOD)[:-5]), r"a\.jsonl\.zst is damaged or truncated.*incomplete"),
    (lambda r: bad(r / "a.jsonl.zst", zstd(GOOD)[:99] + b"x" * 50), r"a\.jsonl\.zst is damaged"),
    (lambda r: bad(r / "a.jsonl.gz", b"xx" + gzip.compress(GOOD)[2:]), r"a\.jsonl\.gz does not begin like a \.gz file"),
    (
        lambda r: bad(r / "a.jsonl.bz2", bz2.compress(GOOD)),
        r"a\.jsonl\.bz2 is compressed by bzip2; compress it by gzip or",
    ),
    (lambda r: bad(r / "a.jsonl", GOOD + b'{"text": "unfin'), r"a\.jsonl, line 61: it is not valid JSON"),
    (lambda r: bad(r / "a.jsonl", b'{"text": "a"}\n["text"]\n'), r"line 2: it is of type list and not an object"),
    (lambda r: bad(r / "a.jsonl", b"[" * 100_000), r"line 1: it is nested too deep"),
    (lambda r: bad(r / "a.jsonl", b'{"text": "caf\xe9"}'), r"line 1: it is not valid JSON .*utf-8"),
    (lambda r: bad(r / "a.jsonl", b'{"texts": "a"}\n'), r"line 1: it has no field 'text'; did you mean 'texts'\?"),
    (
        lambda r: bad(r / "a.jsonl", b'{"text": 3}\n'),
        r"line 1: its field 'text' is of type int and not a text; name another",
    ),
    (lambda r: bad(r / "a.jsonl", b'{"text": null}\n'), r"line 1: its field 'text' is null"),
    (
        lambda r: bad(r / "a.jsonl", b'{"text": "a\\u0000"}\n'),
        r"cannot tokenize .*a\.jsonl, line 1: character 1 is NUL",
    ),
    (lambda r: bad(r / "a.jsonl", b'{"text": "\\ud800"}\n'), r"cannot tokenize .*a\.jsonl, line 1: character 0 is '"),
    (lambda r: data.jsonl_files(f"{r}/*.jsonl"), "no file matches"),
    (
        lambda r: data.jsonl_files("a", id="k", duplicates="dorp"),
        r"jsonl_files.duplicates = 'dorp'.*did you mean 'drop'",
    ),
    (lambda r: data.jsonl_files("a", processes=0), r"jsonl_files.processes = 0: use 1 or more"),
]


def table(path, **options):
    return data.parquet_files(str(parquet(path / "a.parquet", **options).parent / "*.parquet"))


def half_way(root):
    """A second file without the column, after a first that has it."""
    parquet(root / "a.parquet")
    pq.write_table(pa.table({"contents": TEXTS}), root / "b.parquet")
    return data.parquet_files(f"{root}/*.parquet")


def flipped(root):
    path = parquet(root / "a.parquet", texts=[f"{i} {np.random.default_rng(i).bytes(99).hex()}" for i in range(200)])
    content = bytearray(path.read_bytes())
    content[40:60] = b"\xff" * 20
    path.write_bytes(content)
    return data.parquet_files(str(path))


def truncated(root):
    path = parquet(root / "a.parquet")
    path.write_bytes(path.read_bytes()[:-100])
    return data.parquet_files(str(path))


PARQUET = [
    (half_way, r"b\.parquet has no column 'text'; did you mean|b\.parquet has no column 'text'; known: contents"),
    (lambda r: table(r, text=pa.array(range(60)), title=pa.array(TEXTS)),
     r"a\.parquet has a column 'text' of int64 and not of texts; columns of text: title"),
    (lambda r: table(r, texts=TEXTS[:3] + [None] + TEXTS[4:]), r"a\.parquet, row 3: its column 'text' is null"),
    (lambda r: table(r, texts=pa.array([], pa.string())), r"a\.parquet has no row; remove it"),
    (truncated, r"a\.parquet is not a Parquet file, or is truncated"),
    (flipped, r"a\.parquet is damaged in row group 0"),
    (lambda r: data.parquet_files(str(parquet(r / "a.parquet")), id="name"), r"no column 'name'"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "words"), [*LINES, *PARQUET])
def test_a_corpus_that_cannot_be_read_is_named_in_one_sentence(tmp_path, make, words):
    with pytest.raises(DataError, match=words) as caught:
        make(tmp_path).prepared(BYTES)
    assert "\n" not in str(caught.value)


def test_a_schema_that_differs_is_named_before_a_row_is_read(tmp_path, monkeypatch):
    corpus = half_way(tmp_path)
    monkeypatch.setattr(data.parquet_files, "_parts", lambda *_: pytest.fail("it has read a row"))
    with pytest.raises(DataError, match=r"b\.parquet has no column"):
        corpus.pieces()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"field": "txt"}, r"has no column 'txt'; did you mean 'text'\?"),
        ({"field": "other"}, r"row 0: its field 'other' is of type int and not a text"),
        ({"split": "trian"}, r"has no split 'trian'; did you mean 'train'\?"),
        (
            {"name_or_path": "saved", "split": "test"},
            r"saved is one data set without splits; leave out hf_dataset.split",
        ),
        ({"name_or_path": "savd"}, r"there is no data set .*did you mean .*saved'"),
    ],
)
def test_a_data_set_that_cannot_be_read_is_named_in_one_sentence(saved, options, words):
    name = str(saved / options.pop("name_or_path", "splits"))
    with pytest.raises(DataError, match=words) as caught:
        data.hf_dataset(name, **options).prepared(BYTES)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("package", "extra", "make"),
    [
        ("zstandard", "data", lambda r: bad(r / "a.jsonl.zst", zstd(GOOD))),
        ("pyarrow", "data", lambda r: table(r)),
        ("datasets", "datasets", lambda r: data.hf_dataset(str(r))),
    ],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(tmp_path, monkeypatch, package, extra, make):
    corpus = make(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DataError, match=rf"{package}': pip install 'jaxscale\[{extra}\]'"):
        corpus.prepared(BYTES)
