"""Imported models generate the same 64 tokens as `transformers`, greedily, on any layout."""

from __future__ import annotations

import numpy as np
import pytest

import jaxscale as js
from jaxscale.convert.pretrained import import_checkpoint
from tests.truth import foreign

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

PROMPT = np.random.default_rng(1).integers(3, foreign.VOCAB, 9).tolist()
LONG = ("granite4", "nemotron_h", "deepseek_v32", "gemma4", "gemma4 global")
"""Models that take long to compile; `experiments/interop` has them on three layouts."""
CASES = [pytest.param(name, None, marks=[pytest.mark.long] * (name in LONG)) for name in foreign.MODELS]
CASES += [("llama3", "tensor=4"), ("qwen3", "data=2,tensor=2,context=2")]


@pytest.mark.parametrize("name, mesh", CASES, ids=lambda x: str(x))
def test_the_likeliest_tokens_are_those_of_transformers(name, mesh, tmp_path):
    import_checkpoint(foreign.save(name, tmp_path / "theirs"), tmp_path / "run", say=lambda _: None)
    layout = None if mesh is None else js.Layout(mesh)
    run = js.load(str(tmp_path / "run"))
    completion = run.generate(PROMPT, temperature=0, max_tokens=64, ignore_end=True, layout=layout)
    options = dict(max_new_tokens=64, min_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0)
    expected = foreign.make(name).generate(torch.tensor([PROMPT]), **options)[0, len(PROMPT) :]
    assert list(completion.ids) == expected.tolist() and completion.text == ""
