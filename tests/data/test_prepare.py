"""Preparing by several processes, interrupted or not: always the same bytes, and duplicates are dropped on request."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from jaxscale import data
from jaxscale.data import documents, lines, preparation, text, workers
from jaxscale.data.duplicates import SeenTexts
from jaxscale.data.journal import NAME
from jaxscale.data.progress import Meter
from jaxscale.errors import DataError
from tests.truth.long import short

BYTES = data.ByteTokenizer()
TEXTS = [f"text {i * 37 % 50}: " + chr(97 + i % 26) * (i % 40) for i in range(120)]


def content(folder):
    """The files of a token file; a kill right after its folder is renamed leaves an empty `lock` in it, too."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    for module in (documents, lines, text):
        monkeypatch.setattr(module, "PIECE", 300)
    monkeypatch.setattr(lines, "_READ", 64)
    monkeypatch.setattr(preparation, "SMALL", 500)


@pytest.fixture
def corpus(tmp_path):
    """120 documents in 12 pieces or more, in two files."""
    for name, some in (("a", TEXTS[:70]), ("b", TEXTS[70:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in some))
    corpus = data.jsonl_files(f"{tmp_path}/*.jsonl")
    assert len(list(corpus.pieces())) > 12
    return corpus


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return data.train_bpe(TEXTS, 280, tmp_path_factory.mktemp("t") / "t.json")


def test_any_number_of_processes_writes_the_same_bytes(corpus, tmp_path, tokenizer):
    names = [f"a.jsonl#{i}" for i in range(1, 71)] + [f"b.jsonl#{i}" for i in range(1, 51)]
    encode = tokenizer._tokenizer.encode
    plain = [(n, np.array(encode(t, add_special_tokens=False).ids)) for n, t in zip(names, TEXTS, strict=True)]
    truth = data.write_token_file(tmp_path / "truth", plain, tokenizer=tokenizer)
    results = [data.prepare(tmp_path / f"o{n}", corpus, tokenizer, processes=n).folder for n in (1, 3)]
    one, three = map(content, results)
    assert one == three and set(one) == {path.name for path in truth.folder.iterdir()}
    assert all(one[name] == data for name, data in content(truth.folder).items() if name != "meta.json")
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def killing(root, at):
    """A script that prepares by two processes and is killed when it has read a number of pieces."""
    return textwrap.dedent(f"""
        import os, signal, sys
        from jaxscale import data
        from jaxscale.data import lines, preparation
        lines.PIECE, lines._READ, preparation.SMALL = 300, 64, 500
        def killed(pieces, at):
            for n, piece in enumerate(pieces):
                if n == at:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield piece
        whole = data.jsonl_files.pieces
        for at in {at}:
            data.jsonl_files.pieces = lambda self: killed(whole(self), at)
            child = os.fork()
            if not child:
                data.prepare({str(root / "out")!r}, data.jsonl_files({str(root)!r} + "/*.jsonl"),
                             data.ByteTokenizer(), processes=2)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == signal.SIGKILL
    """)


@pytest.mark.long
def test_a_killed_preparation_goes_on_and_ends_with_the_same_bytes(corpus, tmp_path, monkeypatch):
    want = content(data.prepare(tmp_path / "whole", corpus, BYTES).folder)
    subprocess.run([sys.executable, "-c", killing(tmp_path, [9, 9, 14])], check=True)
    journal = (tmp_path / ".out.unfinished" / NAME).read_bytes()
    assert journal.count(b"\n") > 5 and not (tmp_path / "out").exists()
    (tmp_path / ".out.unfinished" / ".digests.bin.0a1b2c3d.partial").write_bytes(b"it was killed as it wrote these")
    encoded = []
    own = data.jsonl_files.encode
    monkeypatch.setattr(data.jsonl_files, "encode", lambda self, *args: encoded.append(1) or own(self, *args))
    assert content(data.prepare(tmp_path / "out", corpus, BYTES, processes=1).folder) == want
    assert len(encoded) == len(list(corpus.pieces())) - (journal.count(b"\n") - 1)  # the rest, and only that


@pytest.mark.long
def test_kills_at_any_time_change_nothing(corpus, tmp_path):
    """Half of them are of a process that tokenizes; the number of processes changes, too."""
    want = content(data.prepare(tmp_path / "whole", corpus, BYTES).folder)
    random = np.random.default_rng(0)
    script = textwrap.dedent(f"""
        import sys, time
        from jaxscale import data
        from jaxscale.data import lines, preparation
        lines.PIECE, lines._READ, preparation.SMALL = 300, 64, 500
        own = data.jsonl_files.pieces
        def slowly(self):
            for piece in own(self):
                time.sleep(0.02)
                yield piece
        data.jsonl_files.pieces = slowly
        data.prepare({str(tmp_path / "out")!r}, data.jsonl_files({str(tmp_path)!r} + "/*.jsonl"),
                     data.ByteTokenizer(), processes=int(sys.argv[1]))
    """)
    for n in range(25):
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(1 + n % 3)], stderr=subprocess.PIPE, start_new_session=True
        )
        time.sleep(float(random.uniform(0.15, 1.2)))
        children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
        victim = int(children[0]) if n % 2 and children else process.pid
        try:
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:
            pass
        error = process.communicate()[1].decode()
        assert process.returncode in (0, 1, -signal.SIGKILL)
        assert process.returncode != 1 or "was ended by SIGKILL" in error or "ended with exit code" in error, error
        if (tmp_path / "out").exists():
            assert content(tmp_path / "out") == want
            shutil.rmtree(tmp_path / "out")
    subprocess.run([sys.executable, "-c", script, "2"], check=True, capture_output=True)
    assert content(tmp_path / "out") == want


def test_a_killed_process_that_tokenizes_is_named_and_the_next_call_goes_on(corpus, tmp_path, monkeypatch):
    want = content(data.prepare(tmp_path / "whole", corpus, BYTES).folder)
    send = workers._Worker.send

    def killing_send(self, value):
        if getattr(getattr(value, "records", None), "name", "") == "b.jsonl":
            os.kill(self.process.pid, signal.SIGKILL)
        send(self, value)

    with monkeypatch.context() as patch:
        patch.setattr(workers._Worker, "send", killing_send)
        with pytest.raises(
            DataError, match=r"by SIGKILL \(is the memory full\? use fewer .*\); start again to go on from"
        ):
            data.prepare(tmp_path / "out", corpus, BYTES, processes=2)
    assert (tmp_path / ".out.unfinished" / NAME).read_bytes().count(b"\n") > 3
    assert content(data.prepare(tmp_path / "out", corpus, BYTES).folder) == want


@pytest.mark.parametrize("file", short(1, [NAME, "tokens.bin", "documents.bin", "hashes.bin"]))
def test_damage_to_what_is_unfinished_is_made_again(corpus, tmp_path, file):
    want = content(data.prepare(tmp_path / "whole", corpus, BYTES).folder)
    (tmp_path / "b.jsonl").rename(tmp_path / "b.good")
    (tmp_path / "b.jsonl").write_text('{"text": 1}\n')
    with pytest.raises(DataError, match=r"b\.jsonl, line 1"):
        data.prepare(tmp_path / "out", corpus, BYTES, processes=1)
    unfinished = tmp_path / ".out.unfinished" / file
    damaged = bytearray(unfinished.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    unfinished.write_bytes(damaged)
    (tmp_path / "b.good").rename(tmp_path / "b.jsonl")
    assert content(data.prepare(tmp_path / "out", corpus, BYTES, processes=1).folder) == want


def test_after_a_bad_line_is_mended_the_files_before_it_are_not_tokenized_again(corpus, tmp_path, monkeypatch):
    good = (tmp_path / "b.jsonl").read_text()
    (tmp_path / "b.jsonl").write_text("nonsense\n" + good)
    with pytest.raises(DataError, match=r"b\.jsonl, line 1"):
        corpus.prepared(BYTES, tmp_path / "cache")
    (tmp_path / "b.jsonl").write_text(good)
    encoded = []
    own = data.jsonl_files.encode
    monkeypatch.setattr(
        data.jsonl_files, "encode", lambda self, p, t: encoded.append(p.records.name) or own(self, p, t)
    )
    file = data.jsonl_files(corpus.glob, processes=1).prepared(BYTES, tmp_path / "cache")
    assert set(encoded) == {"b.jsonl"} and file.meta["documents"] == 120
    assert [p.name for p in (tmp_path / "cache" / "tokens").iterdir()] == [file.folder.name]


@pytest.mark.parametrize("processes", [1, 2])
def test_duplicates_are_dropped_and_counted(corpus, tmp_path, processes):
    twice = [*TEXTS, *TEXTS[:30], TEXTS[0]]
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "all.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in twice))
    dropping = data.jsonl_files(f"{tmp_path}/c/*.jsonl", duplicates="drop")
    file = data.prepare(tmp_path / "out", dropping, BYTES, processes=processes)
    texts = [BYTES.decode(file.tokens[a:b]) for a, b in zip(file.offsets[:-1], file.offsets[1:] - 1, strict=True)]
    assert texts == list(dict.fromkeys(twice))
    assert file.meta["text"]["duplicates"] == len(twice) - len(set(twice))
    assert not (file.folder / "texts.bin").exists()


def test_the_set_of_seen_texts_is_a_set():
    random, seen, want = np.random.default_rng(0), SeenTexts(), set()
    for _ in range(60):
        digests = random.integers(0, 3, (int(random.integers(0, 40)), 16)).astype(np.uint8)
        digests[:, 3:13] = 0  # so that there are equal ones, and zeros at the end
        new = seen.add(digests)
        for digest, is_new in zip(map(bytes, digests), new, strict=True):
            assert is_new == (digest not in want)
            want.add(digest)
    assert len(seen) == len(want) and len(seen._runs) <= 10


class Own(data.ByteTokenizer):
    """A tokenizer that cannot be pickled."""

    def __reduce__(self):
        raise TypeError("it has a socket")


@pytest.mark.long
def test_one_process_tokenizes_for_a_tokenizer_that_cannot_be_sent(corpus, tmp_path, caplog):
    want = content(data.prepare(tmp_path / "whole", corpus, BYTES).folder)
    assert content(data.prepare(tmp_path / "out", corpus, Own(), processes=2).folder) == want
    (message,) = [record.message for record in caplog.records]
    assert "one process tokenizes 'jsonl_files'" in message and "it has a socket" in message and "\n" not in message


def test_a_small_corpus_starts_no_process(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "SMALL", 10**6)
    monkeypatch.setattr(preparation, "Workers", lambda *_: pytest.fail("it has started processes"))
    data.prepare(tmp_path / "out", corpus, BYTES, processes=2)


def test_of_two_preparations_at_once_one_waits_for_the_other(corpus, tmp_path, caplog, monkeypatch):
    script = f"""
import time
from jaxscale import data
own = data.jsonl_files.encode
def slow(self, *args):
    open({str(tmp_path / "started")!r}, "w"); time.sleep(0.5)
    return own(self, *args)
data.jsonl_files.encode = slow
data.prepare({str(tmp_path / "out")!r}, data.jsonl_files({corpus.glob!r}), data.ByteTokenizer())
"""
    process = subprocess.Popen([sys.executable, "-c", script])
    while not (tmp_path / "started").exists():
        time.sleep(0.01)
    monkeypatch.setattr(data.jsonl_files, "encode", lambda *_: pytest.fail("it has tokenized again"))
    assert data.prepare(tmp_path / "out", corpus, BYTES).meta["documents"] == 120
    assert process.wait() == 0 and "waiting for another process" in caplog.text


def test_a_pickled_tokenizer_has_the_file_and_encodes_the_same(tokenizer, tmp_path):
    copy = data.HFTokenizer(str(shutil.copy(tokenizer.path, tmp_path / "t.json")))
    text = "text <|endoftext|> 1"
    ids = copy.encode(text)
    pickled = pickle.dumps(copy)
    (tmp_path / "t.json").unlink()
    again = pickle.loads(pickled)
    assert np.array_equal(again.encode(text), ids) and np.array_equal(again.encode_batch([text, "b"])[0], ids)
    assert again.eos_id not in ids and again.fingerprint == copy.fingerprint


def test_progress_in_a_log_file_has_bytes_documents_and_tokens(capsys, monkeypatch):
    clock = iter([0.0, 40.0, 41.0])
    monkeypatch.setattr("jaxscale.data.progress.time.monotonic", lambda: next(clock))
    with Meter(2**20 * 100, "tokenizing") as meter:
        meter.advance(2**20 * 20, 4_000, 5_000_000)
    line = capsys.readouterr().err.splitlines()[0]
    assert line == "tokenizing: 20 MiB of 100 MiB, 512 KiB/s, 100 documents/s, 5,000,000 tokens, 2:40 left"
