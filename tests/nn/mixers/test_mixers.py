"""Mixers with a state of fixed size pass the checks of mixers: documents, decoding with a cache, layouts."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxscale.errors import ConfigError
from jaxscale.layout import Layout, Pipeline
from jaxscale.models import BlockConfig, TransformerConfig
from jaxscale.nn import NoFeedForward, NoMixer, RingAttention, SquaredReLU
from jaxscale.nn.mixers import (
    HSTU,
    MLGRU,
    RAT,
    SOFT,
    BlockLinear,
    GatedDeltaNet,
    GatedLinearAttention,
    GatedMemory,
    KimiDeltaAttention,
    LinearAttention,
    LongConvolution,
    Mamba2,
    RetNet,
)
from jaxscale.step.state import describe_model
from jaxscale.testing import check_mixer, compare_layouts
from pallas_kernels import chosen, forget
from pallas_kernels.dispatch import on_device
from tests.truth.layouts import random_batch
from tests.truth.long import short

MIXERS = [
    GatedDeltaNet(key_heads=2, value_dim=4, taps=3),
    *(
        pytest.param(m, marks=pytest.mark.long)
        for m in (
            KimiDeltaAttention(value_dim=4, rank=3),
            Mamba2(groups=2, state=4),
            LinearAttention(key_dim=4),
            # norms over few numbers amplify what rounding changes, on one device too
            GatedLinearAttention(rank=2, value_dim=16),
            RetNet(value_dim=16),
            MLGRU(channels=24),
        )
    ),
]


@pytest.mark.long
@pytest.mark.parametrize("mixer", MIXERS, ids=lambda m: type(m).__name__)
def test_mixers_keep_documents_apart_and_decode(mixer):
    check_mixer(mixer)


@pytest.mark.long
@pytest.mark.parametrize(
    "mixer",
    [
        GatedDeltaNet,
        KimiDeltaAttention,
        Mamba2,
        partial(GatedLinearAttention, rank=2, value_dim=16),
        LinearAttention,
    ],
)
def test_with_products_in_bfloat16_decoding_is_training_to_its_rounding(mixer):
    check_mixer(mixer(product_dtype="bfloat16"), tolerance=3e-2)


@pytest.mark.parametrize("mixer", short(1, [GatedDeltaNet(taps=1), LongConvolution(1, features=2, hidden=8, taps=1)]))
def test_convolutions_of_one_token_decode_without_a_state(mixer):
    check_mixer(mixer)


def test_products_have_the_models_dtype_unless_the_mixer_names_another():
    def products(mixer, dtype):
        forget()
        config = TransformerConfig(vocab=8, width=32, heads=2, depth=1, hidden=8, dtype=dtype, blocks=(mixer,))
        graphdef, infos = describe_model(config)
        params = jax.tree.map(lambda info: jax.ShapeDtypeStruct(info.shape, info.dtype), infos)
        tokens = jax.ShapeDtypeStruct((1, 64), jnp.int32)
        with on_device("TPU v5"):
            jax.eval_shape(lambda params, tokens: nnx.merge(graphdef, params).hidden(tokens), params, tokens)
        return {dict(c.case)["facts"].dtype for c in chosen("chunked_recurrence")}

    delta, exact = BlockConfig(mixer=GatedDeltaNet()), BlockConfig(mixer=GatedDeltaNet(product_dtype="float32"))
    assert products(delta, "bfloat16") == {"bfloat16"}
    assert products(delta, "float32") == products(exact, "bfloat16") == {"float32"}
    with pytest.raises(ConfigError, match="RetNet.product_dtype = 'int8': must be None, 'float32' or 'bfloat16'"):
        RetNet(product_dtype="int8")


@pytest.mark.long
@pytest.mark.parametrize("mixer", MIXERS, ids=lambda m: type(m).__name__)
def test_mixers_train_alike_on_every_layout(mixer):
    layouts = (Layout("context=2,tensor=2,fsdp=2"), Layout("pipeline=2,context=2,data=2", pipeline=Pipeline("1f1b")))
    check_mixer(mixer, layouts, depth=2)


MESHES = (
    "data=8", "fsdp=8", "context=8", "tensor=4,data=2", "data=2,fsdp=2,tensor=2", "data=2,context=2,tensor=2",
    "context=4,tensor=2", "fsdp=2,context=4", "pipeline=2,data=2,tensor=2", "pipeline=2,context=2,tensor=2",
    "pipeline=2,fsdp=2,context=2", "pipeline=2,context=4",
)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("mesh", MESHES)
def test_a_hybrid_with_attention_has_the_gradients_of_one_device_in_packed_rows(mesh):
    sizes = dict(depth=4, width=32, heads=4, hidden=64, vocab=32)
    config = TransformerConfig(
        **sizes, blocks=(BlockConfig(mixer=GatedDeltaNet()), BlockConfig()), attention=RingAttention()
    )
    # one step: on one device, too, parameters 1e-7 apart have gradients 1e-3 apart after it
    compare_layouts(
        config, [Layout(mesh)], batch=random_batch(32, rows=8, seq=48, lengths=(20, 17, 6)), steps=1
    ).check()


@pytest.mark.parametrize(
    "mixer,message",
    [
        (GatedDeltaNet(heads=4, key_heads=3), "GatedDeltaNet has 3 key_heads, which must divide its 4 heads"),
        (Mamba2(heads=4, groups=3), "Mamba2 has 3 groups, which must divide its 4 heads"),
    ],
)
def test_heads_that_do_not_divide_are_refused(mixer, message):
    with pytest.raises(ConfigError, match=message):
        TransformerConfig(width=16, heads=2, blocks=(BlockConfig(mixer=mixer),)).validate()


def test_a_block_of_one_sub_layer_has_one_norm_and_stores_nothing_without_a_mixer():
    one = dict(width=16, heads=2, hidden=32, vocab=8, depth=2)
    blocks = (BlockConfig(mlp=NoFeedForward), BlockConfig(NoMixer(), SquaredReLU))
    config = TransformerConfig(**one, blocks=blocks)
    counted = 2 * 8 * 16 + 3 * 16 + 4 * 16 * 16 + 2 * 16 * 32  # embedding and head, norms, attention, feed-forward
    assert config.param_count() == counted
    assert config.product_flops(1, 4)["mlp_up"] == 2 * 4 * 16 * 32
    for wrong, message in (
        (dict(blocks=blocks, parallel=True), "Transformer.parallel = False"),
        (dict(blocks=(BlockConfig(NoMixer(), NoFeedForward),)), "does nothing; remove it"),
    ):
        with pytest.raises(ConfigError, match=message):
            TransformerConfig(**one, **wrong).validate()


@pytest.mark.parametrize("size", [0, -1, 2.5, True, "2"])
@pytest.mark.parametrize(
    "mixer,names",
    [
        (RAT, "heads groups"),
        (BlockLinear, "heads"),
        (partial(HSTU, length=4), "heads key_dim value_dim"),
        (SOFT, "heads"),
        (MLGRU, "channels"),
        (GatedMemory, "heads head_dim"),
        (GatedDeltaNet, "heads key_heads key_dim value_dim taps"),
        (KimiDeltaAttention, "heads key_dim value_dim rank taps"),
        (Mamba2, "heads head_dim state groups taps"),
        (LinearAttention, "heads key_dim value_dim"),
        (RetNet, "heads value_dim"),
        (GatedLinearAttention, "heads key_dim value_dim rank"),
    ],
)
def test_sizes_that_are_no_whole_numbers_are_refused_and_zero_is_not_the_models_size(mixer, names, size):
    for name in names.split():
        with pytest.raises(ConfigError, match=rf"\.{name} = {size!r}: must be .*a whole number of at least 1"):
            mixer(**{name: size})


def test_flops_are_those_of_the_products():
    config = TransformerConfig(width=16, heads=2, head_dim=8)
    got = KimiDeltaAttention(rank=4).products(config, 3, 5, None)
    assert got["residual_mid"] == 2 * 15 * 16 * 16
    assert got["qkv"] == 2 * 15 * (16 * (3 * 16 + 2) + 2 * 16 * 4 + 2 * 4 * 16)
