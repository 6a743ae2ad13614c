"""Damaged token files: damaged data is never used, a cache is written again, and other files raise an error."""

from __future__ import annotations

import json
import logging
import pickle
import random
import shutil

import numpy as np
import pytest

from jaxscale import data
from jaxscale.data.cache import cached
from jaxscale.data.checked import CHUNK
from jaxscale.data.storage import FILES
from jaxscale.errors import DataError
from jaxscale.seals import open_json, seal_json

BYTES = data.ByteTokenizer()
LONG = [(f"d{i}", np.arange(20_000) % 250 + 1 + i) for i in range(5)]  # 200 kB: four chunks
SOME = [(f"d{i}", np.full(10 + i, i + 1)) for i in range(9)]


def flip(path, bit):
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def rows(file):
    """Return everything in a token file that training reads."""
    source = data.token_file(str(file)).source(BYTES, seq_len=16, split="train", packing="fit")
    return source.rows(np.arange(len(source)))


def same(a, b):
    return all(np.array_equal(a[key], b[key]) for key in a)


def old(folder):
    """Change a folder to the format of an earlier version."""
    meta, _ = open_json((folder / "meta.json").read_bytes())
    meta.pop("digest"), meta.pop("digests")
    (folder / "meta.json").write_text(json.dumps(meta, indent=2))
    (folder / "digests.bin").unlink()
    return folder


def test_every_flipped_bit_is_refused_or_changes_nothing(tmp_path):
    folder = data.write_token_file(tmp_path / "t", SOME, tokenizer=BYTES).folder
    want, random_bits, silent = rows(folder), random.Random(0), []
    for file in (*FILES[:3], "digests.bin", "meta.json"):
        size = 8 * (folder / file).stat().st_size
        for bit in random_bits.sample(range(size), min(size, 30)):
            flip(folder / file, bit)
            try:
                if not same(rows(folder), want):
                    silent.append((file, bit))
            except DataError as error:
                assert file in str(error) and "prepare it again" in str(error) and "\n" not in str(error)
            flip(folder / file, bit)
    assert not silent and same(rows(folder), want)


def test_damage_is_seen_when_its_chunk_is_read_and_not_before(tmp_path):
    folder = data.write_token_file(tmp_path / "t", LONG, tokenizer=BYTES).folder
    flip(folder / "tokens.bin", 8 * (2 * CHUNK + 5))
    source = data.token_file(str(folder), heldout=0).source(BYTES, seq_len=100, split="train")
    source.rows(np.arange(10))
    for reader in (source, pickle.loads(pickle.dumps(source))):
        with pytest.raises(DataError, match=rf"tokens.bin, chunk 2 \(bytes {2 * CHUNK} to {3 * CHUNK}\).*prepare it"):
            reader.rows(np.arange(len(source)))
    assert source.documents.tokens[np.array([-1])] == 0  # the last chunk is whole


@pytest.mark.parametrize("file", ["tokens.bin", "documents.bin", "hashes.bin", "digests.bin", "meta.json"])
def test_a_damaged_cache_is_written_again_with_a_warning(tmp_path, caplog, file):
    made = []

    def documents():
        made.append(1)
        return SOME

    read = lambda: data.packing.pack(cached("c", "k", documents, BYTES, tmp_path).documents("train", 0), "fit", 16)  # noqa: E731
    source = read()
    want = source.rows(np.arange(len(source)))
    flip(tmp_path / "tokens" / "c-k" / file, 77)
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        source = read()
        assert same(source.rows(np.arange(len(source))), want)
    (message,) = [record.message for record in caplog.records]
    assert message.startswith("the token cache ") and file in message and "\n" not in message
    assert len(made) == 2 and [p.name for p in (tmp_path / "tokens").iterdir()] == ["c-k"]


def test_a_run_goes_on_when_its_cache_is_damaged_under_way(tmp_path):
    read = lambda: cached("c", "k", lambda: LONG, BYTES, tmp_path).documents("train", 0)  # noqa: E731
    first, second = (data.packing.pack(read(), "stream", 100) for _ in range(2))
    want = data.packing.pack(data.write_token_file(tmp_path / "w", LONG, tokenizer=BYTES).documents("train", 0),
                             "stream", 100).rows(np.arange(len(first)))  # fmt: skip
    first.rows(np.arange(10))
    flip(tmp_path / "tokens/c-k/tokens.bin", 8 * 2 * CHUNK)
    for reader in (first, second):  # the second finds what the first has prepared
        assert same(reader.rows(np.arange(len(first))), want)


def test_a_cache_whose_text_has_changed_does_not_become_other_data_under_way(tmp_path):
    texts = [LONG, [*LONG, ("more", np.arange(1, 9))]]
    source = data.packing.pack(cached("c", "k", lambda: texts.pop(0), BYTES, tmp_path).documents("train", 0), "fit", 9)
    flip(tmp_path / "tokens/c-k/tokens.bin", 3)
    with pytest.raises(DataError, match="chunk 0.*text files have changed.*start the run again"):
        source.rows(np.arange(len(source)))


def test_a_cache_that_says_another_eos_than_its_tokenizer_is_prepared_again(tmp_path):
    folder = cached("c", "k", lambda: SOME, BYTES, tmp_path).folder
    meta, _ = open_json((old(folder) / "meta.json").read_bytes())
    meta["tokenizer"]["eos_id"] = 2
    (folder / "meta.json").write_text(json.dumps(meta))
    assert cached("c", "k", lambda: SOME, BYTES, tmp_path).eos_id == 0


def test_an_earlier_versions_folder_is_read_once_and_has_digests_from_then_on(tmp_path, caplog):
    folder = data.write_token_file(tmp_path / "t", SOME, tokenizer=BYTES).folder
    want = rows(folder)
    assert same(rows(old(folder)), want) and same(rows(folder), want)
    assert [record.message.split(" has no digests")[0] for record in caplog.records] == [str(folder)]
    flip(folder / "tokens.bin", 3)
    with pytest.raises(DataError, match="chunk 0"):
        rows(folder)


@pytest.mark.parametrize("file", ["tokens.bin", "documents.bin", "hashes.bin"])
def test_an_earlier_versions_damaged_folder_is_refused(tmp_path, file):
    folder = old(data.write_token_file(tmp_path / "t", SOME, tokenizer=BYTES).folder)
    flip(folder / file, 3)
    with pytest.raises(DataError, match="is not what was written; restore it from a copy, or remove"):
        data.TokenFile(folder)
    assert cached("x", "y", lambda: SOME, BYTES, tmp_path).tokens.size  # the cache beside it does not mind


def test_an_id_outside_of_the_vocabulary_is_named(tmp_path):
    class Small(data.ByteTokenizer):
        vocab_size = 200

    folder = data.write_token_file(tmp_path / "t", [("a", np.array([7, 255, 3]))], tokenizer=BYTES).folder
    meta, _ = open_json((folder / "meta.json").read_bytes())
    meta["tokenizer"]["vocab_size"] = 200
    (folder / "meta.json").write_text(seal_json(meta))
    source = data.token_file(str(folder), heldout=0).source(Small(), seq_len=2, split="train")
    with pytest.raises(DataError, match="tokens.bin, chunk 0, has id 255 at token 1.*ends at 199"):
        source.rows(np.arange(len(source)))


@pytest.mark.parametrize("field", ["dtype", "tokens", "documents", "tokenizer", "fingerprint", "corpus"])
@pytest.mark.parametrize("value", [None, -1, [], "<u8"])
def test_a_meta_json_of_nonsense_is_refused_in_a_sentence(tmp_path, field, value):
    folder = data.write_token_file(tmp_path / "t", SOME, tokenizer=BYTES).folder
    meta, _ = open_json((folder / "meta.json").read_bytes())
    if field in ("corpus", "fingerprint") and value == "<u8":
        pytest.skip("as good a name as any")
    (folder / "meta.json").write_text(json.dumps({**meta, field: value}))
    with pytest.raises(DataError, match="prepare it again") as caught:
        data.TokenFile(folder)
    assert "\n" not in str(caught.value)


def test_the_advice_for_a_damaged_folder_can_be_followed(tmp_path):
    folder = data.write_token_file(tmp_path / "t", SOME, tokenizer=BYTES).folder
    want, copy = rows(folder), shutil.copytree(folder, tmp_path / "copy")
    for mend in (lambda: shutil.copytree(copy, folder), lambda: data.write_token_file(folder, SOME, tokenizer=BYTES)):
        flip(folder / "tokens.bin", 9)
        with pytest.raises(DataError, match=f"restore it from a copy, or remove {folder} and prepare it again"):
            rows(folder)
        shutil.rmtree(folder)
        mend()
        assert same(rows(folder), want)
