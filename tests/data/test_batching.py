"""Plans of a step's batch: every sequence once, memory respected, and near the exact optimum of small batches."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxscale.data.batching import HDP, BatchPlan, FlexSP, Group, SequenceCosts, Static, best_static
from jaxscale.errors import ConfigError, DataError
from tests.truth.exact_batches import fastest

METHODS = {"flexsp": FlexSP(), "one degree": FlexSP(mixed=False), "hdp": HDP(), "static": Static(8)}


def costs(capacity: int = 4096, largest: int = 8, overlap: float = 1.0, offload: float = np.inf) -> SequenceCosts:
    """About the costs of an 8B model; degrees above 8 leave the host."""
    degrees = [1 << i for i in range(largest.bit_length())]
    exchange = {d: 0.0 if d == 1 else 2e-6 if d <= 8 else 1e-5 for d in degrees}
    latency = {d: 0.0 if d == 1 else 6e-4 * d for d in degrees}
    return SequenceCosts(1.1e-4, 5e-9, exchange, capacity, latency, overlap, offload)


def long_tailed(count: int, largest: int, seed: int) -> np.ndarray:
    """Draw lengths of a log-normal distribution."""
    return np.minimum(np.exp(np.random.default_rng(seed).normal(7.5, 1.3, count)).astype(np.int64) + 1, largest)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("devices", [8, 24, 64])
def test_every_sequence_has_one_group_within_memory(name: str, devices: int) -> None:
    for seed, count in enumerate((1, 7, 60, 500)):
        lengths = long_tailed(count, 8 * 4096, seed)
        plan = METHODS[name].plan(lengths, devices, costs())
        plan.check(lengths, costs())
        seconds = costs().table(lengths, costs().degrees) * np.array(costs().degrees)[:, None]
        assert plan.seconds >= seconds.min(axis=0).sum() / devices * (1 - 1e-9)  # not faster than all devices together
        assert 0 <= plan.idle < 1


def test_flexsp_is_close_to_the_exact_optimum() -> None:
    ratios = []
    for seed in range(12):
        rng = np.random.default_rng(seed)
        devices, count = int(rng.choice([4, 8])), int(rng.integers(3, 7))
        each = costs(largest=devices, overlap=float(seed % 2))
        lengths = long_tailed(count, devices * 4096, 100 + seed)
        exact = fastest(lengths.tolist(), devices, each)
        plans = {name: METHODS[name].plan(lengths, devices, each) for name in ("flexsp", "one degree")}
        ratios.append(plans["flexsp"].seconds / exact)
        assert plans["one degree"].seconds >= exact * (1 - 1e-9)
    assert min(ratios) >= 1 - 1e-9
    assert max(ratios) <= 1.1 and np.mean(ratios) <= 1.03


def test_many_sequences_come_close_to_devices_that_never_wait() -> None:
    lengths, each = long_tailed(4096, 8 * 16384, 0), costs(16384, 1024)
    work = (each.table(lengths, each.degrees) * np.array(each.degrees)[:, None]).min(axis=0).sum() / 256
    for method, most in ((FlexSP(), 1.15), (HDP(), 1.01)):  # FlexSP's devices wait after each micro-batch
        plan = method.plan(lengths, 256, each)
        plan.check(lengths, each)
        assert work <= plan.seconds <= most * work


def test_thousands_of_sequences_take_no_longer_than_in_rows_of_one_length() -> None:
    lengths = np.minimum(np.exp(np.random.default_rng(0).normal(6, 1.3, 10_000)).astype(np.int64) + 1, 60_000)
    each = SequenceCosts(9e-5, 5e-9, {1 << i: 5e-7 * (i > 0) for i in range(7)}, 8980)
    assert FlexSP().plan(lengths, 64, each).seconds <= best_static(lengths, 64, each)[1].seconds * (1 + 1e-9)


def test_short_sequences_stay_on_one_device_beside_a_long_one() -> None:
    lengths = np.array([60_000, *[500] * 400])
    each = costs(8192)
    for method in (FlexSP(), HDP()):
        degree = method.plan(lengths, 16, each).degree_of(len(lengths))
        assert degree[0] == 8
        assert np.mean(degree[1:] == 1) > 0.5
    static = best_static(lengths, 16, each)
    assert static[0] == 8
    assert FlexSP().plan(lengths, 16, each).seconds < static[1].seconds


def test_the_order_of_sequences_changes_no_time() -> None:
    lengths = long_tailed(200, 8 * 4096, 3)
    shuffled = np.random.default_rng(0).permutation(lengths)
    for method in METHODS.values():
        first, again = (method.plan(one, 16, costs()).seconds for one in (lengths, shuffled))
        assert first == pytest.approx(again, rel=1e-12)


def test_offloading_takes_fewer_devices_for_the_longest() -> None:
    lengths, offloading = np.array([16_384, *[1000] * 60]), costs(offload=1e-6)
    with pytest.raises(DataError, match="sequence 0 has 16384 tokens.*of degree 2, holds 8192"):
        HDP(degrees=(1, 2)).plan(lengths, 8, offloading)
    two = HDP(degrees=(1, 2), offload=True).plan(lengths, 8, offloading)
    two.check(lengths, offloading, offload=True)
    assert HDP(offload=True).plan(lengths, 8, offloading).seconds <= HDP().plan(lengths, 8, costs()).seconds
    slow = costs(offload=1.0)  # the transfer would take longer than the arithmetic
    assert HDP(offload=True).plan(lengths, 8, slow).degree_of(len(lengths))[0] == 4
    alone = HDP(offload=True).plan(np.array([100_000]), 8, slow)  # eight devices hold 32,768 tokens
    assert alone.seconds == pytest.approx((100_000 - 32_768) / 8)


def test_an_exchange_is_hidden_behind_attention_only() -> None:
    ring, exposed = costs(overlap=1.0), costs(overlap=0.0)
    s = np.array([100, 20_000])
    attention = 5e-9 * s.astype(float) ** 2 / 8
    assert np.allclose(exposed.compute(s, 8), 1.1e-4 * s / 8 + attention + 2e-6 * s)
    assert np.allclose(ring.compute(s, 8), 1.1e-4 * s / 8 + np.maximum(attention, 2e-6 * s))


def test_devices_of_a_tree_of_groups_wait_only_for_each_other() -> None:
    groups = (Group(0, 4, (0,), 3.0), Group(0, 2, (1,), 1.0), Group(4, 2, (2,), 5.0), Group(2, 1, (3,), 4.0))
    plan = BatchPlan(6, (groups,), waits=False)
    assert plan.seconds == 7.0
    assert plan.busy.tolist() == [4, 4, 7, 3, 5, 5]
    assert plan.idle == pytest.approx(1 - 28 / 42)
    assert BatchPlan(6, ()).idle == 0


def test_a_wrong_plan_is_refused() -> None:
    each = dataclasses.replace(costs(), capacity=10)
    twice = BatchPlan(2, ((Group(0, 1, (0,), 1.0), Group(1, 1, (0,), 1.0)),))
    with pytest.raises(DataError, match="sequence 0 is in 2 groups, and must be in one"):
        twice.check(np.array([5]), each)
    with pytest.raises(DataError, match="11 tokens on 1 devices that hold 10"):
        BatchPlan(1, ((Group(0, 1, (0,), 1.0),),)).check(np.array([11]), each)
    with pytest.raises(DataError, match="device 0 is in 2 groups"):
        BatchPlan(2, ((Group(0, 1, (0,), 1.0), Group(0, 2, (1,), 1.0)),)).check(np.array([5, 5]), each)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: FlexSP().plan(np.array([5, 40_000]), 8, costs()), "sequence 1 has 40000 tokens.*holds 32768"),
        (lambda: HDP().plan(np.array([40_000]), 8, costs()), "cut it to 32768 tokens"),
        (lambda: Static(3).plan(np.array([5]), 8, costs()), "no degree 3, only 1, 2, 4, 8"),
        (lambda: FlexSP(degrees=(8,)).plan(np.array([5]), 4, costs()), "no degree of 8 fits on 4 devices"),
        (lambda: FlexSP(tries=0), "must be 1 or more"),
        (lambda: FlexSP().plan(np.array([0]), 4, costs()), "whole numbers of 1 or more"),
        (lambda: FlexSP().plan(np.array([0.5]), 4, costs()), "whole numbers of 1 or more"),
        (lambda: SequenceCosts(1.0, 1.0, {2: 0.0, 3: 0.0}, 5), "degree 2 does not divide 3"),
        (lambda: SequenceCosts(-1.0, 1.0, {1: 0.0}, 5), "linear = -1.0: must be 0 or more"),
        (lambda: HDP().plan(np.array([5]), 0, costs()), "devices = 0: must be a whole number of at least 1"),
        (lambda: Static(1).plan(np.array([5]), 4.0, costs()), "devices = 4.0"),
        (lambda: SequenceCosts(np.inf, 1.0, {1: 0.0}, 5), "linear = inf: must be 0 or more, and finite"),
        (lambda: SequenceCosts(1.0, 1.0, {"1": 0.0}, 5), "by degree, whole numbers such as"),
        (lambda: SequenceCosts(1.0, 1.0, {1: 0.1}, 5), r"exchange\[1\] = 0.1: one device exchanges nothing"),
        (lambda: SequenceCosts(1.0, 1.0, {1: 0.0}, 5, {2: 0.1}), "latency has degree 2, and exchange has not"),
        (lambda: SequenceCosts(0.0, 0.0, {1: 0.0}, 5), "linear and quadratic are both 0"),
        (lambda: SequenceCosts(1.0, 1.0, {1: 0.0}, 0), "must be 1 token or more"),
        (lambda: SequenceCosts(1.0, 1.0, {1: 0.0}, 5.5), "must be a whole number of tokens"),
        (lambda: SequenceCosts(1.0, 1.0, {}, 5), "use such as"),
    ],
)
def test_what_cannot_be_planned_raises(call, message: str) -> None:
    with pytest.raises(DataError, match=message):
        call()


@pytest.mark.parametrize(
    "settings", [{"degrees": 4}, {"degrees": ()}, {"degrees": (1.0,)}, {"capacity": "16"}, {"costs": 3}], ids=str
)
@pytest.mark.parametrize("planner", [FlexSP, HDP])
def test_settings_of_another_type_are_refused(planner, settings) -> None:
    with pytest.raises(ConfigError, match=f"{planner.__name__}.{next(iter(settings))} = .*must be"):
        planner(**settings)


def test_a_capacity_in_floating_point_is_whole() -> None:
    assert repr(SequenceCosts(1.0, 1.0, {1: 0.0}, 1e6).capacity) == "1000000"


def test_a_row_is_at_least_the_longest_sequence() -> None:
    with pytest.raises(DataError, match="Static.row = 100: must be 500 .* to 8192"):
        Static(2, row=100).plan(np.array([500, 20]), 8, costs())
    plan = Static(2, row=520).plan(np.array([500, 20, 30, 490]), 8, costs())
    assert sorted(sorted(g.sequences) for g in plan.micro_batches[0]) == [[0, 1], [2, 3]]
