"""The measure of how formats change sampling: against float64 on paper."""

from __future__ import annotations

import importlib
import pathlib

import numpy as np

FOLDER = pathlib.Path(__file__).parents[2] / "experiments" / "quantize"


def test_divergences_are_those_of_the_distributions_that_tokens_are_drawn_from(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    divergences = importlib.import_module("temperature").divergences
    full, few = np.random.default_rng(0).normal(size=(2, 3, 5, 16)) * 4
    for temperature in (0.3, 1.0, 2.0):
        p, q = (np.exp(x / temperature) / np.exp(x / temperature).sum(-1, keepdims=True) for x in (full, few))
        kl, variation = divergences(full, few, temperature)
        np.testing.assert_allclose(kl, (p * np.log(p / q)).sum(-1), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(variation, 1 - np.minimum(p, q).sum(-1), rtol=1e-4, atol=1e-5)
