"""A step that does not fit: the report in the place of XLA's dump, and remedies that save what they say."""

from __future__ import annotations

import dataclasses
import sys

import jax
import pytest

import jaxscale as js
from jaxscale.errors import JaxscaleError, OutOfMemory
from jaxscale.hardware import topology
from jaxscale.optim import AdamW8bit
from jaxscale.plan import estimate
from jaxscale.plan.remedies import out_of_memory, remedies, reported_out_of_memory
from jaxscale.step import LoRA
from jaxscale.train import FromRun
from tests.truth.runs import bigram

TPU = (
    "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
    "temporaries (31.97G) exceeds available HBM (15.75G). HLO module: jit_step."
)
MODEL = js.models.Transformer.Config(depth=4, width=1024, heads=8, vocab=8192, dtype="bfloat16")
CONFIG = js.TrainConfig(model=MODEL, layout=js.Layout("data=2,fsdp=2"), batch_size=64, seq_len=2048, prompt=None)
V5E = topology("v5e:2x2")


@pytest.fixture(scope="module")
def result():
    return remedies(CONFIG, V5E, 2**33)


def test_a_remedy_saves_what_the_estimates_differ_by(result):
    base = estimate(CONFIG, V5E)
    for r in result:
        assert r.saves == base.device - estimate(r.config, V5E).device > 0, r.change
        assert r.fits == (r.device <= 2**33), r.change


def test_every_kind_of_remedy_is_tried(result):
    changes = " | ".join(r.change for r in result)
    for kind in ("memory = 'full'", "@CutLoss()", "accumulate = 2", "mesh = 'fsdp=4'", "@AdamW8bit()", "@OnHost()",
                 "@flash_attention"):  # fmt: skip
        assert kind in changes, kind
    (eight,) = [r for r in result if "8bit" in r.change]
    assert isinstance(eight.config.optimizer, AdamW8bit) and eight.config.optimizer.b2 == CONFIG.optimizer.b2


def test_what_fits_comes_first_and_the_cheapest_of_it_foremost(result):
    fits = [r.fits for r in result]
    assert any(fits) and fits == sorted(fits, reverse=True)
    roomy = [r.extra_flops for r in result if r.fits and r.device <= 0.95 * 2**33]
    assert roomy == sorted(roomy)
    rest = [r.saves for r in result if not r.fits]
    assert rest == sorted(rest, reverse=True)


def test_a_stream_may_be_split_over_tensor():
    config = dataclasses.replace(CONFIG, layout=js.Layout("fsdp=2,tensor=2"))
    assert any("sequence_sharded = True" in r.change for r in remedies(config, V5E, 2**33))


def test_several_changes_are_put_together_where_none_is_enough():
    few = remedies(CONFIG, V5E, 2**30)
    (together,) = [r for r in few if ";" in r.change]
    assert together.fits and together.device <= 2**30 and few[0] is together
    assert estimate(together.config, V5E).device == together.device


def test_the_report_tells_what_it_holds_and_what_would_help():
    error = out_of_memory(jax.errors.JaxRuntimeError(TPU), CONFIG, "v5e:2x2")
    text = str(error)
    assert isinstance(error, JaxscaleError)
    assert text.startswith(
        "the step does not fit v5e:2x2: its compiler asks for temporaries of 32 GiB, and a device has"
    )
    assert "15.8 GiB" in text and "by arithmetic" in text and "activations" in text
    assert "train.accumulate = 2" in text and "saves" in text and "XLA" not in text and "RESOURCE" not in text


def test_a_report_on_adapters_knows_that_what_is_frozen_may_be_kept_in_half_the_bytes():
    adapted = dataclasses.replace(CONFIG, start=FromRun("runs/base"), adapters=LoRA())
    whole, half = (dataclasses.replace(adapted, adapters=LoRA(base_dtype=d)) for d in (None, "bfloat16"))
    saved = {r.change: r.saves for r in remedies(whole, V5E, 2**33)}
    assert saved["frozen matrices in half the bytes: LoRA.base_dtype = 'bfloat16'"] > 0
    assert not any("LoRA" in r.change for r in remedies(half, V5E, 2**33))
    assert "by arithmetic" in str(out_of_memory(jax.errors.JaxRuntimeError(TPU), adapted, "v5e:2x2"))


@pytest.mark.parametrize("message", ["allocating 17179869184 bytes.", "while trying to allocate 16.00GiB."])
def test_a_run_that_does_not_fit_this_machine_says_so(tmp_path, monkeypatch, message):
    def refuse(*_, **__):
        raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: Out of memory {message}")

    monkeypatch.setattr(sys.modules["jaxscale.step.prepare"], "jit_step", lambda *_: refuse)
    with pytest.raises(OutOfMemory) as raised:
        js.fit(js.TrainConfig(**bigram()), run=tmp_path / "run", quiet=True)
    assert "one allocation of 16 GiB failed" in str(raised.value)


def test_other_errors_pass():
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), reported_out_of_memory(CONFIG, "v5e:2x2"):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")
    with pytest.raises(OutOfMemory), reported_out_of_memory(CONFIG, "v5e:2x2"):
        raise jax.errors.JaxRuntimeError(TPU)
