"""An imported model on a layout continues a text as `transformers` does, with a cache and without.

A family a layout; `experiments/interop/proof.py` has all of them on all.
"""

from __future__ import annotations

import numpy as np
import pytest

from jaxscale.interop import open_pretrained
from jaxscale.layout import Layout
from tests.truth import foreign, greedy

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("qwen3", None),
        ("llama3", "tensor=4"),
        ("mixtral", "data=2,tensor=2,context=2"),
        ("deepseek_v3", "tensor=4"),
        pytest.param("gemma4", "fsdp=2,tensor=2", marks=pytest.mark.long),
        pytest.param("gemma4", "data=2,context=2", marks=pytest.mark.long),
        pytest.param("gemma4 global", "data=2,pipeline=2", marks=pytest.mark.long),
    ],
)
def test_greedy_tokens_are_theirs(name, where, tmp_path):
    text = foreign.continued(name, prompt=16, new=16)
    opened = open_pretrained(foreign.save(name, tmp_path / "theirs"), dtype="float32")
    got = greedy.run(opened, None if where is None else Layout(where), text, 16)
    np.testing.assert_allclose(got.logits, foreign.logits(name, text), atol=1e-4, rtol=1e-4)
    np.testing.assert_array_equal(got.logits[:, 15:-1].argmax(-1), text[:, 16:])
    np.testing.assert_array_equal(got.cached, text[:, 16:])
