"""Sizes that follow from depth, counts against the papers and against counting by hand, and errors."""

from __future__ import annotations

import dataclasses

import jax
import pytest
from flax import nnx

from jaxscale.errors import ConfigError
from jaxscale.models import (
    Learned,
    TransformerConfig,
    deepseek_moe_16b,
    deepseek_v2_lite,
    deepseek_v3,
    gemma2_2b,
    gemma2_9b,
    gemma3,
    gemma4_31b,
    gemma4_e2b,
    glm4_5,
    glm4_5_air,
    gpt2,
    gpt_oss_20b,
    gpt_oss_120b,
    granite4_h_tiny,
    llama3_8b,
    llama3_70b,
    llama3_405b,
    mixtral_8x7b,
    nemotron3_nano,
    olmo2_7b,
    olmo3_7b,
    phi3_mini,
    qwen3,
    sheared_llama_1_3b,
    smallthinker_21b,
    smollm3_3b,
)
from jaxscale.nn import (
    GELU,
    GatedMultiHead,
    GeGLU,
    GroupLimit,
    Mamba2,
    MixtureOfExperts,
    MultiHeadLatent,
    SoftmaxRouter,
)
from jaxscale.step.state import describe_model
from tests.truth.errors import raises_saying

SMALL = dict(vocab=61, width=32, heads=4, head_dim=8, hidden=48)


PUBLISHED = {
    gpt2: 124_439_808,
    llama3_8b: 8_030_261_248,
    llama3_70b: 70_553_706_496,
    llama3_405b: 405_853_388_800,
    mixtral_8x7b: 46_702_792_704,
    qwen3: 8_190_735_360,
    gemma2_2b: 2_614_341_888,
    gemma2_9b: 9_241_705_984,
    gemma3: 3_880_263_168,
    gemma4_31b: 30_697_345_340,
    phi3_mini: 3_821_079_552,
    sheared_llama_1_3b: 1_345_423_360,
    smollm3_3b: 3_075_098_624,
}


@pytest.mark.parametrize("preset", PUBLISHED, ids=lambda p: p.__name__)
def test_a_preset_has_the_published_number_of_parameters(preset):
    assert preset().param_count() == PUBLISHED[preset]


def test_presets_whose_papers_round_have_the_published_number_of_parameters():
    assert round(olmo2_7b().param_count() / 1e9, 1) == 7.3
    assert round(olmo3_7b().param_count() / 1e9, 1) == 7.3
    assert round(deepseek_v2_lite().param_count() / 1e9, 1) == 15.7
    assert round(deepseek_v3().param_count() / 1e9) == 671


@pytest.mark.long
def test_mixtures_have_the_published_numbers_of_active_parameters():
    assert round(mixtral_8x7b().active_param_count() / 1e9, 1) == 12.9
    # as published: 20.91B and 116.83B in all, of which a token uses 3.61B and 5.13B without the embedding's table
    for preset, total, active in ((gpt_oss_20b, 20.91, 3.61), (gpt_oss_120b, 116.83, 5.13)):
        assert round(preset().param_count() / 1e9, 2) == total
        assert round((preset().active_param_count() - 201088 * 2880) / 1e9, 2) == active
    # as published: a token uses 32B and 12B without the embedding's table and the head
    for preset, total, active in ((glm4_5, 353, 32), (glm4_5_air, 107, 12)):
        assert round(preset().param_count() / 1e9) == total
        assert round((preset().active_param_count() - 2 * 151552 * preset().sizes.width) / 1e9) == active
    # as published (README_WEIGHTS.md): 11.5B of DeepSeek-V3's module are not shared with the model
    assert abs(deepseek_v3(multi_token=1).param_count() - deepseek_v3().param_count() - 11.5e9) < 0.2e9
    assert round(granite4_h_tiny().param_count() / 1e9, 1) == 6.9
    assert round(granite4_h_tiny().active_param_count() / 1e9) == 1
    assert llama3_8b().active_param_count() == llama3_8b().param_count()
    config = deepseek_moe_16b()
    assert round(config.param_count() / 1e9, 1) == 16.4
    assert round(config.active_param_count() / 1e9, 1) == 2.8
    config, vocabulary = smallthinker_21b(), 2 * 151936 * 2560
    assert round((config.param_count() - vocabulary) / 1e9) == 21
    assert round((config.active_param_count() - vocabulary) / 1e9) == 3


@pytest.mark.long
def test_gemma4_e2b_has_the_published_number_of_parameters():
    config = gemma4_e2b()  # as published: 2.3B without the tables of each layer's inputs
    assert round((config.param_count() - 262144 * 35 * 256) / 1e9, 1) == 2.3
    assert [i for i, w in enumerate(config.layer_windows()) if w is None] == [4, 9, 14, 19, 24, 29, 34]


@pytest.mark.long
def test_nemotron3_nano_has_the_published_numbers_of_parameters():
    assert round(nemotron3_nano().param_count() / 1e9, 1) == 31.6
    assert round(nemotron3_nano().active_param_count() / 1e9, 1) == 3.6


def test_a_preset_takes_changes_and_refuses_what_is_no_field():
    assert dataclasses.replace(llama3_8b(), depth=2, memory="none") == llama3_8b(depth=2, memory="none")
    with raises_saying(ConfigError, "llama3_8b", "'detph'", "did you mean 'depth'"):
        llama3_8b(detph=2)


def test_gemma3_has_five_local_layers_for_each_global_one():
    windows = gemma3().layer_windows()
    assert len(windows) == 34
    assert [i for i, w in enumerate(windows) if w is None] == [5, 11, 17, 23, 29]
    assert set(windows) == {1024, None}


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("dense, every", [(0, 1), (1, 1), (1, 2)])
def test_the_pattern_of_windows_is_kept_through_runs(depth, dense, every):
    config = TransformerConfig(depth=depth, windows=(3, 2, None), dense_layers=dense, mlp_every=every)
    in_order = [w for group, repeats in config.runs for _ in range(repeats) for w in group]
    assert in_order == config.layer_windows() == ([3, 2, None] * 3)[:depth]


def test_experts_stand_where_the_pattern_says():
    def of(**pattern):
        config = TransformerConfig(depth=7, width=32, mlp=MixtureOfExperts(), **pattern)
        has_router = []
        for run in describe_model(config)[1]["runs"].values():
            group = ["router" in block["mlp"] for block in run["blocks"].values()]
            repeats = jax.tree.leaves(run)[0].shape[0]
            has_router += group * repeats
        return [i for i, experts in enumerate(has_router) if experts]

    assert of() == list(range(7))
    assert of(dense_layers=2) == [2, 3, 4, 5, 6]
    assert of(mlp_every=2) == [1, 3, 5]
    assert of(dense_layers=1, mlp_every=3, windows=(4, None)) == [3, 6]


@pytest.mark.parametrize("mlp", [TransformerConfig().mlp, GELU])
def test_depth_alone_gives_sizes_that_fit_and_grow(mlp):
    counts = []
    for depth in range(1, 13):
        config = TransformerConfig(depth=depth, mlp=mlp)
        z = config.sizes
        assert z.heads * z.head_dim == z.width and z.kv_heads == z.heads
        assert z.hidden % 64 == 0 and 2.6 * z.width <= z.hidden <= 4 * z.width
        counts.append(config.param_count())
    assert counts == sorted(set(counts))


def _by_hand(config, batch, seq):
    """FLOPs of a forward pass: each weight's matrix once per token, each pair of positions once per head."""
    _, infos = describe_model(config)
    leaves = jax.tree.leaves(infos)
    kernels = sum(i.size for i in leaves if i.path.endswith(("/kernel", "/router")))
    used = config.mlp.top_k / config.mlp.experts if isinstance(config.mlp, MixtureOfExperts) else 0
    kernels += sum(int(i.size * used) for i in leaves if "experts" in i.axes)
    head = infos["embed" if config.tied else "head"]["weight"].size
    pairs = 0
    for layer in range(config.depth):
        window = config.windows[layer % len(config.windows)]
        for i in range(seq):
            for j in range(i + 1):
                pairs += window is None or i - j < window
    per_pair = 2 * config.sizes.heads * (config.sizes.head_dim + config.sizes.value_dim)  # a score, a value mixed in
    return batch * (seq * 2 * (kernels + head) + pairs * per_pair)


@pytest.mark.parametrize(
    "config",
    [
        TransformerConfig(depth=2),
        TransformerConfig(depth=3, **SMALL, kv_heads=2, windows=(4, 100, None), mlp=GeGLU),
        TransformerConfig(depth=2, **SMALL, mlp=GELU, tied=True, bias=True, positions=Learned(32), parallel=True),
        TransformerConfig(depth=5, **SMALL, mlp=MixtureOfExperts(hidden=24, shared=2), dense_layers=2, mlp_every=2),
        TransformerConfig(depth=5, **{**SMALL, "head_dim": 16}, windows=(1, None), qk_norm=True, post_norm=True),
        TransformerConfig(depth=2, width=32, heads=4, attention_layer=MultiHeadLatent(8, 12, 6, 4, 10)),
        TransformerConfig(depth=2, width=32, heads=4, attention_layer=MultiHeadLatent(8, None, 6, 4, 10)),
    ],
)
@pytest.mark.parametrize("batch, seq", [(1, 1), (3, 17)])
def test_flops_are_those_counted_by_hand(config, batch, seq):
    forward = _by_hand(config, batch, seq)
    assert config.flops(batch, seq, training=False) == forward
    assert config.flops(batch, seq) == 3 * forward


@pytest.mark.parametrize(
    "fields, words",
    [
        (dict(depth=0), ["Transformer.depth = 0", "at least 1"]),
        (dict(heads=-2), ["Transformer.heads = -2", "at least 1"]),
        (dict(heads=8, kv_heads=3), ["kv_heads = 3", "heads = 8", "is 2"]),
        (dict(width=32, heads=48), ["heads = 48", "width = 32", "head_dim"]),
        (dict(dense_layers=5), ["dense_layers = 5", "0 to the depth, 4"]),
        (dict(mlp_every=0), ["mlp_every = 0", "at least 1"]),
        (dict(mlp=MixtureOfExperts(), memory="minimal"), ["Transformer.memory", "'mlp_hidden'", "MemoryPolicy.tile"]),
        (dict(mlp=MixtureOfExperts(), overlap=("mlp",)), ["Transformer.overlap", "'mlp'", "('attention',)"]),
        (dict(windows=()), ["windows", "empty", "(None,)"]),
        (dict(windows=None), ["Transformer.windows = None", "must be a tuple, such as (None,)"]),
        (dict(windows=1024), ["Transformer.windows = 1024", "as (1024,)"]),
        (dict(overlap="mlp"), ["Transformer.overlap = 'mlp'", "as ('mlp',)"]),
        (dict(blocks=None), ["Transformer.blocks = None", "as ()"]),
        (dict(windows=(4, 0)), ["windows has 0", "at least 1"]),
        (dict(dropout=1.0), ["dropout = 1.0", "below 1"]),
        (dict(dtype="float16"), ["Transformer.dtype", "'float16'", "'bfloat16'"]),
        (dict(param_dtype="int8"), ["Transformer.param_dtype", "'int8'", "'float32'"]),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(fields, words):
    with raises_saying(ConfigError, *words):
        TransformerConfig(**fields)


def test_a_sequence_longer_than_the_learned_positions_is_refused():
    config = TransformerConfig(depth=1, **SMALL, positions=Learned(8))
    graphdef, infos = describe_model(config)
    params = jax.tree.map(lambda i: jax.ShapeDtypeStruct(i.shape, i.dtype), infos)
    with raises_saying(ConfigError, "9 tokens", "8 learned positions", "LearnedPositions.length = 9"):
        jax.eval_shape(lambda p, t: nnx.merge(graphdef, p)(t), params, jax.ShapeDtypeStruct((1, 9), "int32"))


def test_a_config_is_a_value():
    assert TransformerConfig(windows=[4, None]) == TransformerConfig(windows=(4, None))
    assert hash(gemma3()) == hash(gemma3())


def test_settings_without_effect_on_latent_attention_are_refused():
    layer = MultiHeadLatent()
    for field, value in (("head_dim", 64), ("kv_heads", 2), ("qk_norm", True), ("qkv_bias", True)):
        with raises_saying(ConfigError, f"Transformer.{field} = {value}", "MultiHeadLatent", "remove it"):
            TransformerConfig(width=64, heads=4, attention_layer=layer, **{field: value})
    with raises_saying(ConfigError, "MultiHeadLatent has its own widths", "MultiHead()"):
        TransformerConfig(width=64, heads=4, attention_layer=layer).at_width(128)


def test_a_model_without_any_norms_is_refused():
    with raises_saying(ConfigError, "pre_norm = False", "post_norm = True"):
        TransformerConfig(pre_norm=False)


def test_groups_that_experts_cannot_be_limited_to_are_refused():
    for limit in (GroupLimit(3, 2), GroupLimit(8, 1), GroupLimit(4, 2, best=3)):
        with raises_saying(ConfigError, "does not work with 8 experts and top_k = 2"):
            MixtureOfExperts(experts=8, top_k=2, router=SoftmaxRouter(limit=limit))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (None, r"Transformer.attention_layer = None: must be MultiHead\(\), .*; the nearest is MultiHead\(\)"),
        (GatedMultiHead, r"attention_layer = GatedMultiHead: must be .*; write GatedMultiHead\(\)$"),
        (Mamba2(), r"attention_layer = Mamba2\(.*\): must be .*; other mixers are set as Block.mixer"),
    ],
)
def test_what_is_no_attention_layer_is_refused_with_the_nearest(layer, message):
    with pytest.raises(ConfigError, match=message):
        TransformerConfig(attention_layer=layer)
