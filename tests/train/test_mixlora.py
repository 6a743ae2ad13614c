"""`train.adapters = @MixLoRA()`: experts of low rank against float64 NumPy, on layouts, and beside a frozen model."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

import jaxscale as js
from jaxscale.errors import ConfigError
from jaxscale.layout import Layout, abstract
from jaxscale.models import TransformerConfig
from jaxscale.nn import GELU, LowRankExperts, MixtureOfExperts, SwiGLU
from jaxscale.step import MixLoRA
from jaxscale.train import FromRun
from tests.truth import numpy_experts as truth
from tests.truth.compare import assert_leaves_agree
from tests.truth.errors import raises_saying
from tests.truth.layouts import assert_layouts_agree, random_batch, to_numpy
from tests.truth.params import random_params

EXPERTS = LowRankExperts(experts=4, top_k=2, rank=3, alpha=6.0)
MODEL = TransformerConfig(depth=2, vocab=32, width=16, heads=2, hidden=24)
SETTINGS = dict(
    data=js.data.synthetic(documents=40, length=60, vocab_size=32), layout=None, batch_size=8, seq_len=16,
    eval_batches=0, quiet=True,
)  # fmt: skip


def test_an_expert_is_the_layer_with_its_low_rank_products_added():
    graphdef, infos = abstract(lambda: EXPERTS(8, 12, rngs=nnx.Rngs(0)))
    params = random_params(infos)
    random = np.random.default_rng(1)
    x, real = random.normal(size=(2, 6, 8)).astype(np.float32), random.random((2, 6)) < 0.7
    run = jax.jit(lambda p, x: nnx.merge(graphdef, p)(x, jax.numpy.asarray(real)))
    y, stats = to_numpy(run(params, x))
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), params)

    def of_all(name):
        each = np.split(p[f"{name}_a"], 4, axis=1), np.split(p[f"{name}_b"], 4, axis=0)
        return np.stack([p[name]["kernel"] + 6.0 / 3 * a @ b for a, b in zip(*each, strict=True)])

    whole = {"router": p["router"], **{name: of_all(name) for name in ("gate", "up", "down")}}
    mixture = MixtureOfExperts(experts=4, top_k=2, balance_loss=0.01)
    want, reports = truth.layer(mixture, whole, x.astype(np.float64), real)
    assert_leaves_agree(y[real], want[real])
    assert_leaves_agree(stats, reports)
    fresh = {**params, **{k: np.zeros_like(v) for k, v in params.items() if k.endswith("_b")}}
    dense = truth._expert(mixture, x.astype(np.float64), *(p[n]["kernel"] for n in ("gate", "up", "down")))
    assert_leaves_agree(to_numpy(run(fresh, x)[0])[real], dense[real])


def test_what_has_no_feed_forward_layers_is_refused():
    config = MixLoRA(experts=4, rank=3, alpha=6.0)
    assert config.model(MODEL, MODEL).mlp == EXPERTS
    assert config.model(dataclasses.replace(MODEL, mlp=EXPERTS), MODEL).mlp == EXPERTS, "a resumed run's model"
    for mlp in (SwiGLU, GELU):
        dense = dataclasses.replace(MODEL, hidden=None, mlp=mlp)
        assert config.model(dense, dense).sizes.hidden == dense.sizes.hidden, "the frozen matrices have the same width"
    with raises_saying(ConfigError, "has experts of low rank already", "Unfreeze.targets"):
        config.model(dataclasses.replace(MODEL, mlp=EXPERTS), dataclasses.replace(MODEL, mlp=EXPERTS))
    with raises_saying(ConfigError, "MixLoRA", "use LoRA()"):
        config.model(dataclasses.replace(MODEL, mlp=MixtureOfExperts()), MODEL)
    with raises_saying(ConfigError, "MixLoRA.top_k = 5", "the most is 4"):
        MixLoRA(experts=4, top_k=5)
    with raises_saying(ConfigError, "MixLoRA.alpha = 0", "a finite number above 0"):
        MixLoRA(alpha=0)
    with raises_saying(ConfigError, "overlap", "('attention',)"):
        dataclasses.replace(MODEL, mlp=EXPERTS, overlap=("mlp",))


@pytest.mark.long
@pytest.mark.parametrize("dense", [SwiGLU, GELU])
def test_experts_of_low_rank_train_alike_on_every_layout(dense):
    model = dataclasses.replace(MODEL, mlp=dataclasses.replace(EXPERTS, dense=dense), bias=dense is GELU)
    layouts = [Layout("data=2,fsdp=2,tensor=2"), Layout("context=2,tensor=2,data=2")]
    assert_layouts_agree(model, layouts, batch=random_batch(32, rows=8, seq=16), accumulate=2)


@pytest.mark.long
def test_the_base_stays_bitwise_the_same_and_a_run_resumes_and_generates(tmp_path):
    base = js.fit(model=MODEL, run=tmp_path / "base", steps=2, **SETTINGS)
    own = dict(start=FromRun(str(base.path)), adapters=MixLoRA(experts=4, rank=3), lr=0.01)
    whole = js.fit(run=tmp_path / "whole", steps=4, **own, **SETTINGS)
    js.fit(run=tmp_path / "paused", steps=4, until=2, **own, **SETTINGS)
    run = js.fit(run=tmp_path / "paused", resume=True)
    assert_leaves_agree(to_numpy(run.trained()), to_numpy(whole.trained()))
    params, mlp = run.params(), lambda p: p["runs"][0]["blocks"][0]["mlp"]
    assert set(mlp(params)) - set(mlp(base.params())) == set(mlp(run.trained()))
    for name in ("gate", "up", "down"):
        np.testing.assert_array_equal(mlp(params)[name]["kernel"], mlp(base.params())[name]["kernel"])
    np.testing.assert_array_equal(params["embed"]["weight"], base.params()["embed"]["weight"])
    assert np.abs(mlp(run.trained())["down_b"]).max() > 1e-4
    assert len(run.generate([1, 2, 3], max_tokens=4, temperature=0.0).ids) == 4
    assert (run.path / "experts.jsonl").exists()
