"""Every test of training stands in a folder of its own, where a run may leave its `runs/`."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAXSCALE_CACHE", str(tmp_path / "cache"))
    return tmp_path
