"""Inputs of each layer against float64 NumPy, and what they do not work with."""

from __future__ import annotations

import math

import numpy as np
from flax import nnx

from jaxscale.errors import ConfigError
from jaxscale.models import TransformerConfig
from jaxscale.nn import BlockEnd, Context, LayerInputs, PerLayer, ReversibleRun
from jaxscale.optim.mup import MuP
from tests.truth.errors import raises_saying

CONFIG = dict(depth=3, vocab=11, width=8, heads=2, norm_eps=0.01)


def _normed(x, norm):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 0.01) * np.float64(norm.scale.get_value())


def test_each_layer_adds_its_own_input_gated_by_the_stream():
    config = TransformerConfig(**CONFIG, per_layer=PerLayer(4, scaled=True))
    random = np.random.default_rng(0)
    table, end = LayerInputs(config, rngs=nnx.Rngs(0)), BlockEnd(config, rngs=nnx.Rngs(1))
    for norm in (table.norm, end.norm, end):
        norm.scale.set_value(random.normal(size=norm.scale.get_value().shape).astype(np.float32))
    tokens, x = random.integers(0, 11, (2, 5)), random.normal(size=(2, 5, 8)).astype(np.float32)
    inputs = table(tokens, x)
    of_token = 2 * np.float64(table.table.weight.get_value())[tokens].reshape(2, 5, 3, 4)
    of_stream = (x @ np.float64(table.project.kernel.get_value())).reshape(2, 5, 3, 4) / np.sqrt(8)
    want = (_normed(of_stream, table.norm) + of_token) / np.sqrt(2)
    np.testing.assert_allclose(inputs, want, atol=1e-5)

    gate = x @ np.float64(end.gate.kernel.get_value())
    gate = gate * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    added = _normed((gate * want[:, :, 1]) @ np.float64(end.out.kernel.get_value()), end.norm)
    got = end(x, Context(inputs=inputs, layer=1))
    np.testing.assert_allclose(got, (x + added) * np.float64(end.scale.get_value()), atol=1e-5)


def test_inputs_count_as_parameters_and_flops():
    plain, with_inputs = TransformerConfig(**CONFIG), TransformerConfig(**CONFIG, per_layer=PerLayer(4))
    assert with_inputs.param_count() - plain.param_count() == 11 * 12 + 8 * 12 + 4 + 3 * (2 * 8 * 4 + 8)
    assert with_inputs.flops(2, 5, training=False) - plain.flops(2, 5, training=False) == 3 * 2 * 2 * 5 * 8 * 12
    scaled = TransformerConfig(**CONFIG, per_layer=PerLayer(scaled=True))
    assert scaled.param_count() == plain.param_count() + 3


def test_what_inputs_do_not_work_with_is_one_sentence():
    for changes in ({"soft_prompt": 2}, {"multi_token": 1}, {"parametrisation": MuP(base_width=8)}):
        with raises_saying(ConfigError, f"Transformer.{next(iter(changes))} =", "Transformer.per_layer", "remove one"):
            TransformerConfig(**CONFIG, per_layer=PerLayer(4), **changes)
    with raises_saying(ConfigError, "ReversibleRun has no Transformer.per_layer; set Transformer.stack = @Run"):
        TransformerConfig(**CONFIG, per_layer=PerLayer(4), stack=ReversibleRun)
    with raises_saying(ConfigError, "PerLayer.vocab = 10 is less than Transformer.vocab = 11", "= 11"):
        TransformerConfig(**CONFIG, per_layer=PerLayer(4, vocab=10))
    with raises_saying(ConfigError, "neither inputs nor a number"):
        PerLayer()
    with raises_saying(ConfigError, "PerLayer.vocab = 10 has no effect without PerLayer.width"):
        PerLayer(vocab=10, scaled=True)
