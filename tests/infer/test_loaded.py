"""Loading a run's model: how long its texts may be, and experts on other meshes than those of training."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxscale as js
from jaxscale.errors import RunError
from jaxscale.infer.loaded import dropless, load_model, on_any_mesh, trained_length
from jaxscale.models import Transformer
from jaxscale.nn import MixtureOfExperts
from jaxscale.parallel.dispatch import AllGatherDispatch, HierarchicalDispatch
from jaxscale.parallel.wires import IntegerWire
from jaxscale.step.state import TrainState, describe_model
from tests.truth.params import random_params


def _run(seq_len, base=None):
    start = None if base is None else SimpleNamespace(run=base)
    return SimpleNamespace(
        config=SimpleNamespace(seq_len=seq_len, start=start, adapters=None if base is None else "LoRA")
    )


def test_adapters_do_not_shorten_the_texts_that_their_model_knows():
    base = _run(512)
    assert [trained_length(r) for r in (base, _run(128, base), _run(1024, base), _run(64, _run(128, base)))] == [
        512, 512, 1024, 512,
    ]  # fmt: skip


def test_adapters_whose_model_is_gone_have_their_own_length():
    class Gone:
        @property
        def run(self):
            raise RunError("it is gone")

    run = _run(128)
    run.config.start, run.config.adapters = Gone(), "LoRA"
    assert trained_length(run) == 128


def test_experts_are_loaded_with_a_dispatcher_for_every_mesh(caplog):
    plain = Transformer.Config(depth=1, vocab=64, width=16, heads=2, mlp=MixtureOfExperts(experts=4))
    nested = HierarchicalDispatch(within=AllGatherDispatch())
    for change in (dropless, on_any_mesh):
        assert change(plain) is plain
        assert change(_sent_by(plain, nested)) == plain
    assert not caplog.records  # the same sums in another order
    coded = HierarchicalDispatch(within=AllGatherDispatch(payload=IntegerWire(feedback=False)))
    assert dropless(_sent_by(plain, coded)) == plain
    assert "exact rows" in caplog.text and "drop" not in caplog.text


def _sent_by(model, dispatcher):
    return dataclasses.replace(model, mlp=dataclasses.replace(model.mlp, dispatcher=dispatcher))


@pytest.mark.parametrize("generation", [True, False])
def test_a_hierarchical_run_is_loaded_on_a_mesh_with_one_axis_of_experts(tmp_path, generation):
    experts = MixtureOfExperts(experts=4, dispatcher=HierarchicalDispatch())
    model = Transformer.Config(depth=1, vocab=64, width=16, heads=2, hidden=32, mlp=experts)
    state = TrainState(jnp.int32(0), random_params(describe_model(model)[1]), {}, jax.random.key(0))
    run = js.Run(tmp_path, js.TrainConfig(model=model, layout=None, seq_len=8), state)
    ids = np.arange(16, dtype=np.int32).reshape(2, 8)

    def logits(layout):
        loaded = load_model(run, layout, generation=generation)
        with loaded.in_force():
            return jax.jit(lambda p: nnx.merge(loaded.graphdef, p)(ids))(loaded.params)

    np.testing.assert_allclose(logits(js.Layout("data=1,expert=2")), logits(js.Layout("data=1")), atol=1e-5)
