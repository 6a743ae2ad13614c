"""Layers that share matrices: against a model that has a copy of them in each layer."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxscale as js
from jaxscale.errors import ConfigError, LayoutError
from jaxscale.infer.stages import stages_of
from jaxscale.layout import Layout
from jaxscale.models import TransformerConfig
from jaxscale.nn import Clustered, ReversibleRun, Rounded, SharedBlocks
from jaxscale.nn.formats import Stored
from jaxscale.nn.shared_blocks import ScaledColumns
from jaxscale.parallel import Arithmetic
from jaxscale.step import LoRA
from jaxscale.step.state import describe_model
from tests.truth.compare import assert_leaves_agree
from tests.truth.errors import raises_saying
from tests.truth.layouts import QUICKLY
from tests.truth.params import random_params

Small = functools.partial(TransformerConfig, vocab=32, width=16, heads=2, kv_heads=1, hidden=24)
SHARED = Small(depth=8, windows=(3, None), shared=SharedBlocks(2), scan=True)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 32, (2, 8)), jnp.int32)


def copied(params):
    """Parameters of the model without sharing: of each layer its matrices times its scales, and its norms."""
    run = params["runs"][0]

    def flat(x):
        return x.reshape(-1, *x.shape[2:])

    def layer(path, x, scales):
        names = [k.key for k in path]
        if names[0].endswith("_norm"):
            return flat(x)
        own = scales["_".join(names[:-1])]["scale"]
        own = own.reshape(*own.shape[:2], *(1,) * (x.ndim - own.ndim + 1), *own.shape[2:])
        return flat(x[:, None] * own)

    blocks = {
        j: jax.tree_util.tree_map_with_path(functools.partial(layer, scales=run["scales"][j]), block)
        for j, block in run["blocks"].items()
    }
    return {**params, "runs": {0: {"blocks": blocks}}}


@pytest.mark.long
def test_a_shared_block_computes_what_copies_of_it_in_each_layer_do():
    plain = dataclasses.replace(SHARED, shared=None)
    (shared_graph, infos), (plain_graph, plain_infos) = map(describe_model, (SHARED, plain))
    assert SHARED.layer_windows() == plain.layer_windows()
    assert infos["runs"][0]["blocks"][1]["attn"]["q"]["kernel"].shape[0] == 2
    params = random_params(infos)

    def loss(graphdef, of, params):
        return jnp.sum(nnx.merge(graphdef, of(params))(TOKENS) ** 2)

    def grads(graphdef, of):
        fn = functools.partial(loss, graphdef, of)
        return jax.jit(jax.value_and_grad(fn)).lower(params).compile(QUICKLY)(params)

    assert jax.tree.map(lambda x: x.shape, copied(params)) == jax.tree.map(lambda i: i.shape, plain_infos)
    want, got = grads(plain_graph, copied), grads(shared_graph, lambda p: p)
    assert_leaves_agree(got[0], want[0])
    assert_leaves_agree(got[1], want[1])


def test_what_does_not_fit_is_refused_with_the_nearest_choice():
    with raises_saying(ConfigError, "Transformer.depth = 7", "groups of 2", "set Transformer.depth = 6 or 8"):
        Small(depth=7, shared=SharedBlocks(2))
    with raises_saying(ConfigError, "groups of 3", "depth = 3 or 6, or SharedBlocks.uses = 2 or 4"):
        Small(depth=4, shared=SharedBlocks(3))
    assert Small(depth=4, shared=SharedBlocks(4)).uses == 4
    with raises_saying(ConfigError, "groups of 4", "set Transformer.depth = 4 or 8, or SharedBlocks.uses = 3"):
        dataclasses.replace(SHARED, depth=6)
    with raises_saying(ConfigError, "leave out Transformer.shared"):
        SharedBlocks(1)
    with raises_saying(ConfigError, "Transformer.stack = @Run"):
        dataclasses.replace(SHARED, stack=ReversibleRun)
    with raises_saying(ConfigError, "must be SharedBlocks(uses=2)"):
        dataclasses.replace(SHARED, shared=2)
    graphdef, infos = describe_model(SHARED)
    with raises_saying(LayoutError, "only 2 groups of layers", "use pipeline=2, or at least 16 layers"):
        stages_of(nnx.merge(graphdef, infos).runs, Layout("pipeline=4"))


def test_adapters_round_matrices_alone_and_stored_matrices_keep_their_numbers():
    graphdef, infos = describe_model(SHARED)
    base = LoRA(base_dtype="bfloat16").adapt(graphdef, infos).base["runs"][0]["blocks"][0]
    assert base["attn_norm"]["scale"].dtype == "float32" and base["attn"]["q"]["kernel"].dtype == "bfloat16"
    stored = Stored("int8", activations=8).encode(jnp.ones((16, 24)), (0,))
    rounding = dataclasses.replace(Arithmetic.cast("float32"), reparametrised=jnp.round)
    assert ScaledColumns(stored, jnp.ones(24), 1).arithmetic(rounding).reparametrised is None
    matrix, factors = ScaledColumns(jnp.full((2, 3), 0.6), jnp.full(3, 0.25), 1).matrix(
        rounding
    )  # of overlapped layers
    assert np.all(matrix == 1.0) and np.all(factors == 0.25)


@pytest.mark.long
def test_shared_blocks_train_and_decode_alike_on_every_layout():
    config = dataclasses.replace(SHARED, windows=(None,), depth=4)
    assert "Decodable" in js.testing.check_model(config)
    layouts = [Layout("data=2,pipeline=2,tensor=2"), Layout("fsdp=4,context=2")]
    js.testing.compare_layouts(dataclasses.replace(config, kv_heads=2), layouts).check()
    overlapped = Small(depth=4, kv_heads=2, shared=SharedBlocks(2), scan=True, overlap=("attention", "mlp"))
    for products in (Rounded(Stored("int4", group=8, scale="bfloat16")), Clustered(2)):
        own = dataclasses.replace(overlapped, products=products)
        js.testing.compare_layouts(own, [Layout("data=2,tensor=2", sequence_sharded=True)]).check()
