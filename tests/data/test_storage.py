"""Token files: what is written is read, and incomplete or damaged files raise errors."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from jaxscale import data
from jaxscale.data.cache import cached
from jaxscale.errors import DataError
from jaxscale.seals import open_json, seal_json

BYTES = data.ByteTokenizer()
DOCUMENTS = [(f"d{i}", np.full(10 + i, i + 1)) for i in range(9)]


class Wide(data.ByteTokenizer):
    vocab_size = 100_000


def test_documents_are_read_back_with_their_eos(tmp_path):
    file = data.write_token_file(tmp_path / "t", [*DOCUMENTS, ("empty", np.array([], np.int32))], tokenizer=BYTES)
    assert len(file.hashes) == 9 and file.eos_id == 0 and file.tokens.dtype == np.uint16
    for (_, ids), start, end in zip(DOCUMENTS, file.offsets[:-1], file.offsets[1:], strict=True):
        assert file.tokens[start:end].tolist() == [*ids.tolist(), 0]
    file.verify()
    again = pickle.loads(pickle.dumps(file))
    assert again.fingerprint == file.fingerprint


def test_the_rows_of_a_token_file_open_with_the_eos_of_its_tokenizer(tmp_path):
    class Last(data.ByteTokenizer):
        eos_id, fingerprint = 255, "ee"

    data.write_token_file(tmp_path / "t", DOCUMENTS, tokenizer=Last())
    for packing in data.PACKINGS:
        source = data.token_file(str(tmp_path / "t"), heldout=0).source(seq_len=9, split="train", packing=packing)
        batch = pickle.loads(pickle.dumps(source)).rows(np.arange(len(source)))
        assert np.count_nonzero(batch["tokens"] == 255) == np.count_nonzero(batch["targets"] == 255) == 9


def test_a_large_vocabulary_is_stored_in_32_bits(tmp_path):
    file = data.write_token_file(tmp_path / "t", [("a", np.array([99_999, 5]))], tokenizer=Wide())
    assert file.tokens.dtype == np.uint32 and file.tokens.tolist() == [99_999, 5, 0]


def test_a_failure_while_writing_leaves_nothing_behind(tmp_path):
    def broken():
        yield from DOCUMENTS
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        data.write_token_file(tmp_path / "t", broken(), tokenizer=BYTES)
    assert list(tmp_path.iterdir()) == []


def test_a_killed_preparation_is_not_mistaken_for_a_finished_one_and_needs_no_cleaning(tmp_path):
    code = f"""
import os, signal, numpy as np
from jaxscale import data
def killed():
    yield "a", np.arange(1, 50_000) % 255 + 1
    os.kill(os.getpid(), signal.SIGKILL)
data.write_token_file({str(tmp_path / "t-k")!r}, killed(), tokenizer=data.ByteTokenizer())
"""
    done = subprocess.run([sys.executable, "-c", code])
    (left,) = tmp_path.iterdir()
    assert done.returncode == -signal.SIGKILL and left.suffix == ".partial"
    with pytest.raises(DataError, match="not a complete token file"):
        data.TokenFile(tmp_path / "t-k")
    for entry in (*left.iterdir(), left):
        os.utime(entry, (time.time() - 7200,) * 2)
    data.write_token_file(tmp_path / "t-k", DOCUMENTS, tokenizer=BYTES).verify()
    assert [p.name for p in tmp_path.iterdir()] == ["t-k"]


def test_of_two_preparations_at_once_the_second_to_finish_takes_the_firsts(tmp_path):
    def slow():
        yield from DOCUMENTS
        data.write_token_file(tmp_path / "t", DOCUMENTS, tokenizer=BYTES)  # someone else, meanwhile

    data.write_token_file(tmp_path / "t", slow(), tokenizer=BYTES).verify()
    assert [p.name for p in tmp_path.iterdir()] == ["t"]


def test_the_cache_prepares_once(tmp_path):
    calls = []

    def documents():
        calls.append(1)
        return DOCUMENTS

    files = [cached("c", "k", documents, BYTES, tmp_path) for _ in range(2)]
    assert len(calls) == 1 and files[0].fingerprint == files[1].fingerprint


@pytest.mark.parametrize("file", ["tokens.bin", "documents.bin", "hashes.bin"])
@pytest.mark.parametrize("damage", ["truncated", "removed", "longer"])
def test_a_damaged_file_is_refused_by_name(tmp_path, file, damage):
    path = data.write_token_file(tmp_path / "t", DOCUMENTS, tokenizer=BYTES).folder / file
    content = path.read_bytes()
    path.write_bytes({"truncated": content[:-1], "removed": b"", "longer": content + b"x"}[damage])
    if damage == "removed":
        path.unlink()
    with pytest.raises(DataError, match=rf"{file} is damaged"):
        data.TokenFile(tmp_path / "t")


def test_a_flipped_bit_is_found_by_verify(tmp_path):
    path = data.write_token_file(tmp_path / "t", DOCUMENTS, tokenizer=BYTES).folder / "tokens.bin"
    content = bytearray(path.read_bytes())
    content[20] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="not what was written"):
        data.TokenFile(tmp_path / "t").verify()


def test_the_fingerprint_follows_content_and_tokenizer_only(tmp_path):
    write = lambda name, docs, tok: data.write_token_file(tmp_path / name, docs, tokenizer=tok).fingerprint  # noqa: E731
    same = write("a", DOCUMENTS, BYTES)
    assert same == write("b", DOCUMENTS, BYTES)
    assert same != write("c", DOCUMENTS[:-1], BYTES)
    assert same != write("d", [("renamed", ids) for _, ids in DOCUMENTS], BYTES)


def set_format(folder):
    meta, _ = open_json((folder / "meta.json").read_bytes())
    (folder / "meta.json").write_text(seal_json({**meta, "format": 99}))
    data.TokenFile(folder)


def cut_meta(folder):
    (folder / "meta.json").write_text('{"format": 1, "dt')
    data.TokenFile(folder)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda f: data.write_token_file(f, DOCUMENTS, tokenizer=BYTES), "already exists"),
        (lambda f: data.write_token_file(f / "x", [("bad", np.array([256]))], tokenizer=BYTES), "'bad' has id 256"),
        (lambda f: data.write_token_file(f / "x", [], tokenizer=BYTES), "no document"),
        (lambda f: data.token_file(str(f)).source(Wide2(), seq_len=4, split="train"), "was written with tokenizer"),
        (set_format, "format 99"),
        (cut_meta, "cannot be read"),
    ],
)
def test_an_unusable_token_file_is_refused_in_one_sentence(tmp_path, call, words):
    folder = data.write_token_file(tmp_path / "t", DOCUMENTS, tokenizer=BYTES).folder
    with pytest.raises(DataError, match=words) as caught:
        call(folder)
    assert "\n" not in str(caught.value)


class Wide2(Wide):
    fingerprint = "ff"
