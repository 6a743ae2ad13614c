"""Lizard against its formulas in float64 NumPy, token by token; decoding; layouts; conversion of a trained run."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxscale as js
from jaxscale.convert.attention import change_attention
from jaxscale.errors import ConfigError
from jaxscale.models import BlockConfig, TransformerConfig
from jaxscale.nn import (
    Bidirectional,
    Context,
    GatedMultiHead,
    Lizard,
    MultiHead,
    Rotary,
    SigmoidAttention,
    dot_product_attention,
)
from jaxscale.step import TrainConfig
from jaxscale.testing import check_mixer
from tests.truth import numpy_transformer as truth
from tests.truth.errors import raises_saying

X = np.random.default_rng(0).normal(size=(1, 11, 6)).astype(np.float32)


def made():
    layer = Lizard(reach=3, meta=2, features=3)(
        6, 4, 2, 4, rngs=nnx.Rngs(0), kernel=dot_product_attention, rotary=Rotary()
    )
    random = np.random.default_rng(1)
    for _, p in nnx.iter_graph(layer):
        if isinstance(p, nnx.Param):  # no factor is 0
            p.set_value(jnp.asarray(random.normal(size=p.get_value().shape) * 0.5, jnp.float32))
    return layer


def in_numpy(layer, x):
    """One document: the recurrence step by step, and the softmax over the last 3 tokens and 2 learned keys."""
    of = {name: np.float64(getattr(layer, name).get_value()) for name in ("q_map", "k_map", "meta_keys", "meta_values")}
    q, k, v = (np.einsum("se,ehd->shd", x, np.float64(getattr(layer, n).kernel.get_value())) for n in "qkv")
    gates = x @ np.float64(layer.gate.kernel.get_value()) + np.float64(layer.gate.bias.get_value())
    gates, share = 1 / (1 + np.exp(-gates - 5)), np.float64(layer.share.get_value())
    frequencies, _ = truth.rotary_frequencies(4, 10000.0, None)
    turned = [truth.rotate(y, np.arange(len(x)), frequencies) for y in (q, k)]

    def features(y, w):
        z = y @ w
        return np.concatenate([np.exp(a) / np.exp(a).sum() for a in (z, -z)])

    out = np.zeros_like(q)
    for h in range(4):
        kv, state, total = h // 2, np.zeros((6, 4)), np.zeros(6)
        for t in range(len(x)):
            phi = features(k[t, kv], of["k_map"][kv])
            state = gates[t, h] * state + np.outer(phi, v[t, kv])
            total = gates[t, h] * total + phi
            ask = features(q[t, h], of["q_map"][h])
            rows = [(turned[1][i, kv], v[i, kv]) for i in range(max(0, t - 2), t + 1)]
            rows += [(of["meta_keys"][m, kv], of["meta_values"][m, kv]) for m in range(2)]
            weights = np.exp([turned[0][t, h] @ key / 2 for key, _ in rows])
            near = sum(w * value for w, (_, value) in zip(weights / weights.sum(), rows, strict=True))
            out[t, h] = near + share[h] * (ask @ state) / (ask @ total)
    return np.einsum("shd,hde->se", out, np.float64(layer.out.kernel.get_value()))


def test_chunks_give_the_numbers_of_the_recurrence_step_by_step_in_packed_rows():
    layer, segments = made(), np.array([[1] * 7 + [2] * 4], np.int32)
    positions = np.array([[*range(7), *range(4)]])
    rotary = {Rotary(): Rotary().tables(jnp.asarray(positions), 4)}
    context = Context(jnp.asarray(positions), jnp.asarray(segments), rotary)
    got = jax.jit(lambda x: layer(x, context))(X)
    want = [in_numpy(layer, np.float64(X[0, part])) for part in (slice(0, 7), slice(7, 11))]
    np.testing.assert_allclose(got[0], np.concatenate(want), atol=3e-6)


@pytest.mark.long
def test_it_decodes_and_trains_alike_on_layouts():
    layouts = [js.Layout("tensor=2,context=2"), js.Layout("pipeline=2,fsdp=2")]
    check_mixer(Lizard(reach=4, features=4), layouts, depth=2, kv_heads=2, attention=js.nn.RingAttention())


MODEL = TransformerConfig(vocab=32, depth=2, width=16, heads=2, kv_heads=1)


@pytest.mark.long
def test_a_converted_run_has_the_old_matrices_and_is_distilled(tmp_path):
    options = dict(data=js.data.synthetic(32), layout=None, steps=2, seq_len=16, batch_size=4, quiet=True)
    run = js.fit(model=MODEL, run=tmp_path / "softmax", eval_batches=0, **options)
    new = change_attention(run, tmp_path / "lizard", Lizard(reach=16, meta=1, features=4))
    assert new.config.model.attention_layer == Lizard(reach=16, meta=1, features=4)
    old, params = run.params(), new.params()
    attn = params["runs"][0]["blocks"][0]["attn"]
    assert not np.any(attn["share"]) and not np.any(attn["meta_values"])
    new_arrays = dict(jax.tree_util.tree_leaves_with_path(params))
    for path, x in jax.tree_util.tree_leaves_with_path(old):
        np.testing.assert_array_equal(new_arrays[path], x)
    trained = js.fit(
        model=new.config.model, start=js.train.FromRun(new.path), run=tmp_path / "distilled", eval_batches=0,
        objective=js.step.Distill(teacher=js.train.FromRun(run.path)), **options,
    )  # fmt: skip
    assert trained.last_step() == 2


def test_what_does_not_fit_is_said(tmp_path):
    for name in ("reach", "meta", "features"):
        with raises_saying(ConfigError, f"Lizard.{name} = 0", "at least 1"):
            Lizard(**{name: 0})
    with raises_saying(ConfigError, "no argument return_lse", "Lizard", "flash_attention"):
        dataclasses.replace(MODEL, attention_layer=Lizard(), attention=SigmoidAttention(64))
    with raises_saying(ConfigError, "Lizard is causal"):
        dataclasses.replace(MODEL, attention_layer=Lizard(), attention=Bidirectional())
    with raises_saying(ConfigError, "which Lizard does not"):
        TrainConfig(model=dataclasses.replace(MODEL, attention_layer=Lizard()), objective=js.step.BlankInfilling())
    gated = TrainConfig(model=dataclasses.replace(MODEL, attention_layer=GatedMultiHead()))
    with raises_saying(
        ConfigError, "GatedMultiHead", "which is of shape", "in Lizard", "all parameters of the old one"
    ):
        change_attention(js.Run(tmp_path, gated), tmp_path / "new", Lizard())
    named = TrainConfig(model=dataclasses.replace(MODEL, blocks=(BlockConfig(mixer=MultiHead()),)))
    with raises_saying(ConfigError, "sets Block.mixer", "leave out Block.mixer"):
        change_attention(js.Run(tmp_path, named), tmp_path / "new", Lizard())
