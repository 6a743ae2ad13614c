"""`--check` holds an import to what `transformers` makes of the same folder."""

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
    found = same_logits.compare(foreign.save("llama", tmp_path / "theirs"))
    assert found.error < 1e-4 and found.same == found.places == 64
    assert "the likeliest token is the same at 64 of 64 places" in str(found)


def test_a_tensor_read_the_wrong_way_round_is_found(tmp_path, monkeypatch):
    real = transfer.Foreign._read

    def turned(self, b, region):
        out = real(self, b, region)
        return np.ascontiguousarray(out[..., ::-1]) if b.name.endswith("attn/q/kernel") else out

    monkeypatch.setattr(transfer.Foreign, "_read", turned)
    with pytest.raises(CheckpointError, match="logits are within .* of those of transformers"):
        same_logits.compare(write_folder(tmp_path / "theirs"))
