"""Every family: an import has the logits of `transformers`, which also reads the export."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from flax import nnx

import jaxscale as js
from jaxscale.convert.pretrained import export_checkpoint, import_checkpoint
from jaxscale.interop import open_pretrained
from jaxscale.step.state import describe_model
from tests.truth import foreign

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

TOKENS = np.random.default_rng(0).integers(0, foreign.VOCAB, (2, 24))


@pytest.mark.parametrize("name", foreign.MODELS)
def test_logits_are_those_of_transformers_and_it_reads_what_is_exported(name, tmp_path):
    messages = []
    import_checkpoint(foreign.save(name, tmp_path / "theirs"), tmp_path / "run", say=messages.append)
    assert not messages, messages
    run, expected = js.load(str(tmp_path / "run")), foreign.logits(name, TOKENS)
    graphdef, _ = describe_model(run.config.model)
    ours = jax.jit(lambda p, t: nnx.merge(graphdef, p)(t))(run.params(), TOKENS)
    np.testing.assert_allclose(ours, expected, atol=1e-4, rtol=1e-4)

    out = export_checkpoint(run, tmp_path / "out")
    assert json.loads((out / "config.json").read_text()) == json.loads((run.path / "hf/config.json").read_text())
    opened = open_pretrained(out)
    about = opened.family.json(run.config.model, opened.length)  # made from our config, not copied
    (out / "config.json").write_text(json.dumps(about))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    with torch.no_grad():
        np.testing.assert_array_equal(theirs(torch.tensor(TOKENS)).logits.numpy(), expected)
