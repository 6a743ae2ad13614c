"""User-defined parts: the interface that a Transformer needs, and the errors when they do not fit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxscale.errors import ConfigError, LayoutError
from jaxscale.models import TransformerConfig
from jaxscale.step import describe_model
from tests.truth.errors import raises_saying


class Nameless(nnx.Module):
    """A feed-forward layer whose parameters carry no names."""

    def __init__(self, width, hidden, *, rngs, **_):
        self.linear = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x):
        return self.linear(x)


def test_a_layer_without_names_is_named_in_the_refusal():
    with raises_saying(LayoutError, "runs/0/blocks/0/mlp/linear", "no axis names", "named("):
        describe_model(TransformerConfig(depth=2, width=32, mlp=Nameless))


def test_a_feed_forward_that_takes_less_is_refused_with_what_it_must_take():
    with raises_saying(ConfigError, "Transformer.mlp", "width, hidden", "bias"):
        TransformerConfig(mlp=lambda width, *, rngs: None)


def test_a_norm_that_takes_less_is_refused_with_what_it_must_take():
    with raises_saying(ConfigError, "Transformer.norm", "width", "eps"):
        TransformerConfig(norm=lambda width: None)


def test_heads_that_leave_width_over_are_refused_with_the_nearest_that_fit():
    with raises_saying(ConfigError, "heads = 3", "width = 128", "nearest that does is 2"):
        TransformerConfig(width=128, heads=3)


def test_an_attention_kernel_is_used_unchanged():
    seen = []

    def kernel(q, k, v, **options):
        seen.append(sorted(options))
        return jnp.zeros(q.shape, q.dtype)

    config = TransformerConfig(depth=1, width=32, attention=kernel)
    model = config.make(nnx.Rngs(0))
    jax.eval_shape(lambda t: model.hidden(t), jnp.zeros((2, 8), jnp.int32))
    assert seen == [["causal", "positions", "scale", "segment_ids", "softcap", "window"]]
