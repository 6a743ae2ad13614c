"""Schedules against their closed forms, at every step."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest

from jaxscale.errors import ConfigError
from jaxscale.optim import WSD, Constant, WarmupCosine
from tests.truth.errors import raises_saying

PEAK, STEPS = 0.02, 40


def _cosine(step, warm, final):
    if step < warm:
        return PEAK * step / warm
    done = min((step - warm) / (STEPS - warm), 1.0)
    return PEAK * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * done)))


def _wsd(step, warm, down, final):
    if step < warm:
        return PEAK * step / warm
    done = min(max((step - (STEPS - down)) / down, 0.0), 1.0) if down else 0.0
    return PEAK * (1 - done * (1 - final))


@pytest.mark.parametrize(
    "schedule, closed_form",
    [
        (WarmupCosine(), lambda t: _cosine(t, 2, 0.1)),
        (WarmupCosine(8, final=0.0), lambda t: _cosine(t, 8, 0.0)),
        (WarmupCosine(0), lambda t: _cosine(t, 0, 0.1)),
        (WSD(), lambda t: _wsd(t, 2, 8, 0.0)),
        (WSD(0, 0.5, final=0.25), lambda t: _wsd(t, 0, 20, 0.25)),
        (WSD(30, 10), lambda t: _wsd(t, 30, 10, 0.0)),
        (Constant(), lambda t: PEAK),
        (Constant(0.25), lambda t: PEAK * min(t / 10, 1)),
        (Constant(4), lambda t: PEAK * min(t / 4, 1)),
    ],
    ids=lambda value: "" if callable(value) else str(value),
)
def test_a_schedule_is_its_closed_form_at_every_step(schedule, closed_form):
    rate = schedule.make(PEAK, STEPS)
    steps = np.arange(STEPS + 5)  # constant after the last step
    got = jax.jit(jax.vmap(rate))(steps)
    np.testing.assert_allclose(got, [closed_form(int(t)) for t in steps], rtol=1e-5, atol=1e-9)


def test_phases_that_do_not_fit_are_refused():
    with raises_saying(ConfigError, "WSD", "30 steps of warm-up", "20 of decay", "40", "to 10"):
        WSD(30, 20).make(PEAK, STEPS)


@pytest.mark.parametrize("schedule", [WSD(decay=-1), WarmupCosine(warmup=-1), Constant(-1)], ids=str)
def test_a_negative_number_of_steps_is_refused(schedule):
    with raises_saying(ConfigError, type(schedule).__name__, "-1", "negative"):
        schedule.make(PEAK, STEPS)
