"""Stacks of different layers: a gated linear recurrence defined here, three layers of it to one of attention."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.bring_your_own.recurrence import GatedRecurrence
from jaxscale import config
from jaxscale.errors import ConfigError, LayoutError
from jaxscale.interop import same_model
from jaxscale.layout import Layout, Pipeline
from jaxscale.models import BlockConfig, TransformerConfig
from jaxscale.nn import (
    GELU,
    SOFT,
    Bidirectional,
    Context,
    GatedMultiHead,
    GatherAttention,
    GeGLU,
    Mixer,
    MixtureOfExperts,
    RingAttention,
    SwiGLU,
    flash_attention,
)
from jaxscale.optim import MuP
from jaxscale.plan import estimate, plan_for
from jaxscale.plan.communication import predict
from jaxscale.plan.work import products
from jaxscale.step.config import TrainConfig
from jaxscale.step.state import describe_model
from tests.truth.compare import assert_leaves_agree
from tests.truth.errors import raises_saying
from tests.truth.layouts import assert_layouts_agree, random_batch
from tests.truth.long import short
from tests.truth.params import random_params

LINEAR, FULL = BlockConfig(mixer=GatedRecurrence()), BlockConfig()
MIXED = TransformerConfig(
    depth=8,
    vocab=64,
    width=16,
    heads=4,
    kv_heads=2,
    head_dim=8,
    hidden=32,
    blocks=(LINEAR, LINEAR, LINEAR, FULL),
    attention=GatherAttention(),
    scan=True,
)
LAYOUTS = (
    pytest.param(Layout("data=8"), marks=pytest.mark.long),
    pytest.param(Layout("fsdp=8"), marks=pytest.mark.long),
    pytest.param(Layout("tensor=4,data=2"), marks=pytest.mark.long),
    Layout("context=4,data=2"),
    Layout("pipeline=2,context=2,data=2", pipeline=Pipeline("1f1b")),
    Layout("context=2,tensor=2,fsdp=2"),
)


@pytest.mark.long
@pytest.mark.parametrize("layout", short(1, LAYOUTS), ids=str)
def test_a_mixed_stack_trains_to_one_devices_numbers_on_every_layout(layout):
    assert_layouts_agree(MIXED, [layout], batch=random_batch(64, seq=8, lengths=(4, 1, 2)))


def _layer(seq, rows=2):
    """A mixer's layer of width 16 with random parameters, and an input for it."""
    random = np.random.default_rng(0)
    types = dict(out_scale=1.0, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
    return GatedRecurrence()(16, 4, 2, 8, **types), random.standard_normal((rows, seq, 16)).astype(np.float32)


def test_a_recurrence_is_its_sequential_form_within_each_document():
    layer, x = _layer(12)
    segments = np.asarray([[1] * 5 + [2] * 4 + [0] * 3, [3] * 12])
    got = layer(jnp.asarray(x), Context(segment_ids=jnp.asarray(segments)))
    names = ("decay", "value", "gate", "out")
    kernel = {n: np.asarray(getattr(layer, n).kernel.get_value(), np.float64) for n in names}
    sigmoid = lambda y: 1 / (1 + np.exp(-y))  # noqa: E731
    for row in range(2):
        h = np.zeros(16)
        for t in range(12):
            a, v, g = (x[row, t] @ kernel[n] for n in ("decay", "value", "gate"))
            if segments[row, t] == 0 or t and segments[row, t] != segments[row, t - 1]:
                h = np.zeros(16)
            h = sigmoid(a) * h + (1 - sigmoid(a)) * v
            np.testing.assert_allclose(got[row, t], (g * sigmoid(g) * h) @ kernel["out"], rtol=2e-5, atol=1e-6)


def test_documents_of_a_row_are_what_each_is_alone():
    graphdef, infos = describe_model(MIXED)
    hidden = jax.jit(lambda p, t, **where: nnx.merge(graphdef, p).hidden(t, **where))
    batch, params = random_batch(64, rows=1, lengths=(7, 2, 4)), random_params(infos)
    whole = hidden(params, batch["tokens"], positions=batch["positions"], segment_ids=batch["segment_ids"])
    for start, end in ((0, 7), (7, 9), (9, 13)):
        alone = np.zeros((1, 16), np.int32)
        alone[:, : end - start] = batch["tokens"][:, start:end]
        assert_leaves_agree(whole[:, start:end], hidden(params, alone)[:, : end - start])


def test_blocks_that_say_what_flat_fields_say_are_the_same_model():
    moe = MixtureOfExperts(experts=4, top_k=1)
    flat = TransformerConfig(depth=4, width=32, windows=(4, None), mlp=moe, mlp_every=2)
    blocks = (BlockConfig(mlp=SwiGLU, window=4), BlockConfig())
    same = dataclasses.replace(flat, windows=(None,), mlp_every=1, blocks=blocks)
    assert same.layer_specs() == flat.layer_specs() and same.runs == flat.runs
    assert same.product_flops(2, 16) == flat.product_flops(2, 16)
    assert same_model(flat, same) and not same_model(flat, dataclasses.replace(same, blocks=blocks[::-1]))
    assert not same_model(flat, dataclasses.replace(same, blocks=(BlockConfig(mlp=GELU, window=4), FULL)))
    assert same.active_param_count() == flat.active_param_count() < same.param_count() == flat.param_count()


def test_a_mixed_stack_counts_every_layers_parameters_and_products():
    attention, recurrent = (dataclasses.replace(MIXED, depth=1, blocks=(b,)) for b in (FULL, LINEAR))
    assert [type(layer.mixer).__name__ for layer in MIXED.layer_specs()[2:5]] == [
        "GatedRecurrence",
        "MultiHead",
        "GatedRecurrence",
    ]
    of_layer = attention.param_count() - recurrent.param_count()
    assert MIXED.param_count() == 8 * (recurrent.param_count() - 2 * 64 * 16 - 16) + 2 * of_layer + 2 * 64 * 16 + 16
    forward = MIXED.product_flops(2, 16)
    assert forward["recurrence"] == 6 * 2 * 2 * 16 * 4 * 16 * 16
    assert forward["qkv"] == 2 * attention.product_flops(2, 16)["qkv"]


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(windows=(4, None)), ["Transformer.windows has no effect with Transformer.blocks"]),
        (dict(blocks=(BlockConfig(mixer=GatedRecurrence(), window=4),)), ["Block.window = 4", "GatedRecurrence"]),
        (dict(blocks=(dataclasses.replace(LINEAR, rotary=False),)), ["Block.rotary = False", "GatedRecurrence"]),
        (dict(blocks=(BlockConfig(rotary=False),), positions=None), ["Block.rotary = False", "positions = None"]),
        (dict(blocks=(BlockConfig(window=0),)), ["Block.window = 0", "at least 1"]),
        (dict(blocks=(GatedRecurrence(),)), ["Transformer.blocks", "BlockConfig"]),
        (dict(blocks=(BlockConfig(mixer=len),)), ["Block.mixer = len", "called as (width, heads"]),
        (dict(blocks=(BlockConfig(mixer="GatedDeltaNet"),)), ["Block.mixer = 'GatedDeltaNet'", "@GatedDeltaNet() in"]),
        (dict(blocks=(BlockConfig(mlp="SwiGLU"),)), ["Block.mlp = 'SwiGLU'", "write @SwiGLU in gin"]),
        (dict(norm="RMSNorm"), ["Transformer.norm = 'RMSNorm'", "write @RMSNorm in gin"]),
        (dict(parametrisation=MuP(base_width=16)), ["Transformer.parametrisation", "GatedRecurrence", "MultiHead()"]),
    ],
)
def test_blocks_that_do_not_work_together_are_refused_before_anything_is_made(change, words):
    with raises_saying(ConfigError, *words):
        dataclasses.replace(MIXED, **change)


def test_heads_are_checked_where_a_layer_attends():
    with raises_saying(ConfigError, "Transformer.heads = 3", "does not divide"):
        dataclasses.replace(MIXED, heads=3, kv_heads=None, head_dim=None)
    dataclasses.replace(MIXED, heads=3, kv_heads=None, head_dim=None, blocks=(LINEAR,))


class InOrder(GatedRecurrence):
    """Needs the natural order."""

    any_order = False


def test_a_mixer_without_its_products_is_refused_when_it_is_made():
    @config.register(name="Uncounted")
    @dataclasses.dataclass(frozen=True)
    class Uncounted(Mixer):
        def __call__(self, width, heads, kv_heads, head_dim, **options):
            return GELU(width, 32, **options)

    bindings = ["train.model = @Transformer()", "Transformer.blocks = (@Block(),)", "Block.mixer = @Uncounted()"]
    with config.isolated(), raises_saying(ConfigError, "Uncounted", "has to define products"):
        config.load(bindings=bindings)
        config.call("train")


def test_a_mixer_that_needs_the_natural_order_refuses_another():
    config = dataclasses.replace(MIXED, blocks=(BlockConfig(mixer=InOrder()), FULL), attention=RingAttention())
    model = nnx.eval_shape(lambda: config.make(nnx.Rngs(0)))
    with Layout("context=4"), raises_saying(LayoutError, "InOrder", "RingAttention.zigzag = False"):
        model.order(16)


GIN = """
train.model = @Transformer()
Transformer.depth = 4
Transformer.blocks = (@recurrent/Block(), @recurrent/Block(), @recurrent/Block(), @Block())
recurrent/Block.mixer = @GatedRecurrence()
"""


def test_a_mixed_stack_is_written_in_gin_and_read_back():
    with config.isolated():
        config.load(bindings=GIN.strip().splitlines())
        run = config.call("train")
        assert run.model.blocks == (LINEAR, LINEAR, LINEAR, FULL)
    text = config.dumps("train", vars(run))
    with config.isolated():
        config.load(bindings=text.splitlines())
        assert config.call("train").model == run.model


RUN = TrainConfig(model=MIXED, layout=Layout("data=2,fsdp=4").abstract(), batch_size=8, seq_len=16)


@pytest.mark.long
def test_the_formulas_of_the_planner_refuse_a_mixer_that_they_do_not_know():
    assert {("fsdp",), ("data", "fsdp")} <= {c.axes for c in predict(RUN, "v5e:2x4")}  # which needs no formulas
    for formula in (lambda: estimate(RUN, "v5e:2x4"), lambda: products(MIXED, 16)):
        with raises_saying(ConfigError, "no formula covers", "GatedRecurrence", "traced step"):
            formula()
    with raises_saying(ConfigError, "GatedRecurrence", "jaxscale plan"):
        MIXED.activations(2, 16, layer=0)
    with raises_saying(ConfigError, "GatedRecurrence", "its own widths"):
        MIXED.at_width(32)
    kinds = (BlockConfig(), BlockConfig(mlp=GELU), BlockConfig(mlp=GeGLU))
    with raises_saying(ConfigError, "no formula covers", "layer 2", "third kind besides Transformer.mlp"):
        products(dataclasses.replace(MIXED, blocks=kinds), 16)
    assert products(dataclasses.replace(MIXED, blocks=kinds[:2]), 16)
    traced = plan_for(RUN, "v5e:2x4", compile="never")
    assert traced.error_bar.method == "traced" and traced.memory.device > traced.memory.state > 0


@pytest.mark.tpu_aot
def test_a_mixed_stack_is_planned_by_compiling():
    plan = plan_for(RUN, "v5e:2x4")
    assert plan.compiled is not None and plan.bytes == plan.compiled.bytes
    assert any("GatedRecurrence" in note and "traced step" in note for note in plan.notes)


def test_a_block_without_rotary_positions_does_not_see_the_order_of_its_tokens():
    """Without a causal mask such a layer treats a row as a set: in another order, tokens get the same hidden states."""
    nope = dataclasses.replace(MIXED, depth=2, attention=Bidirectional(), blocks=(BlockConfig(rotary=False),))
    order, tokens = np.random.default_rng(0).permutation(12), np.arange(12)[None]
    for model, same in ((nope, True), (dataclasses.replace(nope, blocks=(BlockConfig(rotary=False), FULL)), False)):
        graphdef, infos = describe_model(model)
        hidden = jax.jit(lambda p, t, g=graphdef: nnx.merge(g, p).hidden(t))
        params = random_params(infos)
        apart = jnp.abs(hidden(params, tokens)[:, order] - hidden(params, tokens[:, order])).max()
        assert (float(apart) < 1e-4) is same


@pytest.mark.long
def test_layers_with_and_without_rotary_positions_train_to_one_devices_numbers():
    config = dataclasses.replace(MIXED, depth=4, blocks=(BlockConfig(window=5), BlockConfig(rotary=False)))
    batch = random_batch(64, seq=8, lengths=(4, 1, 2))
    assert_layouts_agree(config, [Layout("context=2,tensor=2,fsdp=2")], batch=batch)


def test_only_settings_that_no_block_reads_are_said_to_have_no_effect():
    def idle(**fields):
        return {name for name, *_ in TransformerConfig(depth=1, width=16, heads=2, **fields).idle(16, None)}

    gated, soft, linear = (BlockConfig(mixer=m) for m in (GatedMultiHead(), SOFT(), GatedRecurrence(4)))
    assert idle(blocks=(gated,), attention=flash_attention, qk_norm=True) == set()
    assert idle(blocks=(soft,), attention=Bidirectional()) == set()  # it takes models that are not causal
    assert idle(blocks=(linear,), attention=RingAttention()) == set()  # the order of columns
    assert idle(blocks=(linear,), attention=flash_attention, qk_norm=True) == {
        "Transformer.attention", "Transformer.qk_norm",
    }  # fmt: skip
