"""A module, an objective and a data source from outside the package train like our own."""

import dataclasses

import jax
import numpy as np
import pytest

import jaxscale as js
from experiments.bring_your_own.digits import Classify, Digits
from experiments.bring_your_own.vit import FromLinen, ViT
from jaxscale.errors import ConfigError, DataError
from jaxscale.models import TransformerConfig
from jaxscale.plan import plan_for
from jaxscale.plan.flops import of_step
from jaxscale.step import NextToken, blueprint_of
from jaxscale.testing import check_objective
from tests.truth.errors import raises_saying

pytest.importorskip("sklearn")
LAYOUT = js.Layout("data=2,fsdp=2,tensor=2")
SETTINGS = dict(data=Digits(), objective=Classify(), steps=2, batch_size=32, eval_batches=2, quiet=True)


def numbers(run):
    return [[row[k] for k in ("loss", "grad_norm", "accuracy")] for row in run.metrics()], run.metrics()[-1]


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """Two steps of the named transformer on eight devices."""
    return js.fit(model=ViT(depth=1), layout=LAYOUT, run=tmp_path_factory.mktemp("runs") / "run", **SETTINGS)


def test_a_plain_module_trains_to_the_numbers_of_one_device(sharded, tmp_path):
    one = js.fit(model=ViT(depth=1), layout=None, run=tmp_path / "run", **SETTINGS)
    (got, last), (want, alone) = numbers(sharded), numbers(one)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    for metric in ("eval_loss", "eval_accuracy"):
        np.testing.assert_allclose(last[metric], alone[metric], rtol=1e-5)
    assert "rows_per_second" in last and "tokens_per_second" not in last and "model_flops_per_second" not in last


@pytest.mark.long
def test_it_is_called_as_a_module_and_resumes_on_another_mesh(sharded):
    model, images = sharded.model(), Digits().source(None, split="heldout").images[:64]
    labels = Digits().source(None, split="heldout").labels[:64]
    log = jax.nn.log_softmax(model(images))
    assert np.isfinite(-log[np.arange(64), labels].mean())
    config = dataclasses.replace(sharded.config, steps=3, layout=js.Layout("fsdp=4"))
    more = js.fit(config, run=sharded.path, resume=True, quiet=True)
    assert [row["step"] for row in more.metrics()] == [1, 2, 3]


def test_names_are_inferred_for_a_module_that_has_none():
    named = {i.path: i.axes for i in jax.tree.leaves(blueprint_of(_config(ViT(depth=1)))[0].infos)}
    for path, axes in _axes(ViT(depth=1, axes=False)).items():
        if "kernel" in path and path.split("/")[-2] in ("up", "down"):
            assert axes == named[path]
    linen = _axes(FromLinen())
    assert {linen["Dense_1/kernel"], linen["Dense_2/kernel"]} == {("embed", "mlp"), ("mlp", "embed")}


@pytest.mark.long
def test_a_linen_module_trains_to_the_numbers_of_one_device(tmp_path):
    runs = [
        js.fit(model=FromLinen(width=16), layout=layout, run=tmp_path / name, **SETTINGS)
        for name, layout in {"one": None, "eight": LAYOUT}.items()
    ]
    np.testing.assert_allclose(numbers(runs[1])[0], numbers(runs[0])[0], rtol=1e-5)


@pytest.mark.parametrize("config", ["digits", "text"])
def test_objectives_keep_their_promises(config):
    if config == "digits":
        config = js.TrainConfig(model=ViT(depth=1, width=16), data=Digits(), objective=Classify(), layout=None)
        batch = {**Digits().source(None, split="train").rows(np.arange(8)), "weights": np.ones(8, np.float32)}
    else:
        model = TransformerConfig(vocab=11, depth=1, width=8, heads=2)
        config = js.TrainConfig(model=model, layout=None, seq_len=16, objective=NextToken(z_loss=0.1), batch_size=8)
        batch = js.testing.random_batch(11, lengths=(7, 5))
    check_objective(config, batch)


class Squared(Classify):
    """The square of a mean is not linear in the sum."""

    def value(self, totals):
        return super().value(totals) ** 2


def test_an_objective_that_breaks_a_promise_is_named():
    config = js.TrainConfig(model=ViT(depth=1, width=16), data=Digits(), objective=Squared(), layout=None)
    batch = {**Digits().source(None, split="train").rows(np.arange(8)), "weights": np.ones(8, np.float32)}
    with pytest.raises(AssertionError, match="not linear in the terms"):
        check_objective(config, batch)


class AllAtOnce(Classify):
    additive = False


@pytest.mark.parametrize(
    "kind,settings,words",
    [
        (ConfigError, dict(objective=NextToken()), ["NextToken trains language models", "ViT has no 'vocab'"]),
        (DataError, dict(model=TransformerConfig(depth=1), objective=NextToken()), ["'tokens'", "'digits' has none"]),
        (ConfigError, dict(layout=js.Layout("pipeline=2")), ["Classify", "last pipeline stage cannot compute"]),
        (ConfigError, dict(objective=AllAtOnce(), accumulate=2), ["AllAtOnce", "all rows of a batch at once"]),
        (ConfigError, dict(objective=Classify), ["train.objective must be an objective", "the class Classify"]),
        (ConfigError, dict(loss=None), ["fit has no setting 'loss'", "objective=NextToken(loss=...)"]),
    ],
    ids=["text objective", "text model", "stages", "in parts", "a class", "an old setting"],
)
def test_wrong_combinations_are_errors_before_anything_is_compiled(kind, settings, words, tmp_path):
    with raises_saying(kind, *words):
        js.fit(**{**SETTINGS, "model": ViT(), "layout": None, **settings}, run=tmp_path / "run")


def test_a_model_that_is_no_language_model_does_not_sample(sharded):
    with raises_saying(ConfigError, "ViT is not a language model", "Run.model()"):
        sharded.sample("def ")


def _config(model):
    return js.TrainConfig(model=model, layout=LAYOUT.abstract(), data=Digits(), objective=Classify(), batch_size=32)


def _axes(model):
    return {i.path: i.axes for i in jax.tree.leaves(blueprint_of(_config(model))[0].infos)}


def test_without_a_compiler_its_plan_is_of_the_traced_step():
    plan = plan_for(_config(ViT(depth=1)), "v5e:2x4", compile="never")
    products = of_step(plan.config, 8, kind="TPU v5e").matmul
    assert sum(op.flops for op in plan.work.ops) * 8 == pytest.approx(products, rel=0.05)
    assert {axis for t in plan.step.traffic for axis in t.axes} == {"data", "fsdp", "tensor"}
    assert any("Classify" in note and "traced step" in note for note in plan.notes)


@pytest.mark.tpu_aot
def test_its_plan_is_read_off_the_compiled_step():
    plan = plan_for(_config(ViT(depth=1)), "v5e:2x4")
    assert plan.compiled is not None and plan.bytes == plan.compiled.bytes and plan.fits
    assert {axis for t in plan.step.traffic for axis in t.axes} == {"data", "fsdp", "tensor"}
    assert any("Classify" in note and "traced step" in note for note in plan.notes)
