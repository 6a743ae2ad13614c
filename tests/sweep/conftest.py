"""Every test of sweeps runs in a temporary folder, which may receive `runs/`."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def no_waiting(monkeypatch):
    """No pause between polls, for coordinators of scripted runs."""
    monkeypatch.setattr("jaxscale.sweep.coordinator.LOOK", 0.0)
