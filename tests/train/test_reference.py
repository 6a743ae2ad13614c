"""Objectives that compare with the parameters a run started from, as preference optimisation does."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxscale as js
from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.models import TransformerConfig
from jaxscale.optim import Constant
from jaxscale.plan import explain
from jaxscale.plan.dry_run import dry_run
from jaxscale.step import LoRA, NextToken, Objective, TrainConfig, Unfreeze, blueprint_of, make_loss_and_grads, settled
from jaxscale.step.backprop import numbered
from jaxscale.step.prepare import prepare
from jaxscale.testing import check_objective, random_params
from jaxscale.train import FromRun
from tests.truth.compare import assert_leaves_agree
from tests.truth.errors import raises_saying

MODEL = TransformerConfig(vocab=32, depth=2, width=32, heads=4, kv_heads=2, hidden=64)
ROWS = dict(
    data=js.data.synthetic(32, documents=400, length=16), batch_size=8, seq_len=16, eval_batches=1, segments=False
)
QUIET = dict(quiet=True)


@register(name="TestPreferred")
@dataclasses.dataclass(frozen=True)
class Preferred(Objective):
    """Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290, equation 7).

    Of two rows, one after the other, the first is preferred.
    """

    group = 2
    reference = True
    beta: float = 0.5

    def inputs(self, config):
        return NextToken().inputs(config)

    def weights(self, batch, parts):
        return {"pairs": jnp.sum(_counts(batch))}

    def terms(self, model, batch, *, key=None, reference):
        gain = _log_probability(model, batch) - _log_probability(reference, batch)
        chosen, rejected = gain.reshape(-1, 2).T
        return {"losses": jnp.sum(-jax.nn.log_sigmoid(self.beta * (chosen - rejected)) * _counts(batch))}

    def value(self, totals):
        return totals["losses"] / totals["pairs"]


def _counts(batch):
    return jnp.any(batch["weights"] > 0, axis=1)[::2].astype(jnp.float32)


def _log_probability(model, batch):
    logits = jax.nn.log_softmax(model(batch["tokens"]))
    chosen = jnp.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
    return jnp.sum(chosen * batch["weights"], axis=1)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A run of two steps, to start from."""
    return js.fit(model=MODEL, layout=None, steps=2, run=tmp_path_factory.mktemp("base") / "run", **ROWS, **QUIET)


def config_of(base, layout=None, **more):
    more = {"objective": Preferred(), "start": FromRun(str(base.path)), **more}
    return settled(TrainConfig(layout=layout, **ROWS, **more))


def test_value_and_gradient_are_those_of_the_papers_formula(base):
    config = config_of(base)
    blueprint, _ = blueprint_of(config)
    params, first = (jax.tree.map(jnp.asarray, random_params(blueprint.infos, seed=s)) for s in range(2))
    rows = config.data.source(None, seq_len=16, split="train").rows(np.arange(8))
    batch = {k: jnp.asarray(rows[k]) for k in Preferred().inputs(config)}

    def logits(params):
        return jax.nn.log_softmax(nnx.merge(blueprint.graphdef, params)(batch["tokens"]))

    def log_probability(scores, row):
        scores = np.asarray(scores, np.float64)[row, np.arange(16), rows["targets"][row]]
        return np.sum(scores * rows["weights"][row])

    ours, theirs = jax.jit(logits)(params), jax.jit(logits)(first)
    gains = [log_probability(ours, row) - log_probability(theirs, row) for row in range(8)]
    want = np.mean([np.log1p(np.exp(-0.5 * (gains[i] - gains[i + 1]))) for i in range(0, 8, 2)])
    for parts in (1, 2):
        f = jax.jit(make_loss_and_grads(blueprint, objective=Preferred(), accumulate=parts))
        metrics, grads = f(params, batch, jax.random.key(0), first)
        np.testing.assert_allclose(metrics["loss"], want, rtol=2e-5)

    def plain(params):
        gain = _log_probability(nnx.merge(blueprint.graphdef, params), batch)
        gain -= _log_probability(nnx.merge(blueprint.graphdef, first), batch)
        return jnp.mean(jnp.logaddexp(0, -0.5 * (gain[::2] - gain[1::2])))

    assert_leaves_agree(grads, jax.jit(jax.grad(plain))(params))


def test_a_run_on_devices_and_resumed_elsewhere_has_the_numbers_of_one_device(base, tmp_path):
    config = config_of(base, steps=3, lr=1e-2, schedule=Constant(), eval_every=3)
    one = js.fit(config, run=tmp_path / "one", quiet=True)
    assert abs(one.metrics()[0]["loss"] - np.log(2)) < 1e-6  # it begins as its reference
    layout = js.Layout("data=2,fsdp=2,tensor=2")
    js.fit(dataclasses.replace(config, layout=layout, steps=2), run=tmp_path / "two", quiet=True)
    elsewhere = dataclasses.replace(config, layout=js.Layout("fsdp=4"))
    two = js.fit(elsewhere, run=tmp_path / "two", resume=True, quiet=True)
    for name in ("loss", "grad_norm"):
        got, want = ([row[name] for row in run.metrics()] for run in (two, one))
        np.testing.assert_allclose(got, want, rtol=1e-4)
    np.testing.assert_allclose(two.metrics()[-1]["eval_loss"], one.metrics()[-1]["eval_loss"], rtol=1e-4)
    assert not any("reference" in name or "frozen" in name for name in two.checkpoints.manifest(3)["leaves"])
    frozen, first = (jax.tree.leaves(jax.device_get(tree)) for tree in (two.state.frozen, base.state.params))
    assert all(np.array_equal(a, b) for a, b in zip(frozen, first, strict=True))


def test_it_is_counted_and_described(base):
    plain, config = (config_of(base, js.Layout("fsdp=4"), objective=o) for o in (NextToken(), Preferred()))
    assert dry_run(config).parameter_bytes == 2 * dry_run(plain).parameter_bytes
    paths = [row.path for row in explain(config).params]
    assert "reference/embed/weight" in paths and "embed/weight" in paths


def test_adapters_are_compared_with_what_they_are_on(base, tmp_path):
    config = config_of(base, adapters=LoRA(rank=2), steps=2, lr=1e-2)
    prepared = prepare(config)
    state = prepared.blueprint.init(0)
    count = lambda tree: sum(x.size for x in jax.tree.leaves(tree))  # noqa: E731
    assert count(state.frozen) == count(base.state.params)
    run = js.fit(config, run=tmp_path / "run", quiet=True)
    losses = [row["loss"] for row in run.metrics()]
    assert abs(losses[0] - np.log(2)) < 1e-6 and losses[1] != losses[0]


def test_parameters_that_are_trained_apart_are_compared_with_their_first_values(base, tmp_path):
    run = js.fit(config_of(base, adapters=Unfreeze(("head",)), steps=2, lr=1e-2), run=tmp_path / "run", quiet=True)
    losses = [row["loss"] for row in run.metrics()]
    assert abs(losses[0] - np.log(2)) < 1e-6 and losses[1] != losses[0]
    frozen, first = (jax.tree.leaves(jax.device_get(tree)) for tree in (run.state.frozen, base.state.params))
    assert all(np.array_equal(a, b) for a, b in zip(frozen, first, strict=True))


def test_it_keeps_an_objectives_promises(base):
    config = config_of(base)
    rows = config.data.source(None, seq_len=16, split="train").rows(np.arange(8))
    check_objective(config, numbered({k: np.asarray(v) for k, v in rows.items()}))


def test_what_has_no_reference_is_said(base):
    with raises_saying(ConfigError, "Preferred compares with the parameters that a run starts from", "--from RUN"):
        prepare(config_of(base, start=None, model=MODEL))
    with raises_saying(ConfigError, "the last pipeline stage cannot compute Preferred"):
        prepare(config_of(base, js.Layout("pipeline=2")))
