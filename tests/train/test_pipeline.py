"""A pipeline equals one device: every schedule, with every other mesh axis, and all features of training."""

from __future__ import annotations

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxscale.errors import ConfigError, LayoutError
from jaxscale.layout import SCHEDULES, Layout, Pipeline, Rules
from jaxscale.models import TransformerConfig
from jaxscale.nn import MixtureOfExperts, MultiHeadLatent, ReversibleRun, SigmoidRouter
from jaxscale.plan import explain
from jaxscale.step import (
    AutoLoss,
    CutLoss,
    MaterialisedLoss,
    NextToken,
    TrainConfig,
    blueprint_of,
    describe_model,
    make_loss_and_grads,
    pipelined,
    prepare,
    replicas_of,
)
from jaxscale.step.step import make_eval
from tests.truth.compare import assert_leaves_agree
from tests.truth.errors import raises_saying
from tests.truth.layouts import assert_layouts_agree, build, random_batch, remembering_sgd
from tests.truth.long import short
from tests.truth.schedules import random_table

MODEL = TransformerConfig(depth=4, vocab=64, width=16, heads=4, kv_heads=1, head_dim=4, hidden=32)
BATCH = random_batch(64, rows=8, seq=8)

# Packing, accumulation over rows of different weights, a tied head, z-loss, biases, windows, dropout.
EVERYTHING = dict(
    model=dataclasses.replace(
        MODEL, windows=(5,), qk_norm=True, bias=True, tied=True, logit_softcap=5.0, dropout=0.2, memory="full"
    ),
    batch=random_batch(64, rows=16, seq=16, lengths=(7, 2, 4)),
    accumulate=2,
    objective=NextToken(z_loss=1e-2),
)


def random_schedule(stages: int, microbatches: int, chunks: int = 2):
    return random_table(stages, microbatches, chunks=chunks, phases=3, seed=stages * microbatches)


ALL = [*SCHEDULES, Pipeline(random_schedule, 4, 2)]
QUICK = ("dualpipe-v",)  # tests/train/test_stage_order.py trains by "interleaved"


@pytest.mark.parametrize(
    "schedule",
    [s if s in QUICK else pytest.param(s, marks=pytest.mark.long) for s in ALL],
    ids=lambda s: getattr(s, "name", s),
)
def test_every_schedule_gives_the_same_numbers(schedule):
    pipeline = dataclasses.replace(Pipeline.of(schedule), microbatches=4)
    assert_layouts_agree(MODEL, [Layout("pipeline=2", pipeline=pipeline)], batch=BATCH)


@pytest.mark.parametrize(
    "layout",
    short(
        1,
        [
            pytest.param(Layout("pipeline=4", pipeline="interleaved:4:1"), marks=pytest.mark.long),
            Layout("data=2,pipeline=2,tensor=2", pipeline="lockstep-zb"),
            pytest.param(Layout("pipeline=2,tensor=2", pipeline="zb-v"), marks=pytest.mark.long),
            pytest.param(
                Layout("pipeline=2,fsdp=2,tensor=2", pipeline=Pipeline("dualpipe-v", gather="step")),
                marks=pytest.mark.long,
            ),
            pytest.param(Layout("fsdp=2,pipeline=2,data=2", pipeline="1f1b:2"), marks=pytest.mark.long),
            pytest.param(
                Layout("pipeline=2,tensor=2,context=2", pipeline=Pipeline("zb-v", vocabulary="whole")),
                marks=pytest.mark.long,
            ),
            pytest.param(
                Layout("pipeline=4,data=2", pipeline=Pipeline("1f1b", vocabulary="whole")), marks=pytest.mark.long
            ),
            pytest.param(
                Layout("pipeline=2,tensor=2", pipeline=Pipeline(random_schedule, 4, 2), sequence_sharded=True),
                marks=pytest.mark.long,
            ),
            Layout("pipeline=2,context=2", pipeline="gpipe"),
            Layout("pipeline=4,data=2", "zero2"),
        ],
    ),
    ids=str,
)
def test_training_with_everything_on_gives_the_same_numbers(layout):
    assert_layouts_agree(layouts=[layout], **EVERYTHING)


@pytest.mark.parametrize(
    "pipeline",
    [pytest.param("gpipe", marks=pytest.mark.long), Pipeline("zb-h1", gather="step", vocabulary="whole")],
    ids=["gpipe", "zb-h1"],
)
def test_layers_that_do_not_divide_and_unlike_runs_give_the_same_numbers(pipeline):
    # Two groups of two, and one of one left over, on two stages: padding on both.
    model = dataclasses.replace(MODEL, depth=5, windows=(5, None))
    assert_layouts_agree(model, [Layout("pipeline=2,fsdp=2", pipeline=pipeline)], batch=BATCH)


@pytest.mark.long
def test_attention_from_latents_gives_the_same_numbers_with_weight_gradients_apart():
    layer = MultiHeadLatent(kv_rank=8, q_rank=8, plain_dim=4, rotary_dim=4, value_dim=4)
    model = dataclasses.replace(MODEL, depth=2, kv_heads=None, head_dim=None, attention_layer=layer)
    assert_layouts_agree(model, [Layout("pipeline=2,fsdp=2,tensor=2", pipeline="zb-h1")], batch=BATCH)


def test_a_reversible_stack_gives_the_same_numbers():
    model = dataclasses.replace(MODEL, depth=3, stack=ReversibleRun)
    # the streams that are undone differ from those that were by rounding, another one in another program
    layout = Layout("pipeline=2", pipeline="lockstep-zb")
    assert_layouts_agree(model, [layout], batch=BATCH, tolerance=3e-5)


@pytest.mark.long
def test_layers_that_report_give_the_same_numbers_with_weight_gradients_apart():
    experts = MixtureOfExperts(experts=4, shared=1, balance_loss=0.1)
    layout = Layout("pipeline=2", pipeline="lockstep-zb:1")  # one, since what they add is of each micro-batch
    assert_layouts_agree(dataclasses.replace(MODEL, depth=2, mlp=experts), [layout], batch=BATCH)


def test_a_loss_that_holds_no_logits_gives_the_same_numbers():
    def cut(blueprint, *, objective, **options):
        return make_loss_and_grads(blueprint, objective=dataclasses.replace(objective, loss=CutLoss()), **options)

    layouts = [Layout("pipeline=2,tensor=2,data=2")]
    assert_layouts_agree(MODEL, layouts, batch=BATCH, make_loss_and_grads=cut, objective=NextToken(z_loss=1e-2))


class Plain:
    """A loss that knows nothing of layouts: of logits, by optax."""

    def __call__(self, hidden, weight, targets, *, softcap):
        logits = (hidden @ weight.T).astype(jnp.float32)
        squares = jnp.square(jax.nn.logsumexp(logits, axis=-1))
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets), squares

    def describe(self, vocab):
        return "plain"


WHOLE = Pipeline("1f1b", vocabulary="whole")


@pytest.mark.parametrize(
    "layout",
    [
        Layout("pipeline=2,tensor=2", pipeline=WHOLE),
        pytest.param(Layout("pipeline=2,data=2", pipeline=WHOLE), marks=pytest.mark.long),
        pytest.param(Layout("tensor=4,data=2"), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_plain_loss_gives_the_same_numbers_where_no_stage_has_a_part_of_the_vocabulary(layout):
    def plain(blueprint, *, objective, **options):
        return make_loss_and_grads(blueprint, objective=dataclasses.replace(objective, loss=Plain()), **options)

    assert_layouts_agree(MODEL, [layout], batch=BATCH, make_loss_and_grads=plain, objective=NextToken(z_loss=1e-2))


def test_the_loss_is_chosen_by_the_whole_vocabulary_and_not_by_a_stages_part():
    """Each stage has 32 rows of a vocabulary of 64."""
    programs = []
    for loss in (AutoLoss(cut_from=64), CutLoss()):
        setup = build(MODEL, Layout("pipeline=2"), remembering_sgd())
        gradients = make_loss_and_grads(setup.blueprint, objective=NextToken(loss))
        with Layout("pipeline=2"):
            programs.append(str(jax.make_jaxpr(gradients)(setup.state.params, BATCH, setup.state.rng)))
    assert programs[0] == programs[1]


def test_an_evaluation_gives_the_same_numbers_and_gathers_no_layer():
    batch = random_batch(64, rows=8, seq=8, lengths=(3, 4))
    results = []
    for layout in (None, Layout("pipeline=2", pipeline="interleaved:4")):
        setup = build(MODEL, layout, remembering_sgd())
        if layout is None:
            results.append(make_eval(setup.blueprint, None)(setup.state.params, batch))
            continue
        with layout:
            compiled = make_eval(setup.blueprint, None).lower(setup.state.params, batch).compile()
            results.append(compiled(setup.state.params, batch))
    assert [totals.pop("parts") for totals in results] == [1, 4]
    assert_leaves_agree(results[1], results[0])
    smallest = min(i.size for i in jax.tree.leaves(setup.blueprint.infos["runs"]) if len(i.shape) > 2)
    shapes = re.findall(r"= \w+\[([\d,]*)\]\S* all-gather", compiled.as_text())
    assert shapes and all(math.prod(map(int, s.split(","))) < smallest for s in shapes)  # of the log-sum-exp only


# --- what sums gradients once


@pytest.mark.parametrize(
    "layout,replicas",
    [
        (Layout("pipeline=2,data=2,tensor=2"), ("data",)),
        (Layout("pipeline=2,data=2,fsdp=2"), ("data",)),
        (Layout("pipeline=2,data=2,fsdp=2", "zero1"), ("data", "fsdp")),
        (Layout("pipeline=2,fsdp=2"), ()),
        (Layout("pipeline=2,fsdp=2,context=2,tensor=2", pipeline=Pipeline(gather="step")), ("fsdp",)),
        (Layout("pipeline=2,data=2,fsdp=2", "hierarchical", pipeline=Pipeline(gather="step")), ("data", "fsdp")),
        (Layout("pipeline=2,data=2,fsdp=2", "hierarchical"), ("data",)),
        (Layout("pipeline=2,data=2", Rules(activations={"batch": "data", "residual_seq": "data"})), ()),
        (Layout("pipeline=2,data=2,fsdp=2", Rules(activations={"batch": ("fsdp", "data"), "seq": "fsdp"})), ()),
    ],
    ids=str,
)
def test_replicas_are_cut_by_their_rows_alone(layout, replicas):
    assert replicas_of(*describe_model(MODEL), layout) == replicas


def test_how_often_gradients_are_summed_is_reported():
    experts = dataclasses.replace(MODEL, mlp=MixtureOfExperts(experts=4))
    for model in (experts, MODEL):
        blueprint, _ = blueprint_of(TrainConfig(model=model, layout=Layout("pipeline=2,data=2")))
        notes = pipelined(blueprint, NextToken(MaterialisedLoss())).notes(8)
        assert sum("summed over data for every micro-batch" in n for n in notes) == (model is experts)
        assert sum("summed once, after the last micro-batch" in n for n in notes) == (model is MODEL)


# --- mistakes, before anything is compiled


UNEVEN = MixtureOfExperts(experts=3, router=SigmoidRouter())


class Own(MaterialisedLoss):
    of_cut_vocabulary = False


TWO = Layout("pipeline=2")


class Whole(MaterialisedLoss):
    def __call__(self, hidden, weight, targets, *, softcap):
        return super().__call__(hidden, weight, targets, softcap=softcap)


@pytest.mark.parametrize(
    "kind,settings,words",
    [
        (LayoutError, dict(layout=Layout("pipeline=8")), ["8 stages", "4 layers", "pipeline=4"]),
        (
            LayoutError,
            dict(layout=Layout("pipeline=4", pipeline="interleaved:4")),
            ["8 virtual stages", "4 layers", "pipeline=2"],
        ),
        (LayoutError, dict(layout=Layout("pipeline=2", pipeline="1f1b:3")), ["3 micro-batches", "8 rows", "is 2"]),
        (LayoutError, dict(layout=Layout("pipeline=2", pipeline="gpipe:8"), accumulate=2), ["4 rows", "is 4"]),
        (ConfigError, dict(layout=TWO, objective=NextToken(Own())), ["Own", "vocabulary = 'whole'", "CutLoss()"]),
        (
            ConfigError,
            dict(layout=TWO, model=dataclasses.replace(MODEL, vocab=257), objective=NextToken(Whole())),
            ["Whole", "takes no 'vocab'", "embed/weight's vocab of 257", "CutLoss()", "or a vocab of 258"],
        ),
        (
            LayoutError,
            dict(
                layout=Layout("pipeline=2,fsdp=2", pipeline=Pipeline(gather="step")),
                model=dataclasses.replace(MODEL, mlp=MixtureOfExperts(experts=4)),
            ),
            ["Pipeline.gather = 'step'", "report statistics", "'layer'"],
        ),
        (
            LayoutError,
            dict(
                layout=Layout("pipeline=2", pipeline="interleaved"),
                model=dataclasses.replace(MODEL, depth=6, mlp=UNEVEN),
            ),
            ["mlp/load_bias", "(6, 3)", "2 stages divide none of its dimensions", "schedule of 1 chunk"],
        ),
    ],
    ids=["stages", "chunks", "batch", "accumulation", "loss", "vocabulary", "reports", "width"],
)
def test_what_does_not_fit_stages_is_refused_before_compiling(kind, settings, words):
    with raises_saying(kind, *words):
        prepare(TrainConfig(**{"model": MODEL, "batch_size": 8, "seq_len": 8, **settings}))


def test_padding_and_what_the_schedule_costs_are_reported():
    model = dataclasses.replace(MODEL, depth=5)
    notes = explain(TrainConfig(model=model, batch_size=8, seq_len=8, layout=Layout("pipeline=2,data=2"))).notes
    # A layer: 16 x (16 + 2 x 4) + 16 x 16 for attention, 3 x 16 x 32 for the rest, and two norms of 16, in float32.
    layer = 4 * (16 * 24 + 16 * 16 + 3 * 16 * 32 + 2 * 16)
    assert any("1 group of padding layers is computed" in n and f"{layer:,} bytes" in n for n in notes)
    assert not any("sharded along their width" in n for n in notes)
    assert any("schedule lockstep, 2 stages, 4 micro-batches of 2 rows" in n and "idles 20%" in n for n in notes)
    wide = TrainConfig(model=model, batch_size=8, seq_len=8, layout=Layout("pipeline=2"), optimizer=optax.sgd(0.1))
    assert any("stored sharded along their width" in n for n in explain(wide).notes)
    interleaved = TrainConfig(model=MODEL, batch_size=8, seq_len=8, layout=Layout("pipeline=2", pipeline="interleaved"))
    (note,) = explain(interleaved).notes
    assert note.endswith("its layers stay on it, so that steps send no parameters")
