"""The theory of pruned perceptrons: its known limit, and trained perceptrons."""

from __future__ import annotations

import pytest

from experiments.data_pruning.perceptron import error, trained_error


def test_the_error_of_largest_margin_falls_as_in_the_literature():
    """0.5005 / alpha (Opper, Kinzel, Kleinz & Nehl 1990)."""
    assert error(200.0) * 200 == pytest.approx(0.5005, abs=2e-4)


@pytest.mark.parametrize(("order", "share"), [("hardest", 0.3), ("easiest", 0.3)])
def test_trained_perceptrons_are_where_the_theory_is(order, share):
    some = [trained_error(6.0, order, share, seed) for seed in range(4)]
    assert sum(some) / 4 == pytest.approx(error(6 * share, order, share), rel=0.15)
