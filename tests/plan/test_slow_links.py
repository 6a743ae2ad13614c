"""How long steps wait for exchanges: the simulation against closed forms, and the planner's note."""

from __future__ import annotations

import pytest

import jaxscale as js
from jaxscale.layout import Layout
from jaxscale.parallel import Float32Wire
from jaxscale.plan import plan_for
from jaxscale.plan.slow_links import link_seconds, waiting
from jaxscale.step import CO2, DiLoCo, LocalSteps, PeerDiLoCo, blueprint_of
from jaxscale.step.rounds import Exchange, Round
from tests.truth.replicas import config

STEP = 0.5


@pytest.mark.parametrize("seconds", [0.0, 1.0, 3.9, 4.0, 10.0])
def test_what_steps_wait_is_what_the_delay_does_not_hide(seconds):
    for delay in (0, 1, 3, 8):
        waits = waiting(Round(8, (Exchange(0, delay, 1.0),)), STEP, lambda sent: sent * seconds)
        assert waits == pytest.approx(max(0.0, seconds - delay * STEP)), delay


def test_exchanges_of_fragments_share_the_link():
    two = Round(8, (Exchange(0, 2, 1.0), Exchange(4, 2, 1.0)))
    assert waiting(two, STEP, lambda sent: 1.5) == pytest.approx(2 * (1.5 - 1.0))
    at_once = Round(8, (Exchange(0, 2, 1.0), Exchange(1, 2, 1.0)))
    # the second waits for the first, which is used after its second step and half a second of waiting
    assert waiting(at_once, STEP, lambda sent: 1.5) == pytest.approx(0.5 + 1.0)


def test_algorithms_say_when_results_are_used_and_a_replica_shares_its_link():
    layout = Layout("replica=2,fsdp=4")
    rounds = {
        type(a).__name__: a.round(blueprint_of(config(algorithm=a, layout=layout))[0])
        for a in (LocalSteps(2, every=4), CO2(2, every=4), DiLoCo(2, every=4, fragments=2, delay=1, mix=0.5))
    }
    used = [[(e.after, e.delay) for e in r.exchanges] for r in rounds.values()]
    assert used == [[(0, 0)], [(0, 4)], [(0, 1), (2, 1)]]
    blueprint = blueprint_of(config(algorithm=LocalSteps(2, every=4), layout=layout))[0]
    sent = Float32Wire().sent(blueprint.infos, 2, layout)
    assert {r.sent for r in rounds.values()} == {sent / 4}
    assert link_seconds(blueprint, 1e6)(sent) == pytest.approx(8 * 4 * sent / 1e6), "four devices share a link"


def test_the_plan_says_what_was_simulated():
    one = config(algorithm=CO2(2, every=4), layout=Layout("replica=2,fsdp=4"))
    notes = plan_for(one, "h100:8", compile="never").notes
    note = next(n for n in notes if n.startswith("simulated over one link per replica: CO2 waits"))
    assert "at 0.1 Gbit/s" in note and "at 100 Gbit/s" in note
    peers = js.explain(config(algorithm=PeerDiLoCo(shares=4, every=2), layout=Layout("fsdp=2"))).notes
    assert any("PeerDiLoCo: with 4 processes each sends 3 KiB every 2 steps" in n for n in peers), peers
