"""SambaY's cross-decoder: gated memories against NumPy, attention to another layer's keys, one KV cache, layouts."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxscale as js
from jaxscale.errors import ConfigError
from jaxscale.infer.cache import Contiguous, cache_bytes
from jaxscale.models import BlockConfig, TransformerConfig
from jaxscale.nn import Attention, Context, CrossDecoderAttention, GatedMemory, Mamba2, ReversibleRun, Rotary
from jaxscale.nn.mixers.sambay import CrossAttention
from jaxscale.testing import check_model, compare_layouts

OPTIONS = dict(out_scale=1.0, dtype=jnp.float32, param_dtype=jnp.float32)
SAMBA = (BlockConfig(Mamba2(heads=4, state=4, groups=2)), BlockConfig())
BLOCKS = (*SAMBA, BlockConfig(GatedMemory(heads=4)), BlockConfig(CrossDecoderAttention()))
SIZES = dict(vocab=32, width=16, heads=2, hidden=16, depth=4)


def test_a_gated_memory_is_the_papers_formula():
    random = np.random.default_rng(0)
    x, memory = random.normal(size=(1, 5, 6)).astype(np.float32), random.normal(size=(1, 5, 4, 3)).astype(np.float32)
    layer = GatedMemory(heads=4, head_dim=3)(6, 2, 2, 3, rngs=nnx.Rngs(0), **OPTIONS)
    gate = np.einsum("bse,ehd->bshd", x, np.float64(layer.gate.kernel.get_value()))
    want = np.einsum("bshd,hde->bse", memory * gate / (1 + np.exp(-gate)), np.float64(layer.out.kernel.get_value()))
    np.testing.assert_allclose(layer(x, Context(shared={"memory": memory})), want, atol=1e-5)
    with pytest.raises(ConfigError, match="set GatedMemory.heads = 2 and GatedMemory.head_dim = 6"):
        layer(x, Context(shared={"memory": memory.reshape(1, 5, 2, 6)}))


def test_queries_of_the_other_layers_input_give_the_other_layers_output():
    x = np.random.default_rng(0).normal(size=(1, 5, 6)).astype(np.float32)
    other, context = Attention(6, 2, 1, 4, rngs=nnx.Rngs(0)), Context().sharing()
    want = other(x, context)
    names = ("rotary", "window", "softcap", "scale", "qk_norm")
    rest = dict(bias=False, out_bias=False, norm_eps=1e-6, overlap=False, kernel=other.kernel, **OPTIONS)
    layer = CrossDecoderAttention()(6, 2, 1, 4, rngs=nnx.Rngs(1), **dict.fromkeys(names), **rest)
    layer.q, layer.out = other.q, other.out
    assert isinstance(layer, CrossAttention)
    np.testing.assert_array_equal(layer(x, context), want)


@pytest.mark.long
def test_a_stack_keeps_documents_apart_and_decodes_with_one_layers_cache():
    config = TransformerConfig(**SIZES, blocks=BLOCKS)
    assert "Decodable" in check_model(config)
    two = TransformerConfig(**SIZES | {"depth": 2}, blocks=SAMBA)
    bytes_of = [cache_bytes(c.make(nnx.Rngs(0)), Contiguous(), 1, 1, 64) for c in (config, two)]
    assert bytes_of[0] == bytes_of[1] > 64 * 2 * 16 * 4


@pytest.mark.long
def test_layouts_and_pipelines_train_alike():
    config = TransformerConfig(**SIZES | {"depth": 8}, blocks=BLOCKS)
    # through eight layers, float32 gradients summed in another order differ by half more than the usual bound
    compare_layouts(config, [js.Layout("tensor=2,context=2,pipeline=2")], tolerance=3e-5).check()


def test_layers_that_nobody_gives_anything_to_are_refused():
    with pytest.raises(ConfigError, match=r"GatedMemory reads the memory .* put a block with @Mamba2\(\)"):
        TransformerConfig(depth=2, blocks=BLOCKS[1:3])
    with pytest.raises(ConfigError, match="CrossDecoderAttention reads the keys"):
        TransformerConfig(depth=2, blocks=(BLOCKS[0], BLOCKS[3]))
    with pytest.raises(ConfigError, match="set Transformer.stack = @Run"):
        TransformerConfig(**SIZES, blocks=BLOCKS, stack=ReversibleRun)


def test_keys_with_other_rotary_positions_than_the_queries_are_refused():
    cross, plain = BlockConfig(CrossDecoderAttention()), BlockConfig()
    local = dict(positions=Rotary(), local_positions=Rotary(theta=100.0))
    for blocks, options in (
        ((plain, dataclasses.replace(cross, rotary=False)), dict(positions=Rotary())),
        ((BlockConfig(window=4), cross), local),
        ((plain, cross, BlockConfig(rotary=False), cross), dict(positions=Rotary())),
    ):
        with pytest.raises(ConfigError, match="which have other rotary positions than its queries"):
            TransformerConfig(depth=len(blocks), blocks=blocks, **options)
    TransformerConfig(depth=3, blocks=(BlockConfig(window=4), plain, cross), **local)
    bare = (BlockConfig(rotary=False), dataclasses.replace(cross, rotary=False))
    TransformerConfig(depth=2, blocks=bare, positions=Rotary())
