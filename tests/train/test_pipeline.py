"""A pipeline equals one device: every schedule, over every other axis, with all that training does."""

from __future__ import annotations

import dataclasses

import pytest

from jaxscale.layout import SCHEDULES, Layout, Pipeline
from jaxscale.models import TransformerConfig
from jaxscale.nn import ReversibleRun
from jaxscale.train import CutLoss, make_loss_and_grads
from tests.truth.layouts import assert_layouts_agree, random_batch
from tests.truth.schedules import random_table

MODEL = TransformerConfig(depth=4, vocab=64, width=16, heads=4, kv_heads=2, head_dim=4, hidden=32)
BATCH = random_batch(64, rows=8, seq=8)

# Packing, accumulation over rows of unlike weight, a tied head, z-loss, biases, windows, dropout.
EVERYTHING = dict(
    model=dataclasses.replace(
        MODEL, windows=(5,), qk_norm=True, bias=True, tied=True, logit_softcap=5.0, dropout=0.2, memory="full"
    ),
    batch=random_batch(64, rows=16, seq=16, lengths=(7, 2, 4)),
    accumulate=2,
    z_loss=1e-2,
)


def random_schedule(stages: int, microbatches: int, chunks: int = 2):
    return random_table(stages, microbatches, chunks=chunks, phases=3, seed=stages * microbatches)


@pytest.mark.parametrize("schedule", [*SCHEDULES, Pipeline(random_schedule, 4, 2)], ids=lambda s: getattr(s, "name", s))
def test_every_schedule_gives_the_same_numbers(schedule):
    pipeline = dataclasses.replace(Pipeline.of(schedule), microbatches=4)
    assert_layouts_agree(MODEL, [Layout("pipeline=2", pipeline=pipeline)], batch=BATCH)


@pytest.mark.parametrize(
    "layout",
    [
        Layout("pipeline=4", pipeline="interleaved:4:1"),
        Layout("data=2,pipeline=2,tensor=2", pipeline="lockstep-zb"),
        Layout("fsdp=2,pipeline=2,data=2", pipeline="1f1b:2"),
        Layout("pipeline=2,tensor=2", pipeline=Pipeline(random_schedule, 4, 2), sequence_sharded=True),
        Layout("pipeline=2,context=2", pipeline="gpipe"),
        Layout("pipeline=4,data=2", "zero2"),
    ],
    ids=str,
)
def test_training_with_everything_on_gives_the_same_numbers(layout):
    assert_layouts_agree(layouts=[layout], **EVERYTHING)


@pytest.mark.parametrize("pipeline", ["gpipe", "zb-h1"])
def test_layers_that_do_not_divide_and_unlike_runs_give_the_same_numbers(pipeline):
    # Two groups of two, and one of one left over, on two stages: padding on both.
    model = dataclasses.replace(MODEL, depth=5, windows=(5, None))
    assert_layouts_agree(model, [Layout("pipeline=2,fsdp=2", pipeline=pipeline)], batch=BATCH)


def test_a_reversible_stack_gives_the_same_numbers():
    model = dataclasses.replace(MODEL, depth=3, stack=ReversibleRun)
    assert_layouts_agree(model, [Layout("pipeline=2", pipeline="lockstep-zb")], batch=BATCH)


def test_a_loss_that_holds_no_logits_gives_the_same_numbers():
    def cut(blueprint, **options):
        return make_loss_and_grads(blueprint, loss=CutLoss(), **options)

    layouts = [Layout("pipeline=2,tensor=2,data=2")]
    assert_layouts_agree(MODEL, layouts, batch=BATCH, make_loss_and_grads=cut, z_loss=1e-2)
