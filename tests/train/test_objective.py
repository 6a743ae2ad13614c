"""User-written objectives, data and modules: mistakes are errors of one sentence, results are equal on all layouts."""

import dataclasses
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxscale as js
from jaxscale.cli import main
from jaxscale.errors import ConfigError, DataError
from jaxscale.plan.dry_run import dry_run
from jaxscale.step import Input, Objective
from jaxscale.step.backprop import make_loss_and_grads
from jaxscale.step.blueprint import blueprint_of
from jaxscale.step.prepare import prepare
from jaxscale.sweep.checks import _check_objective
from jaxscale.sweep.runners.group import RunGroup
from tests.truth.errors import raises_saying


class Rows:
    """Points (5,) with a number each; consecutive rows are pairs."""

    name = "points"

    def __init__(self, count=64):
        rng = np.random.default_rng(0)
        self.x = rng.normal(size=(count, 5)).astype(np.float32)
        self.y = self.x.sum(1)
        self.fingerprint = hashlib.sha256(self.x.tobytes()).hexdigest()

    def __len__(self):
        return len(self.x)

    def rows(self, ids):
        return {"a point": self.x[ids], "y": self.y[ids]}


@dataclasses.dataclass(frozen=True)
class Points:
    """A corpus of `Rows`, or of another source, without text."""

    rows: object = None
    name = "points"

    def source(self, tokenizer, **_):
        return Rows() if self.rows is None else self.rows


@dataclasses.dataclass(frozen=True)
class Line:
    """A linear module's config."""

    def make(self, rngs):
        return nnx.Linear(5, 1, rngs=rngs)


@dataclasses.dataclass(frozen=True)
class Pairs(Objective):
    """Squared errors, and a term for pairs that are predicted in the wrong order."""

    group = 2

    def inputs(self, config):
        one = Input((), "float32", ())
        return {"a point": Input((5,), "float32", (None,)), "y": one, "weights": one}

    def weights(self, batch, parts):
        return {"count": jnp.sum(batch["weights"])}

    def terms(self, model, batch, *, key=None):
        out, w = model(batch["a point"])[:, 0], batch["weights"]
        (o, other), (y, than) = (jnp.moveaxis(x.reshape(-1, 2), 1, 0) for x in (out, batch["y"]))
        order = jax.nn.softplus(-jnp.sign(y - than) * (o - other))
        return {"squares": jnp.sum(w * (out - batch["y"]) ** 2), "order": jnp.sum(w.reshape(-1, 2)[:, 0] * order)}

    def value(self, totals):
        return (totals["squares"] + totals["order"]) / totals["count"]


def config_of(objective=None, **settings):
    defaults = dict(model=Line(), data=Points(), layout=None, batch_size=8, steps=2, eval_batches=2)
    return js.TrainConfig(objective=objective or Pairs(), **{**defaults, **settings})


def test_a_vmapped_run_reads_the_rows_that_it_reads_alone():
    config = config_of(seed=3)
    alone, member = (p.loader for p in (prepare(config), RunGroup([config], turns=None)._prepare(0, config)))
    np.testing.assert_array_equal(member.ids_at(5), alone.ids_at(5))
    np.testing.assert_array_equal(np.diff(alone.ids_at(5))[::2], 1)  # pairs stay together


def changed(**methods):
    """`Pairs` with other methods or attributes."""
    return dataclasses.dataclass(frozen=True)(type("Own", (Pairs,), methods))()


def with_input(**inputs):
    return changed(inputs=lambda self, config: {**Pairs.inputs(self, config), **inputs})


def with_metric(**metrics):
    return changed(metrics=lambda self, totals: {**Pairs.metrics(self, totals), **metrics})


WRONG = {
    "a tuple": (with_input(y=(5,)), {}, ["Own.inputs['y'] is (5,)", "Input((5,), 'float32', (None,))"]),
    "rows": (with_input(rows=Input((), "int32", ())), {}, ["'rows' are the numbers of its rows"]),
    "axes": (with_input(y=Input((), "float32", (None,))), {}, ["Own.inputs['y']", "1 axes", "as ()"]),
    "dtype": (with_input(y=Input((), "float31", ())), {}, ["'float31', which NumPy does not know"]),
    "64 bits": (with_input(y=Input((), "float64", ())), {}, ["JAX stores as float32; use float32"]),
    "no tuple": (with_input(y=Input(5, "float32", (None,))), {}, ["give tuples, as Input((5,)"]),
    "no axes": (with_input(y=Input((), "float32", None)), {}, ["give tuples, as Input((5,)"]),
    "no size": (with_input(y=Input((-1,), "float32", (None,))), {}, ["the shape (-1,); give whole numbers"]),
    "words": (with_input(y=Input((), "U4", ())), {}, ["dtype <U4, which is not numeric; use 'float32'"]),
    "no dtype": (with_input(y=Input((), None, ())), {}, ["Own.inputs['y'] has no dtype; give one"]),
    "no arrays": (changed(inputs=lambda self, config: {}), {}, ["Own.inputs returns {}"]),
    "group": (changed(group=0), {}, ["Own.group = 0: must be a whole number of at least 1"]),
    "a real group": (changed(group=2.0), {}, ["Own.group = 2.0: must be a whole number"]),
    "evaluated": (changed(evaluated="loss"), {}, ["Own.evaluated = 'loss': give a tuple, as ('loss',)"]),
    "evaluated, no metric": (
        changed(evaluated=("loss", "nats")), {}, ["Own.evaluated names 'nats', but Own.metrics returns only loss"],
    ),
    "no loss": (
        changed(metrics=lambda self, totals: {"each": 1.0}), {},
        ["Own.metrics must return 'loss'; it returns only each"],
    ),
    "no inputs": (changed(inputs=Objective.inputs), {}, ["Own has no method 'inputs'; define it"]),
    "a word": (changed(terms=lambda self, model, batch, *, key=None: {"each": "5"}), {}, ["the sum 'each' is '5'"]),
    "complex": (with_metric(each=jnp.complex64(1)), {}, ["the metric 'each' is of complex64; give a real number"]),
    "a key": (with_metric(each=jax.random.key(0)), {}, ["the metric 'each' is of key<fry>; give a real number"]),
    "groups of parts": (Pairs(), dict(batch_size=12, accumulate=4), ["4 micro-batches", "nearest that does is 16"]),
    "shared": (
        changed(weights=lambda self, batch, parts: {"count": 1.0, "squares": 1.0}), {}, ["both have 'squares'"],
    ),
    "no terms": (changed(terms=lambda self, model, batch, *, key=None: None), {}, ["Own.terms returns None"]),
    "bfloat16": (
        changed(value=lambda self, totals: Pairs.value(self, totals).astype("bfloat16")), {},
        ["its value is bfloat16; give float32"],
    ),
    "whole": (changed(value=lambda self, totals: jnp.int32(0)), {}, ["its value is int32; give float32"]),
    "vector": (with_metric(each=jnp.ones(3)), {}, ["the metric 'each' has the shape (3,)"]),
    "no number": (with_metric(each=None), {}, ["the metric 'each' is None"]),
    "step": (with_metric(step=jnp.ones(())), {}, ["metric 'step', which training writes itself"]),
    "a root": (
        changed(value=lambda self, totals: jnp.sqrt(Pairs.value(self, totals))), dict(accumulate=2),
        ["Own.value is not linear", "train.accumulate = 2", "set train.accumulate = 1"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("objective,settings,words", WRONG.values(), ids=WRONG)
def test_a_wrong_objective_is_said_before_anything_is_compiled(objective, settings, words):
    with raises_saying(ConfigError, *words):
        prepare(config_of(objective, **settings))


def test_a_bfloat16_term_is_accumulated():
    def terms(self, model, batch, *, key=None):
        return {**Pairs.terms(self, model, batch), "few": jnp.bfloat16(1)}

    prepare(config_of(changed(terms=terms, value=lambda self, totals: Pairs.value(self, totals)), accumulate=2))


@pytest.mark.parametrize("remedy", [dict(batch_size=16, accumulate=4), dict(batch_size=12, accumulate=2)])
def test_groups_that_divide_the_parts_are_taken(remedy):
    prepare(config_of(**remedy))


def source(**parts):
    """Return a source with some attributes replaced, or with `None` as if missing."""
    out = type("Source", (Rows,), {k: v for k, v in parts.items() if k != "fingerprint"})()
    vars(out).update({k: v for k, v in parts.items() if k == "fingerprint"})
    return out


BAD_DATA = {
    "fingerprint": (source(fingerprint=None), ["Source, a source of training rows", "no text 'fingerprint'"]),
    "len": (source(__len__=None), ["no method '__len__'"]),
    "a list": (source(rows=lambda self, ids: [1]), ["returns a list; return a dict"]),
    "lists": (source(rows=lambda self, ids: {"y": [1.0, 2.0]}), ["returns a list for 'y'; return a NumPy array"]),
    "one row": (source(rows=lambda self, ids: {"y": np.ones(1)}), ["'y' of shape (1,) for 2 row numbers"]),
}


@pytest.mark.parametrize("rows,words", BAD_DATA.values(), ids=BAD_DATA)
def test_wrong_data_is_said(rows, words):
    with raises_saying(DataError, *words):
        prepare(config_of(data=Points(rows)))


def test_a_further_corpus_without_the_arrays_is_said_before_training():
    other = source(rows=lambda self, ids: {"x": self.y[ids]})
    with raises_saying(DataError, "'a point'", "its rows have x"):
        prepare(config_of(evaluate_on={"far": Points(other)}))


@dataclasses.dataclass(frozen=True)
class Counted(Pairs):
    """Terms that are arrays: weights by row."""

    def terms(self, model, batch, *, key=None):
        totals = super().terms(model, batch)
        return {**totals, "by_row": jnp.zeros(8).at[batch["rows"]].add(batch["weights"])}

    def metrics(self, totals):
        return {"loss": self.value(totals), "most": jnp.max(totals["by_row"])}


def test_parts_of_uneven_and_of_no_weight_add_up_to_the_batch():
    config = config_of(Counted())
    blueprint, _ = blueprint_of(config)
    batch = {**prepare(config).loader.batch_at(0), "weights": np.asarray([3, 3, 0.5, 0.5, 0, 0, 0, 0], np.float32)}
    batch = {name: jnp.asarray(batch[name]) for name in config.objective.inputs(config)}
    params, key = blueprint.make(0).params, jax.random.key(0)
    steps = [make_loss_and_grads(blueprint, objective=config.objective, accumulate=n) for n in (1, 2, 4)]
    whole, *parted = jax.jit(lambda: [step(params, batch, key) for step in steps])()
    for totals in parted:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), totals, whole)
    assert float(whole[0]["most"]) == 3


RUN = """
import tests.train.test_objective
train.model = @Line()
train.data = @Points()
train.objective = @Pairs()
train.layout = None
train.steps = 1
train.batch_size = 8
train.evaluate_on = {"far": @Points()}
"""


@pytest.fixture
def registered():
    for part in (Line, Points, Pairs):
        js.config.register(part)


def test_what_a_run_prints_fits_a_run_without_texts(own_folder, capsys, registered):
    (own_folder / "own.gin").write_text(RUN)
    assert main(["train", "own.gin", "--run", "run"]) == 0
    output = capsys.readouterr().out
    assert "6 parameters" in output and "loss/far" in output and " sample " not in output
    advice = next(line.split() for line in output.splitlines() if line.startswith("  ") and " report " in line)
    assert main(advice[advice.index("report") :]) == 0
    imported = ["--import", "tests.train.test_objective"]
    for command in (["serve", "run"], ["eval", "run"], ["sample", "run"]):
        assert main([*command, *imported]) == 2
        assert "Line is not a language model, so it cannot continue text" in capsys.readouterr().err
    assert main(["replay", "run", "--step", "1", *imported]) == 0
    assert "no effect" not in capsys.readouterr().err


def test_a_dry_run_counts_rows(own_folder, capsys, registered):
    assert "8 rows in 2 micro-batches" in str(dry_run(config_of(accumulate=2)))
    (own_folder / "own.gin").write_text(RUN + 'sweep.axes = {"train.lr": [0.1, 0.2]}')
    assert main(["sweep", "own.gin", "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "rows" in output and "tokens" not in output and "nan" not in output


def test_a_sweep_minimises_what_an_evaluation_reports():
    own = changed(evaluated=("loss", "squares"))
    config = config_of(own, evaluate_on={"far": Points()})
    for name in ("eval_squares", "eval_loss/far", "eval_squares/far", "rows_per_second"):
        _check_objective(name, config)
    with raises_saying(ConfigError, "did you mean 'eval_squares'"):
        _check_objective("eval_square", config)
