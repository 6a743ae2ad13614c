"""DeepSeek sparse attention against float64 NumPy, its two losses, caches, layouts, and what it refuses."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxscale as js
from jaxscale.convert.attention import change_attention
from jaxscale.convert.quantize import quantize
from jaxscale.convert.recipes import RoundToNearest
from jaxscale.errors import ConfigError
from jaxscale.models import BlockConfig, TransformerConfig
from jaxscale.nn import DSA, Context, MultiHead, MultiHeadLatent
from jaxscale.plan import plan_for
from jaxscale.plan.flops import count
from jaxscale.step.state import describe_model
from jaxscale.step.stored import as_arrays, is_weight
from jaxscale.testing import check_mixer, compare_layouts
from tests.truth.layouts import QUICKLY
from tests.truth.paged_texts import in_sharded_pages

SMALL = DSA(kv_rank=6, q_rank=4, plain_dim=4, rotary_dim=2, value_dim=3, index_heads=3, index_dim=4, top_k=3)
OPTIONS = dict(
    kernel=js.nn.dot_product_attention, rotary=None, softcap=None, scale=None, out_scale=1.0, rngs=nnx.Rngs(0),
    dtype=jnp.float32, param_dtype=jnp.float32,
)  # fmt: skip
Model = functools.partial(TransformerConfig, depth=1, vocab=32, width=16, heads=4, hidden=16, attention_layer=SMALL)


def softmax(x):
    x = np.exp(x - x.max())
    return x / x.sum()


def in_numpy(layer, x, z):
    """Section 2.1 of DeepSeek-V3.2 for one document, query by query: outputs (S, E) and divergences (S,)."""

    def by(linear, x):
        return np.tensordot(x, np.float64(linear.kernel.get_value()), 1)

    def root_mean_square(norm, x):
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + z.norm_eps) * np.float64(norm.scale.get_value())

    q_from = root_mean_square(layer.q_norm, by(layer.q_down, x))
    latent = root_mean_square(layer.kv_norm, by(layer.kv_down, x))
    q = np.concatenate([by(layer.q, q_from), by(layer.q_rotary, q_from)], axis=-1)
    k, v, shared, index = by(layer.k, latent), by(layer.v, latent), by(layer.k_rotary, x), layer.indexer
    k = np.concatenate([k, np.broadcast_to(shared[:, None], (*k.shape[:2], z.rotary_dim))], axis=-1)
    index_q, index_k, index_w = by(index.q, q_from), by(index.k, x), by(index.weights, x)
    index_k = index_k - index_k.mean(axis=-1, keepdims=True)
    index_k = index_k / np.sqrt(np.mean(index_k**2, axis=-1, keepdims=True) + 1e-6)
    index_k = index_k * np.float64(index.k_norm.scale.get_value()) + np.float64(index.k_norm.bias.get_value())
    out, apart = np.zeros((len(x), *v.shape[1:])), np.zeros(len(x))
    for t in range(len(x)):
        products = np.maximum(np.einsum("id,sd->si", index_q[t], index_k[: t + 1]), 0)
        scores = products @ index_w[t] / np.sqrt(z.index_heads * z.index_dim)
        picked = np.arange(t + 1) if z.dense else np.sort(np.argsort(-scores, kind="stable")[: z.top_k])
        weights = [softmax(k[picked, h] @ q[t, h] / np.sqrt(q.shape[-1])) for h in range(q.shape[1])]
        out[t] = [w @ v[picked, h] for h, w in enumerate(weights)]
        target = np.mean(weights, axis=0)
        apart[t] = np.sum(target * np.log(target / softmax(scores[picked])))
    return np.einsum("shd,hde->se", out, np.float64(layer.out.kernel.get_value())), apart


@pytest.mark.parametrize("dense", [False, True])
def test_packed_documents_equal_the_papers_formulas_and_losses_train_their_own_parameters(dense):
    z = dataclasses.replace(SMALL, dense=dense, index_loss=0.5)
    x = np.random.default_rng(0).normal(size=(1, 16, 8)).astype(np.float32) * 2
    segments = np.array([[1] * 9 + [2] * 5 + [0] * 2], np.int32)
    graphdef, params = nnx.split(z(8, 2, 2, 4, **OPTIONS))

    def run(params):
        y, stats = nnx.merge(graphdef, params)(x, Context(segment_ids=segments))
        return (jnp.sum(y[:, :14] ** 2), stats["loss"]), (y, stats)

    def pulled(params):
        value, pull, more = jax.vjp(run, params, has_aux=True)
        one, zero = jnp.ones([]), jnp.zeros([])
        return pull((one, zero))[0], pull((zero, one))[0], more

    of_output, of_index, (y, stats) = jax.jit(pulled).lower(params).compile(QUICKLY)(params)
    layer = nnx.merge(graphdef, params)
    parts = [in_numpy(layer, np.float64(x[0, part]), z) for part in (slice(0, 9), slice(9, 14))]
    np.testing.assert_allclose(y[0, :14], np.concatenate([out for out, _ in parts]), atol=2e-5)
    np.testing.assert_allclose(stats["divergence"], np.mean(np.concatenate([d for _, d in parts])), rtol=1e-4)
    np.testing.assert_allclose(stats["loss"], 0.5 * stats["divergence"], rtol=1e-6)
    for path, gradient in jax.tree.leaves_with_path(of_output):
        own = "indexer" in jax.tree_util.keystr(path)
        other = dict(jax.tree.leaves_with_path(of_index))[path]
        assert own != np.any(gradient) and own == np.any(other), path


@pytest.mark.long
def test_it_keeps_documents_apart_and_decodes_after_going_back():
    check_mixer(SMALL, attention_layer=SMALL, head_dim=None)


@pytest.mark.long
@pytest.mark.parametrize("numbers,atol", [(None, 1e-5), ("int8", 0.1)])
def test_sharded_pages_give_what_a_pass_over_the_whole_text_gives(numbers, atol):
    model = Model().make(nnx.Rngs(0))
    tokens = np.random.default_rng(0).integers(0, 32, (1, 12), dtype=np.int32)
    np.testing.assert_allclose(in_sharded_pages(model, tokens, numbers), jax.jit(model.hidden)(tokens), atol=atol)


@pytest.mark.long
def test_layouts_train_alike_in_packed_rows():
    for config in (Model(), Model(attention=js.nn.RingAttention())):
        compare_layouts(config, [js.Layout("data=2,tensor=2,context=2")]).check()
    compare_layouts(Model(), [js.Layout("fsdp=2,tensor=4")]).check()
    batch = js.testing.random_batch(32, rows=4, seq=8)
    compare_layouts(Model(depth=2), [js.Layout("data=2,pipeline=2")], batch=batch).check()


@pytest.mark.long
def test_modules_for_further_tokens_train_alike_on_layouts():
    further = Model(multi_token=1), Model(multi_token=1, attention=js.nn.RingAttention())
    for config, mesh in zip(further, ("fsdp=2,tensor=4", "data=2,tensor=2,context=2"), strict=True):
        compare_layouts(config, [js.Layout(mesh)], objective=js.step.NextTokens()).check()


@pytest.mark.long
def test_a_latent_run_is_continued_as_deepseek_v32_was(tmp_path):
    z = dataclasses.replace(SMALL, dense=True)
    latent = MultiHeadLatent(*(getattr(z, f.name) for f in dataclasses.fields(MultiHeadLatent)))
    options = dict(data=js.data.synthetic(32), layout=None, seq_len=16, batch_size=4, eval_batches=0, quiet=True)
    run = js.fit(model=Model(attention_layer=latent), run=tmp_path / "latent", steps=1, **options)
    new = change_attention(str(run.path), tmp_path / "indexed", z)
    start, only = js.train.FromRun(new.path), js.step.Unfreeze(("indexer",))
    warm = js.fit(
        model=new.config.model, start=start, adapters=only, run=tmp_path / "warm", steps=40, lr=1e-2, **options
    )
    divergences = [line["index_divergence"] for line in warm.metrics()]
    assert np.mean(divergences[-5:]) < 0.8 * np.mean(divergences[:5])
    trained = dict(jax.tree.leaves_with_path(warm.params()))
    for path, x in jax.tree.leaves_with_path(new.params()):
        assert np.array_equal(trained[path], x) != ("indexer" in jax.tree_util.keystr(path)), path
    sparse = js.fit(model=Model(), start=js.train.FromRun(warm.path), run=tmp_path / "sparse", steps=2, **options)
    assert np.isfinite([line["index_divergence"] for line in sparse.metrics()]).all()


RUN = dict(
    data=js.data.synthetic(documents=40, length=60, vocab_size=32), schedule=js.optim.Constant(), lr=0.02,
    layout=None, seq_len=16, batch_size=4, eval_batches=0, quiet=True,
)  # fmt: skip


@pytest.mark.long
def test_a_run_is_resumed_bit_for_bit_and_planned(tmp_path):
    options = dict(RUN, model=Model(attention_layer=dataclasses.replace(SMALL, kv_rank=8, q_rank=8, index_heads=2)))
    whole = js.fit(run=tmp_path / "whole", steps=4, **options)
    js.fit(run=tmp_path / "parts", steps=2, **options)
    parts = js.fit(run=tmp_path / "parts", steps=4, resume=True, **options)
    jax.tree.map(np.testing.assert_array_equal, parts.params(), whole.params())
    config = dataclasses.replace(whole.config, layout=js.Layout("fsdp=2,tensor=2"))
    assert plan_for(config, "h100:4", compile="never").step.compute > 0


@pytest.mark.long
def test_quantised_it_equals_a_model_of_the_rounded_matrices(tmp_path):
    z = dataclasses.replace(SMALL, kv_rank=8, q_rank=8, value_dim=4, index_heads=2)
    whole = js.fit(run=tmp_path / "whole", steps=1, **dict(RUN, model=Model(attention_layer=z)))
    run = quantize(whole, tmp_path / "few", RoundToNearest(bits=8, group=4), say=lambda _: None)
    graphdef, infos = describe_model(run.config.model)
    weights, tokens = run.weights(), np.random.default_rng(0).integers(0, 32, (1, 12), dtype=np.int32)
    assert is_weight(weights["runs"][0]["blocks"][0]["attn"]["indexer"]["q"]["kernel"])
    stored, rounded = (nnx.merge(graphdef, x) for x in (weights, as_arrays(weights, infos)))
    # Against the matrices before rounding, a query may select another token, which changes its logits by much.
    want = jax.jit(rounded.hidden)(tokens)
    np.testing.assert_allclose(jax.jit(stored.hidden)(tokens), want, atol=1e-5)
    np.testing.assert_allclose(in_sharded_pages(stored, tokens, None), want, atol=1e-5)


def test_traced_flops_are_those_that_the_mixer_counts():
    config, layer = Model(width=8, heads=2), SMALL(8, 2, 2, 4, **OPTIONS)

    def traced(seq):
        return count(lambda x: layer(x, Context())[0], jax.ShapeDtypeStruct((1, seq, 8), jnp.float32)).matmul

    assert [traced(seq) for seq in (8, 16)] == [sum(SMALL.products(config, 1, seq, None).values()) for seq in (8, 16)]


def test_what_it_cannot_do_is_refused():
    with pytest.raises(ConfigError, match="DSA.index_dim = 32: must be a whole number of at least 64"):
        DSA(index_dim=32)
    with pytest.raises(ConfigError, match="DSA.top_k = 0: must be a whole number of at least 1"):
        DSA(top_k=0)
    with pytest.raises(ConfigError, match="DSA.index_loss = -1: must be at least 0"):
        DSA(index_loss=-1)
    for name, change in (
        ("Transformer.windows", dict(windows=(4,))),
        ("Block.window", dict(blocks=(BlockConfig(window=4),))),
    ):
        with pytest.raises(ConfigError, match=f"{name} = 4 has no effect with DSA"):
            Model(**change)
    with pytest.raises(ConfigError, match="Transformer.attention = @flash_attention has no effect with DSA"):
        Model(attention=js.nn.flash_attention)
    with pytest.raises(ConfigError, match="Transformer.head_dim = 8 has no effect with DSA"):
        Model(head_dim=8)
    with pytest.raises(ConfigError, match="DSA is causal, and Transformer.attention is not"):
        Model(attention=js.nn.Bidirectional())
    Model(depth=2, attention=js.nn.flash_attention, blocks=(BlockConfig(), BlockConfig(mixer=MultiHead())))
