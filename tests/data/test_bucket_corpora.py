"""Corpora in buckets, on servers of S3's and Google Cloud Storage's protocols: the same batches as from a disk."""

from __future__ import annotations

import contextlib
import gzip
import json
import pickle
import re
import subprocess
import tracemalloc

import jax
import numpy as np
import pytest

from jaxscale import buckets, data
from jaxscale.bucket_files import file_at, matching_objects
from jaxscale.buckets import Bucket
from jaxscale.cli import main
from jaxscale.data import uploading
from jaxscale.errors import LOST, MISTAKE, DataError
from tests.data.test_token_arrays import EOS, IDS, ended, flat, megatron, shard, texts
from tests.truth.servers import failing, object_stores

pytest.importorskip("moto", reason="needs moto[server] and gcp-storage-emulator")


@pytest.fixture(scope="module")
def stores():
    with object_stores() as variables:
        yield variables


@pytest.fixture(autouse=True)
def reached(stores, monkeypatch):
    for name, value in stores.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(params=["s3", pytest.param("gs", marks=pytest.mark.long)])
def url(request, tmp_path):
    return f"{request.param}://runs/{tmp_path.name}"


def upload(folder, url):
    for path in folder.rglob("*"):
        if path.is_file():
            Bucket(url).write(path.relative_to(folder).as_posix(), path.read_bytes())


def files_in(folder):
    """Files of every kind that a corpus reads; returns the corpora of a folder or URL."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (folder / "deep" / "er").mkdir(parents=True)
    documents = [{"text": f"document {i} " * (i % 7 + 1)} for i in range(60)]
    lines = [json.dumps(d).encode() + b"\n" for d in documents]
    (folder / "deep" / "a.jsonl").write_bytes(b"".join(lines[:30]))
    (folder / "deep" / "er" / "b.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[30:])))
    for i, document in enumerate(documents[:20]):
        (folder / "deep" / "er" / f"{i}.txt").write_text(document["text"])
    (folder / "deep" / ".hidden.txt").write_text("not read")
    table = arrow.table({"text": [d["text"] for d in documents], "other": list(range(60))})
    parquet.write_table(table, folder / "deep" / "a.parquet", row_group_size=25)
    turns = [{"prompt": f"{i}", "completion": f"{i + 1}"} for i in range(40)]
    (folder / "deep" / "chat.json").write_text("".join(json.dumps(t) + "\n" for t in turns))
    np.array(flat(ended(texts())), "<u2").tofile(folder / "deep" / "nano.bin")
    for i in range(3):
        shard(folder / "deep" / f"llm_{i}.bin", flat(ended(texts(i))))
    megatron(folder / "deep" / "web_document", [[ids] for ids in ended(texts())])
    return lambda root: {
        "text": data.text_files(f"{root}/**/*.txt"),
        "jsonl": data.jsonl_files(f"{root}/**/*.jsonl*"),
        "parquet": data.parquet_files(f"{root}/*/a.parquet"),
        "chat": data.chat_files(f"{root}/deep/chat.json"),
        "nanogpt": data.bin_tokens(f"{root}/deep/nano.bin", **IDS),
        "llm.c": data.bin_tokens(f"{root}/deep/llm_*.bin", heldout=f"{root}/deep/llm_0.bin", **IDS),
        "megatron": data.megatron_tokens(f"{root}/deep/web_document", **IDS),
    }


def test_batches_are_those_of_the_same_files_on_a_disk(tmp_path, url):
    corpora = files_in(tmp_path / "files")
    upload(tmp_path / "files", url)
    on_disk, in_bucket = corpora(tmp_path / "files"), corpora(url)
    tokenizer = data.ByteTokenizer()
    for kind in on_disk:
        some = {"tokenizer": tokenizer, "seq_len": 16, "split": "train"}
        ours, theirs = (
            in_bucket[kind].source(**some, cache=tmp_path / "a"),
            on_disk[kind].source(**some, cache=tmp_path / "b"),
        )
        assert ours.fingerprint == theirs.fingerprint, kind
        assert len(ours) == len(theirs) > 4, kind
        loaders = [data.Loader(source, batch_size=4, seed=1) for source in (ours, theirs)]
        for step in (0, 3):
            jax.tree.map(np.testing.assert_array_equal, *(loader.batch_at(step) for loader in loaders))
        again = pickle.loads(pickle.dumps(ours))
        np.testing.assert_array_equal(again.rows(np.arange(4))["tokens"], theirs.rows(np.arange(4))["tokens"])


def test_large_files_are_read_block_by_block_and_token_ids_chunk_by_chunk(tmp_path, monkeypatch):
    url, random = f"s3://runs/{tmp_path.name}", np.random.default_rng(0)
    ids = random.integers(0, EOS, 2**21).astype("<u2")  # 4 MiB
    ids[::1000] = EOS
    lines = (json.dumps({"text": "0123456789" * 1000}) + "\n").encode() * 1600  # 16 MB
    Bucket(url).write("ids.bin", ids.tobytes())
    Bucket(url).write("lines.jsonl", lines)
    tracemalloc.start()
    pieces = [piece.text for piece in data.jsonl_files(f"{url}/lines.jsonl").pieces()]
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(pieces) == len(lines) and len(pieces) > 2
    assert most < 20 * 2**20  # a block, the rest of the block before, and their sum

    corpus = data.bin_tokens(f"{url}/ids.bin", **IDS)
    source = corpus.source(seq_len=64, split="train")
    read, spans = Bucket.read, []
    monkeypatch.setattr(Bucket, "read", lambda *a, **k: (spans.append(a[2:]), read(*a, **k))[1])
    for _ in range(2):
        data.Loader(source, batch_size=4, seed=1).batch_at(3)
    assert 1 <= len(spans) == len(set(spans)) <= 8  # each chunk once
    assert all(stop - start == 2**16 for start, stop in spans)
    Bucket(url).write("ids.bin", ids[::-1].tobytes())
    with pytest.raises(DataError, match="ids.bin has changed while it was read; start again"):
        source.rows(np.arange(len(source)))
    corpus.source(seq_len=64, split="train").rows(np.arange(100))


def test_a_tokenizer_is_read_from_a_bucket(tmp_path):
    pytest.importorskip("tokenizers")
    tokenizer = data.train_bpe(["a few words", "a few more"], 270, tmp_path / "tokenizer.json")
    url = f"s3://runs/{tmp_path.name}"
    with pytest.raises(DataError, match=f"cannot read the tokenizer {url}/tokenizer.json"):
        _ = data.HFTokenizer(url).fingerprint
    Bucket(url).write("tokenizer.json", (tmp_path / "tokenizer.json").read_bytes())
    for path in (url, f"{url}/tokenizer.json"):
        assert data.HFTokenizer(path).fingerprint == tokenizer.fingerprint


def test_what_cannot_be_read_is_one_sentence(tmp_path, stores, monkeypatch):
    url, tokenizer = f"s3://runs/{tmp_path.name}", data.ByteTokenizer()
    Bucket(url).write("a/b.jsonl", b'{"text": "x"}\n' * 20)
    Bucket(url).write("empty.bin", b"")
    Bucket(url).write("cut.gz", gzip.compress(b'{"text": "x"}\n' * 2000)[:-20])
    Bucket(url).write("web.idx", b"x")

    def error(corpus):
        with pytest.raises(DataError) as e:
            corpus.source(tokenizer, seq_len=4, split="train", cache=tmp_path)
        assert "\n" not in str(e.value)
        return str(e.value), e.value.code

    advised = f"{url}/**/*.jsonl"
    assert advised in error(data.jsonl_files(f"{url}/*.jsonl"))[0]
    data.jsonl_files(advised).source(tokenizer, seq_len=4, split="train", cache=tmp_path)
    assert "there is no file in s3://runs/nothing" in error(data.jsonl_files("s3://runs/nothing/*.jsonl"))[0]
    assert "its files end in" in error(data.text_files(f"{url}/none.txt"))[0]
    assert error(data.text_files("s3://elsewhere/*"))[0].endswith("there is no bucket s3://elsewhere; create it first")
    assert "without a wildcard" in error(data.text_files("s3://*/a"))[0]
    assert "empty.bin is empty" in error(data.bin_tokens(f"{url}/empty.bin", **IDS))[0]
    assert "is damaged or truncated after line" in error(data.jsonl_files(f"{url}/cut.gz"))[0]
    assert f"{url}/a/b.jsonl is not a Parquet file" in error(data.parquet_files(f"{url}/**/*.jsonl"))[0]
    assert "web.idx is not an index of Megatron-LM" in error(data.megatron_tokens(f"{url}/web", **IDS))[0]
    with failing(stores["AWS_ENDPOINT_URL"], lambda method, path: 403) as proxy, monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", proxy)
        message, code = error(data.jsonl_files(f"{url}/a/*.jsonl"))
        assert "access is denied" in message and code == MISTAKE
    monkeypatch.setattr(buckets, "RETRIES", {"max_retries": 1, "initial_delay": "5ms", "max_delay": "5ms"})

    def down(method, path):
        return 503 if "a/b.jsonl" in path and method == "GET" else None

    with failing(stores["AWS_ENDPOINT_URL"], down) as proxy:  # after it was found
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy)
        message, code = error(data.jsonl_files(f"{url}/a/*.jsonl", field="other"))
        assert "the server does not answer" in message and code == LOST


def test_patterns_match_as_on_a_disk_and_sizes_are_known(tmp_path, monkeypatch):
    names = ["a", "x/a", "x/y/a", "x/.h/a", ".a", "x/b1", "x/b2.c"]
    url = f"s3://runs/{tmp_path.name}"
    for i, name in enumerate(names):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * (i + 1))
        Bucket(url).write(name, b"x" * (i + 1))
    Bucket(url).write("x/folder/", b"")
    for pattern in ("*", "**", "**/a", "x/*", "x/**", "x/b?", "x/b[0-9]*", "*/*/a", ".*", "x/.*/a", "**/*"):
        ours = [name for name, _ in matching_objects(f"{url}/{pattern}")[1]]
        assert ours == [name for name, _ in data.text_files(f"{tmp_path}/{pattern}").files()], pattern
    assert [file_at(f"{url}/{name}").size for name in names] == list(range(1, 8))
    monkeypatch.setattr(buckets, "_SIZE", re.compile("no such (text)"))  # a server that does not say it, as Google's
    monkeypatch.setattr(buckets, "LARGEST", 1000)
    Bucket(url).write("empty", b"")
    assert [Bucket(url).size(name) for name in ("a", "x/b1", "empty")] == [1, 6, 0]


def test_a_token_file_is_prepared_into_a_bucket_and_shown(tmp_path, monkeypatch, capsys):
    url = f"s3://runs/{tmp_path.name}"
    for i in range(3):
        lines = "".join(json.dumps({"text": f"{i}-{j} " * 300}) + "\n" for j in range(50))
        Bucket(url).write(f"web/{i}.jsonl", lines.encode())
    monkeypatch.setenv("JAXSCALE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(uploading, "PART", 2**16)
    tokenizer, corpus = data.ByteTokenizer(), data.jsonl_files(f"{url}/web/*.jsonl")
    write, kills = Bucket.write, []

    def killed(self, key, *args, **options):
        if key == "meta.json" and not kills:
            kills.append(key)
            raise KeyboardInterrupt
        return write(self, key, *args, **options)

    monkeypatch.setattr(Bucket, "write", killed)
    command = ["data", "prepare", f"{url}/web/*.jsonl", "--out", f"{url}/tokens"]
    with contextlib.suppress(KeyboardInterrupt):
        main(command)
    with pytest.raises(DataError, match="is not a complete token file"):
        data.TokenFile(f"{url}/tokens")
    assert main(command) == 0
    assert f"{url}/tokens: 150 documents" in capsys.readouterr().out
    assert main(command) == MISTAKE
    assert "already exists" in capsys.readouterr().err
    assert len(Bucket(url).list("tokens/tokens.bin.")) > 2
    ours, theirs = data.token_file(f"{url}/tokens"), data.prepare(tmp_path / "tokens", corpus, tokenizer)
    split = {"tokenizer": tokenizer, "seq_len": 64, "split": "train"}
    theirs = data.token_file(str(theirs.folder)).source(**split)
    rows = np.arange(len(theirs))
    np.testing.assert_array_equal(ours.source(**split).rows(rows)["tokens"], theirs.rows(rows)["tokens"])
    assert main(["data", f"{url}/tokens", "--rows", "1", "--documents", "1"]) == 0
    assert f"({url}/tokens)" in (out := capsys.readouterr().out) and "0-0 0-0" in out
    assert main(["data", f"{url}/web/*.jsonl", "--documents", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["corpora"][0]["corpus"] == "jsonl_files"

    copy = tmp_path / "copy"
    copy.mkdir()
    for key in Bucket(f"{url}/tokens").list():
        (copy / key).write_bytes(Bucket(f"{url}/tokens").read(key))
    while True:  # follow the advice for each file
        try:
            data.TokenFile(copy).verify()
            break
        except DataError as e:
            subprocess.run(str(e).partition("join them: ")[2], shell=True, check=True)
    written = data.write_token_file(f"{url}/own", [("a", np.arange(9)), ("b", np.arange(5))], tokenizer=tokenizer)
    assert written.meta["corpus"] == "own" and len(written.documents("train", 0.0).lengths) == 2
    with pytest.raises(DataError, match="already exists"):
        data.write_token_file(f"{url}/own", [("a", np.arange(9))], tokenizer=tokenizer)
