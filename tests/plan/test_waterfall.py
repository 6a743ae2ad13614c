"""A step's time by term: they add up to the step, and the picture's bars follow one another."""

from __future__ import annotations

import dataclasses
import math

import pytest

import jaxscale as js
from jaxscale.hardware import topology
from jaxscale.nn import MixtureOfExperts, flash_attention
from jaxscale.optim import Muon
from jaxscale.plan import plan_for
from jaxscale.plan.printing import text_of
from jaxscale.plan.roofline import Op, Work, step_time
from jaxscale.plan.waterfall import WIDTH, step_terms, waterfall
from tests.truth.long import short

MODEL = js.models.TransformerConfig(depth=4, width=32, heads=2, vocab=64, attention=flash_attention)
TINY = js.TrainConfig(model=MODEL, layout=js.Layout("fsdp=4,tensor=2"), batch_size=16, seq_len=32)


def _attention(q, k, v, *, mask=None, **_):
    return flash_attention(q, k, v)


@pytest.mark.parametrize(
    "changes, terms",
    short(
        3,
        [
            ({}, {"products", "attention", "memory-bound", "optimizer", "exposed, tensor"}),
            (dict(optimizer=Muon()), {"optimizer"}),
            (dict(model=dataclasses.replace(MODEL, mlp=MixtureOfExperts(experts=4))), {"experts"}),
            (dict(layout=js.Layout("pipeline=2,fsdp=4", pipeline="gpipe:4")), {"bubble"}),
            (
                dict(model=dataclasses.replace(MODEL, attention=_attention), optimizer=Muon()),
                {"attention", "optimizer"},
            ),
        ],
    ),
    ids=["formulas", "muon", "experts", "pipeline", "traced"],
)
def test_terms_add_up_to_the_step(changes, terms):
    plan = plan_for(dataclasses.replace(TINY, **changes), "v5e:2x4", compile="never")
    assert math.isclose(sum(plan.terms.values()), plan.step.total) and terms <= plan.terms.keys()
    assert all(name in str(plan) for name in plan.terms) and plan.to_json()["terms"] == plan.terms


def test_muon_takes_longer_than_adamw_in_the_optimizer_alone():
    adamw, muon = (
        plan_for(dataclasses.replace(TINY, **c), "v5e:2x4", compile="never").terms for c in ({}, dict(optimizer=Muon()))
    )
    assert muon["optimizer"] > adamw["optimizer"] and muon["products"] == adamw["products"]


def test_a_module_of_the_users_named_update_is_not_the_optimizer():
    ops = [Op(name, "matmul", 1e12, 0.0, "bfloat16", optimizer=flag) for name, flag in (("update", False), ("x", True))]
    hardware = topology("v5e:2x4")
    work = Work((*ops,), (), {"data": 8}, 2e12, 64)
    terms = step_terms(work, step_time(work, hardware), hardware)
    assert terms.keys() == {"products", "optimizer"} and terms["products"] == terms["optimizer"]


def test_bars_follow_one_another_and_fill_the_width():
    text = text_of(waterfall("time", {"a": {"x": 3.0, "y": 1e-9, "z": 1.0}, "b": {"x": 1.0}}, "a"))
    rows = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    begin = rows["x"].index("█")
    assert rows["x"][begin:].rstrip() == "█" * 24
    assert rows["y"][begin:].rstrip() == " " * 24 + "▏" and "-" in rows["y"].split()
    assert rows["z"][begin:].rstrip() == " " * 24 + "█" * (WIDTH - 24)
