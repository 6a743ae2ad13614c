"""The decoder against float64 NumPy, for a table of configs that has every option."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.models import BlockConfig, Learned, TransformerConfig
from jaxscale.nn import (
    GELU,
    GeGLU,
    GroupLimit,
    LayerNorm,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    MixtureOfExperts,
    MultiHeadLatent,
    NTKScaling,
    QKNorm,
    Rotary,
    SigmoidRouter,
    SoftmaxRouter,
    UnitOffsetRMSNorm,
    YarnScaling,
)
from jaxscale.step.loss import token_losses
from jaxscale.step.state import describe_model
from tests.truth import numpy_transformer as truth
from tests.truth.compare import assert_leaves_agree
from tests.truth.layouts import random_batch
from tests.truth.long import short
from tests.truth.params import random_params

Small = functools.partial(TransformerConfig, depth=2, vocab=61, width=32, heads=4, head_dim=8, hidden=48)

LONG_SHORT = [tuple(np.linspace(1, last, 4)) for last in (2, 7)]
CONFIGS = {
    "llama": Small(kv_heads=2),
    "gpt2": Small(norm=LayerNorm, norm_eps=1e-5, mlp=GELU, positions=Learned(16), bias=True, tied=True),
    "gemma2": Small(
        mlp=GeGLU,
        windows=(4, None),
        attention_softcap=2.0,
        logit_softcap=3.0,
        attention_scale=0.5,
        post_norm=True,
        tied=True,
        embed_scale=32**0.5,
    ),
    "gemma3": Small(
        depth=5,
        kv_heads=1,
        norm=UnitOffsetRMSNorm,
        mlp=GeGLU,
        positions=Rotary(1e6, LinearScaling(8.0)),
        local_positions=Rotary(1e4),
        windows=(3, 3, None),
        qk_norm=QKNorm(UnitOffsetRMSNorm),
        tied=True,
        post_norm=True,
        embed_scale=32**0.5,
    ),
    "qwen3": Small(kv_heads=2, head_dim=16, qk_norm=True, norm_eps=1e-2),
    "qwen2 with yarn": Small(qkv_bias=True, positions=Rotary(1e4, YarnScaling(4.0, 32.0, 1.0, 64))),
    "llama3.1": Small(positions=Rotary(5e5, Llama3Scaling(8.0, 1.0, 4.0, 64))),
    "palm": Small(parallel=True, kv_heads=1, tied=True, residual_scale=0.3),
    "parallel with post norms": Small(parallel=True, post_norm=True, bias=True, norm=LayerNorm),
    "ntk": Small(positions=Rotary(1e4, NTKScaling(4.0)), mlp=GELU),
    "no positions": Small(positions=None, windows=(2,), residual_scale=0.4, logit_scale=0.5),
    "learned with rotary locals": Small(positions=Learned(20), local_positions=Rotary(), windows=(5, None)),
    "unrolled": Small(depth=3, scan=False, blocks=(BlockConfig(window=4), BlockConfig())),
    "mixtral": Small(mlp=MixtureOfExperts(experts=4)),
    "deepseek": Small(
        depth=6,
        mlp=MixtureOfExperts(experts=4, hidden=8, router=SigmoidRouter(), shared=1),
        dense_mlp=GeGLU,
        dense_layers=1,
        mlp_every=2,
        windows=(4, None, 3),
    ),
    "olmo2": Small(kv_heads=2, qk_norm=QKNorm(across_heads=True), pre_norm=False, post_norm=True),
    "phi3": Small(positions=Rotary(1e4, LongRopeScaling(*LONG_SHORT, 6, 4.0))),
    "phi4": Small(positions=Rotary(fraction=0.5)),
    "deepseek v2": Small(
        depth=3,
        head_dim=None,
        attention_layer=MultiHeadLatent(16, None, 8, 6, 10),
        positions=Rotary(1e4, YarnScaling(4.0, 32.0, 1.0, 64, 0.7, 0.8)),
        mlp=MixtureOfExperts(
            experts=8, hidden=8, shared=2, router=SoftmaxRouter(normalized=False, scale=3.0, limit=GroupLimit(4, 2))
        ),
        dense_layers=1,
    ),
    "deepseek v3": Small(
        head_dim=None,
        attention_layer=MultiHeadLatent(16, 24, 8, 6, 10),
        mlp=MixtureOfExperts(
            experts=8, hidden=8, shared=1, router=SigmoidRouter(scale=2.5, limit=GroupLimit(4, 2, best=2))
        ),
        windows=(4, None),
    ),
    "recomputed": Small(memory="full", windows=(4, None)),
}


@pytest.mark.parametrize("name", short(12, CONFIGS))
def test_the_model_is_the_decoder_of_the_papers_on_packed_rows(name):
    _check(name, lengths=(5, 7, 3))


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_the_model_is_the_decoder_of_the_papers_on_whole_rows(name):
    _check(name, lengths=None)


def _check(name, lengths):
    config = CONFIGS[name]
    graphdef, infos = describe_model(config)
    params = random_params(infos)
    batch = random_batch(config.vocab, rows=2, lengths=lengths)
    rest = {k: batch[k] for k in ("positions", "segment_ids") if k in batch}
    got = jax.jit(lambda p, tokens, rest: nnx.merge(graphdef, p)(tokens, **rest))(params, batch["tokens"], rest)
    assert got.dtype == jnp.float32
    want = truth.logits(config, params, batch["tokens"], **rest)
    assert_leaves_agree(got, want, what=name)


def test_every_option_is_on_in_some_row_of_the_table():
    plain = TransformerConfig()
    sizes = {"depth", "vocab", "width", "heads", "head_dim", "hidden"}
    elsewhere = {"attention", "dropout", "dtype", "embedding", "overlap", "param_dtype", "parametrisation", "products"}
    elsewhere |= {"attention_dropout", "embed_gradient", "multi_token", "per_layer", "shared", "soft_prompt", "stack"}
    for field in TransformerConfig.__dataclass_fields__:
        if field not in sizes | elsewhere:
            assert any(getattr(c, field) != getattr(plain, field) for c in CONFIGS.values()), field


def test_a_bfloat16_model_keeps_float32_parameters_and_gives_float32_logits():
    config = Small(dtype="bfloat16", qk_norm=True)
    graphdef, infos = describe_model(config)
    assert {str(i.dtype) for i in jax.tree.leaves(infos)} == {"float32"}
    params = jax.tree.map(lambda i: jax.ShapeDtypeStruct(i.shape, i.dtype), infos)
    tokens = jax.ShapeDtypeStruct((2, 8), jnp.int32)
    assert jax.eval_shape(lambda p, t: nnx.merge(graphdef, p)(t), params, tokens).dtype == jnp.float32
    assert jax.eval_shape(lambda p, t: nnx.merge(graphdef, p).hidden(t), params, tokens).dtype == jnp.bfloat16
    halves = describe_model(Small(param_dtype="bfloat16"))[1]
    assert {str(i.dtype) for i in jax.tree.leaves(halves)} == {"bfloat16"}


def test_a_bfloat16_model_is_near_the_truth():
    config = Small(dtype="bfloat16")
    graphdef, infos = describe_model(config)
    params = random_params(infos)
    batch = random_batch(config.vocab, rows=2)
    got = jax.jit(lambda p, t: nnx.merge(graphdef, p)(t))(params, batch["tokens"])
    want = truth.logits(config, params, batch["tokens"])
    # 2 layers of about 8 roundings each, each of at most 2**-9, adding up as a random walk would, and twice that
    assert_leaves_agree(got, want, tolerance=2 * 4 * 2**-9)


def test_the_embedding_starts_at_unit_size_when_it_is_scaled_by_the_root_of_the_width():
    model = Small(embed_scale=32**0.5).make(nnx.Rngs(0))
    assert abs(float(jnp.std(model.embed.weight.get_value())) * 32**0.5 - 1) < 0.1


def test_loss_and_z_loss_are_those_of_the_papers():
    random = np.random.default_rng(0)
    hidden, weight = (random.normal(size=s).astype(np.float32) for s in ((2, 6, 16), (11, 16)))
    targets = random.integers(0, 11, (2, 6))
    for cap in (None, 3.0):
        z = hidden.astype(np.float64) @ weight.astype(np.float64).T
        want = truth.token_losses(z if cap is None else cap * np.tanh(z / cap), targets)
        assert_leaves_agree(token_losses(hidden, weight, jnp.asarray(targets), softcap=cap), want)
