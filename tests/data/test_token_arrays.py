"""Megatron-LM's indexed datasets and the .bin files of nanoGPT and llm.c, written here from their specifications.

megatron/core/datasets/indexed_dataset.py of Megatron-LM, data/openwebtext/prepare.py of nanoGPT and
dev/data/data_common.py of llm.c.
"""

from __future__ import annotations

import os
import pickle
import struct

import numpy as np
import pytest

from jaxscale import data
from jaxscale.errors import DataError

EOS, VOCAB = 90, 100
IDS = dict(eos=EOS, vocab_size=VOCAB)
CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}


def texts(seed=0, n=30):
    random = np.random.default_rng(seed)
    return [random.integers(0, EOS, random.integers(1, 60)).tolist() for _ in range(n)]


def megatron(prefix, documents, dtype="uint16", modes=False):
    """A dataset; a document is a list of sequences."""
    sequences = [ids for document in documents for ids in document]
    lengths = [len(ids) for ids in sequences]
    size = np.dtype(dtype).itemsize
    pointers = [sum(lengths[:i]) * size for i in range(len(lengths))]
    bounds = [0, *np.cumsum([len(document) for document in documents]).tolist()]
    with open(f"{prefix}.idx", "wb") as out:
        out.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, CODES[dtype], len(sequences), len(bounds)))
        out.write(struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(lengths)}q", *pointers))
        out.write(struct.pack(f"<{len(bounds)}q", *bounds) + b"\0" * len(lengths) * modes)
    np.array([t for ids in sequences for t in ids], dtype).tofile(f"{prefix}.bin")


def shard(path, ids, magic=20240520, version=1, count=None):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ids) if count is None else count
    path.write_bytes(header.tobytes() + np.array(ids, "<u2" if magic == 20240520 else "<u4").tobytes())


def ended(documents):
    return [ids + [EOS] for ids in documents]


def flat(documents):
    return [t for ids in documents for t in ids]


def documents_in(source):
    """The targets of each document, in order."""
    d = source.documents
    return [d.tokens[s : s + n].tolist() for s, n in zip(d.starts, d.lengths, strict=True)]


def opened(corpus, split="train", **settings):
    return corpus.source(None, seq_len=8, split=split, **settings)


@pytest.mark.parametrize("dtype", CODES)
def test_every_dtype_of_megatron_is_read_and_each_document_ends_once(tmp_path, dtype):
    plain = texts()
    megatron(tmp_path / "a", [[ids] if i % 3 else [ids + [EOS]] for i, ids in enumerate(plain)], dtype)
    corpus = data.megatron_tokens(f"{tmp_path}/a", heldout=0, **IDS)
    assert documents_in(opened(corpus)) == ended(plain)
    as_is = data.megatron_tokens(f"{tmp_path}/a.idx", heldout=0, append_eos=False, **IDS)
    assert documents_in(opened(as_is)) == [ids if i % 3 else ids + [EOS] for i, ids in enumerate(plain)]


@pytest.mark.parametrize("packing", data.PACKINGS)
def test_every_id_is_a_target_once_also_when_an_eos_is_inserted(tmp_path, packing):
    plain = texts(1)
    megatron(tmp_path / "a", [[ids] for ids in plain[:15]])
    megatron(tmp_path / "b", [[ids + [EOS] * (i % 2)] for i, ids in enumerate(plain[15:])], "int32")
    source = opened(data.megatron_tokens(f"{tmp_path}/*", heldout=0, **IDS), packing=packing)
    batch = source.rows(np.arange(len(source)))
    targets, expected = batch["targets"][batch["weights"] > 0], flat(ended(plain))
    if packing == "stream":
        expected = expected[: len(expected) // 8 * 8]
        assert targets.tolist() == expected
        assert batch["tokens"].ravel().tolist() == [EOS, *expected[:-1]]
    assert sorted(targets) == sorted(expected)


def test_sequences_of_megatron_are_joined_or_stand_alone_and_empty_documents_are_left_out(tmp_path):
    megatron(tmp_path / "a", [[[1, 2], [3]], [], [[]], [[4, 5, 6]]])
    for unit, expected in {"document": [[1, 2, 3], [4, 5, 6]], "sequence": [[1, 2], [3], [4, 5, 6]]}.items():
        corpus = data.megatron_tokens(f"{tmp_path}/a", heldout=0, unit=unit, **IDS)
        assert documents_in(corpus.source(seq_len=2, split="train")) == ended(expected)


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("kind", ["nanogpt", "gpt-2", "llama-3"])
def test_bin_files_are_read_whether_documents_begin_or_end_with_an_eos(tmp_path, kind, begins):
    plain = texts(2)
    for name, part in {"a.bin": plain[:10], "b.bin": plain[10:]}.items():
        ids = flat([EOS, *ids] if begins else [*ids, EOS] for ids in part)
        if kind == "nanogpt":
            np.array(ids, np.uint16).tofile(tmp_path / name)
        else:
            shard(tmp_path / name, ids, *((20240520, 1) if kind == "gpt-2" else (20240801, 7)))
    corpus = data.bin_tokens(f"{tmp_path}/*.bin", heldout=0, **IDS)
    expected = ended(plain)
    if begins:  # the last of a file has none
        expected[9], expected[-1] = plain[9], plain[-1]
    assert documents_in(opened(corpus)) == expected


def written(kind, folder):
    plain = texts(3, 60)
    if kind == "megatron":
        megatron(folder / "a", [[ids] for ids in plain[:20]])
        megatron(folder / "b", [[ids + [EOS]] for ids in plain[20:]], "int32")
        return data.megatron_tokens(f"{folder}/*", heldout=0.3, **IDS)
    shard(folder / "a.bin", flat(ended(plain[:20])))
    shard(folder / "b.bin", flat(ended(plain[20:])))
    return data.bin_tokens(f"{folder}/*.bin", heldout=0.3, **IDS)


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("packing", data.PACKINGS)
@pytest.mark.parametrize("kind", ["megatron", "bin"])
def test_readers_groups_and_resuming_give_the_same_global_batches(tmp_path, kind, packing, group):
    corpus = written(kind, tmp_path)
    loader = data.Loader(opened(corpus, packing=packing), 8, seed=5, group=group)
    again = data.Loader(pickle.loads(pickle.dumps(opened(corpus, packing=packing))), 8, seed=5, group=group)
    assert again.fingerprint == loader.fingerprint and len(pickle.dumps(loader.source.documents)) < 1000
    for step in (0, 11, 10**6):
        whole = loader.batch_at(step)
        for readers in (2, 4):
            parts = [again.batch_at(step, slice(r * 8 // readers, (r + 1) * 8 // readers)) for r in range(readers)]
            for key in data.KEYS:
                assert np.array_equal(np.concatenate([part[key] for part in parts]), whole[key])


def test_splits_are_disjoint_and_a_new_file_moves_no_document(tmp_path):
    corpus = written("bin", tmp_path)
    train, heldout = (documents_in(opened(corpus, split)) for split in data.split.SPLITS)
    assert sorted(train + heldout) == sorted(ended(texts(3, 60))) and 8 < len(heldout) < 28
    shard(tmp_path / "c.bin", flat(ended(texts(4))))
    more = documents_in(opened(corpus, "heldout"))
    assert more[: len(heldout)] == heldout and len(more) > len(heldout)


def test_held_out_files_are_not_trained_on_and_the_fingerprint_follows_the_content(tmp_path):
    shard(tmp_path / "x_train_1.bin", flat(ended(texts(5))))
    shard(tmp_path / "x_val_1.bin", flat(ended(texts(6))))
    corpus = data.bin_tokens(f"{tmp_path}/*.bin", heldout=f"{tmp_path}/*val*.bin", **IDS)
    assert documents_in(opened(corpus)) == ended(texts(5))
    assert documents_in(opened(corpus, "heldout")) == ended(texts(6))
    before = opened(corpus).fingerprint
    assert before == opened(corpus).fingerprint != opened(corpus, "heldout").fingerprint
    changed = texts(5)
    changed[3][0] = (changed[3][0] + 1) % EOS
    shard(tmp_path / "x_train_1.bin", flat(ended(changed)))
    assert opened(corpus).fingerprint != before
    with pytest.raises(DataError, match="matches every file"):
        opened(data.bin_tokens(f"{tmp_path}/*val*.bin", heldout=f"{tmp_path}/*.bin", **IDS))


def test_a_change_after_the_scan_is_an_error_and_a_damaged_scan_is_repeated(tmp_path):
    path, cache = tmp_path / "a.bin", tmp_path / "cache"
    shard(path, flat(ended(texts(7))))
    corpus = data.bin_tokens(str(path), heldout=0, **IDS)
    source = opened(corpus, cache=cache)
    (saved,) = (cache / "scans").iterdir()
    assert opened(corpus, cache=path).fingerprint == source.fingerprint  # a cache that cannot be written
    saved.write_bytes(saved.read_bytes()[:100])
    assert opened(corpus, cache=cache).fingerprint == source.fingerprint
    stat = path.stat()
    content = bytearray(path.read_bytes())
    content[1100] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(DataError, match="has changed since it was scanned"):
        opened(corpus, cache=cache).rows(np.arange(4))


def cut(path, drop=2):
    path.write_bytes(path.read_bytes()[:-drop])


def edit(path, at, value):
    content = bytearray(path.read_bytes())
    content[at] = value
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda p: cut(p / "a.bin"), r"a.bin has \d+ bytes, but .*a.idx counts"),
        (lambda p: (p / "a.bin").unlink(), "a.bin does not exist beside"),
        (lambda p: cut(p / "a.idx"), r"a.idx has \d+ bytes, but"),
        (lambda p: edit(p / "a.idx", 0, 0), "does not begin with MMIDIDX"),
        (lambda p: edit(p / "a.idx", 9, 2), "has version 2"),
        (lambda p: edit(p / "a.idx", 17, 9), "dtype code 9"),
        (lambda p: edit(p / "a.idx", 34, 61), "contradicts itself"),
        (lambda p: megatron(p / "a", [[[1, 2]]], modes=True), "multimodal"),
        (lambda p: megatron(p / "a", []), "has no sequence"),
        (lambda p: megatron(p / "a", [[[]]]), "a.bin has no token"),
        (lambda p: megatron(p / "a", [[[1, 2, 100, 4]]]), "has id 100 at token 2, outside of the vocabulary of 100"),
        (lambda p: megatron(p / "a", [[[1, -2, 3]]], "int32"), "has id -2 at token 1"),
        (lambda p: megatron(p / "a", [[[1, 2.5]]], "float32"), "has 2.5 at token 1"),
        (lambda p: (p / "a.idx").unlink(), "no file matches"),
    ],
)
def test_a_damaged_dataset_of_megatron_is_refused_in_one_sentence(tmp_path, damage, words):
    megatron(tmp_path / "a", [[ids] for ids in texts()])
    damage(tmp_path)
    with pytest.raises(DataError, match=words) as caught:
        opened(data.megatron_tokens(f"{tmp_path}/a", **IDS))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("damage", "settings", "words"),
    [
        (cut, {}, r"has \d+ bytes, but its header counts"),
        (lambda p: shard(p, [1, 2], magic=20240522), {}, "begins with 20240522"),
        (lambda p: p.write_bytes(b"\1\0"), {"format": "llm.c"}, "has only 2 bytes"),
        (lambda p: p.write_bytes(b"\1\0\2"), {}, "not a whole number of uint16 ids"),
        (lambda p: p.write_bytes(b""), {}, "is empty"),
        (lambda p: shard(p, [1, 2], version=3), {}, "has version 3"),
        (lambda p: shard(p, [1, 100]), {}, "has id 100 at token 1, outside"),
        (lambda p: None, {"vocab_size": None}, "eos is set without bin_tokens.vocab_size"),
        (lambda p: None, {"eos": 100}, "eos = 100 is not an id"),
        (lambda p: None, {"vocab_size": None, "eos": None}, "pass the tokenizer, or set bin_tokens.vocab_size"),
        (lambda p: None, {"format": "llmc"}, "did you mean 'llm.c'"),
        (lambda p: None, {"heldout": None}, "heldout = None does not name files; .*, or a fraction"),
        (lambda p: None, {"glob": ()}, r"glob = \(\) does not name files"),
        (lambda p: None, {"eos": "x"}, "eos = 'x' is not a whole number"),
        (lambda p: None, {"glob": ("{p}", "{p}")}, "matches two patterns"),
        (lambda p: None, {"heldout": 0.5, "glob": "{p}x"}, "no file matches"),
    ],
)
def test_an_unusable_bin_file_is_refused_in_one_sentence(tmp_path, damage, settings, words):
    path = tmp_path / "a.bin"
    shard(path, flat(ended(texts())))
    damage(path)
    settings = {"glob": str(path), **IDS, **settings}
    name = settings["glob"]
    settings["glob"] = name.format(p=path) if isinstance(name, str) else tuple(n.format(p=path) for n in name)
    with pytest.raises(DataError, match=words) as caught:
        opened(data.bin_tokens(**settings))
    assert "\n" not in str(caught.value)


def test_ids_of_another_tokenizer_are_an_error_whose_advice_works(tmp_path):
    path = tmp_path / "train.bin"
    np.array(flat([i % 400 + 300, 1, 2, 3, 999] for i in range(200)), np.uint16).tofile(path)
    corpus = data.bin_tokens(str(path))
    assert corpus.token_ids(data.ByteTokenizer()) == 256
    with pytest.raises(DataError, match="set its vocab_size and eos here"):
        corpus.source(data.ByteTokenizer(), seq_len=8, split="train")
    corpus = data.bin_tokens(str(path), vocab_size=1000, eos=999)
    source = corpus.source(data.ByteTokenizer(), seq_len=8, split="train")
    assert corpus.token_ids(data.ByteTokenizer()) == source.vocab_size == 1000 and source.rows(np.arange(2))
