"""Tiles: the nearest entry of the nearest device."""

from __future__ import annotations

import json

import pytest

from pallas_kernels import tiles
from pallas_kernels.dispatch import KernelError


@pytest.fixture
def table(tmp_path, monkeypatch):
    monkeypatch.setattr(tiles, "_ROOT", tmp_path)
    (tmp_path / "toy").mkdir()
    entry = lambda device, columns, rows: {  # noqa: E731
        "device": device, "key": {"dtype": "bfloat16", "columns": columns}, "tile": {"rows": rows}, "from": "compiled"
    }  # fmt: skip
    table = [entry("NVIDIA H200", 1024, 1), entry("NVIDIA H200", 65536, 2), entry("TPU v5 lite", 1024, 3)]
    (tmp_path / "toy" / "tiles.json").write_text(json.dumps(table))
    tiles._read.cache_clear()
    yield tmp_path / "toy" / "tiles.json"
    tiles._read.cache_clear()


@pytest.mark.parametrize(
    "kind, columns, rows",
    [
        ("NVIDIA H200", 1024, 1),
        ("NVIDIA H200", 5000, 1),  # 2.3 doublings from 1024, 3.7 from 65536
        ("NVIDIA H200", 10000, 2),
        ("NVIDIA H100 80GB HBM3", 65536, 2),  # its family's
        ("TPU v6 lite", 65536, 3),
    ],
)
def test_the_nearest_key_is_found(table, kind, columns, rows):
    assert tiles.lookup("toy", kind, dtype="bfloat16", columns=columns) == {"rows": rows}


def test_writing_replaces_the_same_key_and_keeps_the_rest(table):
    key = {"dtype": "bfloat16", "columns": 1024}
    tiles.write("toy", [{"device": "NVIDIA H200", "key": key, "tile": {"rows": 9}, "from": "measured"}])
    assert tiles.lookup("toy", "NVIDIA H200", **key) == {"rows": 9}
    assert len(json.loads(table.read_text())) == 3


def test_the_error_for_an_op_without_a_table_names_the_command(table):
    with pytest.raises(KernelError, match="has no entries; run python -m pallas_kernels.tune nothing"):
        tiles.lookup("nothing", "NVIDIA H200")
