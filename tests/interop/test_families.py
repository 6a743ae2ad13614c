"""What `transformers` says of ids with random weights, an imported run says as well; and what is exported it reads."""

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
    said = []
    import_checkpoint(foreign.save(name, tmp_path / "theirs"), tmp_path / "run", say=said.append)
    assert not said, said
    run, wanted = js.load(str(tmp_path / "run")), foreign.logits(name, TOKENS)
    graphdef, _ = describe_model(run.config.model)
    ours = jax.jit(lambda p, t: nnx.merge(graphdef, p)(t))(run.params(), TOKENS)
    np.testing.assert_allclose(ours, wanted, atol=1e-4, rtol=1e-4)

    out = export_checkpoint(run, tmp_path / "out")
    assert json.loads((out / "config.json").read_text()) == json.loads((run.path / "hf/config.json").read_text())
    found = open_pretrained(out)
    about = found.family.json(run.config.model, found.length)  # said anew, not as it came
    (out / "config.json").write_text(json.dumps(about))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    with torch.no_grad():
        np.testing.assert_array_equal(theirs(torch.tensor(TOKENS)).logits.numpy(), wanted)
