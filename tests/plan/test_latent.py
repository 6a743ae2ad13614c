"""What the planner says of multi-head latent attention: what it can work out, and by name what it cannot."""

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
    made = MODEL.products(2, 8)
    for name in ("qkv", "residual_mid"):
        assert sum(p.flops for p in products(MODEL, 8) if p.name == name) * 2 * 8 == made[name]


def test_what_is_kept_of_a_token_is_the_published_size():
    """512 + 64 numbers a layer (Liu et al. 2024, DeepSeek-V2, table 1)."""
    assert cache_bytes(deepseek_v3(), context=1) == 61 * 576 * 2


def test_a_run_is_explained_and_what_it_sends_is_read_off_the_program():
    config = TrainConfig(model=MODEL, layout=Layout("fsdp=2,tensor=2"), batch_size=4, seq_len=8)
    found = explain(config, compile=True)
    rows = {r.path: r for r in found.params}
    assert rows["runs/0/blocks/0/attn/k/kernel"].axes == ("layers", "latent_in", "heads", "head_dim")
    assert found.compiled.traffic


def test_a_run_is_planned():
    config = TrainConfig(model=MODEL, layout=Layout("fsdp=2,tensor=2"), batch_size=4, seq_len=8)
    assert plan_for(config, "h100:4").step.compute > 0


def test_every_head_adds_to_the_cotangents_of_what_all_have_in_common():
    config = TrainConfig(model=MODEL, layout=Layout("fsdp=2,tensor=2"), batch_size=4, seq_len=8)
    found = [c for c in predict(config, "v5p:2x2x1") if c.axes == ("tensor",) and "attn" in c.name]
    tokens, layers = 4 // 2 * 8, 2  # of a device
    sizes = Counter({c.payload: 0 for c in found})
    for c in found:
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
    sent, ours = (sum(c.sent for c in found) for found in (compiled, predict(config, "v5p:2x2x1")))
    stream = 8 * 64 * 256 * 2
    assert abs(sent - ours) < stream / 10


@pytest.mark.parametrize(
    ("mesh", "parallel"), [("fsdp=2,context=2", False), ("tensor=4", True)], ids=["cut", "parallel"]
)
def test_attention_that_no_formula_knows_is_planned_from_the_traced_step(mesh, parallel):
    model = dataclasses.replace(MODEL, parallel=parallel)
    config = TrainConfig(model=model, layout=Layout(mesh), batch_size=4, seq_len=8)
    found = plan_for(config, "h100:4", compile="never")
    assert found.error_bar.method == "traced" and found.memory.device > found.memory.state > 0
    assert any("no formula covers" in note and "MultiHeadLatent" in note for note in found.notes)
