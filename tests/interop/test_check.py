"""`--check` compares the logits of an import with those of `transformers`."""

from __future__ import annotations

import numpy as np
import pytest

from jaxscale.convert import same_logits
from jaxscale.errors import CheckpointError
from jaxscale.interop import transfer
from tests.truth import foreign
from tests.truth.hf_folder import write_folder

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.torch


def test_the_same_folder_is_the_same_model(tmp_path):
    compared = same_logits.compare(foreign.save("llama", tmp_path / "theirs"))
    assert compared.error < 1e-4 and compared.same == compared.places == 64
    assert "the most likely token is the same at 64 of 64 positions" in str(compared)


def test_a_tensor_read_the_wrong_way_round_is_found(tmp_path, monkeypatch):
    real = transfer.Foreign._read

    def turned(self, b, region):
        out = real(self, b, region)
        return np.ascontiguousarray(out[..., ::-1]) if b.name.endswith("attn/q/kernel") else out

    monkeypatch.setattr(transfer.Foreign, "_read", turned)
    with pytest.raises(CheckpointError, match="logits are within .* of those of transformers"):
        same_logits.compare(write_folder(tmp_path / "theirs"))
