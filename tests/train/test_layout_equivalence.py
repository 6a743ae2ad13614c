"""Sharded equals unsharded: one table of layouts, each training the same model to the same numbers."""

from __future__ import annotations

import dataclasses

import pytest

from jaxscale.layout import PRESETS, Layout
from jaxscale.models import TransformerConfig
from jaxscale.nn import GroupLimit, MixtureOfExperts, MultiHeadLatent, QKNorm, SigmoidRouter
from jaxscale.step import NextToken
from tests.truth.layouts import assert_layouts_agree, random_batch
from tests.truth.long import short

SEQ = 16
MODEL = TransformerConfig(depth=2, vocab=64, width=32, heads=4, kv_heads=4, head_dim=8, hidden=64)

# Everything at once: packing, accumulation over rows of unlike weight, a tied head, z-loss, biases, windows, and key
# heads that tensor=2 cuts and tensor=4 leaves whole.
EVERYTHING = dict(
    model=TransformerConfig(
        depth=2,
        vocab=64,
        width=32,
        heads=8,
        kv_heads=2,
        head_dim=8,
        hidden=64,
        windows=(5,),
        qk_norm=True,
        bias=True,
        tied=True,
        logit_softcap=5.0,
    ),
    batch=random_batch(64, rows=32, seq=SEQ, lengths=(7, 2, 4)),
    accumulate=4,
    objective=NextToken(z_loss=1e-2),
)

LAYOUTS = [
    Layout("data=8", "replicated"),
    Layout("fsdp=8"),
    Layout("tensor=4,data=2", "tensor"),
    Layout("data=2,fsdp=2,tensor=2"),
    Layout("data=2,fsdp=2,tensor=2", sequence_sharded=True),
    Layout("context=2,fsdp=2,tensor=2", "fsdp_context"),
    Layout("context=2,data=2,tensor=2", sequence_sharded=True),
    Layout("data=2,fsdp=4", "zero1"),
    Layout("data=2,fsdp=2,tensor=2", "zero2"),
    Layout("data=2,fsdp=2,tensor=2", "hierarchical"),
    Layout("replica=2,data=2,fsdp=2", "three_level"),
    Layout("data=2,fsdp=4", "fsdp"),
    Layout("data=2,tensor=4", "folded"),
]


# Others in the list have each axis of these, a sequence that is cut with and without tensors, and each preset but
# `fsdp_context`.
REPEATED = LAYOUTS[1], LAYOUTS[3], LAYOUTS[5]


@pytest.mark.parametrize(
    "layout", short(4, [pytest.param(x, marks=pytest.mark.long if x in REPEATED else (), id=str(x)) for x in LAYOUTS])
)
def test_training_with_everything_on_gives_the_same_numbers_on_every_layout(layout):
    assert_layouts_agree(layouts=[layout], **EVERYTHING)


@pytest.mark.parametrize(
    "layout",
    [pytest.param(Layout("tensor=4,data=2"), marks=pytest.mark.long), Layout("context=4,data=2", "fsdp")],
    ids=str,
)
def test_training_plainly_gives_the_same_numbers_on_every_layout(layout):
    assert_layouts_agree(MODEL, [layout], batch=random_batch(64, seq=SEQ))


@pytest.mark.parametrize("layout", [Layout("data=2,context=2,tensor=2", sequence_sharded=True)], ids=str)
def test_dropout_and_unlike_blocks_give_the_same_numbers_on_every_layout(layout):
    model = dataclasses.replace(MODEL, depth=3, dropout=0.2, windows=(5, None))
    assert_layouts_agree(model, [layout], batch=random_batch(64, seq=SEQ))


# Keys and values from narrow vectors, experts of a few groups; norms after the sub-layers, of all heads together.
LATENT = TransformerConfig(
    depth=2,
    vocab=64,
    width=32,
    heads=4,
    hidden=64,
    attention_layer=MultiHeadLatent(kv_rank=16, q_rank=16, plain_dim=8, rotary_dim=4, value_dim=8),
    mlp=MixtureOfExperts(
        experts=8, hidden=16, shared=1, router=SigmoidRouter(scale=2.5, limit=GroupLimit(4, 2, best=2))
    ),
    dense_layers=1,
)
OLMO = dataclasses.replace(MODEL, qk_norm=QKNorm(across_heads=True), pre_norm=False, post_norm=True)


@pytest.mark.parametrize(
    ("model", "layout"),
    short(
        1,
        [
            (LATENT, Layout("data=2,fsdp=2,tensor=2", sequence_sharded=True)),
            pytest.param(LATENT, Layout("data=2,fsdp=2,tensor=2", "zero2"), marks=pytest.mark.long),
            (LATENT, Layout("context=2,expert=2,tensor=2")),
            pytest.param(OLMO, Layout("data=2,tensor=4"), marks=pytest.mark.long),
            (OLMO, Layout("context=2,fsdp=2,tensor=2", sequence_sharded=True)),
        ],
    ),
    ids=lambda x: str(x) if isinstance(x, Layout) else "latent" if x is LATENT else "olmo",
)
def test_attention_from_latents_and_norms_over_all_heads_give_the_same_numbers_on_every_layout(model, layout):
    assert_layouts_agree(model, [layout], batch=random_batch(64, seq=SEQ))


def test_the_table_has_every_preset():
    assert {layout.rules for layout in LAYOUTS} == set(PRESETS)
