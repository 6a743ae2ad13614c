"""`jaxscale data`: what it shows of every kind of corpus, and the token files that it writes."""

from __future__ import annotations

import gzip
import json
import re
import shlex

import numpy as np
import pytest

from jaxscale import data
from jaxscale.cli import main
from jaxscale.data.statistics import statistics
from jaxscale.errors import DataError

TEXTS = [f"text {i} " + "ab" * (i % 20) for i in range(50)]
BYTES = data.ByteTokenizer()


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAXSCALE_CACHE", str(tmp_path / "cache"))
    lines = "".join(json.dumps({"text": t, "body": "x"}) + "\n" for t in [*TEXTS, *TEXTS[:5]])
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").write_text("two")


@pytest.fixture
def run(capfd):
    """Run a command in this process: its exit code, stdout and stderr."""

    def call(*argv):
        code = main([str(a) for a in argv])
        return code, *capfd.readouterr()

    return call


def test_it_shows_statistics_documents_and_rows(run):
    code, out, err = run("data", "a.jsonl.gz", "--seq-len", 32, "--packing", "fit", "--rows", 1, "--documents", 2)
    assert code == 0 and not err
    for words in (
        "documents  ",
        " 55",
        f"{sum(len(t) + 1 for t in [*TEXTS, *TEXTS[:5]]):,}",
        "longer than 32",
        "packing 'fit'",
        "packing 'stream'",
        "'b'",
    ):
        assert words in out, words
    assert "document 1, 10 tokens\ntext 1 ab" in out and "document 2" not in out and "row 1" not in out
    assert re.search(r"row 0: segments: \d, positions with weight 1: \d+, padding: \d", out)


def test_its_json_has_the_segments_that_fill_each_row(run):
    code, out, _ = run("data", "show", "a.jsonl.gz", "--seq-len", 40, "--packing", "fit", "--rows", 7, "--json")
    rows = json.loads(out)["rows"]
    assert code == 0 and len(rows) == 7
    for row in rows:
        spans = [(s["from"], s["to"]) for s in row["segments"]]
        assert sum(to - start + 1 for start, to in spans) + row["padding"] == 40
        assert row["learned"] == sum(s["learned"] for s in row["segments"])
        assert all("text" in s["text"] or "ab" in s["text"] for s in row["segments"])


def test_statistics_are_those_of_the_lengths(tmp_path):
    random = np.random.default_rng(0)
    lengths = random.integers(1, 300, 400)
    file = data.write_token_file(
        tmp_path / "t", [(f"{i}", np.full(n, 65)) for i, n in enumerate(lengths)], tokenizer=BYTES
    )
    s, lengths = statistics(file, 100), lengths + 1
    assert (s.documents, s.tokens) == (400, lengths.sum()) and s.bytes is None and s.duplicates is None
    assert s.quantiles[0.5] == np.sort(lengths)[199] and s.quantiles[1.0] == lengths.max()
    assert all(count == np.count_nonzero((lengths >= low) & (lengths < high)) for low, high, count in s.histogram)
    assert sum(count for *_, count in s.histogram) == 400
    assert s.longer == (lengths > 100).mean() and s.longer_tokens == lengths[lengths > 100].sum() / lengths.sum()
    assert s.frequent == [(65, (lengths - 1).sum() / lengths.sum()), (0, 400 / lengths.sum())]
    for name, rows in s.packings.items():
        source = data.token_file(str(tmp_path / "t"), heldout=0).source(seq_len=100, split="train", packing=name)
        batch = source.rows(np.arange(len(source)))
        assert rows.rows == len(source) and rows.padding == pytest.approx((batch["segment_ids"] == 0).mean())
        assert rows.dropped == lengths.sum() - np.count_nonzero(batch["segment_ids"])
    with pytest.raises(DataError, match="seq_len=0"):
        statistics(file, 0)


GIN = """
train.data = @mixture()
mixture.parts = ((@jsonl_files(), 3), (@text_files(), 1))
jsonl_files.glob = "*.jsonl.gz"
text_files.glob = "*.txt"
train.seq_len = 16
train.tokenizer = @ByteTokenizer()
"""


def test_of_a_mixture_it_shows_each_part_with_its_share(run, tmp_path):
    (tmp_path / "mix.gin").write_text(GIN)
    code, out, _ = run("data", "mix.gin", "--gin.text_files.heldout=0", "--gin.train.seq_len=8")
    assert code == 0 and "jsonl_files: 75.0% of rows" in out and "text_files: 25.0% of rows" in out
    assert "rows of 8 tokens" in out
    changed = "--gin.mixture.schedule=((10, (1, 1)), (2000, (0, 1)))"
    code, out, _ = run("data", "mix.gin", "--gin.text_files.heldout=0", "--gin.train.seq_len=8", changed)
    assert code == 0 and "jsonl_files: 75.0% of rows, from step 10 50.0%, from step 2,000 0.0%" in out
    assert "text_files: 25.0% of rows, from step 10 50.0%, from step 2,000 100.0%" in out


def test_preparing_a_config_fills_the_cache_that_a_run_reads(run, tmp_path, monkeypatch):
    (tmp_path / "mix.gin").write_text(GIN)
    code, out, _ = run("data", "prepare", "mix.gin")
    assert code == 0 and "55 documents" in out and "2 documents" in out
    monkeypatch.setattr(data.jsonl_files, "encode", lambda *_: pytest.fail("it is tokenized again"))
    assert run("data", "mix.gin", "--rows", 0, "--seq-len", 4)[0] == 0


def test_a_prepared_folder_is_trained_on_as_the_command_advises(run, tmp_path):
    data.train_bpe(TEXTS, 260, tmp_path / "t.json")
    code, out, err = run(
        "data",
        "prepare",
        "a.jsonl.gz",
        "--tokenizer",
        "t.json",
        "--out",
        "out",
        "--processes",
        1,
        "--duplicates",
        "drop",
    )
    assert code == 0 and "out: 50 documents" in out and "5 duplicates were dropped" in out
    bindings = shlex.split(err.strip().removeprefix("train on it with "))
    (tmp_path / "small.gin").write_text("train.seq_len = 16\n")
    code, out, _ = run("data", "small.gin", *bindings)
    assert code == 0 and "document 2, " in out and "text 2 abab" in out and "0 dropped" not in out
    assert "5 dropped" in out


def test_a_token_file_is_shown_as_ids_unless_its_tokenizer_is_known(run, tmp_path):
    data.write_token_file(tmp_path / "bytes", [("a", np.array([104, 105])), ("b", np.array([106]))], tokenizer=BYTES)
    assert "document 0, 3 tokens\nhi\\x00\n" in run("data", "bytes", "--seq-len", 1)[1]
    tokenizer = data.train_bpe(TEXTS, 260, tmp_path / "t.json")
    data.write_token_file(tmp_path / "ids", [("a", np.array([70, 71])), ("b", np.array([7]))], tokenizer=tokenizer)
    assert "document 0, 3 tokens\n70 71 0" in run("data", "ids", "--seq-len", 1)[1]
    text = tokenizer.decode(np.array([70, 71]))
    assert f"document 0, 3 tokens\n{text}<" in run("data", "ids", "--seq-len", 1, "--tokenizer", "t.json")[1]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["none.jsonl"], "no file matches 'none.jsonl'"),
        (["a.jsonl.gz", "--field", "bodi"], r"line 1: it has no field 'bodi'; did you mean 'body'\?"),
        (["a.txt", "--field", "x"], "--field x has no effect on text files"),
        (["a.txt", "--duplicates", "none"], "text_files.duplicates = 'none' does not exist"),
        (["a.txt", "--processes", "0"], "text_files.processes = 0: use 1 or more"),
        (["a.txt", "--rows", "-1"], "--rows -1: use 0 or more"),
        (["a.txt", "--packing", "fti"], "packing 'fti' does not exist; did you mean 'fit'"),
        (["a.txt", "--gin.x=1"], "leave out --gin.x"),
        (["a.txt", "--tokenizer", "none.json"], "cannot read the tokenizer none.json"),
        (["cache"], r"cache is a folder; name its files by a glob in quotes, such as 'cache/\*\*/\*.jsonl'"),
        (["prepare", "a.txt", "--out", "a.txt"], "a.txt already exists; remove it or write to another folder"),
        (["prepare", "a.txt", "--out", "b.txt/out"], r"cannot write b.txt/out \(.*\); name another folder"),
        (["prepare", "bytes", "--out", "new"], "consists of token ids already; there is nothing to prepare"),
        (["bytes", "--duplicates", "drop"], "--duplicates has no effect on the corpus 'bytes'; leave it out"),
        (["prepare"], "the following arguments are required: WHAT"),
        (["a.txt", "--tokeniser", "x"], r"did you mean '--tokenizer'\?"),
    ],
)
def test_a_mistake_is_one_sentence(run, tmp_path, argv, words):
    (tmp_path / "cache").mkdir()
    data.write_token_file(tmp_path / "bytes", [("a", np.array([104])), ("b", np.array([106]))], tokenizer=BYTES)
    code, out, err = run("data", *argv)
    assert code == 2 and not out
    assert re.fullmatch(r"jaxscale: [^\n]+\n", err) and re.search(words, err), err


@pytest.mark.parametrize("word, action", [("shw", "show"), ("prepar", "prepare")])
def test_a_misspelt_action_names_the_nearest(word, action, capsys):
    assert main(["data", word, "a.txt"]) == 2
    assert f"no action '{word}'; did you mean '{action}'?" in capsys.readouterr().err


def test_a_pattern_of_plain_and_compressed_files_is_one_of_json_lines(tmp_path, capsys):
    (tmp_path / "texts").mkdir()
    line = json.dumps({"text": "x" * 2000}).encode() + b"\n"
    (tmp_path / "texts" / "a.jsonl").write_bytes(line)
    (tmp_path / "texts" / "b.jsonl.gz").write_bytes(gzip.compress(line))
    for pattern in ("*.jsonl*", "*.*"):
        assert main(["data", "show", f"{tmp_path}/texts/{pattern}", "--json"]) == 0
        (corpus,) = json.loads(capsys.readouterr().out)["corpora"]
        assert [document["tokens"] for document in corpus["documents"]] == [2001, 2001]
    (tmp_path / "texts" / "c.md").write_text("text")
    assert main(["data", "show", f"{tmp_path}/texts/*.*"]) == 2
    assert "matches files that end in .jsonl, .md; name one kind, as in '*.jsonl'" in capsys.readouterr().err
