"""Costs of sequences for the batch planner, from the planner's roofline."""

from __future__ import annotations

import dataclasses

import pytest

from jaxscale.errors import ConfigError
from jaxscale.hardware import topology
from jaxscale.layout import Layout
from jaxscale.models import TransformerConfig
from jaxscale.nn import RingAttention
from jaxscale.plan.memory import estimate
from jaxscale.plan.planner import on_hardware, traced_work
from jaxscale.plan.roofline import op_times
from jaxscale.plan.sequence_costs import sequence_costs
from jaxscale.step import TrainConfig

MODEL = TransformerConfig(
    depth=2, width=512, heads=8, kv_heads=4, vocab=1024, attention=RingAttention(), dtype="bfloat16", memory="none"
)
CONFIG = TrainConfig(model=MODEL, layout=Layout("data=4"), seq_len=2048, batch_size=4)


@pytest.mark.long
def test_costs_are_those_of_the_roofline() -> None:
    costs = sequence_costs(CONFIG, "v5p:2x2x1", (1, 2))
    target = topology("v5p:2x2x1")
    longer = on_hardware(dataclasses.replace(CONFIG, seq_len=8192), target)
    work, _ = traced_work(longer, target, estimate(longer, target))
    seconds = sum(c + m for op, c, m in op_times(work, target) if not op.optimizer and op.name != "update")
    assert costs.linear * 8192 + costs.quadratic * 8192**2 == pytest.approx(seconds, rel=0.03)
    # Around a ring of 2, a device sends one shard of K and V forward, and of them and their gradients backward.
    assert costs.exchange[1] == costs.latency[1] == 0
    shard = 4 * 64 * 2 * MODEL.depth / 2  # kv heads, head width, K and V; half of the tokens are another device's
    least = shard * (2 + 2) / target.chip.links[0].bandwidth
    assert least * 0.9 <= costs.exchange[2] <= 6 * least
    assert costs.latency[2] > 0 and costs.overlap == target.chip.efficiency.get("overlap", 1.0)
    # The capacity fits, and a third more does not.
    held = [dataclasses.replace(CONFIG, seq_len=int(f * costs.capacity)) for f in (0.95, 1.33)]
    sizes = [estimate(on_hardware(c, target), target).device for c in held]
    assert sizes[0] <= target.chip.capacity < sizes[1]


def test_a_degree_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match="degree 3 does not divide data=4.*use degrees of 1, 2, 4"):
        sequence_costs(CONFIG, "v5p:2x2x1", (1, 3))
