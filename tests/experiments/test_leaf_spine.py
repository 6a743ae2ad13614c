"""Choosing paths for whole flows, and splitting a few, has the congestion of spraying packets."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest

from experiments.calculators.leaf_spine import (
    Network,
    Part,
    all_to_all,
    congestion,
    hashed,
    ring,
    seconds,
    split,
    sprayed,
)
from jaxscale.errors import ConfigError

SIZES = [(leaves, hosts, spines) for leaves in (2, 3) for hosts in (1, 4, 6) for spines in (1, 3, 4)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_link_has_the_load_of_sprayed_packets(sizes):
    network = Network(*sizes)
    random = np.random.default_rng(0)
    hosts = range(network.leaves * network.hosts)
    some = [(int(a), int(b)) for a, b in random.choice(hosts, (40, 2)) if a != b]
    for flows in (ring(network), ring(network, network.hosts), all_to_all(network), some):
        parts = split(network, flows)
        assert congestion(parts) == congestion(sprayed(network, flows))
        whole = [Fraction(0)] * len(flows)
        for part in parts:
            whole[part.flow] += part.size
        assert whole == [1] * len(flows)


def test_few_flows_are_split():
    network = Network(2, 6, 4)  # six flows each way: four whole ones, and two of two parts
    parts = split(network, ring(network, 6))
    assert len(parts) == 2 * (4 + 2 * 2) and len(sprayed(network, ring(network, 6))) == 2 * 6 * 4


def test_no_choice_of_whole_flows_has_less_congestion():
    """Three flows over two spines: the best whole paths carry two, and split ones one and a half."""
    network = Network(2, 3, 2)
    flows = [(i, 3 + i) for i in range(3)]
    paths = [lambda i, s: (("out", i, 0), ("up", 0, s), ("down", s, 1), ("in", 3 + i, 0))] * 3
    choices = itertools.product(range(2), repeat=3)
    best = min(
        max(congestion([Part(i, Fraction(1), paths[i](i, s)) for i, s in enumerate(c)]).values()) for c in choices
    )
    assert best == 2 and max(congestion(split(network, flows)).values()) == Fraction(3, 2)


def test_seconds_are_those_of_the_fullest_link_and_of_max_min_fairness():
    network = Network(2, 4, 4)
    flows = ring(network, 4)
    assert seconds(sprayed(network, flows)) == pytest.approx(1) == seconds(split(network, flows))
    crowded = [part for part in hashed(network, flows, seed=1)]
    assert seconds(crowded) == pytest.approx(float(max(congestion(crowded).values())))
    # two flows from one host, one of which shares its target with a third: 1/2 each, then the rest alone
    shared = sprayed(Network(1, 4, 1), [(0, 1), (0, 2), (3, 2)])
    assert seconds(shared) == pytest.approx(2)


def test_a_network_without_spines_is_refused():
    with pytest.raises(ConfigError, match="spines = 0"):
        Network(2, 2, 0)
