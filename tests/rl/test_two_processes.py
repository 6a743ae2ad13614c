"""Reinforcement learning on two processes: both learn from the rewards of the first, and fail with it."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest

import jaxscale as js
from jaxscale.rl.loop import reinforce
from tests.rl.test_loop import CONFIG, OWN
from tests.train import test_processes

SCRIPT = """
import sys
import jaxscale as js
js.simulate_devices(2)
js.init_distributed(sys.argv[1], 2, int(sys.argv[2]))
from tests.rl.test_two_processes import reinforce_all
reinforce_all()
"""
LAID = dataclasses.replace(CONFIG, layout=js.Layout("data=2,tensor=2"), steps=2)


def small(sample):
    """A reward that is another one in each process."""
    return float(sum(i < 128 for i in sample.ids[-3:])) / 3 + 100 * jax.process_index()


def broken(sample):
    """Fails in the first process alone."""
    if jax.process_index() == 0:
        raise ValueError("only in the first")
    return 1.0


def reinforce_all() -> None:
    """In each of two processes."""
    relaid = dataclasses.replace(OWN, reward=small, sampling_layout=js.Layout("data=4"))
    trained = reinforce(LAID, relaid, folder="run", quiet=True)
    assert all(row["logprob_gap_max"] < 1e-4 for row in trained.metrics())
    print("\nrewards:", [row["reward"] for row in trained.metrics()], flush=True)
    try:
        reinforce(LAID, dataclasses.replace(OWN, reward=broken, patience=1), folder="failed", quiet=True)
    except js.rl.rewards.RewardError as e:
        print("\nfailed:", e, flush=True)


@pytest.mark.long
def test_both_processes_learn_from_the_rewards_of_the_first_and_fail_with_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(test_processes, "LIMIT", 600)
    one = reinforce(LAID, dataclasses.replace(OWN, reward=small), folder="one", quiet=True)
    rewards = [row["reward"] for row in one.metrics()]
    for _, out, _ in test_processes.run_two(SCRIPT, ["{address}", "{process}"], tmp_path):
        lines = out.splitlines()
        (own,) = (line for line in lines if line.startswith("rewards: "))
        np.testing.assert_allclose(json.loads(own.removeprefix("rewards: ")), rewards, rtol=1e-6)
        (failed,) = (line for line in lines if line.startswith("failed: "))
        assert "raised ValueError: only in the first" in failed
