"""Codes whose first bits are codes of fewer bits: exact slices, and no more bytes read than needed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxscale as js
from jaxscale.convert.quantize import quantize
from jaxscale.convert.recipes import D2MoE
from jaxscale.errors import ConfigError
from jaxscale.layout import TensorInfo
from jaxscale.models import TransformerConfig
from jaxscale.nn.formats import FewerBits, NestedBits
from tests.truth.errors import raises_saying

DRAW = np.random.default_rng(0)


@pytest.mark.long
def test_the_first_slices_are_the_first_bits_of_the_codes_and_values_lie_in_the_middle():
    kernel = DRAW.normal(size=(3, 32, 24)).astype(np.float32)
    whole = NestedBits((4, 2, 2), 16).encode(jnp.asarray(kernel), (-2,))
    groups = kernel.astype(np.float64).reshape(3, 2, 16, 24)
    least, most = groups.min(2, keepdims=True), groups.max(2, keepdims=True)
    want = np.round((groups - least) / ((most - least) / 255)).reshape(kernel.shape)
    assert np.abs(np.asarray(whole.codes(), int) - want).max() <= 1  # float32 rounds ties elsewhere
    assert np.mean(whole.codes() != want) < 1e-3
    half = (most - least) / 255 / 2
    for loaded, bits in ((1, 4), (2, 6), (3, 8)):
        part = NestedBits((4, 2, 2), 16, loaded).encode(jnp.asarray(kernel), (-2,))
        assert np.array_equal(part.codes(), np.asarray(whole.codes()) >> (8 - bits))
        assert sum(s.nbytes for s in part.slices) == kernel.size * bits // 8
        error = np.abs(np.asarray(part.dense(), np.float64).reshape(groups.shape) - groups)
        assert (error <= half * 2 ** (8 - bits) * 1.001).all()
    one = jax.tree.map(lambda a: a[1], whole)
    assert one.shape == (32, 24) and np.array_equal(one.dense(), whole.dense()[1])


@pytest.mark.long
def test_a_run_is_read_with_fewer_bits(tmp_path):
    model = TransformerConfig(depth=2, vocab=256, width=32, heads=4, kv_heads=2, hidden=64)
    data = js.data.synthetic(documents=80, length=60, vocab_size=256)
    options = dict(data=data, layout=None, batch_size=8, seq_len=16, eval_batches=0, steps=2, quiet=True)
    base = js.fit(model=model, run=tmp_path / "base", **options)
    run = quantize(base, tmp_path / "nested", D2MoE(group=32), say=lambda _: None)
    every = run.generate("ab", max_tokens=4, temperature=0).ids
    assert run.generate("ab", max_tokens=4, temperature=0, weights=FewerBits(8)).ids == every
    assert len(run.generate("ab", max_tokens=4, temperature=0, weights=FewerBits(4)).ids) == 4


def test_what_does_not_fit_is_one_sentence():
    with raises_saying(ConfigError, "NestedBits.widths = (4, 2)", "8 bits together"):
        NestedBits((4, 2))
    with raises_saying(ConfigError, "NestedBits.widths = 8", "(4, 2, 2)"):
        D2MoE(widths=8)
    info = TensorInfo("up", (36, 64), jnp.float32, ("embed", "mlp"), (-2,))
    with raises_saying(ConfigError, "NestedBits.group = 64 does not divide the 36 inputs of up", "is 36"):
        NestedBits().covers(info)
    with raises_saying(ConfigError, "FewerBits.bits = 5", "4, 6, 8 bits can be read"):
        FewerBits(5).part_of(NestedBits(), {}, lambda x: x)
    with raises_saying(ConfigError, "D2MoE.bits has no effect; set D2MoE.widths"):
        D2MoE(bits=2)
