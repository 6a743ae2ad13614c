"""Simulated loads of experts: against cases by hand, and one event after the other."""

from __future__ import annotations

import numpy as np
import pytest

from jaxscale.errors import ConfigError
from jaxscale.hardware import chip
from jaxscale.plan.expert_streaming import Costs, Job, hottest_first, in_order, layer_time, pipelined, sliced
from tests.truth.errors import raises_saying

DRAW = np.random.default_rng(0)
COSTS = Costs(attention=2.0, load=3.0, expert=1.0)


def test_a_pipeline_is_a_flow_shop_of_two_machines():
    assert pipelined([Job(3, 1), Job(3, 1), Job(1, 5)], 0, 2) == (10, 3)
    for _ in range(20):
        jobs = [Job(*DRAW.uniform(0, 2, 2)) for _ in range(6)]
        ends = [
            sum(j.load for j in jobs[: k + 1]) + sum(j.compute for j in jobs[k:]) for k in range(len(jobs))
        ]  # the longest path, Johnson 1954
        got = pipelined(jobs)
        assert got.seconds == pytest.approx(max(ends))
        assert got.idle == pytest.approx(got.seconds - sum(j.compute for j in jobs))


def test_layers_by_hand():
    assert layer_time(COSTS, cached=2) == 4
    assert layer_time(COSTS, cached=1, missed=1) == 6  # loads from 2 to 5
    assert layer_time(COSTS, cached=1, guessed=1) == 4  # loads from 0 to 3, while attention and the cached one compute
    assert layer_time(COSTS, cached=1, missed=1, wasted=1) == 7  # loads from 3 to 6
    assert layer_time(Costs(2.0, 3.0, 1.0, host=3.5), cached=1, missed=2) == 6  # one on the host until 5.5, one loaded
    device = chip("v5e")
    costs = Costs.of(device, 4 * 10**6, 10**6)
    assert costs.attention == 4 * costs.expert and costs.load == 10**6 / device.host_bandwidth
    with raises_saying(ConfigError, "host = 0", "bytes/s"):
        Costs.of(device, 1, 1, 0)


def test_hot_bits_come_first_and_after_those_that_they_continue():
    tokens = {0: (1, 1, 0), 1: (8, 2, 1), 2: (3, 0, 0)}
    assert hottest_first(tokens) == [(1, 0), (2, 0), (1, 1), (0, 0), (0, 1), (1, 2)]
    assert in_order(tokens) == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (2, 0)]
    fast, slow = (sliced(tokens, f(tokens), (2, 1, 1), 1.0, 1.0) for f in (hottest_first, in_order))
    assert fast.seconds < slow.seconds and fast.idle < slow.idle
    assert fast.seconds - fast.idle == slow.seconds - slow.idle == 12
    with raises_saying(ConfigError, "slice 1 of expert 1 is loaded before slice 0"):
        sliced(tokens, [(1, 1)], (2, 1, 1), 1.0, 0.0)
