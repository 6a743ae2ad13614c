"""`train.adapters = @SoftPrompt()`: only the prompt is trained and saved; resumed, sampled and merged runs have it."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

import jaxscale as js
from jaxscale.convert.merge import merge
from jaxscale.errors import ConfigError
from jaxscale.models import TransformerConfig
from jaxscale.step import SoftPrompt, Unfreeze
from jaxscale.step.blueprint import settled
from jaxscale.train import FromRun
from tests.truth.errors import raises_saying

MODEL = TransformerConfig(depth=2, vocab=32, width=16, heads=2, hidden=24)
SETTINGS = dict(
    data=js.data.synthetic(documents=40, length=60, vocab_size=32), layout=None, batch_size=8, seq_len=16,
    eval_batches=0, quiet=True,
)  # fmt: skip


@pytest.mark.long
def test_a_prompt_trains_alone_resumes_and_generates_and_a_second_one_is_refused(tmp_path):
    base = js.fit(model=MODEL, run=tmp_path / "base", steps=2, **SETTINGS)
    own = dict(start=FromRun(str(base.path)), adapters=SoftPrompt(3), lr=0.1)
    run = js.fit(run=tmp_path / "run", steps=2, **own, **SETTINGS)
    assert run.config.model == dataclasses.replace(base.config.model, soft_prompt=3)
    prompt = np.asarray(run.trained()["prompt"]["weight"])
    table = np.asarray(base.params()["embed"]["weight"])
    assert prompt.shape == (3, 16)
    assert np.abs(prompt[:, None] - table).max(-1).min() > 1e-3  # it has moved
    params = run.params()
    jax.tree.map(np.testing.assert_array_equal, {k: v for k, v in params.items() if k != "prompt"}, base.params())
    saved = js.load(run.path)
    assert sum("/prompt/" in name for name in saved.checkpoints.manifest(2)["leaves"]) == 3  # and two moments
    assert not any("/runs/" in name for name in saved.checkpoints.manifest(2)["leaves"])
    want = saved.generate([1, 2, 3], max_tokens=4, temperature=0.0).ids
    merged = merge(saved, tmp_path / "merged")
    assert merged.generate([1, 2, 3], max_tokens=4, temperature=0.0).ids == want
    more = dict(start=FromRun(str(merged.path)))
    with raises_saying(ConfigError, "Unfreeze.targets = ('prompt',)"):
        settled(dataclasses.replace(saved.config, **more))
    with raises_saying(ConfigError, "SoftPrompt.length = 4 and Transformer.soft_prompt = 3 differ", "leave out"):
        settled(dataclasses.replace(saved.config, adapters=SoftPrompt(4)))
    further = settled(dataclasses.replace(merged.config, adapters=Unfreeze(("prompt",)), **more))
    assert further.model.soft_prompt == 3


@pytest.mark.long
def test_a_prompt_is_trained_alike_on_a_mesh_and_after_a_pause(tmp_path):
    base = js.fit(model=MODEL, run=tmp_path / "base", steps=2, **SETTINGS)
    own = dict(start=FromRun(str(base.path)), adapters=SoftPrompt(4), lr=0.1)
    whole = js.fit(run=tmp_path / "whole", steps=4, **own, **SETTINGS)
    on_mesh = {**SETTINGS, "layout": js.Layout("data=2,fsdp=2,tensor=2")}
    paused = js.fit(run=tmp_path / "paused", steps=4, until=2, **own, **on_mesh)
    resumed = js.fit(run=paused.path, resume=True)
    want, half, got = (np.asarray(r.trained()["prompt"]["weight"]) for r in (whole, paused, resumed))
    np.testing.assert_allclose(got, want, atol=1e-4)
    assert np.abs(half - want).max() > 1e-2
