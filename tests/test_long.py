"""Which tests `make test` and a run of CI leave out."""

from __future__ import annotations

import pytest

from tests.truth.long import share, short


def _quick(values):
    return [made.values for made in values if not made.marks]


def test_values_that_stay_short_are_spread_evenly_and_none_is_lost():
    made = short(3, range(7))
    assert [m.values for m in made] == [(n,) for n in range(7)] and _quick(made) == [(0,), (2,), (4,)]
    assert _quick(short(3, "ab")) == [("a",), ("b",)]


def test_tuples_are_several_arguments_and_long_values_stay_long():
    slow = pytest.param(1, 2, marks=pytest.mark.long, id="slow")
    made = short(1, [slow, (3, 4), (5, 6)])
    assert [m.values for m in made] == [(1, 2), (3, 4), (5, 6)] and made[0] is slow and _quick(made) == [(3, 4)]


def test_every_test_is_in_one_share():
    names = [f"tests/a.py::test_{n}" for n in range(50)]
    counts = [sum(share(f"{k}/3")(name) for name in names) for k in (1, 2, 3)]
    assert sum(counts) == 50 and min(counts) > 5 and all(map(share("1/1"), names))


@pytest.mark.parametrize("text", ["4/3", "0/3", "2", "2/3/4", "a/b", ""])
def test_a_share_that_is_none_is_refused(text):
    with pytest.raises(pytest.UsageError, match="such as 2/3"):
        share(text)
