"""PEFT loads exported adapters, and its own are imported: with the same logits."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx

from jaxscale.convert.exporting_adapters import export_adapters
from jaxscale.convert.pretrained import export_checkpoint, import_checkpoint
from jaxscale.step import LoRA
from jaxscale.step.state import describe_model
from tests.truth import foreign
from tests.truth.adapted import adapted

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.torch

TOKENS = np.random.default_rng(0).integers(0, foreign.VOCAB, (2, 24))


def _logits(model):
    with torch.no_grad():
        return model.eval()(torch.tensor(TOKENS)).logits.numpy()


def _ours(run):
    graphdef, _ = describe_model(run.config.model)
    return jax.jit(lambda params: nnx.merge(graphdef, params)(TOKENS))(run.params())


@pytest.mark.parametrize("name, stabilized", [("phi3", False), ("gpt2", True)])
def test_peft_makes_of_the_base_and_our_adapters_what_our_run_is(name, stabilized, tmp_path):
    quiet = dict(say=lambda _: None)
    theirs = foreign.save(name, tmp_path / "theirs")
    base = import_checkpoint(theirs, tmp_path / "base", **quiet)
    run = adapted(base, tmp_path / "run", LoRA(rank=3, alpha=4.5, rank_stabilized=stabilized))
    out = export_adapters(run, tmp_path / "out", **quiet)
    with_adapters = peft.AutoPeftModelForCausalLM.from_pretrained(out)  # finds the base model through its config
    logits = _logits(with_adapters)
    np.testing.assert_allclose(logits, _ours(run), atol=1e-4, rtol=1e-4)
    merged = transformers.AutoModelForCausalLM.from_pretrained(export_checkpoint(run, tmp_path / "merged", **quiet))
    np.testing.assert_allclose(logits, _logits(merged), atol=1e-4, rtol=1e-4)
    assert np.abs(logits - foreign.logits(name, TOKENS)).max() > 0.1


def test_adapters_that_peft_made_are_imported(tmp_path):
    name, targets = "gpt2", ["c_attn", "attn.c_proj"]
    theirs = foreign.save(name, tmp_path / "theirs")
    model = transformers.AutoModelForCausalLM.from_pretrained(theirs)
    patterns = dict(rank_pattern={targets[0]: 5}, alpha_pattern={f"1.*{targets[0]}": 9})
    config = peft.LoraConfig(
        r=2, lora_alpha=3, target_modules=targets, use_rslora=True, init_lora_weights=False, **patterns
    )
    model = peft.get_peft_model(model, config)
    model.save_pretrained(tmp_path / "adapters")
    run = import_checkpoint(theirs, tmp_path / "run", adapters=tmp_path / "adapters", say=lambda _: None)
    expected = _logits(model)
    np.testing.assert_allclose(_ours(run), expected, atol=1e-4, rtol=1e-4)
    assert np.abs(expected - foreign.logits(name, TOKENS)).max() > 0.1
