"""Passes over a rank, against FuseMax's own labels (Nayak et al. 2024, section IV) and cases worked out by hand."""

from __future__ import annotations

import pytest

from experiments.calculators.einsum_cascade import CASCADES, by_tensor, passes
from jaxscale.errors import ConfigError
from tests.truth.errors import raises_saying

LABELS = {
    "attention in three passes": 3,
    "attention in two passes": 2,
    "attention in one pass": 1,
    "softmax in three passes": 3,
    "softmax in two passes": 2,
}


def test_every_cascade_has_a_label_of_the_literature():
    assert LABELS.keys() == CASCADES.keys()


@pytest.mark.parametrize("name", CASCADES)
def test_passes_are_those_of_the_literature(name):
    assert passes(CASCADES[name]) == LABELS[name]


def test_each_tensor_of_the_three_passes_is_made_in_its_own():
    made = by_tensor(CASCADES["attention in three passes"])
    assert made == {"QK": 1, "GM": 1, "SN": 2, "SD": 2, "A": 3, "AV": 3}


def test_dividing_at_the_end_saves_a_pass():
    text = CASCADES["attention in three passes"].replace("A[m, p] = SN[m, p] / SD[p]", "")
    text = text.replace("AV[f, p] = A[m, p] V[f, m]", "SV[f, p] = SN[m, p] V[f, m]\nAV[f, p] = SV[f, p] / SD[p]")
    assert passes(text) == 2


def test_no_running_value_no_single_pass():
    """Where each chunk waits for the largest score of all, a second pass is needed."""
    text = CASCADES["attention in one pass"].replace("- RM[m1+1, p])\n        SLD", "- RM[M1, p])\n        SLD")
    assert passes(text) == 2


def test_other_ranks_are_counted_for_themselves():
    assert passes(CASCADES["attention in three passes"], "p") == 1
    assert passes("S[] = sum X[i]\nY[i] = X[i] / S[]\nT[] = sum Y[i]\nZ[i] = Y[i] / T[]", "i") == 3


@pytest.mark.parametrize(
    ("text", "rank", "words"),
    [
        ("SD[p] = sum SN[m, p]", "n", "'n'"),
        ("what is this", "m", "what is this"),
        ("S[p] = sum X[m, p]\nS[p] = max X[m, p]", "m", "twice"),
        ("S[p] = S[p] + X[m, p]", "m", "from itself"),
    ],
    ids=["no such rank", "no einsum", "made twice", "from itself"],
)
def test_what_cannot_be_read_is_said(text, rank, words):
    with raises_saying(ConfigError, words):
        passes(text, rank)
