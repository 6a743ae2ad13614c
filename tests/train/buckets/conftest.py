"""Servers of S3's and Google Cloud Storage's protocols, and a small run on a disk."""

from __future__ import annotations

import pytest

import jaxscale as js
from jaxscale import working_copy
from tests.truth.bucket_runs import SETTINGS, copied
from tests.truth.servers import object_stores


@pytest.fixture(scope="module")
def stores():
    with object_stores() as variables:
        yield variables


@pytest.fixture(autouse=True)
def reached(stores, monkeypatch):
    for name, value in stores.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(working_copy, "_fetched", {})
    monkeypatch.setattr(working_copy, "PERIOD", 0.2)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The same run, on a disk and without an interruption."""
    return js.fit(run=tmp_path_factory.mktemp("disk") / "run", **SETTINGS)


@pytest.fixture(params=["s3", pytest.param("gs", marks=pytest.mark.long)])
def url(request, tmp_path):
    return f"{request.param}://runs/{tmp_path.name}/run"


@pytest.fixture(scope="module")
def copy(whole, stores):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in stores.items():
            patch.setenv(name, value)
        return copied(whole, "s3://runs/copied/run")
