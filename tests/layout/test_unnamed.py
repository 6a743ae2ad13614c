"""Logical axes inferred for models without names, written without a mesh in mind."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.errors import LayoutError
from jaxscale.layout import Layout, TensorInfo, fitting_layout, infer_names, shardings_of
from jaxscale.plan.collectives import collectives
from tests.truth.compare import assert_leaves_agree
from tests.truth.errors import raises_saying
from tests.truth.long import short

LAYOUT = Layout("data=2,tensor=4")


class Layer(nnx.Module):
    """Attention and feed-forward from Flax's own layers."""

    def __init__(self, width, rngs):
        self.ln1, self.ln2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs)
        self.fc1, self.fc2 = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        x = x + self.attn(self.ln1(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.fc2(nnx.gelu(self.fc1(self.ln2(x))))


class Decoder(nnx.Module):
    """GPT-2 with two unrolled layers."""

    def __init__(self, rngs):
        self.table, self.places = nnx.Embed(64, 16, rngs=rngs), nnx.Embed(8, 16, rngs=rngs)
        self.layers = nnx.List([Layer(16, rngs) for _ in range(2)])
        self.last = nnx.LayerNorm(16, rngs=rngs)

    def __call__(self, ids):
        x = self.table(ids) + self.places(jnp.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.table.attend(self.last(x))


def decoder():
    graphdef, params = nnx.split(Decoder(nnx.Rngs(0)))
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 64, (4, 8)))
    return lambda p, ids: nnx.merge(graphdef, p)(ids).astype(jnp.float32).var(), nnx.to_pure_dict(params), ids


def scanned():
    """A gated, fused, stacked decoder in plain JAX."""
    rng = np.random.default_rng(0)
    w = lambda *s: jnp.asarray(rng.standard_normal(s) / s[-2] ** 0.5, jnp.float32)  # noqa: E731
    layers = {"qkv": w(3, 3, 16, 4, 8), "o": w(3, 4, 8, 16), "gu": w(3, 2, 16, 32), "d": w(3, 32, 16)}
    params = {"e": w(48, 16), "layers": layers, "out": w(16, 48)}

    def fn(p, ids):
        def layer(x, p):
            h = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
            q, k, v = jnp.einsum("bse,cehd->cbshd", h, p["qkv"])
            z = jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", q, k))
            x = x + jnp.einsum("bhst,bthd,hde->bse", z, v, p["o"])
            gate, up = jnp.einsum("bse,cef->cbsf", x, p["gu"])
            return x + (jax.nn.silu(gate) * up) @ p["d"], None

        x, _ = jax.lax.scan(layer, p["e"][ids], p["layers"])
        return jax.nn.logsumexp(x @ p["out"], -1).sum()

    return fn, params, jnp.asarray(rng.integers(0, 48, (4, 8)))


class Mixer(nnx.Module):
    """A convolutional stem and two layers that mix patches, then channels (Tolstikhin et al. 2021)."""

    def __init__(self, rngs):
        self.stem = nnx.Conv(3, 32, (4, 4), strides=(4, 4), rngs=rngs)
        dense = functools.partial(nnx.Linear, rngs=rngs)
        self.tokens = nnx.List([nnx.List([dense(4, 24), dense(24, 4)]) for _ in range(2)])
        self.channels = nnx.List([nnx.List([dense(32, 64), dense(64, 32)]) for _ in range(2)])
        self.head = dense(32, 10)

    def __call__(self, images):
        x = self.stem(images)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        for (t1, t2), (c1, c2) in zip(self.tokens, self.channels, strict=True):
            x = x + t2(nnx.gelu(t1(x.swapaxes(1, 2)))).swapaxes(1, 2)
            x = x + c2(nnx.gelu(c1(x)))
        return self.head(x.mean(1))


def mixer():
    graphdef, params = nnx.split(Mixer(nnx.Rngs(0)))
    images = jnp.asarray(np.random.default_rng(0).standard_normal((4, 8, 8, 3)), jnp.float32)
    return lambda p, images: (nnx.merge(graphdef, p)(images) ** 2).sum(), nnx.to_pure_dict(params), images


MODELS = {"decoder": decoder, "scanned": scanned, "mixer": mixer}

# for each model: the logical axes of some weights
CUTS = {
    "decoder": {
        "layers/0/attn/query/kernel": ("embed", "mlp", None),
        "layers/0/attn/out/kernel": ("mlp", None, "embed"),
        "layers/1/fc1/kernel": ("embed", "mlp"),
        "layers/1/fc1/bias": ("mlp",),
        "layers/1/fc2/kernel": ("mlp", "embed"),
        "layers/1/ln1/scale": ("norm",),
        "table/embedding": ("vocab", "embed"),
    },
    "scanned": {
        "e": ("vocab", "embed"),
        "layers/qkv": ("layers", None, "embed", "mlp", None),
        "layers/o": ("layers", "mlp", None, "embed"),
        "layers/d": ("layers", "mlp", "embed"),
    },
    "mixer": {
        "channels/0/0/kernel": ("embed", "mlp"),
        "channels/0/1/kernel": ("mlp", "embed"),
        "tokens/1/0/kernel": (None, "mlp"),
        "tokens/1/1/kernel": ("mlp", None),
        "stem/kernel": (None, None, None, "embed"),
        "head/kernel": ("embed", None),
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_matrices_are_cut_in_pairs(name):
    fn, params, data = MODELS[name]()
    axes = {i.path: i.axes for i in jax.tree.leaves(infer_names(fn, params, data, tensor=4).infos)}
    assert {path: axes[path] for path in CUTS[name]} == CUTS[name]


@pytest.mark.parametrize("name", short(1, MODELS))
def test_laid_out_by_inferred_names_a_model_gives_the_same_gradients(name):
    fn, params, data = MODELS[name]()
    want = jax.jit(jax.value_and_grad(fn))(params, data)
    infos = infer_names(fn, params, data, tensor=4).infos
    with LAYOUT:
        placed = jax.device_put(params, shardings_of(infos, LAYOUT))
        batch = jax.device_put(data, LAYOUT.sharding(("batch", *[None] * (data.ndim - 1)), kind="activations"))
        got = jax.jit(jax.value_and_grad(fn))(placed, batch)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    assert_leaves_agree(got[1], want[1], what=name)


def test_a_layer_is_summed_over_tensor_twice_and_nothing_is_gathered():
    fn, params, ids = decoder()
    with LAYOUT:
        placed = jax.device_put(params, shardings_of(infer_names(fn, params, ids, tensor=4).infos, LAYOUT))
        batch = jax.device_put(ids, LAYOUT.sharding(("batch", None), kind="activations"))
        compiled = jax.jit(fn).lower(placed, batch).compile()
    stream, places = 2 * 8 * 16 * 4, 8 * 16 * 4  # bytes per device of the residual stream, and of positions
    tensor_collectives = [c for c in collectives(compiled, LAYOUT.sizes) if c.axes == ("tensor",) and c.payload > 4]
    assert {c.kind for c in tensor_collectives} == {"all-reduce"}
    # lookups in two sharded tables, and the sums after attention and feed-forward of each layer
    assert sorted(c.payload for c in tensor_collectives) == [stream] * 4 + [stream + places]


def test_what_does_not_divide_is_left_whole_with_a_note():
    fn, params, images = mixer()
    notes = infer_names(fn, params, images, tensor=5).notes
    assert any("channels/0/0/kernel" in n and "64" in n and "tensor=5" in n for n in notes)


def test_the_layout_fits_the_memory_there_is():
    fn, params, ids = decoder()
    infos = infer_names(fn, params, ids, tensor=4).infos
    size = sum(i.nbytes for i in jax.tree.leaves(infos))
    assert fitting_layout(infos, 8, 4 * size).mesh == "data=8,fsdp=1,tensor=1"
    tight = fitting_layout(infos, 8, 4 * size // 3)
    assert tight.sizes["tensor"] == 4 and tight.sizes["data"] == 2
    with raises_saying(LayoutError, "times the devices"):
        fitting_layout(infos, 8, 100)


def test_a_vocabulary_and_key_heads_that_do_not_divide_are_no_obstacle():
    infos = {
        "embed": TensorInfo("embed", (61, 32), np.dtype("float32"), ("vocab", "embed")),
        "key": TensorInfo("key", (32, 1, 8), np.dtype("float32"), ("embed", "kv_heads", "head_dim")),
    }
    held = (61 * 32 // 8 + 32 * 8) * 4  # the table in eight shards, the key head replicated
    assert fitting_layout(infos, 8, held, state=0).mesh == "data=1,fsdp=1,tensor=8"
