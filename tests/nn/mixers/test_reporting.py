"""A mixer that reports a loss and a number: in the gradient, the log, every layout, and every kind of stack."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.errors import ConfigError
from jaxscale.layout import Layout, named
from jaxscale.models import BlockConfig, TransformerConfig
from jaxscale.nn import Context, Mixer, MixtureOfExperts, NoFeedForward, ReversibleRun, metrics
from jaxscale.nn.stats import of_layer
from jaxscale.step.state import describe_model
from jaxscale.testing import compare_layouts
from tests.truth.compare import assert_leaves_agree
from tests.truth.layouts import QUICKLY, random_batch
from tests.truth.long import short
from tests.truth.params import random_params

EPS = 1e-6


class Scaled(nnx.Module):
    """`y = scale * x`; the loss is the mean square of y over the tokens that are not padding."""

    reports = "scaled"

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.scale = nnx.Param(named(jax.nn.initializers.ones, "norm")(rngs.params(), (width,), jnp.float32))

    def __call__(self, x, context: Context):
        y = x * self.scale.get_value()
        real = jnp.ones(x.shape[:2]) if context.segment_ids is None else context.segment_ids != 0
        square = jnp.sum(jnp.mean(y * y, axis=-1) * real) / jnp.maximum(jnp.sum(real), 1)
        return y, {"loss": 3 * square, "square": square, "layers": jnp.ones([])}


@dataclasses.dataclass(frozen=True)
class Scale(Mixer):
    any_order = True

    def products(self, config, batch, seq, window):
        return {}

    def __call__(self, width, heads, kv_heads, head_dim, **options):
        return Scaled(width, options["rngs"])


Small = functools.partial(
    TransformerConfig, depth=2, vocab=16, width=8, heads=2, blocks=(BlockConfig(Scale(), mlp=NoFeedForward),)
)


def losses_of(config, batch):
    """Hidden states and statistics of random parameters, and gradients of the sum of all losses of layers."""
    graphdef, infos = describe_model(config)
    params = random_params(infos)

    def run(params):
        model = nnx.merge(graphdef, params)
        _, stats = model.hidden_and_stats(batch["tokens"], segment_ids=batch["segment_ids"])
        return stats["loss"], stats

    grads = jax.jit(jax.value_and_grad(run, has_aux=True))
    (_, stats), gradients = grads.lower(params).compile(QUICKLY)(params)
    return params, stats, gradients


def in_numpy(params, batch):
    """The mean square of each layer's output, float64."""
    x = np.float64(params["embed"]["weight"])[batch["tokens"]]
    real = batch["segment_ids"] != 0
    squares, block = [], params["runs"][0]["blocks"][0]
    for norm, scale in zip(np.float64(block["attn_norm"]["scale"]), np.float64(block["attn"]["scale"]), strict=True):
        y = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPS) * norm * scale
        squares.append(np.mean(y[real] ** 2))
        x = x + y
    return squares


def test_the_loss_is_the_layers_sum_and_the_number_their_mean():
    batch = random_batch(16, rows=2, seq=6, lengths=(3, 2))
    params, stats, gradients = losses_of(Small(norm_eps=EPS), batch)
    squares = in_numpy(params, batch)
    np.testing.assert_allclose(stats["loss"], 3 * sum(squares), rtol=1e-5)
    np.testing.assert_allclose(metrics(stats)["scaled_square"], np.mean(squares), rtol=1e-5)
    # of the last layer alone, d loss / d scale = 2 loss / scale, summed over the width's elements: Euler's theorem
    block = params["runs"][0]["blocks"][0]["attn"]["scale"][-1]
    slope = gradients["runs"][0]["blocks"][0]["attn"]["scale"][-1]
    np.testing.assert_allclose(np.sum(block * slope), 6 * squares[-1], rtol=1e-5)
    recomputed = losses_of(Small(norm_eps=EPS, memory="full"), batch)
    assert_leaves_agree(recomputed[1:], (stats, gradients), what="with recomputation")


def test_reversible_layers_report_and_have_the_same_gradient():
    batch = random_batch(16, rows=2, seq=6, lengths=(3, 2))
    _, *plain = losses_of(Small(depth=1), batch)
    _, *reversed_ = losses_of(Small(depth=1, stack=ReversibleRun), batch)  # of one layer, both stacks are one function
    assert_leaves_agree(reversed_, plain, what="one layer")


def test_numbers_of_mixers_and_experts_are_means_of_their_own_layers():
    experts = BlockConfig(Scale(), mlp=MixtureOfExperts(2, 1, hidden=4))
    batch = random_batch(16, rows=2, seq=6, lengths=(3, 2))
    plain = BlockConfig(Scale(), mlp=NoFeedForward)
    _, stats, _ = losses_of(Small(blocks=(plain, experts)), batch)
    assert (stats["scaled/layers"], stats["moe/layers"]) == (2, 1)
    assert {"scaled_square", "moe_load_balance"} <= metrics(stats).keys()


def test_numbers_without_a_prefix_or_a_count_of_layers_are_refused():
    layer = Scaled(2, nnx.Rngs(0))
    with pytest.raises(ConfigError, match="Scaled reports 'square' without 'layers'; also report \"layers\": jnp.ones"):
        of_layer(layer, {"loss": jnp.ones([]), "square": jnp.ones([])})
    layer.reports = True
    with pytest.raises(ConfigError, match="Scaled.reports = True: must be text that its numbers' names"):
        of_layer(layer, {"layers": jnp.ones([])})
    assert of_layer(layer, {"loss": 1}) == {"loss": 1}


@pytest.mark.parametrize("mesh", short(1, ["context=2,pipeline=2", "data=2,pipeline=2", "fsdp=2,tensor=2"]))
def test_layouts_agree_on_the_loss_and_the_number(mesh):
    batch = random_batch(16, rows=4, seq=8)
    compare_layouts(Small(), [Layout(mesh)], batch=batch, steps=1).check()
