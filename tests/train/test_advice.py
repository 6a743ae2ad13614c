"""Every advice in an error works: what it says to change is changed, and the same check passes. Nothing is compiled."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxscale.errors import JaxscaleError
from jaxscale.layout import Layout, Pipeline, Rules, preset
from jaxscale.models import BlockConfig, TransformerConfig
from jaxscale.models.positions import Learned
from jaxscale.nn import (
    ExpertChoiceRouter,
    GatedDeltaNet,
    Mamba2,
    MemoryPolicy,
    MixedHeads,
    MixtureOfExperts,
    MultiHead,
    MultiHeadLatent,
    ReversibleRun,
    RingAttention,
    SoftmaxRouter,
    UlyssesAttention,
    dot_product_attention,
    flash_attention,
)
from jaxscale.optim import AdamW8bit, EightBit, MuP
from jaxscale.step import TrainConfig, blueprint_of
from jaxscale.step.effects import without_effect
from jaxscale.step.prepare import check
from tests.truth.errors import raises_saying

MODEL = dict(depth=2, vocab=64, width=32, heads=4, head_dim=8, hidden=64)
RUN = dict(seq_len=32, batch_size=16, steps=2)
LATENT = MultiHeadLatent(kv_rank=16, plain_dim=8, rotary_dim=4, value_dim=8)
EXPERTS = MixtureOfExperts(experts=4, top_k=2)
CAPACITY = dataclasses.replace(EXPERTS, capacity=1.25)
CHOICE = dataclasses.replace(EXPERTS, router=ExpertChoiceRouter(), capacity=1.0)
OWN = preset("fsdp_tensor")
WIDE = dict(vocab=50257, width=768, heads=12, head_dim=64, hidden=3072)


def checked(mesh="data=1", *, rules="fsdp_tensor", sequence_sharded=False, pipeline=None, run=None, **model):
    """Checks a run as training does before it compiles, on a layout that needs no devices."""
    layout = Layout(mesh, rules, sequence_sharded=sequence_sharded, pipeline=pipeline).abstract(8)
    config = TrainConfig(model=TransformerConfig(**{**MODEL, **model}), layout=layout, **{**RUN, **(run or {})})
    with pytest.MonkeyPatch.context() as patch:
        if "pipeline" in mesh:  # stages are checked before the model is traced
            patch.setitem(check.__globals__, "_trace", lambda *_: None)
        check(config)


def eight_bit(**storage):
    return dict(run=dict(optimizer=AdamW8bit(storage=EightBit(**storage))))


def grouped(mlp, group):
    return dataclasses.replace(mlp, group=group)


# what is refused; words of the advice; what it says to change, each way by itself
RING, PLAIN = RingAttention(), RingAttention(zigzag=False)
LAYOUTS = {
    "expert choice x context": (
        dict(mesh="context=2,data=2", attention=PLAIN, mlp=CHOICE),
        ("MixtureOfExperts.group = 16",),
        [dict(mlp=grouped(CHOICE, 16))],
    ),
    "capacity x zigzag": (
        dict(mesh="context=2,data=2", attention=RING, mlp=CAPACITY),
        ("MixtureOfExperts.group = 8", "MixtureOfExperts.capacity = None"),
        [dict(mlp=grouped(CAPACITY, 8)), dict(mlp=EXPERTS)],
    ),
    "groups x zigzag": (
        dict(mesh="context=2,data=2", attention=RING, mlp=grouped(CAPACITY, 16)),
        ("MixtureOfExperts.group = 8", "MixtureOfExperts.capacity = None", "RingAttention.zigzag = False"),
        [dict(attention=PLAIN)],
    ),
    "groups x folded experts": (
        dict(mesh="context=2,tensor=4", rules="folded", attention=RING, mlp=dataclasses.replace(CAPACITY, experts=8)),
        ("MixtureOfExperts.group = 4",),
        [dict(mlp=dataclasses.replace(CAPACITY, experts=8, group=4))],
    ),
    "interleaved, few layers": (
        dict(mesh="pipeline=4", pipeline="interleaved", depth=4),
        ("pipeline=2", "a schedule of 1 chunk a stage, such as 'lockstep'", "at least 8 layers"),
        [dict(mesh="pipeline=2"), dict(pipeline="lockstep"), dict(depth=8)],
    ),
    "interleaved, fewer layers than chunks": (
        dict(mesh="pipeline=2", pipeline="interleaved", depth=3),
        ("a schedule of 1 chunk a stage, such as 'lockstep'", "at least 4 layers"),
        [dict(pipeline="lockstep"), dict(depth=4)],
    ),
    "one layer": (
        dict(mesh="pipeline=2", depth=1),
        ("a mesh without pipeline", "at least 2 layers"),
        [dict(mesh="data=2"), dict(depth=2)],
    ),
    "windows x pipeline": (
        dict(mesh="pipeline=4", windows=(5, None), depth=6),
        ("pipeline=2", "at least 8 layers"),
        [dict(mesh="pipeline=2"), dict(depth=8)],
    ),
    "windows x stages that divide no width": (
        dict(mesh="pipeline=3", windows=(5, None), depth=9, vocab=63),
        ("pipeline=2", "a multiple of 6"),
        [dict(mesh="pipeline=2"), dict(depth=12)],
    ),
    "chunks that divide no width": (
        dict(mesh="pipeline=3", pipeline="interleaved", depth=9, vocab=63, run=dict(batch_size=18)),
        ("a schedule of 1 chunk a stage, such as 'lockstep'", "pipeline=2", "a multiple of 6"),
        [dict(pipeline="lockstep"), dict(mesh="pipeline=2"), dict(depth=12)],
    ),
    "18 tokens x context=4": (
        dict(mesh="context=4", attention=RING, run=dict(seq_len=18)),
        ("a sequence of 18", "16 or 24"),
        [dict(run=dict(seq_len=16)), dict(run=dict(seq_len=24))],
    ),
    "20 tokens in zigzag order": (
        dict(mesh="context=4", attention=RING, run=dict(seq_len=20)),
        ("16 or 24", "zigzag=False"),
        [dict(attention=PLAIN)],
    ),
    "18 tokens, sequence sharded": (
        dict(mesh="tensor=4", sequence_sharded=True, run=dict(seq_len=18)),
        ("a sequence of 18", "tensor=4", "16 or 20"),
        [dict(run=dict(seq_len=16)), dict(run=dict(seq_len=20))],
    ),
    "20 tokens, sequence sharded, zigzag": (
        dict(mesh="context=2,tensor=4", sequence_sharded=True, attention=RING, run=dict(seq_len=20)),
        ("16 or 24",),
        [dict(run=dict(seq_len=16)), dict(run=dict(seq_len=24))],
    ),
    "rows": (
        dict(mesh="data=4", run=dict(batch_size=6)),
        ("4 does not divide 6", "4 or 8"),
        [dict(run=dict(batch_size=4)), dict(run=dict(batch_size=8))],
    ),
    "rows of micro-batches": (
        dict(mesh="data=4", run=dict(batch_size=18, accumulate=3)),
        ("3 micro-batches", "12 or 24"),
        [dict(run=dict(batch_size=12, accumulate=3)), dict(run=dict(batch_size=24, accumulate=3))],
    ),
    "query heads": (
        dict(mesh="tensor=4", heads=6),
        ("4 or 8", "over 2 devices"),
        [dict(heads=4), dict(heads=8), dict(mesh="tensor=2")],
    ),
    "flash attention x context": (
        dict(mesh="context=2", attention=flash_attention),
        ("a mesh without context", "RingAttention() or dot_product_attention"),
        [dict(attention=RING), dict(attention=dot_product_attention)],
    ),
    "ulysses: heads": (
        dict(mesh="context=4,tensor=2", attention=UlyssesAttention()),
        ("ring=2",),
        [dict(attention=UlyssesAttention(ring=2))],
    ),
    "micro-batches": (
        dict(mesh="pipeline=2", pipeline="1f1b:3"),
        ("nearest number that does is 2",),
        [dict(pipeline="1f1b:2")],
    ),
    "micro-batches, interleaved": (
        dict(mesh="pipeline=2", pipeline="interleaved:3:2", depth=4),
        ("nearest number that does is 2",),
        [dict(pipeline="interleaved:2:2")],
    ),
    "a batch of too few rows": (
        dict(mesh="pipeline=4", pipeline="interleaved", depth=8, run=dict(batch_size=2)),
        ("nearest batch that can has 4 rows",),
        [dict(run=dict(batch_size=4))],
    ),
    "overlap without a ring": (
        dict(mesh="tensor=2", overlap=("mlp",)),
        ("sequence_sharded=True", "no overlap"),
        [dict(sequence_sharded=True), dict(overlap=())],
    ),
    "overlap of whole key heads": (
        dict(mesh="tensor=4", sequence_sharded=True, kv_heads=2, overlap=("attention", "mlp")),
        ("remove 'attention' from Transformer.overlap",),
        [dict(overlap=("mlp",))],
    ),
    "an axis that no rule uses": (
        dict(mesh="tensor=2", rules="replicated"),
        ("rules='fsdp_tensor'", "a mesh without tensor"),
        [dict(rules="fsdp_tensor"), dict(mesh="data=2")],
    ),
    "sequence_sharded beside rules": (
        dict(mesh="tensor=2", rules=OWN, sequence_sharded=True),
        ("map 'residual_seq' to ('context', 'tensor')",),
        [
            dict(
                sequence_sharded=False,
                rules=Rules(OWN.params, activations={**OWN.activations, "residual_seq": ("context", "tensor")}),
            )
        ],
    ),
    "learned positions": (
        dict(positions=Learned(16)),
        ("LearnedPositions.length = 32", "shorter train.seq_len"),
        [dict(positions=Learned(32)), dict(run=dict(seq_len=16))],
    ),
    "8-bit blocks of a head cut along the width": (
        dict(mesh="tensor=4", **WIDE, **eight_bit()),
        ("head/weight", "a device holds (50257, 192)", "EightBit(width=64)"),
        [eight_bit(width=64)],
    ),
    "8-bit blocks, larger than usual": (
        dict(mesh="tensor=4", **WIDE, **eight_bit(block_size=256)),
        ("tiles of (1, 256)", "EightBit(width=64)"),
        [eight_bit(width=64), eight_bit(block_size=256, width=64)],
    ),
    "reversible, parallel": (
        dict(stack=ReversibleRun, parallel=True),
        ("Transformer.parallel = False",),
        [dict(parallel=False)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LAYOUTS)
def test_what_a_refused_run_is_advised_passes(case):
    bad, words, ways = LAYOUTS[case]
    with raises_saying(JaxscaleError, *words):
        checked(**bad)
    for change in ways:
        checked(**{**bad, **change})


def test_a_pattern_that_the_depth_cuts_is_one_short_warning():
    blocks = (BlockConfig(Mamba2()), BlockConfig(MixedHeads()), BlockConfig(GatedDeltaNet()))
    model = TransformerConfig(**MODEL, blocks=blocks)
    config = TrainConfig(model=model, layout=None, **RUN)
    (sentence,) = [s for s in without_effect(config, blueprint_of(config)[0]) if "Transformer.blocks" in s]
    assert sentence == (
        "Transformer.blocks = 3 BlockConfig(...) has no effect: those after the first 2 have no layer "
        "(Transformer.depth)"
    )


def test_blocks_without_a_kernel_are_named_and_those_that_are_advised_have_one():
    def notes(mesh="data=1", **storage):
        layout, settings = Layout(mesh).abstract(8), eight_bit(**storage)["run"]
        config = TrainConfig(model=TransformerConfig(**{**MODEL, **WIDE}), layout=layout, **RUN, **settings)
        return [s for s in without_effect(config, blueprint_of(config)[0]) if "no kernel" in s]

    for storage, platforms in ((dict(block_size=256), "TPU"), (dict(block_size=64), "GPU or TPU")):
        (sentence,) = notes(**storage)
        assert f"no kernel for {platforms} " in sentence and sentence.endswith("EightBit.block_size = 128")
    (sentence,) = notes(width=64)
    assert sentence.endswith("EightBit.width = None")
    assert not notes() and not notes("tensor=4", width=64)  # there the layout takes no larger ones


@pytest.mark.long
def test_a_router_that_the_loss_does_not_train_is_named_and_the_one_that_is_advised_is_trained():
    def tried(**router):
        experts = MixtureOfExperts(experts=4, top_k=1, router=SoftmaxRouter(**router))
        config = TrainConfig(model=TransformerConfig(**MODEL, mlp=experts), layout=None, **RUN)
        grads = nnx.grad(lambda m: (m(jnp.arange(8).reshape(1, 8)) ** 2).mean())(config.model.make(nnx.Rngs(0)))
        (of_router,) = [
            g for at, g in jax.tree_util.tree_leaves_with_path(grads) if "router" in jax.tree_util.keystr(at)
        ]
        sentences = without_effect(config, blueprint_of(config)[0])
        return [s for s in sentences if "does not train the router" in s], of_router

    (sentence,), gradient = tried()
    assert "SoftmaxRouter(normalized=False)" in sentence and abs(gradient).max() < 1e-6
    sentences, gradient = tried(normalized=False)
    assert not sentences and abs(gradient).max() > 1e-5


MODELS = {
    "heads": (dict(heads=3, head_dim=None), ("nearest that does is 2", "head_dim"), [dict(heads=2), dict(head_dim=8)]),
    "heads as many as the width": (dict(heads=40, head_dim=None), ("nearest that does is 16",), [dict(heads=16)]),
    "heads of an odd width": (dict(width=33, heads=2, head_dim=None), ("; set head_dim",), [dict(head_dim=8)]),
    "key heads": (dict(kv_heads=3), ("nearest that does is 2",), [dict(kv_heads=2)]),
    "an odd head": (dict(head_dim=7), ("make it even",), [dict(head_dim=8)]),
    "no norms": (
        dict(pre_norm=False),
        ("post_norm = True", "parallel = False"),
        [dict(post_norm=True, parallel=False)],
    ),
    "experts' overlap": (
        dict(mlp=EXPERTS, overlap=("attention", "mlp")),
        ("use ('attention',)",),
        [dict(overlap=("attention",))],
    ),
    "experts' tiles": (
        dict(mlp=EXPERTS, memory=MemoryPolicy(tile=("mlp_hidden",))),
        ("remove it from MemoryPolicy.tile",),
        [dict(memory=MemoryPolicy())],
    ),
    "float16": (dict(dtype="float16"), ("'bfloat16'", "'float32'"), [dict(dtype="bfloat16"), dict(dtype="float32")]),
    "no windows": (dict(windows=()), ("(None,)",), [dict(windows=(None,))]),
    "latent, key heads": (
        dict(attention_layer=LATENT, head_dim=None, kv_heads=4),
        ("remove it",),
        [dict(kv_heads=None)],
    ),
    "latent, overlap": (
        dict(attention_layer=LATENT, head_dim=None, overlap=("attention",)),
        ("remove it",),
        [dict(overlap=())],
    ),
    "latent, parametrised": (
        dict(attention_layer=LATENT, head_dim=None, parametrisation=MuP(base_width=16)),
        ("use MultiHead()",),
        [dict(attention_layer=MultiHead(), head_dim=8)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MODELS)
def test_what_a_refused_model_is_advised_passes(case):
    bad, words, ways = MODELS[case]
    with raises_saying(JaxscaleError, *words):
        TransformerConfig(**{**MODEL, **bad})
    for change in ways:
        TransformerConfig(**{**MODEL, **bad, **change})


def sizes(mesh):
    return lambda: Layout(mesh).abstract(8)


def mixture(**settings):
    return lambda: MixtureOfExperts(experts=4, top_k=2, **settings)


PARTS = {
    "the rest of the devices": (sizes("data=-1,tensor=3"), ("divides them is 2",), [sizes("data=-1,tensor=2")]),
    "chunks": (
        lambda: Pipeline("1f1b", chunks=2),
        ("'interleaved' has more",),
        [lambda: Pipeline("interleaved", chunks=2)],
    ),
    "a router without capacity": (
        mixture(router=ExpertChoiceRouter()),
        ("set MixtureOfExperts.capacity, 1.0",),
        [mixture(router=ExpertChoiceRouter(), capacity=1.0)],
    ),
    "a gate of nothing": (
        mixture(shared_gate=True),
        ("set shared, or leave it False",),
        [mixture(shared_gate=True, shared=1), mixture()],
    ),
    "interleaved": (
        lambda: Pipeline("interleaved").table(4, 6),
        ("nearest is 8",),
        [lambda: Pipeline("interleaved").table(4, 8)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PARTS)
def test_what_a_refused_part_is_advised_passes(case):
    bad, words, ways = PARTS[case]
    with raises_saying(JaxscaleError, *words):
        bad()
    for way in ways:
        way()


def test_latent_heads_need_not_divide_the_width():
    checked(attention_layer=LATENT, head_dim=None, heads=3, width=32)
    checked("tensor=2", attention_layer=LATENT, head_dim=None, heads=6, width=32)
