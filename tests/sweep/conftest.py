"""Every test of sweeps stands in a folder of its own, where one may leave its `runs/`."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def no_waiting(monkeypatch):
    """A coordinator whose runs are only told what they do looks at them without a pause."""
    monkeypatch.setattr("jaxscale.sweep.coordinator.LOOK", 0.0)
