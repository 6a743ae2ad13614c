"""Every test of sweeps stands in a folder of its own, where one may leave its `runs/`."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path
