"""Simulated time of layers whose experts are loaded from the host while the device computes.

A link loads one thing after the other, the device computes one thing after the other, and an expert computes once it is
loaded. Times are the planner's: bytes over the chip's bandwidth to the host, and for a product of few tokens the bytes
of its weights over the bandwidth of the device's memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from jaxscale.errors import ConfigError
from jaxscale.hardware import Chip


class Timeline(NamedTuple):
    """When a device is done with jobs, and how long it waited.

    Args:
      seconds: from the start to the end of the last job.
      idle: of these, when the device waited for a load.
    """

    seconds: float
    idle: float


class Job(NamedTuple):
    """Something that is loaded, and computed once it is.

    Args:
      load: seconds on the link.
      compute: seconds on the device.
    """

    load: float
    compute: float


def pipelined(jobs: Iterable[Job], link: float = 0.0, device: float = 0.0) -> Timeline:
    """Return the timeline of jobs that are loaded and computed in their order.

    Args:
      jobs: the jobs.
      link: when the link is free, in seconds.
      device: when the device is free.
    """
    begin, idle = device, 0.0
    for load, compute in jobs:
        link += load
        idle += max(0.0, link - device)
        device = max(device, link) + compute
    return Timeline(device - begin, idle)


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds of the parts of a layer.

    Args:
      attention: everything before the experts.
      load: loading an expert to the device.
      expert: computing one.
      host: computing one on the host, from the host's memory; `None` if the host does not compute.
    """

    attention: float
    load: float
    expert: float
    host: float | None = None

    @classmethod
    def of(cls, chip: Chip, attention: int, expert: int, host: float | None = None) -> Costs:
        """Return the costs of few tokens, which take as long as reading weights.

        Args:
          chip: the device.
          attention: bytes of everything before the experts, the KV cache included.
          expert: bytes of an expert.
          host: bytes/s of the host's own memory, if it computes.

        Raises:
          ConfigError: the host's bandwidth is not above 0.
        """
        if host is not None and not host > 0:
            raise ConfigError(f"host = {host}: must be a bandwidth in bytes/s above 0, or None")
        seconds = None if host is None else expert / host
        return cls(attention / chip.bandwidth, expert / chip.host_bandwidth, expert / chip.bandwidth, seconds)


def layer_time(costs: Costs, cached: int, guessed: int = 0, missed: int = 0, wasted: int = 0) -> float:
    """Return the seconds of a layer.

    Guesses, wrong ones included, load from the start, others once the router has chosen. Cached experts compute first.
    A missed expert is computed by the host if that is done before the device would be (HybriMoE, arXiv:2504.05897).

    Args:
      costs: of its parts.
      cached: chosen experts that are on the device.
      guessed: chosen ones that were guessed.
      missed: chosen ones that were not.
      wasted: guessed ones that were not chosen, loaded last of the guesses.
    """
    chosen = costs.attention
    on_device = [Job(costs.load, costs.expert)] * guessed
    link = guessed * costs.load
    busy = chosen + cached * costs.expert
    busy += pipelined(on_device, 0.0, busy).seconds
    link = max(link + wasted * costs.load, chosen)
    host = chosen
    for _ in range(missed):
        loaded = max(busy, link + costs.load) + costs.expert
        if costs.host is not None and host + costs.host <= loaded:
            host += costs.host
        else:
            link, busy = link + costs.load, loaded
    return max(busy, host)


def hottest_first(tokens: Mapping[int, Sequence[int]]) -> list[tuple[int, int]]:
    """Return the slices of bits in the order of D²MoE (arXiv:2504.15299): those that most tokens need first.

    A slice comes after the slices of its expert before it.

    Args:
      tokens: for each expert how many tokens need each slice, which never rises: a token that needs a slice needs those
        before it.

    Returns:
      pairs of expert and slice.
    """
    slices = [(e, s) for e, counts in tokens.items() for s, n in enumerate(counts) if n > 0]
    return sorted(slices, key=lambda one: (-tokens[one[0]][one[1]], one[1], one[0]))


def in_order(tokens: Mapping[int, Sequence[int]]) -> list[tuple[int, int]]:
    """Return the slices of bits one expert after the other, all of an expert first: first in, first out.

    Args:
      tokens: see `hottest_first`.

    Returns:
      pairs of expert and slice.
    """
    return [(e, s) for e, counts in tokens.items() for s, n in enumerate(counts) if n > 0]


def sliced(
    tokens: Mapping[int, Sequence[int]],
    order: Sequence[tuple[int, int]],
    load: Sequence[float],
    compute: float,
    start: float,
) -> Timeline:
    """Return the timeline of experts in slices of bits: the tokens whose last slice is loaded compute.

    Args:
      tokens: see `hottest_first`.
      order: in which slices are loaded.
      load: seconds of loading each slice.
      compute: seconds of an expert for each token.
      start: seconds of other work of the device, while the first slices load.

    Raises:
      ConfigError: a slice comes before the one that it continues.
    """
    jobs: list[Job] = []
    done: set[tuple[int, int]] = set()
    for expert, at in order:
        if at and (expert, at - 1) not in done:
            raise ConfigError(f"slice {at} of expert {expert} is loaded before slice {at - 1}, which it continues")
        done.add((expert, at))
        counts = [*tokens[expert], 0]
        jobs.append(Job(load[at], (counts[at] - counts[at + 1]) * compute))
    return pipelined(jobs, 0.0, start)
