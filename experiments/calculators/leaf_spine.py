"""Congestion of collectives in a leaf-spine network: packets over all spines, or flows over one spine each.

Addanki et al. 2024 (arXiv:2407.00550): flows of one step of a collective are equal and known when they begin, so that
paths can be chosen for whole flows, and splitting a few of them suffices for the congestion of spraying every packet
over all spines. Here the flows between two leaves take turns over the spines; of `count` flows the last `count mod
spines` are split into `spines / gcd(count mod spines, spines)` parts each. Every link then carries what it carries when
packets are sprayed: for each pair of leaves each spine has `count / spines` flows' worth.

Rates are max-min fair and change when a flow ends; there are no packets, queues or latencies.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from fractions import Fraction

import numpy as np

from jaxscale.errors import ConfigError

Link = tuple[str, int, int]
"""("up", leaf, spine), ("down", spine, leaf), ("out", host, 0) or ("in", host, 0)."""


@dataclasses.dataclass(frozen=True)
class Network:
    """A leaf-spine network whose links all have one rate.

    Args:
      leaves: number of leaf switches.
      hosts: hosts of a leaf.
      spines: number of spine switches, each with a link to and from every leaf.

    Raises:
      ConfigError: a number is below 1.
    """

    leaves: int
    hosts: int
    spines: int

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if value < 1:
                raise ConfigError(f"Network.{name} = {value}: must be 1 or more")


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a flow, which has one path.

    Args:
      flow: number of the flow.
      size: its share of the flow.
      path: its links.
    """

    flow: int
    size: Fraction
    path: tuple[Link, ...]


Flows = list[tuple[int, int]]
"""Source and target host of each flow of a step; all have the size 1."""


def ring(network: Network, stride: int = 1) -> Flows:
    """Return a step of a ring over all hosts, which each send to the one `stride` further on.

    Args:
      network: the network.
      stride: 1 for the next host; the number of hosts of a leaf for rings of one host of each leaf.
    """
    count = network.leaves * network.hosts
    return [(i, (i + stride) % count) for i in range(count)]


def all_to_all(network: Network) -> Flows:
    """Return the flows of an all-to-all over all hosts, which all begin at once.

    Args:
      network: the network.
    """
    count = network.leaves * network.hosts
    return [(i, j) for i in range(count) for j in range(count) if i != j]


def sprayed(network: Network, flows: Flows) -> list[Part]:
    """Return flows whose packets take every spine alike.

    Args:
      network: the network.
      flows: the flows.
    """
    every = [Fraction(1, network.spines)] * network.spines
    return list(_parts(network, flows, lambda pair, count: [dict(enumerate(every))] * count))


def hashed(network: Network, flows: Flows, seed: int = 0) -> list[Part]:
    """Return whole flows on a random spine each, as equal-cost multi-path routing has them.

    Args:
      network: the network.
      flows: the flows.
      seed: seed of the spines.
    """
    random = np.random.default_rng(seed)
    one = Fraction(1)
    return list(
        _parts(network, flows, lambda pair, count: [{int(random.integers(network.spines)): one} for _ in range(count)])
    )


def split(network: Network, flows: Flows) -> list[Part]:
    """Return flows on one spine each, but those that are left over between two leaves, which are split.

    Args:
      network: the network.
      flows: the flows.
    """
    spines = network.spines

    def of_pair(pair: tuple[int, int], count: int) -> list[dict[int, Fraction]]:
        whole = count - count % spines
        chosen = [{i % spines: Fraction(1)} for i in range(whole)]
        rest = count - whole
        if not rest:
            return chosen
        parts = spines // math.gcd(rest, spines)
        turns = (i % spines for i in range(rest * parts))
        return chosen + [{next(turns): Fraction(1, parts) for _ in range(parts)} for _ in range(rest)]

    return list(_parts(network, flows, of_pair))


def _parts(
    network: Network, flows: Flows, chosen: Callable[[tuple[int, int], int], list[dict[int, Fraction]]]
) -> Iterator[Part]:
    """Yield parts of flows, given the shares by spine of each flow between two leaves."""
    pairs: dict[tuple[int, int], list[int]] = defaultdict(list)
    for i, (source, target) in enumerate(flows):
        ends = ("out", source, 0), ("in", target, 0)
        a, b = source // network.hosts, target // network.hosts
        if a == b:
            yield Part(i, Fraction(1), ends)
        else:
            pairs[a, b].append(i)
    for (a, b), members in pairs.items():
        for i, shares in zip(members, chosen((a, b), len(members)), strict=True):
            source, target = flows[i]
            for spine, size in shares.items():
                path = (("out", source, 0), ("up", a, spine), ("down", spine, b), ("in", target, 0))
                yield Part(i, size, path)


def congestion(parts: list[Part]) -> dict[Link, Fraction]:
    """Return the flows' worth of bytes on each link between switches.

    Args:
      parts: parts of flows.
    """
    load: dict[Link, Fraction] = defaultdict(Fraction)
    for part in parts:
        for link in part.path:
            if link[0] in ("up", "down"):
                load[link] += part.size
    return load


def seconds(parts: list[Part]) -> float:
    """Return when the last flow ends, in units of a flow's size over a link's rate.

    Args:
      parts: parts of flows.
    """
    links = {link: i for i, link in enumerate(sorted({link for part in parts for link in part.path}))}
    on = np.zeros((len(links), len(parts)))
    for j, part in enumerate(parts):
        on[[links[link] for link in part.path], j] = 1
    left, now = np.array([float(part.size) for part in parts]), 0.0
    while (active := left > 1e-12).any():
        rate = _fair(on, active)
        until = (left[active] / rate[active]).min()
        left, now = np.where(active, left - rate * until, 0.0), now + until
    return now


def _fair(on: np.ndarray, active: np.ndarray) -> np.ndarray:
    """Return max-min fair rates: the fullest link fixes the rates of its flows, and so on."""
    rate, open_, space = np.zeros(len(active)), active.copy(), np.ones(len(on))
    while open_.any():
        users = on @ open_
        share = np.divide(space, users, out=np.full(len(space), np.inf), where=users > 0)
        least = share.min()
        fixed = open_ & (on[share <= least * (1 + 1e-9)] > 0).any(axis=0)
        rate[fixed] = least
        space = np.maximum(space - on @ (fixed * least), 0.0)
        open_ &= ~fixed
    return rate
