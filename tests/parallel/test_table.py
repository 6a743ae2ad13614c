"""Twelve rows of the table of layouts, others after every change, most of them by `make test-all` alone.

`python -m tests.parallel.table` runs the whole table.
"""

from __future__ import annotations

import hashlib
import itertools
import pathlib

import numpy as np
import pytest

import jaxscale
from tests.parallel.table import DIMENSIONS, disagreement, table

ROWS = [row for row in table() if row.layout.devices == 8]
SHORT = 4
"""Rows that `make test` trains."""


def chosen(count):
    """Rows drawn by a seed that is a hash of the library's sources."""
    digest = hashlib.sha256()
    for path in sorted(pathlib.Path(jaxscale.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    order = np.random.default_rng(int.from_bytes(digest.digest()[:4], "big")).permutation(len(ROWS))
    marks = lambda place: () if place < SHORT else pytest.mark.long  # noqa: E731
    return [pytest.param(ROWS[i], marks=marks(place), id=ROWS[i].name) for place, i in enumerate(order[:count])]


@pytest.mark.parametrize("row", chosen(12))
def test_a_layout_trains_to_the_numbers_of_one_device(row):
    got, want = row.run()
    assert max(disagreement(got, want).values()) <= 1


def test_the_table_has_every_pair_of_dimensions_and_ten_triples():
    cut = [frozenset(d for d in DIMENSIONS if row.layout.sizes[d] > 1) for row in ROWS]
    assert set(map(frozenset, itertools.combinations(DIMENSIONS, 2))) <= set(cut)
    assert len({c for c in cut if len(c) == 3}) >= 10 and len(ROWS) >= 40
