"""Planning multi-head latent attention, by formulas where they cover it and from the traced step elsewhere."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from experiments.calculators.long_context import cache_bytes
from jaxscale.layout import Layout
from jaxscale.models import TransformerConfig, deepseek_v3
from jaxscale.nn import MultiHeadLatent
from jaxscale.plan import compile_step, explain, plan_for
from jaxscale.plan.collectives import collectives
from jaxscale.plan.communication import predict
from jaxscale.plan.work import products
from jaxscale.step import TrainConfig

MODEL = TransformerConfig(
    depth=2, vocab=64, width=32, heads=4, hidden=64, attention_layer=MultiHeadLatent(16, 16, 8, 4, 8)
)


def test_products_are_those_that_flops_count():
    made = MODEL.product_flops(2, 8)
    for name in ("qkv", "residual_mid"):
        assert sum(p.flops for p in products(MODEL, 8) if p.name == name) * 2 * 8 == made[name]


def test_the_cache_of_a_token_has_the_published_size():
    """512 + 64 numbers a layer (Liu et al. 2024, DeepSeek-V2, table 1)."""
    assert cache_bytes(deepseek_v3(), context=1) == 61 * 576 * 2


@pytest.mark.long
def test_a_run_is_explained_with_its_collectives():
    config = TrainConfig(model=MODEL, layout=Layout("fsdp=2,tensor=2"), batch_size=4, seq_len=8)
    explanation = explain(config, compile=True)
    rows = {r.path: r for r in explanation.params}
    assert rows["runs/0/blocks/0/attn/k/kernel"].axes == ("layers", "latent_in", "heads", "head_dim")
    assert explanation.compiled.traffic


def test_a_run_is_planned():
    config = TrainConfig(model=MODEL, layout=Layout("fsdp=2,tensor=2"), batch_size=4, seq_len=8)
    assert plan_for(config, "h100:4").step.compute > 0


def test_cotangents_of_shared_latents_are_summed_over_heads():
    config = TrainConfig(model=MODEL, layout=Layout("fsdp=2,tensor=2"), batch_size=4, seq_len=8)
    sent = [c for c in predict(config, "v5p:2x2x1") if c.axes == ("tensor",) and "attn" in c.name]
    tokens, layers = 4 // 2 * 8, 2  # of a device
    sizes = Counter({c.payload: 0 for c in sent})
    for c in sent:
        sizes[c.payload] += c.times
    # the queries' vector, and the keys' and values', are of 16 numbers a token, the turned key of 4
    assert sizes[4 * tokens * 16] == 2 * layers and sizes[4 * tokens * 4] == layers


@pytest.mark.tpu_aot
def test_a_compiled_step_sums_the_streams_cotangents_once():
    latent = MultiHeadLatent(kv_rank=128, plain_dim=128, rotary_dim=64, value_dim=128)
    model = TransformerConfig(
        depth=2, vocab=256, width=256, heads=4, hidden=512, dtype="bfloat16", attention_layer=latent
    )
    config = TrainConfig(model=model, layout=Layout("tensor=4"), batch_size=8, seq_len=64, prompt=None)
    compiled = collectives(compile_step(config, "v5p:2x2x1"), config.layout.sizes)
    sent, ours = (sum(c.sent for c in step) for step in (compiled, predict(config, "v5p:2x2x1")))
    stream = 8 * 64 * 256 * 2
    assert abs(sent - ours) < stream / 10


@pytest.mark.parametrize(
    ("mesh", "parallel"), [("fsdp=2,context=2", False), ("tensor=4", True)], ids=["cut", "parallel"]
)
def test_attention_without_formulas_is_planned_from_the_traced_step(mesh, parallel):
    model = dataclasses.replace(MODEL, parallel=parallel)
    config = TrainConfig(model=model, layout=Layout(mesh), batch_size=4, seq_len=8)
    plan = plan_for(config, "h100:4", compile="never")
    assert plan.error_bar.method == "traced" and plan.memory.device > plan.memory.state > 0
    assert any("no formula covers" in note and "MultiHeadLatent" in note for note in plan.notes)
