"""The full grid is run by hand (`grid.py`); these tests check that it is complete, can fail, and has a right table."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from pallas_kernels import flash_attention
from pallas_kernels.flash_attention import xla
from tests.pallas_kernels.flash_attention.grid import (
    FEATURES,
    HEAD,
    PADDED,
    PARTS,
    TABLE,
    TILE,
    check,
    grid,
    name_of,
    order,
    tuples,
    work_of,
)

CASES = {name_of(case): case for case in grid()}
HARD = CASES["float32 D=64 odd S≠T causal"]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(xla, "TILE", TILE)


def test_the_grid_is_every_combination_of_its_features_once():
    assert len(CASES) == np.prod([len(values) for values in FEATURES.values()]) == 2304


@pytest.mark.parametrize("n, cases", [(2, 60), (3, 233)])
def test_the_first_cases_have_all_combinations_of_few_features(n, cases):
    every = set[object]().union(*(tuples(case, n) for case in grid()))
    assert every == set[object]().union(*(tuples(case, n) for case in order(grid())[:cases]))


@pytest.mark.long
def test_a_case_is_judged_by_all_its_results_and_an_error_shows(monkeypatch):
    assert [check(HARD, "xla")[part][2] for part in PARTS] == ["ok"] * 5
    off = functools.partial(flash_attention.flash_attention, scale=64**-0.5 * (1 + 1e-5))
    monkeypatch.setattr(flash_attention, "flash_attention", off)
    assert {check(HARD, "xla")[part][2] for part in ("lse", "dq", "dk")} == {"WRONG"}


@pytest.mark.long
def test_plain_attention_in_longer_matrices_is_the_same_function():
    short, padded = (work_of(HARD, multiple=n).make(None).plain() for n in (1, PADDED))
    for a, b in zip(short, padded, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


def test_the_committed_table_holds_nothing_wrong():
    rows = [line.strip("| ").split(" | ") for line in TABLE.read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in row] for row in rows if row[0].strip() in FEATURES["dtype"]]
    backends = TABLE.read_text().count("\n## ")
    assert backends and len(cells) == backends * len(FEATURES["dtype"]) * len(FEATURES["D"])
    assert {row[HEAD.index("WRONG")] for row in cells} == {"0"}
