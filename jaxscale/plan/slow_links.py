"""What algorithms send between replicas, and how long steps wait for it over slow links: notes for the planner."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax

from jaxscale.parallel import Float32Wire
from jaxscale.step import Blueprint
from jaxscale.step.meeting import Meeting
from jaxscale.step.rounds import Exchange, Round
from jaxscale.units import human_bytes

SPEEDS = (0.1e9, 1e9, 10e9, 100e9)
"""Speeds of links in bits per second for which the planner simulates."""


def wire_notes(blueprint: Blueprint) -> list[str]:
    """Return a note on the bytes that cross the mesh axis `replica`, or go to other processes, if there are any.

    Args:
      blueprint: the run's blueprint.
    """
    layout, algorithm = blueprint.layout, blueprint.algorithm
    if (meeting := algorithm.meeting(blueprint)) is not None:
        sent = peer_bytes(meeting, meeting.shares)
        return [
            f"{algorithm.describe()}: with {meeting.shares} processes each sends {human_bytes(round(sent))} every "
            f"{meeting.every} steps"
        ]
    sent_a_step = algorithm.wire_bytes(blueprint)
    if sent_a_step is None or layout is None:
        return []
    replicas = layout.sizes["replica"]
    if replicas == 1:
        return [note] if (note := algorithm.note(layout)) else []
    every_step = Float32Wire().sent(blueprint.infos, replicas, layout)
    return [
        f"{algorithm.describe()}: each device sends {human_bytes(round(sent_a_step))} a step over replica on average; "
        f"an all-reduce of float32 gradients in every step would send {human_bytes(every_step)}"
    ]


def peer_bytes(meeting: Meeting, peers: int) -> float:
    """Return the bytes that one of several processes sends to the others in an exchange, on average.

    Args:
      meeting: what they exchange.
      peers: the number of processes.
    """
    sizes = [(math.prod(i.shape), meeting.wire.block_of(i.shape)) for i in jax.tree.leaves(meeting.infos)]
    packed = sum(meeting.wire.packed_size(size // block, block) for size, block in sizes)
    return 2 * (peers - 1) / peers * packed


def waiting(round: Round, step: float, seconds: Callable[[float], float], rounds: int = 40) -> float:
    """Return the seconds of a round in which steps wait for exchanges, by simulation.

    Exchanges go over one link, one after the other. One begins when its step has ended, and the step that uses its
    result waits for its end. This is what the algorithm's dependencies allow, not a measurement: a program overlaps an
    exchange with steps only as far as its runtime does.

    Args:
      round: the exchanges.
      step: seconds of a step without them.
      seconds: bytes that a device sends -> seconds of the exchange.
      rounds: rounds to simulate; the later half counts.
    """
    now = free = middle = 0.0
    due: dict[int, float] = {}
    for k in range(1, rounds * round.steps + 1):
        now += step
        for e in round.exchanges:
            if (k - e.after) % round.steps == 0:
                free = max(now, free) + seconds(e.sent)
                due[k + e.delay] = max(due.get(k + e.delay, 0.0), free)
        now = max(now, due.pop(k, 0.0))
        if k == rounds // 2 * round.steps:
            middle = now
    return (now - middle) / (rounds - rounds // 2) - round.steps * step


def link_seconds(blueprint: Blueprint, speed: float) -> Callable[[float], float]:
    """Return a function from the bytes that a device sends to seconds, without latency.

    Args:
      blueprint: the run's blueprint.
      speed: bits per second between a replica and the others, which all devices of a replica share.
    """
    layout = blueprint.layout
    shared = 1 if layout is None else layout.devices // layout.sizes["replica"]
    return lambda sent: 8 * sent * shared / speed


def simulated_notes(blueprint: Blueprint, step: float) -> list[str]:
    """Return a note on how long steps wait over links of some speeds, beside an all-reduce in every step.

    Args:
      blueprint: the run's blueprint.
      step: seconds of a step without what crosses `replica`.
    """
    layout, round = blueprint.layout, blueprint.algorithm.round(blueprint)
    if round is None or layout is None or layout.sizes["replica"] == 1:
        return []
    every_step = Float32Wire().sent(blueprint.infos, layout.sizes["replica"], layout)
    plain = Round(1, (Exchange(0, 0, every_step),))

    def share(of: Round, speed: float) -> str:
        waits = waiting(of, step, link_seconds(blueprint, speed)) / of.steps
        return f"{waits / (waits + step):.0%}"

    parts = [f"{share(round, s)} ({share(plain, s)}) at {s / 1e9:g} Gbit/s" for s in SPEEDS]
    return [
        f"simulated over one link per replica: {blueprint.algorithm.describe()} waits for exchanges (an all-reduce in "
        f"every step would) for this share of the time: {', '.join(parts)}"
    ]
