"""Small corpora on disk, and a new cache for every test session."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jaxscale import data


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXSCALE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """40 text files of 1 to 400 characters; document i repeats the letters of its number, so that mixing is visible."""
    root = tmp_path_factory.mktemp("text")
    random = np.random.default_rng(0)
    for i in range(40):
        (root / f"f{i}.txt").write_text(chr(ord("0") + i) * int(random.integers(1, 400)))
    return root


def _written(folder, root, kind):
    """The texts of `folder` as a corpus of another kind."""
    rows = [{"name": path.name, "text": path.read_text()} for path in sorted(folder.iterdir())]
    if kind == "jsonl":
        (root / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return data.jsonl_files(f"{root}/*.jsonl", id="name", heldout=0.2)
    table = pytest.importorskip("pyarrow").Table.from_pylist(rows)
    if kind == "parquet":
        import pyarrow.parquet

        pyarrow.parquet.write_table(table, root / "a.parquet", row_group_size=7)
        return data.parquet_files(f"{root}/*.parquet", id="name", heldout=0.2)
    pytest.importorskip("datasets").Dataset(table).save_to_disk(str(root / "saved"))
    return data.hf_dataset(str(root / "saved"), id="name", heldout=0.2)


@pytest.fixture(params=["stream", "fit", "mixture", "pruned", "jsonl", "parquet", "hf"])
def source(request, folder, tmp_path):
    """One source of each kind, 32 tokens a row."""
    text = data.text_files(f"{folder}/*.txt", heldout=0.2)
    if request.param in ("jsonl", "parquet", "hf"):
        written = _written(folder, tmp_path, request.param)
        return written.source(data.ByteTokenizer(), seq_len=32, split="train", packing="fit")
    if request.param == "pruned":
        half = data.pruned(text, keep=0.5, clusters=4)
        return half.source(data.ByteTokenizer(), seq_len=32, split="train", packing="fit")
    if request.param != "mixture":
        return text.source(data.ByteTokenizer(), seq_len=32, split="train", packing=request.param)
    other = data.synthetic(256, documents=20, length=40)
    return data.mixture(((text, 3), (other, 1))).source(data.ByteTokenizer(), seq_len=32, split="train")
