"""Runs that train some of a model's parameters; the others stay unchanged."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jaxscale as js
from jaxscale.errors import ConfigError
from jaxscale.models import TransformerConfig
from jaxscale.optim import Constant
from jaxscale.plan.covered import NotCovered, covered
from jaxscale.step import NextToken, TrainConfig, Unfreeze, blueprint_of, settled
from jaxscale.step.prepare import prepare
from jaxscale.step.rates import model_flops
from jaxscale.train import FromRun
from jaxscale.train.checkpoints import flatten
from tests.truth.errors import raises_saying

MODEL = TransformerConfig(vocab=32, depth=2, width=32, heads=4, kv_heads=2, hidden=64)
ROWS = dict(data=js.data.synthetic(32, documents=400, length=16), batch_size=8, seq_len=16, eval_batches=1)
QUIET = dict(quiet=True)
NORMS = Unfreeze(("*norm*", "head"))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A run of two steps, to start from."""
    return js.fit(model=MODEL, layout=None, steps=2, run=tmp_path_factory.mktemp("base") / "run", **ROWS, **QUIET)


def config_of(base, layout=None, **more):
    more = {"adapters": NORMS, "start": FromRun(str(base.path)), "schedule": Constant(), **more}
    return settled(TrainConfig(layout=layout, lr=1e-2, **ROWS, **more))


def chosen(path):
    return "norm" in path or path.startswith("head")


@pytest.mark.long
def test_steps_are_those_of_optax_with_the_others_masked(base, tmp_path):
    run = js.fit(config_of(base, steps=2, optimizer=optax.adam(1e-2), clip_norm=None), run=tmp_path / "run", quiet=True)
    blueprint, _ = blueprint_of(base.config)
    params = jax.device_get(base.state.params)
    labels = jax.tree.map(lambda i: "train" if chosen(i.path) else "leave", blueprint.infos)
    tx = optax.multi_transform({"train": optax.adam(1e-2), "leave": optax.set_to_zero()}, labels)
    state = tx.init(params)
    prepared = prepare(run.config)
    for step in range(2):
        batch = prepared.place(prepared.loader, step)

        def loss(params, batch=batch):
            objective = NextToken()
            totals = objective.terms(nnx.merge(blueprint.graphdef, params), batch) | objective.weights(batch, 1)
            return objective.value(totals)

        updates, state = tx.update(jax.jit(jax.grad(loss))(params), state, params)
        params = optax.apply_updates(params, updates)
    got, want, before = flatten(run.params()), flatten(params), flatten(base.state.params)
    for path in want:
        np.testing.assert_allclose(got[path], want[path], rtol=2e-5, atol=2e-6, err_msg=path)
        assert chosen(path) != np.array_equal(got[path], before[path]), path
    state = run.state
    count = lambda tree: sum(np.size(x) for x in jax.tree.leaves(tree))  # noqa: E731
    trained = sum(np.size(x) for path, x in before.items() if chosen(path))
    assert count(state.params) == trained and count(state.frozen) == count(base.state.params) - trained
    assert count(state.opt_state) == 2 * trained + 1


def test_on_devices_resumed_elsewhere_evaluated_and_sampled(base, tmp_path):
    config = config_of(base, steps=3, eval_every=3)
    one = js.fit(config, run=tmp_path / "one", quiet=True)
    js.fit(
        dataclasses.replace(config, layout=js.Layout("data=2,fsdp=2,tensor=2"), steps=2), run=tmp_path / "two", **QUIET
    )
    two = js.fit(dataclasses.replace(config, layout=js.Layout("fsdp=4")), run=tmp_path / "two", resume=True, quiet=True)
    for name in ("loss", "grad_norm"):
        got, want = ([row[name] for row in run.metrics()] for run in (two, one))
        np.testing.assert_allclose(got, want, rtol=1e-4)
    np.testing.assert_allclose(two.metrics()[-1]["eval_loss"], one.metrics()[-1]["eval_loss"], rtol=1e-5)
    assert all(
        chosen(name.removeprefix("params/")) for name in two.checkpoints.manifest(3)["leaves"] if "params/" in name
    )
    again = js.Run(two.path)
    ids = [r.generate([1, 2, 3], max_tokens=4, temperature=0.0).ids for r in (again, one)]
    assert ids[0] == ids[1]


def test_it_is_planned_counted_and_said(base):
    config = config_of(base, js.Layout("fsdp=4"))
    with pytest.raises(NotCovered, match="Unfreeze"):
        covered(config, adapters=True)
    whole = model_flops(config_of(base, adapters=None))
    assert 2 / 3 * whole < model_flops(config) < whole
    sentence = blueprint_of(config)[0].adaptation.describe()
    assert "parameters are trained: attn_norm/scale, head/weight, mlp_norm/scale, norm/scale" in sentence
    with raises_saying(ConfigError, "Unfreeze.targets has 'nrm'", "norm"):
        blueprint_of(config_of(base, adapters=Unfreeze(("nrm",))))
    with raises_saying(ConfigError, "Unfreeze.targets = 'norm'", "must be a tuple"):
        Unfreeze("norm")
    with raises_saying(ConfigError, "set train.start"):
        TrainConfig(adapters=NORMS)
