"""User-defined parts: the interface that a Transformer needs, and the errors when they do not fit."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.errors import ConfigError, LayoutError
from jaxscale.layout import Layout
from jaxscale.layout.rules import preset
from jaxscale.models import TransformerConfig
from jaxscale.models.base import arrange
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


def test_arranged_arrays_are_sharded_by_the_names_of_their_own_dimensions():
    rules = dataclasses.replace(preset("fsdp_tensor"), activations={"batch": "data", "embed": "tensor"})
    order, x = np.array([2, 0, 1]), np.arange(2 * 3 * 5.0).reshape(2, 3, 5)
    with Layout("data=2,tensor=2", rules):
        arranged = jax.jit(lambda x: arrange({"top": x, "rows": x[:, 0, 0]}, order))(x)
        np.testing.assert_array_equal(arranged["top"], x[:, order])
        with pytest.raises(LayoutError, match="embed"):  # five do not divide, and the name says that they must
            jax.jit(lambda x: arrange(x, order, "embed"))(x)
